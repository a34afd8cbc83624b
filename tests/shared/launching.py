"""Starts jobs of several processes, and ends them if they hang."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

LIMIT_SECONDS = 240
MPIRUN = shutil.which("mpirun")
# TensorFlow loads Keras 3 otherwise, which takes 2 s longer; TensorFlow before 2.16 has Keras 2 without tf_keras.
KERAS_2 = {"TF_USE_LEGACY_KERAS": "1"} if importlib.util.find_spec("tf_keras") else {}
MARKS = [
    pytest.mark.skipif(MPIRUN is None, reason="needs mpirun"),
    pytest.mark.skipif("OMPI_COMM_WORLD_SIZE" in os.environ, reason="starts jobs of its own, not inside another job"),
]


def mpirun(ranks):
    return [MPIRUN, "-np", str(ranks), "--oversubscribe", "--mca", "btl_vader_single_copy_mechanism", "none"]


def launch(command, environment=()):
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    # Unbuffered, print writes a line and its newline separately, and mpirun may put another rank's line in between.
    root["PYTHONUNBUFFERED"] = ""
    # a separate process group, so that mpirun and all ranks can be ended after a hang
    job = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, **root, **dict(environment)},
    )
    try:
        output, _ = job.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGTERM)
        output, _ = job.communicate()
        pytest.fail(f"the job hung:\n{output}")
    return job.returncode, output


def run_asynchronous_job(directory, script, ranks=3, environment=(), options=()):
    """Run a script with the names of `asynchronous_job` under mpirun; a directory is for the ranks' output.

    Returns the exit code, and what ranks and mpirun wrote.
    """
    preamble = "import os, signal, subprocess, sys, time\nfrom asynchronous_job import *\n"
    (output := directory / "output").mkdir(exist_ok=True)
    command = [*mpirun(ranks), *options, sys.executable, "-c", preamble + textwrap.dedent(script)]
    here = {"JOB_OUTPUT": str(output), "PYTHONPATH": str(Path(__file__).parent), **dict(environment)}
    code, printed = launch(command, here)
    return code, "".join(file.read_text() for file in sorted(output.iterdir())) + printed
