"""The training loop that trainers are compared with, and what compares them."""

import importlib.util
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from ddp_helpers import assert_ranks_agree
from torch.nn.parallel import DistributedDataParallel

from hvd_sparse.torch.ddp import Compression


def needs(package):
    reason = f"{package} is not installed: pip install -r requirements-ddp.txt, as make test-all does"
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=reason)


def dgc(named):
    return Compression.dgc(named, density=0.01, momentum=0.9)


def batches(steps, first=0):
    """Return this rank's batches of so many steps."""
    found = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
        inputs = torch.randn(16, 64, generator=generator)
        found.append((inputs, (inputs[:, 0] > 0).long()))
    return found


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def loss_of(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


class Loop:
    """The training loop that a user would write.

    accumulate: passes of a step, all but the last in `no_sync`. scale: that of a loss scaler.
    """

    def __init__(self, module=None, make=dgc, accumulate=1, scale=None):
        self.module = network() if module is None else module
        self.compression = make(self.module.named_parameters())
        self.model = DistributedDataParallel(self.module)
        self.compression.register(self.model)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.accumulate = accumulate
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        if scale is not None:
            self.compression.loss_scale = self.scaler

    def train(self, own):
        for place, batch in enumerate(own, 1):
            is_last = place % self.accumulate == 0
            with nullcontext() if is_last else self.model.no_sync():
                self.scaler.scale(loss_of(self.model, batch) / self.accumulate).backward()
            if not is_last:
                continue
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
        return self


def assert_same(module, expected):
    """Assert that training has changed all parameters, and that all ranks have the bits that are expected."""
    assert_ranks_agree(module)
    for one, other, start in zip(module.parameters(), expected.parameters(), network().parameters(), strict=True):
        assert torch.equal(one, other) and not torch.equal(one, start)


def assert_same_memory(found, expected):
    """Assert that two states have the same step and the same bits in all buffers, and residuals that are not zero."""
    assert found["step"] == expected["step"] > 0
    residuals = [buffers["residual"] for buffers in expected["memory"].values() if "residual" in buffers]
    assert any(bool(residual.any()) for residual in residuals)
    assert found["memory"].keys() == expected["memory"].keys()
    for name, buffers in expected["memory"].items():
        assert buffers.keys() == found["memory"][name].keys()
        assert all(torch.equal(found["memory"][name][kind], buffer) for kind, buffer in buffers.items())
