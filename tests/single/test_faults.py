"""Short scenarios of `make test-faults`, without those that may end in Horovod's own hang."""

import os
import subprocess
import sys

import pytest

RUN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "faults", "run.py")
pytestmark = pytest.mark.skipif("OMPI_COMM_WORLD_SIZE" in os.environ, reason="starts jobs of its own, not inside a job")


@pytest.mark.parametrize(
    ("name", "tries"),
    [
        ("corrupted_torch", 1),
        ("killed_writer", 3),
        ("in_server", 2),
        ("submits_torch", 2),
        pytest.param("in_worker", 2, marks=pytest.mark.exhaustive),
        pytest.param("in_stage_torch", 3, marks=pytest.mark.exhaustive),
    ],
)
def test_a_scenario(name, tries):
    command = [sys.executable, RUN, name, "--tries", str(tries), "--dry"]
    # As Python knows the environment: MPI, where a test before this one started it, has put its own variables behind
    # Python's back, and a mpirun that inherits these does not start.
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{tries} tries, 0 failures" in done.stdout
