"""Hybrid runs on MPI: grids, replicas that agree bit for bit, and the same training as dense in one process."""

import json
import os
import sys
import textwrap

import launching
import numpy as np
import pytest
from launching import launch, mpirun

from hvd_sparse.model_parallel import ProcessGrid

pytestmark = launching.MARKS
JOB = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "shared", "hybrid_job.py")


def run(ranks, *options):
    code, output = launch([*mpirun(ranks), sys.executable, JOB, *map(str, options)])
    assert code == 0, output
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    ("ranks", "stages", "order", "micro_batches", "options"),
    [
        (4, 2, "pipeline", 3, ["--late"]),
        pytest.param(4, 2, "pipeline", 3, [], marks=pytest.mark.exhaustive),
        pytest.param(4, 2, "replica", 1, [], marks=pytest.mark.exhaustive),
        pytest.param(2, 1, "pipeline", 3, [], marks=pytest.mark.exhaustive),
        pytest.param(3, 3, "pipeline", 1, [], marks=pytest.mark.exhaustive),
    ],
)
def test_without_sparsity_it_is_training_on_one_process(ranks, stages, order, micro_batches, options):
    """Also where stages that are done must wait for one that is late, after a layout and a pipeline were refused."""
    found = run(ranks, "--stages", stages, "--order", order, "--micro-batches", micro_batches, *options)
    grids = [ProcessGrid(rank, ranks, stages, order) for rank in range(ranks)]
    assert [(one["stage"], one["replica"]) for one in found] == [(one.stage, one.replica) for one in grids]
    for one in found:
        assert f"stages must divide the number of ranks, got stages={ranks + 1} on {ranks} ranks" in one["refused"]
        assert "communicator must be the one that hybrid() returned, got the world" in one["in_the_world"]
        assert one["difference"] < 1e-5
    mean = np.mean([one["losses"] for one in found if one["stage"] == 0], axis=0)
    assert mean == pytest.approx(found[0]["expected"], rel=1e-4)
    assert len({one["parameters"] for one in found}) == stages


@pytest.mark.exhaustive
@pytest.mark.parametrize("compression", ["dct", "dgc"])
def test_sparse_on_every_link_learns_and_replicas_agree(compression):
    found = run(4, "--stages", 2, "--density", 0.25, "--compression", compression)
    for stage in range(2):
        of_stage = [one for one in found if one["stage"] == stage]
        assert len({one["parameters"] for one in of_stage}) == 1
        losses = np.mean([one["losses"] for one in of_stage], axis=0)
        assert losses[-5:].mean() < 0.9 * losses[:5].mean()
        # DGC's payloads of so small a stage are rows of an all-reduce: those of both replicas count. With the presence
        # sum and the vote, 40 and 48 bytes, a step sends 1522 bytes for the first stage, whose gradients have 2072.
        assert of_stage[0]["dp_ratio"] > (1.35 if compression == "dgc" else 2.0)


def test_the_layout_is_described():
    grid = ProcessGrid(3, 4, 2)
    assert (grid.stage, grid.replica, grid.replicas) == (1, 1, 2)
    assert grid.describe() == (
        "rank 3 of 4: stage 1 of 2, replica 1 of 2; activations on ranks [2, 3], gradients on [1, 3]"
    )
    for order in ("pipeline", "replica"):
        places = {(one.stage, one.replica): one for one in (ProcessGrid(rank, 6, 3, order) for rank in range(6))}
        assert len(places) == 6
        assert all(one.rank_of(stage, replica) == one.rank for (stage, replica), one in places.items())
        assert sorted(rank for stage in range(3) for rank in ProcessGrid(0, 6, 3, order).stage_ranks(stage)) == list(
            range(6)
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 3), "stages must divide the number of ranks, got stages=3 on 4 ranks"),
        ((0, 4, 0), "stages must be an integer of at least 1, got 0"),
        ((4, 4, 2), "rank must be an integer from 0 to 3, got 4"),
        ((0, 0, 2), "size must be an integer of at least 1, got 0"),
        ((0, 4, 2, "ring"), "order must be one of 'pipeline', 'replica'; got 'ring'"),
    ],
)
def test_wrong_layouts_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ProcessGrid(*arguments)


def test_stages_are_an_integer_of_python_or_numpy():
    with pytest.raises(TypeError, match=r"stages must be an integer of at least 1, got 2\.0 of type float"):
        ProcessGrid(0, 4, 2.0)
    assert type(ProcessGrid(0, 4, np.int64(2)).stages) is int and ProcessGrid(0, 4, np.int64(2)) == (
        0,
        4,
        2,
        "pipeline",
    )


REFUSED_BY_ONE = """
    import sys
    from mpi4py import MPI
    import horovod.torch as hvd
    from hvd_sparse.model_parallel import hybrid
    hybrid.START_TIMEOUT = 3.0
    rank = MPI.COMM_WORLD.Get_rank()
    MPI.COMM_WORLD.Barrier()  # on a loaded machine, one rank has imported Horovod seconds before another
    try:
        hybrid.hybrid(hvd, 2) if rank == 0 else {second}
    except Exception as error:
        print("rank", rank, "refuses:", error, flush=True)
"""


@pytest.mark.parametrize(
    ("second", "message", "count"),
    [
        ("hybrid.hybrid(hvd, 3)", "stages must divide the number of ranks, got stages=3 on 2 ranks", 2),
        ("hybrid.hybrid(hvd, 1)", "stages must be the same on all ranks, got 2 on rank 0 and 1 on rank 1", 2),
        ("None", "not all 2 ranks have called hybrid() within 3 s", 1),
    ],
)
def test_wrong_calls_of_one_rank_end_all_ranks(second, message, count):
    code, output = launch([*mpirun(2), sys.executable, "-c", textwrap.dedent(REFUSED_BY_ONE.format(second=second))])
    assert code == 0, output
    assert output.count("refuses:") == output.count(message) == count, output


@pytest.mark.exhaustive  # that each rank refuses them: test_without_sparsity_it_is_training_on_one_process
def test_ranks_that_cannot_be_shared_out_end_all_ranks():
    code, output = launch([*mpirun(3), sys.executable, JOB, "--stages", "2"])
    assert code != 0 and "stages must divide the number of ranks, got stages=2 on 3 ranks" in output
