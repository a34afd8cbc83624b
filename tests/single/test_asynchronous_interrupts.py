"""Asynchronous jobs that are interrupted: no rank waits for another that has ended."""

import os
import re
import signal
import subprocess
import sys
import time

import launching
import pytest
import tiers
from launching import mpirun

pytestmark = launching.MARKS
SHARED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "shared")


@pytest.mark.parametrize(
    ("name", "threads"),
    [
        pytest.param("INT", 1, marks=pytest.mark.exhaustive),
        ("INT", 2),
        pytest.param("TERM", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_an_interrupted_server_tells_its_workers(run_job, threads, name):
    """All of its threads do, and it raises KeyboardInterrupt."""
    code, output = run_job(
        f"""
        session = Job(threads={threads})
        if session.is_server:
            subprocess.Popen(["sh", "-c", f"sleep 2; kill -{name} {{os.getpid()}}"])
            session.serve()
        else:
            session.train(10**6, lambda step: time.sleep(0.01))
        """
    )
    assert code != 0 and output.count("ServerRefused: server") == 2, output
    assert "the server has stopped: KeyboardInterrupt" in output and re.search("^KeyboardInterrupt", output, re.M), (
        output
    )


RAISES = "raise FileNotFoundError('no log folder')"
LEAVING = {  # how the first server leaves between connect and serve, the number of servers, and what it raises
    "raises": (RAISES, 1, "FileNotFoundError: no log folder"),
    "raises in with": (f"with session: {RAISES}", 1, "FileNotFoundError: no log folder"),
    "raises, the first of two": (RAISES, 2, "FileNotFoundError: no log folder"),
    "ends": ("sys.exit()", 1, None),
    "closes": ("session.close(); session.serve()", 1, "RuntimeError: rank 2 has left the run: call serve() before"),
}


@pytest.mark.parametrize("how", tiers.choice(LEAVING, "raises in with", "raises, the first of two"))
def test_a_server_that_does_not_come_to_serve_tells_the_others(run_job, how):
    """Its workers, and the servers that wait for the first one's parameters. None of them waits for `timeout`."""
    leaves, servers, raised = LEAVING[how]
    code, output = run_job(
        f"""
        begin = time.monotonic()
        try:
            session = Job(servers={servers})
            if RANK != 2:
                session.serve() if session.is_server else session.train(10**6)
        except Exception as error:
            print("told after", int(time.monotonic() - begin), error)
        if RANK == 2:
            {leaves}
        """,
        2 + servers,
    )
    reason = raised if raised == LEAVING["raises"][2] else "RuntimeError: rank 2 has ended without serve()"
    told = [int(seconds) for seconds in re.findall(rf"told after (\d+) .*{re.escape(reason)}", output)]
    assert len(told) == 1 + servers and max(told) < 10, output
    assert code == 0 if raised is None else code != 0 and re.search(f"^{re.escape(raised)}", output, re.M), output


def test_the_model_of_an_interrupted_server_can_be_saved(run_job, tmp_path):
    """It is the one that the worker had last, and another run starts from it."""
    code, output = run_job(
        f"""
        import threading
        path = {str(tmp_path / "saved.npz")!r}
        session = Job()
        if session.is_server:
            def interrupt():
                while not os.path.exists(path + ".trained"):
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGINT)
            threading.Thread(target=interrupt).start()
            try:
                session.serve()
            except KeyboardInterrupt:
                session.save(path)
            MPI.COMM_WORLD.Barrier()
            Job(restore=path).serve()
        else:
            session.train(20)
            open(path + ".trained", "w").close()  # it has the answer to its last push
            expected = session.theta
            MPI.COMM_WORLD.Barrier()
            session.close()
            session = Job(restore=path)
            print("saved", all((session.theta[name] == array).all() for name, array in expected.items()))
            session.close()
        """,
        2,
    )
    assert code == 0 and "saved True" in output, output


def test_interrupting_mpirun_ends_all_ranks(tmp_path):
    script = "import time\nfrom asynchronous_job import *\n"
    script += "print('pid', os.getpid())\nrun(steps=10**6, before=lambda step: time.sleep(0.01))"
    environment = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "JOB_OUTPUT": str(tmp_path)}
    job = subprocess.Popen(
        [*mpirun(3), sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, **environment, "PYTHONPATH": SHARED},
    )
    try:
        deadline = time.monotonic() + 30
        while sum("pid" in file.read_text() for file in tmp_path.iterdir()) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(1.0)
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=20)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode != 0
    pids = [pid for file in tmp_path.iterdir() for pid in re.findall(r"pid (\d+)", file.read_text())]
    deadline = time.monotonic() + 10  # they may still be writing why, when mpirun has ended
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(pids) == 3 and not [pid for pid in pids if is_alive(pid)]


def is_alive(pid):
    """Return whether a process runs. A process that ended is listed until its parent waits for it."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
