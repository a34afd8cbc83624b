"""Shared code of the tests of PyTorch's asynchronous session."""

import torch
from torch import nn

SMALL = {"density": 0.1, "min_numel": 8}


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))


def learn(model, optimizer, steps, seed=0, dtype=torch.float32, before=lambda step: None):
    random = torch.Generator().manual_seed(seed)
    for step in range(steps):
        before(step)
        optimizer.zero_grad()
        x = torch.randn(5, 6, generator=random).to(dtype)
        (model(x) - 1).square().mean().backward()
        optimizer.step()


def numbers(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(one, other, **close):
    assert one.keys() == other.keys()
    for name in one:
        if close:
            torch.testing.assert_close(one[name].float(), other[name].float(), **close, msg=name)
        else:
            assert torch.equal(one[name], other[name]), name
