"""A Horovod job for each test session, see tests/shared/job.py.

mpirun -np 3 --oversubscribe python -m pytest -x -q tests/parallel
horovodrun -np 2 --gloo python -m pytest -x -q tests/parallel
"""

import os

import pytest
import torch

os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")  # for the tests of process sets
import horovod.torch as hvd
import leftover_sets
from job import Job

# under Gloo each rank is a separate world of MPI, which pipelines refuse
collect_ignore_glob = ["test_*pipeline*.py"] if os.environ.get("HOROVOD_CONTROLLER") == "gloo" else []


def start():
    """Wait for all ranks."""
    hvd.barrier()
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_sets_left():
    yield
    leftover_sets.remove(hvd)


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    # the tests have a lone process's hooks called too, see helpers.distributed
    config.addinivalue_line("filterwarnings", "ignore:hvd_sparse. Horovod calls no compressor with one process")
    config.pluginmanager.register(Job(hvd, start))
    torch.set_num_threads(1)
