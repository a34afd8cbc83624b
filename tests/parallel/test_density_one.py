"""With density 1, results equal Horovod's dense results, for every reduction and type."""

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from gradients import SCOPES, SHAPES, draw, shuffled, whole_numbers
from helpers import backward, distributed, make_parameters, step

from hvd_sparse.torch import Compression

pytestmark = pytest.mark.rank_counts

REDUCTIONS = {
    "sum": {"op": hvd.Sum},
    "average": {"op": hvd.Average},
    "predivide": {"op": hvd.Average, "gradient_predivide_factor": 4.0},
    "predivide_odd": {"op": hvd.Average, "gradient_predivide_factor": 1.7},
    "grouped": {"op": hvd.Average, "groups": 1},
    "grouped_sum": {"op": hvd.Sum, "groups": 2},
}
EVERYTHING = {"density 1": {"density": 1.0}, "all small": {"density": 0.01, "min_numel": 10**6}}
METHODS = {"gradient_dropping": {}, "dgc": {"momentum": 0.0}}


def reduced(parameters, gradients, compression, **options):
    """Return {name: gradient} as Horovod's optimizer leaves it for the step."""
    optimizer = distributed(parameters, compression, **options)
    backward(parameters, gradients, shuffled(gradients, 0, hvd.rank()))
    optimizer.synchronize()
    return {name: parameter.grad.detach().clone() for name, parameter in parameters.items()}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_one_step_is_horovods(reduction, method, scope):
    options = REDUCTIONS[reduction]
    gradients = whole_numbers(SHAPES, 3, hvd.rank())
    dense = reduced(make_parameters(), gradients, Compression.none, **options)
    parameters = make_parameters()
    make = getattr(Compression, method)
    compression = make(parameters.items(), density=1.0, scope=scope, **METHODS[method])
    found = reduced(parameters, gradients, compression, **options)
    for name in SHAPES:
        torch.testing.assert_close(found[name], dense[name], rtol=4e-7, atol=2e-5, msg=named(name))
    if reduction.endswith("sum"):
        exact = sum(whole_numbers(SHAPES, 3, rank)["body.weight"] for rank in range(hvd.size()))
        assert (found["body.weight"].double().numpy() == exact).all()


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("everything", EVERYTHING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_type_is_reduced_as_horovod_reduces_it(dtype, everything, scope):
    """Horovod refuses bfloat16: there the oracle is the float32 sum, rounded once."""
    gradients = draw(SHAPES, 5, hvd.rank())
    parameters = make_parameters(dtype=dtype)
    compression = Compression.gradient_dropping(parameters.items(), scope=scope, **EVERYTHING[everything])
    found = reduced(parameters, gradients, compression)
    if dtype == torch.bfloat16:
        drawn = [draw(SHAPES, 5, rank) for rank in range(hvd.size())]
        exact = {name: sum(torch.tensor(one[name]).to(dtype).double() for one in drawn) for name in SHAPES}
        dense = {name: (value / hvd.size()).to(dtype) for name, value in exact.items()}
    else:
        dense = reduced(make_parameters(dtype=dtype), gradients, Compression.none)
    ulp = torch.finfo(dtype).eps
    for name in SHAPES:
        assert found[name].dtype == dtype and found[name].shape == SHAPES[name]
        torch.testing.assert_close(found[name], dense[name], rtol=2 * ulp, atol=4 * ulp, msg=named(name))


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("everything", EVERYTHING)
def test_float64_keeps_its_digits(everything, scope):
    """Sent dense in its own type, float64 keeps digits beyond float32 and numbers below its range."""
    values = np.array([1.0 + 2.0**-40, -1.0 / 3.0, 1e-300, 1e-60])
    parameters = {"weight": torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))}
    compression = Compression.gradient_dropping(parameters.items(), scope=scope, **EVERYTHING[everything])
    found = reduced(parameters, {"weight": values}, compression, op=hvd.Sum)["weight"]
    np.testing.assert_allclose(found.numpy(), values * hvd.size(), rtol=1e-15)


SGD = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "decay": {"momentum": 0.9, "weight_decay": 0.1},
    "all": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
}


@pytest.mark.parametrize("predivide", [1.0, 2.0])
def test_dgc_at_density_one_is_torchs_sgd(predivide):
    """30 steps of torch.optim.SGD(momentum, nesterov, weight_decay) without compression; all variants side by side."""
    pairs = []
    for scope in SCOPES:
        for title, settings in SGD.items():
            shapes = {f"{scope}.{title}.{name}": shape for name, shape in SHAPES.items()}
            plain = make_parameters({f"plain.{name}": shape for name, shape in shapes.items()})
            inner = torch.optim.SGD(list(plain.values()), lr=0.1, **settings)
            expected = distributed(plain, optimizer=inner, gradient_predivide_factor=predivide)
            ours = {name: torch.nn.Parameter(plain[f"plain.{name}"].detach().clone()) for name in shapes}
            compression = Compression.dgc(ours.items(), 1.0, scope=scope, **{"momentum": 0.0, **settings})
            found = distributed(ours, compression, gradient_predivide_factor=predivide)
            pairs.append((plain, expected, ours, found))
    for t in range(30):
        for plain, expected, ours, found in pairs:
            gradients = draw(SHAPES, t, hvd.rank())
            step(expected, plain, {name: gradients[short(name)] for name in plain})
            step(found, ours, {name: gradients[short(name)] for name in ours})
    for plain, _, ours, _ in pairs:
        for name, parameter in ours.items():
            torch.testing.assert_close(parameter, plain[f"plain.{name}"], rtol=1e-5, atol=2e-5, msg=named(name))


def short(name):
    return next(key for key in SHAPES if name.endswith(key))


def named(name):
    return lambda message: f"{name}: {message}"
