"""Ranks agree bit for bit, even if their hooks run in different orders or some have no gradients."""

import horovod.torch as hvd
import pytest
import torch
from gradients import SCOPES, SHAPES, draw, shuffled
from helpers import assert_ranks_agree, backward, distributed, everywhere, make_parameters, step
from torch import nn

from hvd_sparse.torch import Compression

pytestmark = pytest.mark.rank_counts

MAKERS = {
    "gradient_dropping": lambda named, **settings: Compression.gradient_dropping(named, density=0.03, **settings),
    "dgc": lambda named, **settings: Compression.dgc(named, density=0.03, nesterov=True, weight_decay=0.01, **settings),
}


class Branches(nn.Module):
    """Independent branches. Each rank builds its graph in a different order, without the branches not in `used`."""

    def __init__(self, count=6):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(20, 10 + i) for i in range(count))

    def forward(self, inputs, order):
        return sum(self.branches[i](inputs).square().mean() for i in order)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("method", MAKERS)
def test_after_50_steps_with_hooks_in_any_order(method, scope):
    model = Branches()
    parameters = dict(model.named_parameters())
    compression = MAKERS[method](parameters.items(), scope=scope, min_numel=12, bucket_bytes=200)
    optimizer = distributed(parameters, compression, lr=0.05)
    orders = []
    for name, parameter in parameters.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: orders.append(name))
    generator = torch.Generator().manual_seed(hvd.rank())
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for t in range(50):
        optimizer.zero_grad()
        order = shuffled(range(6), t, hvd.rank())
        model(torch.randn(8, 20, generator=generator), order).backward()
        optimizer.step()
    assert hvd.size() == 1 or len(set(map(tuple, everywhere(orders)))) > 1, "the orders must have differed"
    assert_ranks_agree(parameters)
    assert all((parameter != start[name]).any() for name, parameter in parameters.items())


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("method", MAKERS)
def test_with_gradients_missing_on_some_ranks_and_steps(method, scope):
    """Horovod fills in zeros, in synchronize, in an order that is the ranks' own: a set of objects, hashed by id."""
    model = Branches()
    parameters = dict(model.named_parameters())
    compression = MAKERS[method](parameters.items(), scope=scope, min_numel=12, bucket_bytes=200)
    optimizer = distributed(parameters, compression, lr=0.05)
    generator = torch.Generator().manual_seed(hvd.rank())
    for t in range(40):
        optimizer.zero_grad()
        order = shuffled(range(6), t, hvd.rank())[: 1 + (t + 2 * hvd.rank()) % 5]
        model(torch.randn(8, 20, generator=generator), order).backward()
        optimizer.step()
        assert all(parameter.grad is not None for parameter in parameters.values())
    assert_ranks_agree(parameters)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("values", ["float32", "float16", "bfloat16"])
def test_with_every_type_side_by_side(values, scope):
    """One model of four types, rounded on the wire too."""
    types = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}
    parameters = {}
    for title, dtype in types.items():
        shapes = {f"{title}.{name}": shape for name, shape in SHAPES.items()}
        parameters.update(make_parameters(shapes, dtype))
    compression = Compression.dgc(parameters.items(), density=0.05, scope=scope, values=values, min_numel=100)
    optimizer = distributed(parameters, compression, lr=0.01)
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    for t in range(10):
        step(optimizer, parameters, draw(shapes, t, hvd.rank()), shuffled(shapes, t, hvd.rank()))
    assert_ranks_agree(parameters)
    assert all(parameter.grad.dtype == parameter.dtype for parameter in parameters.values())
    assert all(bool(parameter.isfinite().all()) for parameter in parameters.values())


def test_one_backward_pass_through_two_compressions_in_any_order():
    models = [make_parameters({f"{title}.weight": (2000,)}) for title in ("first", "second")]
    optimizers = [distributed(one, Compression.gradient_dropping(one.items(), density=0.03)) for one in models]
    both = {**models[0], **models[1]}
    shapes = {name: (2000,) for name in both}
    for t in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(both, draw(shapes, t, hvd.rank()), list(both) if hvd.rank() == 0 else list(reversed(both)))
        for optimizer in optimizers:
            optimizer.step()
    assert_ranks_agree(both)
    assert all(bool(parameter.grad.count_nonzero()) for parameter in both.values())
