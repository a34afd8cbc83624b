"""Two ranks that share a GPU under DistributedDataParallel, over gloo, and one over NCCL: no Horovod is needed."""

import json
import socket
import subprocess
import sys
from pathlib import Path

from gpu_helpers import SMALL, assert_nothing_wrong, assert_trained, need

HERE = Path(__file__).resolve().parent
LIMIT_SECONDS = 180
RANKS = 2


def run_job(what, ranks=RANKS):
    """Run ddp_job.py as several processes; return the last line of each one's output, from JSON."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = "import sys; sys.path[:0] = sys.argv[1:3]; del sys.argv[1:3]; import ddp_job; ddp_job.main()"
    command = [sys.executable, "-c", script, str(HERE), str(HERE.parent / "shared"), what]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    jobs = [subprocess.Popen([*command, str(rank), str(ranks), str(port)], **pipes) for rank in range(ranks)]
    try:
        outputs = [job.communicate(timeout=LIMIT_SECONDS)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0] * ranks, outputs
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_payloads_and_parameters_are_those_of_the_cpu():
    assert_nothing_wrong(run_job("parity"), 6)


def test_one_rank_over_nccl():
    assert_nothing_wrong(run_job("nccl", ranks=1), 6)


def test_eventful_steps_are_those_of_the_cpu():
    assert_nothing_wrong(run_job("events"), 11)


def test_a_thousand_steps_of_a_real_model():
    need(not SMALL, "it has no small form")
    assert_trained(run_job("train"))
