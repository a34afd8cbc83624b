"""Asynchronous runs on MPI: they train, and after a failure they end without a hang."""

import re
import time

import launching
import numpy as np
import pytest
import tiers
from asynchronous_job import LR, dgs, gradients, loss_of, numbers

from hvd_sparse.parameter_server import Simulation, in_turn

pytestmark = launching.MARKS


def losses(output):
    return [float(number) for number in re.findall(r"loss ([\d.]+) rank", output)]


@pytest.fixture(scope="module")
def expected_loss():
    """Of 600 steps with two workers in turn, in one process."""
    randoms = [np.random.default_rng(100 + worker) for worker in range(2)]
    simulation = Simulation(dgs(), numbers(2), 2)
    simulation.run(in_turn(2), 600, lambda worker, theta: gradients(theta, randoms[worker]), LR)
    return loss_of(simulation.parameters())


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(3, "servers=1", marks=pytest.mark.exhaustive),
        pytest.param(3, "servers=1, overlap=True", marks=pytest.mark.exhaustive),
        (3, "servers='colocated', threads=2, silence=20.0"),
        pytest.param(5, "servers=2", marks=pytest.mark.exhaustive),
        (5, "servers=2, overlap=True, method=dgs(pull_density=0.2, values='int2')"),
        pytest.param(5, "servers='colocated', overlap=True", marks=pytest.mark.exhaustive),
        pytest.param(3, "servers=1, threads=2", marks=pytest.mark.exhaustive),
        pytest.param(2, "servers='colocated', threads=3", marks=pytest.mark.exhaustive),
        pytest.param(4, "servers=2, threads=2, overlap=True", marks=pytest.mark.exhaustive),
    ],
)
def test_quality_is_that_of_a_deterministic_run(run_job, expected_loss, ranks, options):
    workers = ranks if "colocated" in options else ranks - int(options[8])
    code, output = run_job(f"run({600 // workers}, {options})", ranks)
    assert code == 0, output
    found = losses(output)
    assert len(found) == workers and output.count("ended") == ranks, output
    assert min(found) < expected_loss + 0.1, output  # the last one's, when all have been heard; it began at 40


@pytest.mark.parametrize("threads", [1, 3])
def test_one_worker_is_the_simulation_bit_for_bit(run_job, threads):
    """Also where a message of MPI's holds no more than a part of the worker's and the server's.

    Several threads of a server are several servers.
    """
    code, output = run_job(
        f"""
        from hvd_sparse import mailbox
        mailbox.MOST_BYTES = 100
        session = Job(dgs(pull_density=0.3), threads={threads})
        if session.is_server:
            session.serve()
        else:
            from hvd_sparse.parameter_server import Simulation
            twin, random = Simulation(session.method, numbers(1), 1, {threads}), np.random.default_rng(100)
            session.train(60)
            for _ in range(60):
                twin.step(0, lambda worker, theta: gradients(theta, random), LR)
            theirs = session._state()[0]
            same = [(theirs[name] == array).all() for name, array in twin.parameters().items()]
            same += [(session.worker.parameters[name] == array).all()
                     for name, array in twin.workers[0].parameters.items()]
            print("same", all(same), len(same))
            session.close()
        """,
        ranks=2,
    )
    assert code == 0 and "same True 4" in output, output


def test_slow_early_and_late_workers(run_job, expected_loss):
    """One is five times slower, one leaves early, one joins three seconds late."""
    code, output = run_job(
        """
        if RANK == 2:
            time.sleep(3.0)
        pause = [0.05, 0.01, 0.01, 0.01, 0.0][RANK]
        run(steps=[100, 20, 200, 300, 0][RANK], before=lambda step: time.sleep(pause))
        """,
        ranks=5,
    )
    assert code == 0, output
    assert len(losses(output)) == 4 and "departures [(0, ''), (1, ''), (2, ''), (3, '')]" in output, output
    assert min(losses(output)) < expected_loss + 0.1


def test_a_worker_that_raises_does_not_stop_the_others(run_job):
    code, output = run_job(
        """
        def before(step):
            if RANK == 1 and step == 5:
                raise ArithmeticError("what went wrong")
        run(before=before)
        """
    )
    assert code != 0
    assert "ArithmeticError: what went wrong" in output and "worker 1 left early: ArithmeticError: what" in output
    assert len(losses(output)) == 1 and "ended 2" in output, output


def test_a_thread_that_fails_ends_the_others(run_job):
    """The workers hear of it from both; `serve` raises what was raised in the thread."""
    code, output = run_job(
        """
        session = Job(threads=2)
        if session.is_server:
            def fail(message, record):
                raise ArithmeticError("what went wrong")
            session._local.servers[1]._push = fail
            session.serve()
        session.train(5)
        """
    )
    assert code != 0 and output.count("ServerRefused: server") == 2, output
    assert re.search(r"^ArithmeticError: what went wrong", output, re.M), output


@pytest.mark.exhaustive
def test_without_a_with_statement_too(run_job):
    code, output = run_job(
        """
        session = Job(servers="colocated")
        session.train(5)
        if RANK == 1:
            raise ArithmeticError("what went wrong")
        """
    )
    assert code != 0
    assert "worker 1 left early: ArithmeticError: what went wrong" in output, output


def test_a_killed_rank_ends_the_job(run_job):
    code, output = run_job(
        "run(before=lambda step: os.kill(os.getpid(), signal.SIGKILL) if RANK + step == 6 else None)"
    )
    assert code != 0 and re.search("exited on signal 9|noticed that process rank", output), output


def test_with_enable_recovery_the_others_outlive_a_killed_worker(run_job, expected_loss):
    """MPI goes on for those that are left; only the server's report tells that a worker is missing."""
    code, output = run_job(
        """
        def before(step):
            time.sleep(0.01)
            if RANK == 1 and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
        run(steps=300, before=before, silence=3.0)
        """,
        options=["--enable-recovery"],
    )
    assert code == 0, output
    assert len(losses(output)) == 1 and losses(output)[0] < expected_loss + 0.1, output
    assert "departures [(0, ''), (1, 'no sign of life for 3 seconds')]" in output and "ended 2" in output, output


@pytest.mark.exhaustive
def test_a_push_that_is_on_its_way_is_a_sign_of_life(run_job):
    """The worker computes longer than `silence` and does not call MPI: its push moves when it does."""
    code, output = run_job(
        """
        from hvd_sparse.mailbox import Mailbox
        from hvd_sparse.parameter_server import ASGD
        Mailbox._progress = lambda box: None  # no thread moves messages
        shapes = {"weight": (2000, 2000)}
        session = Job(ASGD(), shapes, silence=4.0 if RANK == 1 else None, overlap=True)  # no heartbeat
        if session.is_server:
            print("departures", session.serve())
        else:
            for _ in range(2):
                session._push({"weight": np.ones(4_000_000, np.float32)}, {"weight": 0.1})
                time.sleep(5.0)
            session.close()
        """,
        ranks=2,
    )
    assert code == 0 and "departures {0: ''}" in output and "is gone" not in output, output


WIDER = "session = Job(shapes={'weight': (20, 5 + RANK // %d)})\nsession.serve()"
DIFFERING = {  # ranks, script, what is said
    "method": (3, "run(method=dgs(momentum=0.1 * RANK))", "momentum = 0.1"),
    "model": (3, WIDER % 2, "elements = 120 here"),
    "co-located": (3, "run(method=dgs(density=0.1 + 0.1 * RANK), servers='colocated')", "density = "),
    "second server": (4, WIDER.replace("})", "}, servers=2)") % 3, "elements = 120 here"),
    "threads": (3, "run(threads=1 + RANK // 2)", "servers times threads = 1 there; servers times threads = 2 here"),
    "threads of a worker": (3, "run(threads=2 - RANK // 2)", "servers times threads = 2 there"),
    "servers": (3, "run(servers='colocated' if RANK == 0 else 1)", "differs: rank 0 serves there, here ranks 2 do"),
    "first server": (4, WIDER.replace("RANK // %d", "RANK %% 3 // %d").replace("})", "}, servers=2)") % 2, "120 here"),
}


@pytest.mark.parametrize("what", tiers.choice(DIFFERING, "model", "threads"))
def test_ranks_that_differ_say_in_what(run_job, what):
    """Nobody waits for workers that were refused."""
    ranks, script, difference = DIFFERING[what]
    begin = time.monotonic()
    code, output = run_job(script, ranks)
    assert time.monotonic() - begin < 25.0, output  # less than the timeout of the session
    assert code != 0 and "ServerRefused" in output and difference in output and "differ" in output, output


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ("method=dgs(density=0.2 if RANK == 1 else 0.1)", "density"),
        ("shapes={'weight': (20, 5), 'bias': (5,)} | ({'more': (7,)} if RANK == 1 else {})", "tensors = 3 there"),
    ],
)
def test_one_worker_that_differs_is_left_out(run_job, options, difference):
    """Only this worker raises an error; the others finish, and the server reports who is missing and why."""
    code, output = run_job(f"run({options})")
    assert code != 0 and output.count("ServerRefused: ") == 1
    assert "loss" in output and len(losses(output)) == 1 and "ended 0" in output and "ended 2" in output, output
    assert f"worker 1 left early: worker 1 and this server differ: {difference}" in output, output


def test_servers_that_do_not_serve(run_job):
    code, output = run_job(
        """
        MPI.COMM_WORLD.Barrier()
        session = Job(timeout=2.0)
        time.sleep(4.0)
        """
    )
    assert code != 0 and "TimeoutError: no answer from the servers, ranks [2]" in output, output


@pytest.mark.exhaustive
def test_workers_that_do_not_come(run_job):
    code, output = run_job(
        """
        if RANK == 1:
            sys.exit(0)
        MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Excl([1])).Barrier()
        if RANK == 0:
            run(steps=3)
        else:
            run(timeout=2.0)
        """
    )
    assert code != 0 and "TimeoutError: workers [1] have not joined for 2 seconds" in output, output


def test_an_idle_server_costs_little(run_job):
    code, output = run_job(
        """
        import resource
        def used():
            usage = resource.getrusage(resource.RUSAGE_SELF)
            return usage.ru_utime + usage.ru_stime
        session = Job()
        if session.is_server:
            before = used()
            session.serve()
            print("server used", used() - before)
        else:
            session.train(3)
            time.sleep(3.0)
            session.close()
        """,
        ranks=2,
    )
    assert code == 0, output
    assert float(re.search(r"server used ([\d.]+)", output)[1]) < 0.3, output


@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_a_worker_that_was_silent_comes_back(run_job, servers):
    """Stopped for longer than `silence`, the worker is dropped, then joins again. Each push counts once."""
    code, output = run_job(
        f"""
        def before(step):
            time.sleep(0.02)
            if RANK == 1 and step == 20:  # no push is on its way; somebody else lets this process go on
                subprocess.Popen(["sh", "-c", f"sleep 6; kill -CONT {{os.getpid()}}"])
                os.kill(os.getpid(), signal.SIGSTOP)
        session = Job(servers={servers}, silence=3.0)
        if session.is_worker:
            with session:
                session.train(40 if RANK == 1 else 250, before)
                print("incarnations", session.worker._rejoins, "pushes", session.worker.traffic.pushes)
                MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl(session.placement.workers)).Barrier()
                if RANK == 0:  # both have pushed
                    print("servers", [(d["pushes"], d["refused"]) for d, _ in session._answers("statistics")])
        else:
            print("departures", session.serve())
        """,
        ranks=2 + servers,
    )
    assert code == 0, output
    assert "worker 1 is gone: no sign of life for 3 seconds" in output, output
    found = re.findall(r"\((\d+), (\d+)\)", re.search(r"servers \[(.*)\]", output)[1])
    assert len(found) == servers
    # a push that met one forgetful server of two is empty at the other, the second time
    for pushes, refused in found:
        assert int(pushes) in range(290, 290 + servers) and int(refused) == 1, output


def test_horovod_and_a_session_in_one_process(run_job):
    code, output = run_job(
        """
        import horovod.torch as hvd
        import torch
        from hvd_sparse.torch.asynchronous import connect
        hvd.init()
        model = torch.nn.Sequential(torch.nn.Linear(10, 4), torch.nn.BatchNorm1d(4))
        session = connect(model, dgs(), timeout=30.0)
        assert hvd.rank() == RANK and session.rank == RANK
        if session.is_worker:
            optimizer = session.optimizer(lr=0.1)
            for _ in range(10):
                optimizer.zero_grad()
                model(torch.randn(8, 10)).square().sum().backward()
                optimizer.step()
            model.load_state_dict(session.global_state_dict())
            session.close()
        else:
            session.serve()
        total = hvd.allreduce(torch.ones(3), op=hvd.Sum)
        print("sum", total.tolist())
        hvd.shutdown()
        """
    )
    assert code == 0 and output.count("sum [3.0, 3.0, 3.0]") == 3, output


FROZEN = """
import json
from torch import nn
import torch
from hvd_sparse.torch.asynchronous import DGS, connect

torch.manual_seed(RANK if os.environ["DIFFERS"] else 0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
model[0].requires_grad_(False)
session = connect(model, DGS(), silence=None, timeout=60.0)
if not session.is_worker:
    session.serve()
    parameters = session.global_state_dict()
    print("value", parameters["1.bias"].tolist(), session.save(os.environ["JOB_OUTPUT"] + ".npz"))
    saved = json.loads(str(np.load(os.environ["JOB_OUTPUT"] + ".npz")["settings"]))["statistics"]
    stats = session.stats()
    assert stats.keys() == saved.keys() == {"all"}
    assert stats["all"]["pushes"] == saved["all"]["pushes"] == 1 and stats["all"]["staleness"] == {0: 1}
    assert stats["all"]["departures"] == {0: ""} and stats["all"]["bytes_in"] > 0
else:
    optimizer = session.optimizer(lr=0.5)
    model(torch.zeros(1, 4)).sum().backward()
    model[1].bias.grad.fill_(1.0)
    optimizer.step()
    print("value", model[1].bias.tolist(), None)
    session.close()
"""


def test_the_final_model_is_on_the_server(run_job):
    code, output = run_job(FROZEN, 2, environment={"DIFFERS": ""})
    values = re.findall(r"value (.*)", output)
    assert code == 0 and len(values) == 2 and values[0] == values[1], output


@pytest.mark.exhaustive
def test_frozen_parameters_must_be_equal(run_job):
    code, output = run_job(FROZEN, 2, environment={"DIFFERS": "1"})
    assert code != 0 and "ServerRefused" in output and "frozen parameters = 2, checksum" in output, output


def test_a_worker_that_never_pushes_is_reported(run_job):
    assert "worker 0 left without a push" in run_job("run(steps=0)", 2)[1]


def test_several_servers_have_no_final_model(run_job):
    script = """
    session = Job(servers=2)
    if session.is_worker:
        session.train(2)
        session.close()
    else:
        session.serve()
        session.save("nothing.npz")
    """
    code, output = run_job(script, 3)
    assert code != 0 and "has only a part of the model: save on a worker" in output, output
