"""torch.distributed jobs that must end well, which a test inside such a job could not check."""

import sys

import launching
import pytest
from launching import launch

pytestmark = [*launching.MARKS, pytest.mark.exhaustive]
JOBS = 12  # of which 5 aborted as long as nothing kept the last collectives
ENDS_AT_ONCE = """
import os
import torch
import torch.distributed as dist
from hvd_sparse.torch.collectives.distributed import DistributedCollectives

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # the threads of both ranks wait for each other
dist.init_process_group("gloo")
collectives = DistributedCollectives()
for _ in range(20):
    collectives.gather("", torch.ones(1000)).wait()
"""


def test_a_job_may_end_at_once_after_a_collective():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    for _ in range(JOBS):
        code, output = launch([*torchrun, sys.executable, "-c", ENDS_AT_ONCE])
        assert code == 0, output
