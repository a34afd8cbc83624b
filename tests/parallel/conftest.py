"""A Horovod job for each test session, see tests/shared/job.py.

mpirun -np 3 --oversubscribe python -m pytest -x -q tests/parallel
horovodrun -np 2 --gloo python -m pytest -x -q tests/parallel
"""

import os

import pytest
import torch

os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")  # for the tests of process sets
import horovod.torch as hvd
from job import Job


def start():
    """Wait for all ranks."""
    hvd.barrier()
    torch.manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    # the tests have a lone process's hooks called too, see helpers.distributed
    config.addinivalue_line("filterwarnings", "ignore:hvd_sparse. Horovod calls no compressor with one process")
    config.pluginmanager.register(Job(hvd, start))
    torch.set_num_threads(1)
