"""The common part of `stats()`, of pipelines: bytes and elements calculated by hand, and those of the neighbours.

The tests of both frameworks give `build`, which returns a pipeline (of this boundary, or of a density of KEPT / WIDTH),
and `given`, which returns inputs and targets of so many samples.
"""

import pytest
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
RANK, STAGES = WORLD.Get_rank(), WORLD.Get_size()
LAST = RANK == STAGES - 1
WIDTH, KEPT = 200, 10  # elements of a sample between two stages, and how many are sent
INPUTS, OUTPUTS = 8 if RANK == 0 else WIDTH, 3 if LAST else WIDTH  # of this rank's stage
several = pytest.mark.skipif(STAGES == 1, reason="one stage has no boundary")


def check_steps_and_totals(build, given):
    """They are those of training."""
    sends = (not LAST) + (RANK > 0)  # activations, and gradients
    with build() as pipeline:
        first = pipeline.stats()
        assert first["steps"] == first["total"]["dense_bytes"] == first["step"]["received_bytes"] == 0
        for part in ("step", "total", "forward", "backward", "evaluation"):
            assert first[part]["ratio"] == first[part]["density"] == 1.0
        pipeline.step(*given(10))
        pipeline.step(*given(30))
        stats = pipeline.stats()
        pipeline.evaluate(*given(7))
        pipeline.predict(given(7)[0])
        later = pipeline.stats()
        pipeline.step(*given(10))
        assert pipeline.stats()["step"]["dense_bytes"] == sends * 10 * WIDTH * 4
    for name in ("steps", "step", "total", "forward", "backward"):
        assert later[name] == stats[name]
    assert later["evaluation"]["messages"] == (0 if LAST else 4)
    assert later["evaluation"]["density"] == (1.0 if LAST else KEPT / WIDTH)
    assert stats["steps"] == 2
    assert stats["step"]["dense_bytes"] == sends * 30 * WIDTH * 4
    assert stats["total"]["dense_bytes"] == sends * 40 * WIDTH * 4
    for part in ("step", "total"):
        own = stats[part]
        assert own["density"] == pytest.approx(KEPT / WIDTH)
        assert own["ratio"] == pytest.approx(own["dense_bytes"] / own["payload_bytes"])
        assert own["seconds"] == {}
    forward, backward = stats["forward"], stats["backward"]
    assert stats["total"]["payload_bytes"] == forward["sent_bytes"] + backward["sent_bytes"]
    for direction in (forward, backward):
        assert direction["payload_bytes"] == direction["sent_bytes"]
        assert direction["density"] == (KEPT / WIDTH if direction["messages"] else 1.0)
    others = WORLD.allgather((forward["sent_bytes"], backward["sent_bytes"]))
    before, after = (others[RANK - 1][0] if RANK else 0), (0 if LAST else others[RANK + 1][1])
    assert stats["total"]["received_bytes"] == before + after
    assert 0 < stats["step"]["received_bytes"] < stats["total"]["received_bytes"]


def check_logs(build, given):
    """Steps of training are logged, on a rank that asks for it."""
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


def check_failing_writer(build, given, of_others):
    """It ends all stages. of_others: the error on other ranks."""

    def fail(numbers, step):
        raise OSError("the disk is full")

    with build() as pipeline:
        if RANK == 0:
            pipeline.log_to(fail)
        expected = OSError if RANK == 0 else of_others
        with pytest.raises(expected, match="the disk is full"):
            pipeline.step(*given(10))
            pipeline.step(*given(10))


def check_occupancies(build, given, boundary):
    """That of a pipeline is of training, that of a boundary of all. boundary: keeps other parts of other rows."""
    with build(boundary) as pipeline:
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
