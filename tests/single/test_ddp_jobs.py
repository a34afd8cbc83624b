"""Jobs of torch.distributed that must end well, which a test inside such a job could not check."""

import os
import sys

import launching
import pytest
from launching import launch

pytestmark = [
    *launching.MARKS,
    pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="looks for the threads of gloo in Linux's /proc"),
]
TRAINED = """
import os, subprocess, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from hvd_sparse.torch.ddp import Compression

def gloo_threads():
    names = {thread: open(f"/proc/self/task/{thread}/comm").read() for thread in os.listdir("/proc/self/task")}
    return [int(thread) for thread, name in names.items() if "gloo_runloop" in name]

def train():
    model = torch.nn.Linear(64, 64)
    compression = Compression.dgc(model.named_parameters(), density=0.01, momentum=0.9, dense_fallback=None)
    model = DistributedDataParallel(model)
    compression.register(model)
    for _ in range(3):
        model(torch.ones(4, 64)).sum().backward()

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
train()
"""
# Each group has its own threads. They run only after everything else on the processor, which has always work to do, so
# that most still hold the tensor of the group's last collective when the main thread goes on. Beside other tests they
# may get no turn in the moment that is enough elsewhere, so the process waits longer.
PATIENT = """
from hvd_sparse.torch.collectives import distributed
distributed.EXIT_SECONDS = 3
"""
LATE = """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
groups = [dist.new_group([0]) for _ in range(6)]
for thread in gloo_threads():
    os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
busy = f"import os\\nwhile os.getppid() == {os.getpid()}: pass"
subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
for group in groups:
    dist.all_reduce(torch.ones(3), group=group)
"""
ENDED = """
import gc
assert gloo_threads()
gc.collect()
dist.destroy_process_group()
assert not gloo_threads()
"""
WATCHED = """
import torch
from hvd_sparse.torch.ddp import Compression
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks
assert not hooks
for _ in range(2):
    Compression.topk(torch.nn.Linear(64, 64).named_parameters(), 0.01)
assert len(hooks) == 1
"""


def test_a_process_may_end_while_threads_of_gloo_free_their_tensors():
    code, output = launch([sys.executable, "-c", PATIENT + TRAINED + LATE])
    assert code == 0, output


def test_destroying_the_process_group_ends_its_threads():
    """They do not end if PyTorch imports torch.distributed.nn when it builds the model."""
    code, output = launch([sys.executable, "-c", TRAINED + ENDED])
    assert code == 0, output


def test_optimizers_are_watched_only_where_there_is_a_compression():
    code, output = launch([sys.executable, "-c", WATCHED])
    assert code == 0, output
