"""Control messages between ranks of a pipeline: meetings, failures, and ranks that have left."""

from types import SimpleNamespace

import pytest
from mpi4py import MPI

from hvd_sparse.model_parallel.notices import Notices, PipelineError

WORLD = MPI.COMM_WORLD
RANK, RANKS = WORLD.Get_rank(), WORLD.Get_size()
LAST = RANKS - 1
several = pytest.mark.skipif(RANKS == 1, reason="nobody to tell")


@pytest.fixture
def notices():
    """Return notices of all ranks."""
    made = Notices(WORLD.Dup(), "rank {}".format, grace=0.2)
    yield made
    made.close()
    WORLD.Barrier()


def test_a_duplicate_of_a_replicas_communicator_has_its_notices(notices, monkeypatch):
    monkeypatch.setattr(Notices, "is_hybrid", False)
    replica = WORLD.Dup()
    assert Notices.attached(replica) is Notices.attached(WORLD) is None
    notices.attach(replica)
    assert Notices.attached(replica) is Notices.attached(replica.Dup()) is notices
    assert Notices.attached(MPI.COMM_SELF) is None  # a pipeline of this rank's own
    with pytest.raises(ValueError, match=r"communicator must be the one that hybrid\(\) returned, got the world"):
        Notices.attached(WORLD)


def test_mpi_may_still_write_to_what_a_rank_gave_up_waiting_for(notices, monkeypatch):
    """When the late ranks come."""
    given, kept = [], []

    class Never:
        """A request of MPI that is not complete."""

        def Test(self):
            return False

    def gather(*arrays):
        """Note the arrays that MPI reads and writes."""
        given.extend(arrays)
        return Never()

    monkeypatch.setattr(notices, "_communicator", SimpleNamespace(Iallgather=gather))
    monkeypatch.setattr("hvd_sparse.model_parallel.notices.keep_for_ever", kept.append)
    with pytest.raises(TimeoutError, match=rf"not all {RANKS} ranks have begun within 0\.01 s"):
        notices.agree(None, {}, 0.01, "begun")
    monkeypatch.undo()
    assert len(given) == 2 and all(any(one is other for other in kept) for one in given)


@several
def test_who_comes_to_a_meeting_that_another_will_not_come_to_hears_so(notices):
    notices.meet("the end of step 1", 30.0)
    if RANK == LAST:
        notices.leave(None)
    else:
        expected = f"rank {LAST} has ended, while rank {RANK} waits until all have come to the end of step 2:"
        with pytest.raises(PipelineError, match=expected):
            notices.meet("the end of step 2", 30.0)


def test_who_leaves_after_the_last_meeting_disturbs_nobody(notices):
    for step in range(20):
        notices.meet(f"step {step}", 30.0)
        if step == 19 and RANK % 2 == 0:
            notices.leave(None)
    notices.check()


@several
def test_a_failure_ends_a_meeting_with_its_reason(notices):
    if RANK == LAST:
        assert notices.fail(ArithmeticError("out of luck")) is None
        assert notices.fail(KeyError("and then")) is None  # not told again
    else:
        with pytest.raises(PipelineError, match=f"^rank {LAST} has failed: ArithmeticError: out of luck$"):
            notices.meet("the end", 30.0)


@several
def test_below_an_uncaught_error_stands_what_caused_it(notices, capsys):
    shown = []
    hook = notices.excepthook(lambda *arguments: shown.append(arguments))
    error = ArithmeticError("out of luck") if RANK == LAST else ConnectionError("somebody has gone")
    if RANK != LAST:
        WORLD.recv(source=LAST)  # as Horovod's errors come after the failure that causes them
    hook(type(error), error, None)
    if RANK == LAST:
        for rank in range(LAST):
            WORLD.send(None, rank)
    assert shown == [(type(error), error, None)]
    expected = f"hvd_sparse: rank {RANK}: this follows from another rank's failure: rank {LAST} has failed: "
    expected = "" if RANK == LAST else expected + "ArithmeticError: out of luck\n"
    assert capsys.readouterr().err == expected


@several
def test_nobody_waits_longer_than_agreed(notices):
    if RANK == 0:
        with pytest.raises(TimeoutError, match=rf"not all {RANKS} ranks have come to the end within 0.05 s"):
            notices.meet("the end", 0.05)
    WORLD.Barrier()
    if RANK != 0:
        notices.meet("the end", 30.0)  # for the communicator's sake
