"""Horovod and DistributedDataParallel in one job: the same bytes, parameters and checkpoints."""

import horovod.torch as hvd
import numpy as np
import parity_job
import pytest
import torch
import torch.distributed as dist
from gradients import draw
from helpers import distributed, step
from terms import Terms
from torch.nn.parallel import DistributedDataParallel

from hvd_sparse import torch as front
from hvd_sparse.torch import ddp

pytestmark = pytest.mark.skipif(
    hvd.size() != 2, reason="compares bits: Horovod and gloo add float32 of more than two ranks in orders of their own"
)

SHAPES = {"a": (30, 20), "b": (20,), "c": (500,)}


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    """Have a process group of gloo beside Horovod."""
    address = hvd.broadcast_object(f"file://{tmp_path_factory.mktemp('group')}/store", name="store")
    dist.init_process_group("gloo", init_method=address, rank=hvd.rank(), world_size=hvd.size())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("case", parity_job.CASES)
def test_both_hosts_send_the_same_bytes(case):
    """The same gradients give the same payloads, bit for bit, over 50 steps, and the same parameters."""
    method, settings = parity_job.CASES[case]
    drawn = draw(parity_job.SHAPES, 0, 0, seed=9)
    initial = {name: value.astype(np.float32) for name, value in drawn.items()}
    theirs, expected = parity_job.train_torch(method, settings, {name: one.copy() for name, one in initial.items()})
    ours, found = parity_job.train_ddp(method, settings, initial)
    assert sum(map(len, theirs)) > 10_000
    assert b"".join(ours) == b"".join(theirs)
    for name in parity_job.SHAPES:
        np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("method", ["dgc", "dct", "micro"])
def test_a_checkpoint_of_horovod_resumes_under_ddp(method, summed):
    """Both go on from it alike, bit for bit, and a checkpoint of DDP resumes under Horovod."""
    start = draw(SHAPES, step=0, rank=0, seed=1)
    settings = {
        "density": 0.05,
        "min_numel": 0,
        "dense_fallback": None,
        **({"momentum": 0.9} if method == "dgc" else {}),
    }

    parameters, model = dict(Terms(start).named()), Terms(start)
    compression = getattr(front.Compression, method)(parameters.items(), **settings)
    optimizer = distributed(parameters, compression)
    for number in range(4):
        step(optimizer, parameters, draw(SHAPES, number, hvd.rank()))
    state = compression.state_dict(summed)
    compression.load_state_dict(state)

    resumed = getattr(ddp.Compression, method)(model.named(), **settings)
    wrapped = DistributedDataParallel(model)
    resumed.register(wrapped)
    resumed.load_state_dict(state)
    assert any(bool(buffer.any()) for buffers in state["memory"].values() for buffer in buffers.values())
    for number in range(4, 8):
        if number == 6:
            compression.load_state_dict(resumed.state_dict())
        gradients = draw(SHAPES, number, hvd.rank())
        step(optimizer, parameters, gradients)
        wrapped.zero_grad()
        wrapped(gradients).backward()
        for name in SHAPES:
            assert torch.equal(model[name].grad, parameters[name].grad), (name, number)
