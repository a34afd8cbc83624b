"""The common part of `stats()`, of pipelines: bytes and elements calculated by hand, and those of the neighbours."""

import pytest
import tensorflow as tf
from mpi4py import MPI
from pipeline_oracle_tensorflow import cross_entropy

from hvd_sparse.tensorflow.model_parallel import Pipeline, PipelineError

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


@several
def test_steps_of_training_are_logged():
    reports = []
    with build() as pipeline:
        if RANK == 0:
            pipeline.log_to(lambda numbers, step: reports.append((step, numbers)), every=2)
        for _ in range(3):
            pipeline.step(*given(10))
            pipeline.evaluate(*given(10))
            stats = pipeline.stats()
            if RANK == 0 and stats["steps"] == 2:
                names = ("ratio", "density", "payload_bytes", "received_bytes")
                assert reports == [(2, {f"pipeline/{name}": stats["step"][name] for name in names})]
        assert [step for step, _ in reports] == ([2] if RANK == 0 else [])


@several
def test_a_writer_that_fails_ends_all_stages():
    def fail(numbers, step):
        raise OSError("the disk is full")

    with build() as pipeline:
        if RANK == 0:
            pipeline.log_to(fail)
        pipeline_error = OSError if RANK == 0 else PipelineError
        with pytest.raises(pipeline_error, match="the disk is full"):
            pipeline.step(*given(10))
            pipeline.step(*given(10))
