"""The common part of `stats()`, of pipelines: bytes and elements calculated by hand, and those of the neighbours."""

import pytest
import tensorflow as tf
from mpi4py import MPI
from pipeline_oracle_tensorflow import cross_entropy

from hvd_sparse.tensorflow.model_parallel import Pipeline

pytestmark = pytest.mark.rank_counts

WORLD = MPI.COMM_WORLD
RANK, STAGES = WORLD.Get_rank(), WORLD.Get_size()
LAST = RANK == STAGES - 1
WIDTH, KEPT = 200, 10  # density 0.05
several = pytest.mark.skipif(STAGES == 1, reason="one stage has no boundary")


def build():
    stage = tf.keras.layers.Dense(3 if LAST else WIDTH)
    stage.build([None, 8 if RANK == 0 else WIDTH])
    return Pipeline(stage, boundary=0.05, micro_batches=2, loss=cross_entropy, timeout=60.0)


def given(rows):
    return tf.random.normal([rows, 8]), tf.range(rows) % 3


@several
def test_steps_and_totals_are_those_of_training():
    sends = (not LAST) + (RANK > 0)  # activations, and gradients
    with build() as pipeline:
        first = pipeline.stats()
        assert first["steps"] == first["total"]["dense_bytes"] == 0
        for part in ("step", "total", "forward", "backward", "evaluation"):
            assert first[part]["ratio"] == first[part]["density"] == 1.0
        pipeline.step(*given(10))
        pipeline.step(*given(30))
        pipeline.evaluate(*given(7))
        stats = pipeline.stats()
    assert stats["steps"] == 2
    assert stats["step"]["dense_bytes"] == sends * 30 * WIDTH * 4
    assert stats["total"]["dense_bytes"] == sends * 40 * WIDTH * 4
    for part in ("step", "total"):
        assert stats[part]["density"] == pytest.approx(KEPT / WIDTH)
        assert stats[part]["seconds"] == {}
    forward, backward = stats["forward"], stats["backward"]
    assert stats["total"]["payload_bytes"] == forward["sent_bytes"] + backward["sent_bytes"]
    others = WORLD.allgather((forward["sent_bytes"], backward["sent_bytes"]))
    before, after = (others[RANK - 1][0] if RANK else 0), (0 if LAST else others[RANK + 1][1])
    assert stats["total"]["received_bytes"] == before + after
