"""Overflows in error feedback and bad numbers in checkpoints never enter a residual and are never sent."""

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from gradients import draw
from helpers import assert_alive, drive, everywhere, make_parameters, memory_of, total

from hvd_sparse.torch import Compression

SHAPES = {"body.weight": (30, 20), "body.bias": (20,), "head.weight": (500,)}
METHODS = {
    "dgc": {"momentum": 0.9},
    "dgc, model": {"momentum": 0.9, "scope": "model"},
    "dgc, dense": {"momentum": 0.9, "density": 1.0},
    "gradient_dropping": {},
    "gradient_dropping, float16": {"values": "float16"},
    "topk": {},
    "samomentum": {},
    "samomentum, model": {"scope": "model"},
    "samomentum, dense": {"density": 1.0},
    "dct": {},
    "hard_threshold": {"value": 3.3e38, "density": None},
    "sidco": {},
    "cltk": {},
    "random_k": {},
    "micro": {},
}


def make(kind, parameters):
    settings = {"density": 0.05, "min_numel": 100, **METHODS[kind]}
    if settings["density"] is None:
        del settings["density"]
    return getattr(Compression, kind.split(",")[0])(parameters.items(), **settings)


def huge(step):
    """The gradients of the last rank, distinct, each finite; any two of them together are not. Others have zeros."""
    drawn = draw(SHAPES, step, 0)
    is_last = hvd.rank() == hvd.size() - 1
    return {name: (2.6e38 + 1e37 * np.tanh(value)) * is_last for name, value in drawn.items()}


@pytest.mark.parametrize("kind", METHODS)
def test_an_overflow_in_the_memory_voids_the_step_and_leaves_the_memory(kind):
    parameters = make_parameters(SHAPES)
    compression = make(kind, parameters)
    first = drive(compression, parameters, huge(0), op=hvd.Average)
    assert all(bool(result.isfinite().all()) for result in first.values())
    for t in (1, 2):
        void = drive(compression, parameters, huge(t), op=hvd.Average)
        assert all(bool(result.isnan().all()) for result in void.values()), t
    for name in SHAPES:
        waited = (first[name] == 0).reshape(-1).numpy()  # what was not sent stands there as it came
        residual = memory_of(compression, parameters, name).numpy()
        assert np.isfinite(residual).all() and bool(
            memory_of(compression, parameters, name, "velocity").isfinite().all()
        )
        expected = np.float32(huge(0)[name]).astype(np.float64).reshape(-1)
        if name != "body.bias":
            np.testing.assert_array_equal(residual[waited], expected[waited], err_msg=name)
    assert len(set(everywhere(compression.stats()["steps"]))) == 1


@pytest.mark.skipif(hvd.size() == 1, reason="one gradient alone has no sum")
@pytest.mark.parametrize("settings", [{}, {"exchange": "reduce_scatter"}], ids=["gather", "reduce_scatter"])
def test_an_infinite_sum_of_bfloat16_leaves_nothing_in_the_memory(settings):
    """Each rank's gradient is finite, and their sum is not: it is clamped, and what is beyond has no finite size."""
    parameters = {name: torch.nn.Parameter(one.bfloat16()) for name, one in make_parameters(SHAPES).items()}
    compression = Compression.gradient_dropping(parameters.items(), density=0.05, min_numel=100, **settings)
    same = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    same["head.weight"][7] = 3e38
    assert drive(compression, parameters, same, op=hvd.Sum)["head.weight"][7] == torch.finfo(torch.bfloat16).max
    assert all(memory_of(compression, parameters, name).isfinite().all() for name in SHAPES)
    small = drive(compression, parameters, draw(SHAPES, 1, 0), op=hvd.Sum)
    assert all(found.isfinite().all() for found in small.values())


@pytest.mark.skipif(hvd.size() == 1, reason="one residual alone is in the range of float32")
def test_a_sum_of_residuals_beyond_float32_is_clamped():
    parameters = make_parameters(SHAPES)
    compression = make("dgc", parameters)
    drive(compression, parameters, draw(SHAPES, 0, hvd.rank()))
    state = compression.state_dict()
    state["memory"]["body.weight"]["residual"][:3] = torch.tensor([3e38, -3e38, 1.0])
    compression.load_state_dict(state)
    summed = compression.state_dict(summed=True)
    largest = torch.finfo(torch.float32).max
    assert summed["memory"]["body.weight"]["residual"][:3].tolist() == [largest, -largest, hvd.size()]
    compression.load_state_dict(summed)
    assert total(memory_of(compression, parameters, "body.weight"))[:3].tolist() == [largest, -largest, hvd.size()]


@pytest.mark.parametrize("summed", [False, True], ids=["own", "summed"])
def test_a_state_of_another_method_is_refused_on_every_rank(summed):
    """A residual of Top-k would be worth 1 / (1 - m) times as much in SAMomentum. Older states have no method."""
    parameters = make_parameters(SHAPES)
    theirs, ours = make("topk", parameters), make("samomentum", parameters)
    drive(theirs, parameters, draw(SHAPES, 0, hvd.rank()))
    state, before = theirs.state_dict(summed=summed), ours.state_dict(summed=summed)
    given = state if hvd.rank() == hvd.size() - 1 else before
    message = f"rank {hvd.size() - 1}: the state is of another method: topk there, samomentum here"
    with pytest.raises(ValueError, match=message):
        ours.load_state_dict(given)
    assert ours.stats()["residual_norm"] == 0.0
    ours.load_state_dict({key: part for key, part in state.items() if key != "method"})
    assert ours.stats()["residual_norm"] > 0.0


def test_nesterov_overflows_at_once():
    """v = m (u + g) + g: nothing of it enters."""
    parameters = make_parameters(SHAPES)
    compression = Compression.dgc(parameters.items(), density=0.05, min_numel=100, nesterov=True)
    result = drive(compression, parameters, huge(0))
    assert all(bool(one.isnan().all()) for one in result.values())
    assert compression.stats()["residual_norm"] == 0.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["residual", "velocity"])
def test_a_state_that_is_not_finite_is_refused_on_every_rank(kind, bad):
    """On one rank alone it is bad; every rank hears which one, and of which buffer, and keeps what it had."""
    parameters = make_parameters(SHAPES)
    compression = make("dgc", parameters)
    drive(compression, parameters, draw(SHAPES, 0, hvd.rank()))
    before = memory_of(compression, parameters, "body.weight", kind)
    state = compression.state_dict()
    if hvd.rank() == hvd.size() - 1:
        state["memory"]["body.weight"][kind][7] = bad
    with pytest.raises(ValueError, match=rf"rank {hvd.size() - 1}: body.weight: the state's {kind} must be finite"):
        compression.load_state_dict(state)
    assert torch.equal(before, memory_of(compression, parameters, "body.weight", kind))
    drive(compression, parameters, draw(SHAPES, 1, hvd.rank()))
    assert_alive()
