"""Short scenarios of `make test-faults`, without those that may end in Horovod's own hang."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "faults", "run.py")
# Starts a script with Ctrl-C as it is in a terminal: a shell's job in the background ignores it.
STARTED = """import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
pytestmark = pytest.mark.skipif("OMPI_COMM_WORLD_SIZE" in os.environ, reason="starts jobs of its own, not inside a job")


@pytest.mark.parametrize(
    ("name", "tries"),
    [
        ("corrupted_torch", 1),
        pytest.param("corrupted_tensorflow", 1, marks=pytest.mark.exhaustive),
        pytest.param("ends_tensorflow", 2, marks=pytest.mark.exhaustive),
        pytest.param("delays_tensorflow", 2, marks=pytest.mark.exhaustive),
        ("killed_writer", 3),
        pytest.param("in_server", 2, marks=pytest.mark.exhaustive),
        ("submits_torch", 2),
        pytest.param("in_worker", 2, marks=pytest.mark.exhaustive),
        pytest.param("in_stage_torch", 3, marks=pytest.mark.exhaustive),
        pytest.param("link_cut_torch", 1, marks=pytest.mark.exhaustive),
        pytest.param("link_cut_for_good_torch", 2, marks=pytest.mark.exhaustive),
        pytest.param("asymmetric_rates_torch", 2, marks=pytest.mark.exhaustive),
        pytest.param("recovered_worker", 1, marks=pytest.mark.exhaustive),
        pytest.param("recovered_server", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_a_scenario(name, tries):
    command = [sys.executable, RUN, name, "--tries", str(tries), "--dry"]
    # As Python knows the environment: MPI, where a test before this one started it, has put its own variables behind
    # Python's back, and a mpirun that inherits these does not start.
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    if "skipped: " in done.stdout:
        pytest.skip(done.stdout)
    assert f"{tries} tries, 0 failures" in done.stdout


def test_a_scenario_that_cannot_run_here_says_what_is_missing():
    command = [sys.executable, RUN, "link_cut_torch", "--dry"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "PATH": "/nowhere"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped: There is no unshare, nsenter, hostname, ip, tc, cc on PATH. Install" in done.stdout


def ranks_of(folder):
    """Return the ranks of network jobs whose temporary files are in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            words = path.read_bytes()
            if b"rank_job.py" in words and os.fsencode(folder) in words:
                found.append(path.parent.name)
    return found


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_network_job_whose_runner_ends(how, tmp_path):
    command = [sys.executable, "-c", STARTED, RUN, "link_cut_for_good_torch", "--tries", "1", "--dry"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    runner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    end = time.monotonic() + 60
    while not ranks_of(tmp_path):
        if runner.poll() == 0:
            pytest.skip(runner.stdout.read())
        assert time.monotonic() < end and runner.poll() is None, runner.stdout.read()
        time.sleep(0.05)
    runner.send_signal(how)
    runner.communicate(timeout=60)
    end = time.monotonic() + 20
    while ranks_of(tmp_path) or list(tmp_path.iterdir()):
        assert time.monotonic() < end, [ranks_of(tmp_path), list(tmp_path.iterdir())]
        time.sleep(0.05)
