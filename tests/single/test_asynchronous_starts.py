"""Asynchronous runs on MPI: what they start from, a file that was saved, and sessions one after another."""

import re

import launching
import numpy as np
import pytest
import tiers
from asynchronous_job import SHAPES, loss_of

pytestmark = launching.MARKS


@pytest.mark.parametrize(
    "roles", ["servers=1", pytest.param("servers='colocated', silence=20.0", marks=pytest.mark.exhaustive)]
)
def test_a_worker_that_is_already_in_the_next_session(run_job, roles):
    """Worker 0 opens the second session, of another method, while the others are still in the first one."""
    code, output = run_job(
        f"""
        for number in range(2):
            session = Job(method=dgs(momentum=0.1 * (number + 1)), timeout=20.0, {roles})
            if session.is_worker:
                start = loss_of(session.theta)
                MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl(session.placement.workers)).Barrier()
                session.train(20)
                if RANK == 1:
                    time.sleep(2.0)
                print(f"loss {{start:.4f}} rank {{RANK}}")
                session.close()
            if session.is_server:
                session.serve()
        print("ended", RANK)
        """
    )
    assert code == 0 and all(f"ended {rank}" in output for rank in range(3)), output
    starts = re.findall(r"loss ([\d.]+) rank", output)
    assert len(starts) >= 4 and len(set(starts)) == 1, output  # the first server's model, not one that is trained


@pytest.mark.parametrize("servers", [1, "colocated"])
def test_two_sessions_side_by_side(run_job, servers):
    """As of a GAN. A rank that only serves has one of them in a thread: `serve` returns when its workers have left."""
    code, output = run_job(
        f"""
        import threading
        from hvd_sparse.parameter_server import ASGD

        communicators = [MPI.COMM_WORLD.Dup() for _ in range(2)]  # which all ranks do together
        one, other = (Job(ASGD(), communicator=each, servers={servers!r}) for each in communicators)
        if one.is_worker:
            for _ in range(3):
                one.train(1)
                other.train(2)
            for session in (one, other):
                print("pushes", session.worker.traffic.pushes)
                session.close()
        else:
            thread = threading.Thread(target=one.serve)
            thread.start()
            print("departures", other.serve())
            thread.join()
        print("ended", RANK)
        """,
        ranks=2,
    )
    assert code == 0 and output.count("ended") == 2, output
    assert output.count("pushes 3") == output.count("pushes 6") == (1 if servers == 1 else 2), output


def test_a_run_begins_with_the_model_of_the_first_server(run_job):
    """Statistics of batch normalisation with it: a pretrained model need be loaded on that rank only."""
    code, output = run_job(
        """
        import torch
        from hvd_sparse.torch.asynchronous import ASGD, connect

        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        for tensor in model.state_dict().values():
            tensor.fill_(1 + RANK)
        session = connect(model, ASGD(), servers=2)
        if session.is_worker:
            found = {float(value) for tensor in model.state_dict().values() if tensor.ndim for value in tensor.view(-1)}
            print(f"rank {RANK} begins with {found}")
            session.close()
        else:
            session.serve()
        """,
        4,
    )
    assert code == 0
    assert [f"rank {rank} begins with {{3.0}}" in output for rank in (0, 1)] == [True, True], output


ONLY_SOME = {  # ranks with the file, ranks, servers, and what is said; None: all is well
    "the first server": ([2], 3, 1, None),
    "a worker": ([0], 3, 1, "restore = a file there"),
    "all but the second server": ([0, 1, 2], 4, 2, None),
    "the second server": ([3], 4, 2, "was given to rank 3, and none to rank 2"),
}


@pytest.mark.parametrize("what", tiers.choice(ONLY_SOME, "a worker", "the second server"))
def test_a_file_that_only_some_ranks_are_given(run_job, tmp_path, what):
    """The first server reads it. Without it there, no other rank may believe that the run goes on from it."""
    given, ranks, servers, said = ONLY_SOME[what]
    path = tmp_path / "saved.npz"
    arrays = {f"parameter/{name}": np.full(shape, 7.0, np.float32) for name, shape in SHAPES.items()}
    np.savez(path, buffers=np.empty(0, np.float32), **arrays)
    code, output = run_job(
        f"""
        session = Job(restore={str(path)!r} if RANK in {given} else None, servers={servers}, timeout=4.0)
        if session.is_server:
            session.serve()
        else:
            print("begins with", set(float(v) for array in session.theta.values() for v in array.reshape(-1)))
            session.close()
        """,
        ranks,
    )
    assert (code == 0) == (said is None), output
    assert output.count("begins with {7.0}") == 2 if said is None else said in output, output


@pytest.mark.parametrize(
    ("ranks", "servers", "first"), [(4, 2, 2), pytest.param(3, "'colocated'", 0, marks=pytest.mark.exhaustive)]
)
def test_a_server_that_cannot_start_says_why(run_job, ranks, servers, first):
    """No rank waits for `timeout`, 30 seconds."""
    _, output = run_job(
        f"""
        begin = time.monotonic()
        try:
            session = Job(servers={servers}, restore="missing.npz" if RANK == {first} else None)
            session.serve() if session.is_server else session.train(10**6)
        except Exception as error:
            print("raised", "because of the file" * ("missing.npz" in str(error)))
        print("after", int(time.monotonic() - begin))
        """,
        ranks,
    )
    assert output.count("raised because of the file") == ranks, output
    assert max(map(int, re.findall(r"after (\d+)", output))) < 10, output


@pytest.mark.exhaustive
def test_a_file_with_buffers_of_another_size(run_job, tmp_path):
    """Every rank says so, and the session ends: another can be opened."""
    np.savez(tmp_path / "saved.npz", buffers=np.ones(3, np.float32), **{"parameter/weight": np.ones(2, np.float32)})
    np.savez(tmp_path / "without.npz", buffers=np.empty(0, np.float32), **{"parameter/weight": np.ones(2, np.float32)})
    code, output = run_job(
        f"""
        import torch
        from hvd_sparse.torch.asynchronous import ASGD, connect

        model = torch.nn.BatchNorm1d(2, affine=False)
        model.weight = torch.nn.Parameter(torch.zeros(2))
        try:
            connect(model, ASGD(), restore={str(tmp_path / "saved.npz")!r}, timeout=60.0)
        except Exception as error:
            print(f"rank {{RANK}}: {{error}}")
        session = connect(model, ASGD(), restore={str(tmp_path / "without.npz")!r}, timeout=20.0)
        if session.is_server:
            session.serve()
        else:
            print("begins with", model.weight.tolist(), model.running_var.tolist())
            session.close()
        """
    )
    assert code == 0 and output.count("must have 4 elements of buffers, got 3") == 3, output
    assert output.count("begins with [1.0, 1.0] [1.0, 1.0]") == 2, output


def test_a_server_that_fails_after_its_worker_has_left(run_job):
    """`close` of that rank waits for the server, and raises."""
    code, output = run_job(
        """
        session = Job(servers="colocated")
        session.train(3)
        MPI.COMM_WORLD.Barrier()
        if RANK == 0:
            def fail(*arguments):
                raise MemoryError("no room")
            for server in session._local.servers.values():
                server.handle = fail
        else:
            time.sleep(1.0)
            try:
                session.train(10**6)
            except Exception as error:
                print(f"rank {RANK}: {error}")
        try:
            session.close()
        except Exception as error:
            print(f"rank {RANK}, close: {error}")
        """
    )
    assert code == 0 and "rank 0, close: the server on this rank has stopped: no room" in output, output
    assert all(f"rank {rank}: server 0" in output for rank in (1, 2)), output


def test_an_mpi_that_only_one_thread_may_call_runs_what_needs_no_more(run_job):
    """Heartbeats, a server beside a worker and several servers on a rank are refused, with a run that works."""
    code, output = run_job(
        """
        refused = [{"silence": 20.0}, {"servers": "colocated"}]
        if RANK == RANKS - 1:  # which serves
            refused.append({"servers": 1, "threads": 2})
        for options in refused:
            try:
                Job(**options)
            except RuntimeError as error:
                print("refused:", error)
        session = Job(silence=None, servers=1, threads=1)
        if session.is_worker:
            session.train(3)
            session.close()
        else:
            session.serve()
        print("ended", RANK)
        """,
        ranks=2,
        environment={"MPI4PY_RC_THREAD_LEVEL": "serialized"},
    )
    assert code == 0 and output.count("ended") == 2, output
    told = "refused: this MPI was started without MPI_THREAD_MULTIPLE, which heartbeats and co-located servers need: "
    assert output.count(told) == 5 and output.count("or pass silence=None, servers=1 and threads=1") == 5, output


def test_a_session_within_an_exception_handler_ends_well(run_job):
    """Neither that exception nor one of an earlier line of a notebook is a reason to leave early."""
    code, output = run_job(
        """
        sys.last_value = KeyError("of an earlier line")
        try:
            raise ValueError("handled")
        except ValueError:
            session = Job()
            if session.is_worker:
                session.train(3)
                session.close()
            else:
                print("departures", sorted(session.serve().items()))
        del sys.last_value
        """
    )
    assert code == 0 and "departures [(0, ''), (1, '')]" in output, output


RESTORED = """
session = Job(restore={restore!r}, servers={servers!r})
if session.is_worker:
    if {restore!r}:
        with np.load({restore!r}) as file:
            same = [(file[f"parameter/{{name}}"] == theta).all() for name, theta in session.theta.items()]
            print("as saved", all(same))
    # no worker pushes before all have looked
    MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl(session.placement.workers)).Barrier()
    session.train(20)
    if RANK == 0:
        session.save({path!r})
    session.close()
else:
    session.serve()
"""


def test_saved_and_restored_with_other_numbers(run_job, tmp_path):
    """Two workers and one server go on as one worker and three servers, then as three co-located ranks."""
    paths, losses_there = [str(tmp_path / f"{number}.npz") for number in range(3)], []
    for path, (ranks, servers, restore) in zip(
        paths, [(3, 1, None), (4, 3, paths[0]), (3, "colocated", paths[1])], strict=True
    ):
        code, output = run_job(RESTORED.format(restore=restore, servers=servers, path=path), ranks)
        assert code == 0 and "as saved False" not in output, output
        with np.load(path) as file:
            losses_there.append(loss_of({name: file[f"parameter/{name}"] for name in SHAPES}))
        expected = 0 if restore is None else ranks if servers == "colocated" else ranks - servers
        assert output.count("as saved True") == expected, output
    assert losses_there == sorted(losses_there, reverse=True)
