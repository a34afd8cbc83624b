"""The common part of `stats()`, of pipelines: bytes and elements calculated by hand, and those of the neighbours."""

import pytest
import tensorflow as tf
from mpi4py import MPI
from pipeline_oracle_tensorflow import cross_entropy

from hvd_sparse.tensorflow.model_parallel import Pipeline, PipelineError, ThresholdBoundary

pytestmark = pytest.mark.rank_counts

WORLD = MPI.COMM_WORLD
RANK, STAGES = WORLD.Get_rank(), WORLD.Get_size()
LAST = RANK == STAGES - 1
WIDTH, KEPT = 200, 10  # density 0.05
several = pytest.mark.skipif(STAGES == 1, reason="one stage has no boundary")


def build(boundary=0.05):
    stage = tf.keras.layers.Dense(3 if LAST else WIDTH)
    stage.build([None, 8 if RANK == 0 else WIDTH])
    return Pipeline(stage, boundary=boundary, micro_batches=2, loss=cross_entropy, timeout=60.0)


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


def test_a_pipeline_says_what_it_is():
    with build() as pipeline:
        assert repr(pipeline) == f"<Pipeline, stage {RANK} of {STAGES}, 2 micro-batches, gpipe, step 0>"


@several
def test_occupancy_of_a_pipeline_is_that_of_training_and_of_a_boundary_of_all():
    """Of "laplace", which keeps other parts of other rows."""
    with build(ThresholdBoundary(0.2, "laplace")) as pipeline:
        for rows in (10, 20):
            pipeline.step(*given(rows))
        before = pipeline.stats()
        pipeline.evaluate(*given(10))
        after = pipeline.stats()
    assert after["occupancy"] == before["occupancy"] == before["forward"]["density"]
    if not LAST:
        first, last = (stats["boundaries"]["output"] for stats in (before, after))
        assert first["mean_occupancy"] == pytest.approx(before["occupancy"])
        in_all = (30 * before["occupancy"] + 10 * after["evaluation"]["density"]) / 40
        assert last["mean_occupancy"] == pytest.approx(in_all) and first["mean_occupancy"] != last["mean_occupancy"]
        assert 0.0 < first["occupancy"] < 1.0
