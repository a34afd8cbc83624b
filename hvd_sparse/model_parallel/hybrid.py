"""Hybrid training: replicas of a pipeline (model parallel), and Horovod between a stage's replicas (data parallel)."""

import atexit
import sys
from typing import NamedTuple

from hvd_sparse.library import checked_communicator
from hvd_sparse.mailbox import poll
from hvd_sparse.model_parallel.notices import Notices, wait_for
from hvd_sparse.model_parallel.process_grid import Order, ProcessGrid
from hvd_sparse.timeouts import TIMEOUT_SECONDS

START_TIMEOUT = TIMEOUT_SECONDS  # that a rank waits for the others in `hybrid`
LEAVE_TIMEOUT = 60.0  # seconds that a rank waits for the others at its end
GRACE = 0.5  # seconds between Horovod's error and word of what caused it; the word was sent first


class Hybrid(NamedTuple):
    """The result of `hybrid`: this rank's place, Horovod's process set of its stage, and its replica's communicator."""

    grid: ProcessGrid
    process_set: object
    communicator: object


def hybrid(hvd, stages: int, order: Order = "pipeline") -> Hybrid:
    """Start Horovod with one process set per stage; call it in place of `hvd.init()`, on every rank.

    hvd: `horovod.torch` or `horovod.tensorflow`. stages: number of stages per replica; it must divide the world size.
    order: see `ProcessGrid`. Pass the communicator to `Pipeline`, the process set to `Compression` and to Horovod's
    optimizer. At exit, ranks wait for each other. If an error ends one rank, the others raise PipelineError in their
    current or next step, or show the reason below the error that Horovod raises.
    Raises what the frameworks' `hybrid` lists.
    """
    communicator, request = checked_communicator(None).Idup()
    wait_for(request, START_TIMEOUT, communicator.Get_size(), "called hybrid()")
    notices = Notices(communicator, "rank {}".format, GRACE)
    try:
        grid = _agreed(hvd, communicator, stages, order, notices)
        notices.name, notices.process_set = grid.name_of, _start(hvd, grid)
    except BaseException:
        notices.close()
        raise
    replica = communicator.Split(grid.replica, grid.stage)
    notices.attach(replica)
    sys.excepthook = notices.excepthook(sys.excepthook)
    atexit.register(leave_together, communicator.Dup(), notices)  # runs before Horovod's own shutdown, which came first
    return Hybrid(grid, notices.process_set, replica)


def _agreed(hvd, communicator, stages: int, order: Order, notices: Notices) -> ProcessGrid:
    """Return the grid; raise on every rank if any rank's arguments are wrong, or if they differ."""
    error: Exception | None = None
    settings = {}
    try:
        grid = ProcessGrid(communicator.Get_rank(), communicator.Get_size(), stages, order)
        settings = {"stages": grid.stages, "order": order}
        if hvd.is_initialized():
            raise RuntimeError("Horovod has been started already: call hybrid() in place of hvd.init()")
    except (TypeError, ValueError, RuntimeError) as caught:  # the other ranks wait in `agree`
        error = caught
    notices.agree(error, settings, START_TIMEOUT, "called hybrid()")
    return grid


def _start(hvd, grid: ProcessGrid):
    """Start Horovod; return the process set of this rank's stage."""
    if grid.stages == 1:
        hvd.init()
        process_set = hvd.global_process_set
    else:
        sets = [hvd.ProcessSet(grid.stage_ranks(stage)) for stage in range(grid.stages)]
        hvd.init(process_sets=sets)
        process_set = sets[grid.stage]
    if hvd.size() != grid.size:
        raise RuntimeError(
            f"MPI has {grid.size} ranks where Horovod has {hvd.size()}: start with mpirun or horovodrun --mpi, and "
            "a Horovod built with MPI"
        )
    return process_set


def leave_together(communicator, notices: Notices) -> None:
    """Wait at the interpreter's end until all ranks have come to theirs, unless an error ends one of them.

    The first rank to shut Horovod down does so for all, and the replicas of one stage may be done while those of
    another still reduce gradients.
    """
    notices.leave(getattr(sys, "last_value", None))
    request = communicator.Ibarrier()
    poll(lambda: request.Test() or notices.heard() or None, LEAVE_TIMEOUT)
    notices.close()
