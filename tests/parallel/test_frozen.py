"""Parameters frozen on every rank send nothing and do not count in k. Parameters frozen on one rank are still sent."""

import horovod.torch as hvd
import pytest
import torch
from gradients import SCOPES, draw, whole_numbers
from helpers import as_gradient, assert_ranks_agree, distributed, drive, make_parameters, memory_of, step, total

from hvd_sparse import wire
from hvd_sparse.torch import Compression

SHAPES = {"a": (1000,), "b": (3000,), "c": (50,), "d": (40,)}  # the last two are small
FROZEN = ("b", "d")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_frozen_integers_are_left_out(dtype):
    parameters = make_parameters(SHAPES)
    counter = torch.nn.Parameter(torch.ones(7, dtype=dtype), requires_grad=False)
    compression = Compression.gradient_dropping([*parameters.items(), ("counter", counter)], density=0.01)
    with_counter = distributed({**parameters, "counter": counter}, compression)
    step(with_counter, parameters, draw(SHAPES, 0, hvd.rank()))
    assert_ranks_agree(parameters)
    assert "counter" not in compression.state_dict()["memory"] and bool((counter == 1).all())


@pytest.mark.parametrize("scope", SCOPES)
def test_what_all_freeze_sends_nothing_and_counts_for_nothing(scope):
    """Frozen from step 3 to 5, and from the first step on: payloads of k of 1000 elements then, of 4000 otherwise."""
    parameters = make_parameters(SHAPES)
    compression = Compression.gradient_dropping(parameters.items(), density=0.01, scope=scope, min_numel=100)
    optimizer = distributed(parameters, compression, op=hvd.Sum)
    fed, got = torch.zeros(3000, dtype=torch.float64), torch.zeros(3000, dtype=torch.float64)
    small = torch.zeros(40, dtype=torch.float64)
    for t in range(9):
        trains = not 3 <= t <= 5
        for name in FROZEN:
            parameters[name].requires_grad_(trains)
        waited = memory_of(compression, parameters, "b")
        gradients = whole_numbers(SHAPES, t, hvd.rank())
        step(optimizer, parameters, gradients)
        sent = compression.stats()["step"]
        elements = 1000 + 50 if t in (4, 5) else None if t == 3 else 4090
        if elements is not None:
            k = 10 + 50 if t in (4, 5) else 40 + 90
            assert round(sent["density"] * 4090) == k, t
        if t in (4, 5):
            summed = hvd.size() * wire.payload_size(1000, 10)  # small messages: a sum of rows, one for each rank
            bare = summed + 50 * 4 + 40 + 48 + 4 * 4  # presence, vote, who trains what
            assert sent["payload_bytes"] == bare + 8 * 4, t
        if not trains:
            assert torch.equal(waited, memory_of(compression, parameters, "b"))
            assert not parameters["b"].grad.any() and not parameters["d"].grad.any()
        else:
            fed += torch.tensor(gradients["b"])
            small += total(gradients["d"])
        got += parameters["b"].grad.double()
        small -= parameters["d"].grad.double()
        assert_ranks_agree(parameters)
    assert torch.equal(total(fed), got + total(memory_of(compression, parameters, "b")))
    assert not small.any(), "the small one comes dense again from the step on in which it is unfrozen"


@pytest.mark.parametrize("scope", SCOPES)
def test_frozen_in_the_first_step(scope):
    parameters = make_parameters(SHAPES)
    compression = Compression.gradient_dropping(parameters.items(), density=0.01, scope=scope, min_numel=100)
    optimizer = distributed(parameters, compression)
    parameters["b"].requires_grad_(False)
    step(optimizer, parameters, draw(SHAPES, 0, hvd.rank()))
    assert round(compression.stats()["step"]["density"] * 4090) == 10 + 90


@pytest.mark.parametrize("method", ["gradient_dropping", "topk", "dct", "micro", "cltk", "random_k"])
@pytest.mark.parametrize("order", [list(SHAPES), [*FROZEN, *(name for name in SHAPES if name not in FROZEN)]])
def test_one_rank_may_freeze_what_another_trains(method, order):
    """In the second order, the first gradients of some ranks are in another message than those of the others."""
    parameters = make_parameters(SHAPES)
    compression = getattr(Compression, method)(parameters.items(), density=0.05, min_numel=100)
    optimizer = distributed(parameters, compression, op=hvd.Sum)
    balance = {name: torch.zeros(SHAPES[name], dtype=torch.float64) for name in FROZEN}
    for t in range(12):
        for name in FROZEN:  # in turn: on all ranks, on rank 0, on all but rank 0, on none
            kind = t % 4
            trains = kind == 3 or (kind == 1 and hvd.rank() != 0) or (kind == 2 and hvd.rank() == 0)
            parameters[name].requires_grad_(trains)
        gradients = whole_numbers(SHAPES, t, hvd.rank())
        step(optimizer, parameters, gradients, order)
        for name in FROZEN:
            fed = torch.tensor(gradients[name]) if parameters[name].requires_grad else torch.zeros(SHAPES[name])
            balance[name] += total(fed) - parameters[name].grad.double()
        assert_ranks_agree(parameters)
    for name in FROZEN:
        assert torch.equal(balance[name], total(memory_of(compression, parameters, name))), name


@pytest.mark.parametrize("method", ["micro", "cltk", "random_k"])
def test_a_step_that_is_given_up_keeps_what_is_frozen(method):
    """As in an elastic job: a rank dies in a step, and the others restore their states, or start anew."""
    parameters = make_parameters(SHAPES)
    compression = getattr(Compression, method)(parameters.items(), density=0.05, min_numel=100)
    drive(compression, parameters, draw(SHAPES, 0, hvd.rank()))
    saved = compression.state_dict()
    kept = memory_of(compression, parameters, "b")
    assert kept.any()
    parameters["b"].requires_grad_(False)
    gradients = draw(SHAPES, 2, hvd.rank())
    for name, parameter in parameters.items():
        parameter.grad = as_gradient(parameter, gradients[name])
        compression.compress(parameter.grad)
    compression.load_state_dict(saved)
    drive(compression, parameters, draw(SHAPES, 1, hvd.rank()))
    assert torch.equal(memory_of(compression, parameters, "b"), kept)
    compression.reset()
    drive(compression, parameters, draw(SHAPES, 0, hvd.rank()))
    assert not memory_of(compression, parameters, "b").any()
