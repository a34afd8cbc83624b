"""Gradients of 16 bits: what fits the type is delivered, the rest stays in the residual, and nothing is lost."""

import horovod.torch as hvd
import pytest
import tiers
import torch
from helpers import assert_ranks_agree, distributed, drive, make_parameters, memory_of, step, total

from hvd_sparse.schedule import Schedule
from hvd_sparse.torch import Compression

SHAPES = {"weight": (40, 50), "bias": (10,)}
METHODS = {
    "gradient_dropping": {},
    "gradient_dropping, model": {"scope": "model"},
    "gradient_dropping, float16": {"values": "float16"},
    "gradient_dropping, reduce-scatter": {"exchange": "reduce_scatter"},
    "dgc": {"momentum": 0.0},
    "dgc, completed": {"momentum": 0.0, "exchange": "reduce_scatter", "complete": True},
    "dct": {},
    "cltk": {},
    "micro": {},
}


def make(kind, parameters, **settings):
    settings = {"density": 0.01, "min_numel": 100, **METHODS[kind], **settings}
    return getattr(Compression, kind.split(",")[0])(parameters.items(), **settings)


CASES = [
    ("gradient_dropping", torch.float16, hvd.Average),
    ("gradient_dropping", torch.float16, hvd.Sum),
    ("gradient_dropping", torch.bfloat16, hvd.Average),
    ("gradient_dropping, model", torch.float16, hvd.Sum),
    ("gradient_dropping, float16", torch.float16, hvd.Average),
    ("dgc", torch.bfloat16, hvd.Sum),
    ("gradient_dropping, reduce-scatter", torch.float16, hvd.Average),
    ("gradient_dropping, reduce-scatter", torch.bfloat16, hvd.Sum),
    ("dgc, completed", torch.float16, hvd.Sum),
    ("dct", torch.float16, hvd.Sum),
    ("cltk", torch.float16, hvd.Average),
    ("micro", torch.float16, hvd.Sum),
]


@pytest.mark.parametrize(("kind", "dtype", "op"), tiers.choice(CASES, *CASES[1::2]))
def test_what_is_delivered_and_what_waits_are_what_was_fed(kind, dtype, op):
    """512 a step, and 30,720 at some elements: 60 steps bring up to 1.8 million where float16 ends at 65,504."""
    parameters = make_parameters(SHAPES, dtype)
    compression = make(kind, parameters)
    # Both types hold 512 and 30,720; the ranks' sums of them are exact in float32.
    gradients = {name: torch.full(shape, 512.0) for name, shape in SHAPES.items()}
    gradients["weight"].view(-1)[::3] = 30720.0
    sent = torch.zeros(2000, dtype=torch.float64)
    for _ in range(60):
        reduced = drive(compression, parameters, {n: g.numpy() for n, g in gradients.items()}, op=op)
        assert all(bool(one.isfinite().all()) and one.dtype == dtype for one in reduced.values())
        sent += reduced["weight"].reshape(-1).double()
    ranks = hvd.size()
    waiting = total(memory_of(compression, parameters, "weight")) / (ranks if op == hvd.Average else 1)
    fed = 60 * gradients["weight"].reshape(-1).double() * (1 if op == hvd.Average else ranks)
    exact = ranks & (ranks - 1) == 0 or op == hvd.Sum  # 1/3 of a sum is rounded
    torch.testing.assert_close(sent + waiting, fed, rtol=0 if exact else 1e-6, atol=0)
    if dtype == torch.float16:
        assert sent.max() >= 65504.0, "more than one message can hold had waited"


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float16, {}),
        (torch.bfloat16, {"scope": "model"}),
        (torch.float16, {"exchange": "reduce_scatter"}),
        (torch.float16, {"exchange": "hierarchical", "ranks_per_host": 1}),
        (torch.float32, {"exchange": "reduce_scatter", "values": "int2"}),
        (torch.float32, {"exchange": "reduce_scatter", "values": "float16"}),
    ],
)
def test_samomentum_has_kept_a_part_of_what_comes_back(dtype, settings):
    """Sending u leaves m u (DGS, Algorithm 3): what is delivered, times 1 - m, and what waits are what was fed."""
    check_samomentum(dtype, settings, freezes=False)


@pytest.mark.rank_counts
@pytest.mark.parametrize("exchange", [{}, {"exchange": "hierarchical", "ranks_per_host": 1}], ids=["", "hierarchical"])
@pytest.mark.parametrize("values", ["float16", "int2"])
def test_a_rank_whose_tensors_are_frozen_keeps_a_part_too(values, exchange):
    """It owns a region, too, and what its owner rounds away are sums of other ranks: two at least."""
    settings = {"exchange": "reduce_scatter", **exchange}
    if "ranks_per_host" in exchange:
        settings["between_hosts"] = "reduce_scatter"
    check_samomentum(torch.float32, {"values": values, **settings}, freezes=hvd.size() > 1)


def check_samomentum(dtype, settings, freezes):
    """freezes: whether rank 0 freezes the weight in every other step."""
    parameters = make_parameters(SHAPES, dtype)
    settings = {"momentum": 0.75, "density": 0.1, "min_numel": 100, "dense_fallback": None, **settings}
    compression = Compression.samomentum(parameters.items(), **settings)
    gradients = {name: torch.full(shape, 512.0) for name, shape in SHAPES.items()}
    gradients["weight"].view(-1)[::30] = 30720.0
    if freezes:
        gradients["weight"].view(-1)[1::7] = 717.13  # of which sums have more bits than float16
    nothing = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    sent, fed = torch.zeros(2000, dtype=torch.float64), torch.zeros(2000, dtype=torch.float64)
    for t in range(40):
        is_frozen = freezes and t % 2 == 1 and hvd.rank() == 0
        parameters["weight"].requires_grad_(not is_frozen)
        given = gradients if t < 10 else nothing
        reduced = drive(compression, parameters, {name: one.numpy() for name, one in given.items()}, op=hvd.Sum)
        assert all(bool(one.isfinite().all()) for one in reduced.values())
        sent += reduced["weight"].reshape(-1).double()
        fed += given["weight"].reshape(-1).double() * (0.0 if is_frozen else 1.0)
    waiting, fed = total(memory_of(compression, parameters, "weight")), total(fed)
    torch.testing.assert_close(0.25 * sent + waiting, fed, rtol=0, atol=1e-6 * float(fed.max()))


@pytest.mark.parametrize("method", ["dgc", "samomentum"])
@pytest.mark.parametrize("scope", ["tensor", "model"])
def test_a_velocity_beyond_float16_travels_in_parts(method, scope):
    """Dense: momentum 0.75 makes four times the gradient of it, which is 30,000. All comes, later."""
    parameters = make_parameters(SHAPES, torch.float16)
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    compression = getattr(Compression, method)(parameters.items(), density=1.0, momentum=0.75, scope=scope)
    optimizer = distributed(parameters, compression, lr=2.0**-14)
    fed, velocity = 0.0, 0.0
    for t in range(30):
        gradient = 30720.0 if t < 6 else 0.0
        velocity = 0.75 * velocity + gradient
        fed += velocity
        step(optimizer, parameters, {n: torch.full(s, gradient).numpy() for n, s in SHAPES.items()})
        assert all(bool(parameter.grad.isfinite().all()) for parameter in parameters.values())
    for name, parameter in parameters.items():
        moved = (start[name] - parameter.detach()).double() * 2.0**14
        torch.testing.assert_close(moved, torch.full(SHAPES[name], fed, dtype=torch.float64), rtol=2e-2, atol=0)
    assert_ranks_agree(parameters)


class DenseFromTheThird(Schedule):
    def density(self, step):
        return 0.01 if step < 2 else 1.0

    def describe(self):
        return "dense from the third"


def test_a_residual_leaves_with_a_dense_step_in_parts():
    """Density 1 for ever after: 600,000 had waited on each rank, and no step brings more than 65,504 of it."""
    parameters = make_parameters(SHAPES, torch.float16)
    compression = Compression.gradient_dropping(parameters.items(), density=DenseFromTheThird(), min_numel=100)
    state = compression.state_dict()
    state["memory"]["weight"] = {"residual": torch.full((2000,), 600000.0)}
    compression.load_state_dict(state)
    zeros = {name: torch.zeros(shape).numpy() for name, shape in SHAPES.items()}
    sent = torch.zeros(2000, dtype=torch.float64)
    for _ in range(80):
        reduced = drive(compression, parameters, zeros)["weight"]
        assert bool(reduced.isfinite().all())
        sent += reduced.reshape(-1).double()
    ranks = hvd.size()
    torch.testing.assert_close(sent, torch.full((2000,), 600000.0 * ranks, dtype=torch.float64), rtol=1e-3, atol=0)
