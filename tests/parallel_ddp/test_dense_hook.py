"""`Compression.none` and `Compression.fp16` send gradients as PyTorch does."""

import pytest
import torch
import torch.distributed as dist
from ddp_helpers import ALONE, assert_ranks_agree, everywhere
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_sparse.torch.ddp import Compression


def trained(register, group=None):
    """Return a model after three steps, its local and its reduced gradients in the last one."""
    torch.manual_seed(0)
    module = nn.Linear(40, 30)
    model = DistributedDataParallel(module, process_group=group)
    register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        inputs = torch.randn(8, 40, generator=generator)
        (local,) = torch.autograd.grad(module(inputs).square().mean(), module.weight)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        reduced = module.weight.grad.clone()
        optimizer.step()
    return module, local, reduced


def test_none_leaves_the_gradients_of_ddp():
    module, *_ = trained(Compression.none.register)
    plain, *_ = trained(lambda model: None)
    assert torch.equal(module.weight, plain.weight) and torch.equal(module.bias, plain.bias)


def test_fp16_sends_the_mean_of_float16():
    module, local, reduced = trained(Compression.fp16.register)
    assert_ranks_agree(module)
    ranks = dist.get_world_size()
    parts = [one.half() / ranks for one in everywhere(local)]
    expected = sum(parts[1:], start=parts[0])
    torch.testing.assert_close(reduced, expected.float(), rtol=2e-3 * (ranks > 2), atol=1e-5 * (ranks > 2))
    assert torch.equal(reduced, reduced.half().float()) and not torch.equal(local, local.half().float())


@ALONE
@pytest.mark.parametrize("one", [Compression.none, Compression.fp16], ids=repr)
def test_a_process_group_exchanges_for_itself(one):
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    _, local, reduced = trained(one.register, groups[dist.get_rank()])
    expected = local if one is Compression.none else local.half().float()
    assert torch.equal(reduced, expected)


@pytest.mark.parametrize("one", [Compression.none, Compression.fp16], ids=repr)
def test_what_it_refuses(one):
    model = nn.Linear(40, 30)
    message = rf"got Linear: model = DistributedDataParallel\(model\); {one!r}\.register\(model\)"
    with pytest.raises(TypeError, match=message):
        one.register(model)
    wrapped = DistributedDataParallel(model)
    with pytest.raises(TypeError, match=r"got the OptimizedModule of torch\.compile: register before torch\.compile"):
        one.register(torch.compile(wrapped))
    Compression.dgc(model).register(wrapped)
    with pytest.raises(ValueError, match="the model has a communication hook already"):
        one.register(wrapped)
    assert repr(one) in ("Compression.none", "Compression.fp16")
