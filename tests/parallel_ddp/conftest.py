"""A torch.distributed job for each test session, see tests/shared/job.py. Horovod cannot be imported in it.

torchrun --standalone --nproc-per-node 2 --no-python pytest -x -q tests/parallel_ddp
"""

import os
import sys

import pytest
import torch
import torch.distributed as dist
from job import Job


class WithoutHorovod:
    """Makes every import of Horovod fail, as where it is not installed."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "horovod":
            raise ModuleNotFoundError("No module named 'horovod'", name=name)


class Distributed:
    """What a job has to know of its ranks."""

    @staticmethod
    def init():
        assert "horovod" not in sys.modules
        sys.meta_path.insert(0, WithoutHorovod)
        for name, alone in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
            os.environ.setdefault(name, alone)
        dist.init_process_group("gloo")

    rank = staticmethod(dist.get_rank)
    size = staticmethod(dist.get_world_size)


def start():
    """Wait for all ranks."""
    dist.barrier()
    torch.manual_seed(0)


def pytest_unconfigure():
    dist.destroy_process_group()


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    config.pluginmanager.register(Job(Distributed, start))
    torch.set_num_threads(1)
