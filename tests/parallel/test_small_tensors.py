"""Small tensors are sent dense in one message, and steps do not influence each other."""

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from gradients import draw
from helpers import Caller, as_gradient, distributed, drive, make_parameters

from hvd_sparse.torch import Compression

SHAPES = {"bias": (10,), "scale": (), "kernel": (3, 5), "weight": (40, 50)}  # the last is not small
METHODS = {
    "dgc": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "decay": {"momentum": 0.9, "weight_decay": 0.1},
    "samomentum": {"momentum": 0.9},
    "gradient_dropping": {},
}


def build(method, parameters, **settings):
    make = {"nesterov": "dgc", "decay": "dgc"}.get(method, method)
    return getattr(Compression, make)(parameters.items(), density=0.05, min_numel=100, **METHODS[method], **settings)


def expected(method, steps, parameters, name, dtype=torch.float64):
    """The sum over ranks in each step, float64: momentum SGD's, whose momentum is linear in the gradients."""
    momentum = METHODS[method].get("momentum", 0.0)
    velocity, sums = np.zeros(SHAPES[name]), []
    for t in range(steps):
        drawn = [torch.from_numpy(draw(SHAPES, t, rank)[name]) for rank in range(hvd.size())]
        gradient = sum(one.to(dtype).double().numpy() for one in drawn)
        gradient += METHODS[method].get("weight_decay", 0.0) * parameters[name].detach().double().numpy()
        if method == "nesterov":
            velocity = momentum * (velocity + gradient)
            sums.append(velocity + gradient)
        else:
            velocity = momentum * velocity + gradient
            sums.append(velocity)
    return sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_a_result_outlives_the_next_step(method, dtype):
    parameters = make_parameters(SHAPES, dtype)
    compression = build(method, parameters)
    kept = [drive(compression, parameters, draw(SHAPES, t, hvd.rank())) for t in range(5)]
    tolerance = 2e-6 if dtype == torch.float32 else 2**-8  # results are rounded to 8 bits
    for name in ("bias", "scale", "kernel"):
        for results, wanted in zip(kept, expected(method, 5, parameters, name, dtype), strict=True):
            found = results[name]
            assert (found.shape, found.dtype) == (torch.Size(SHAPES[name]), dtype)
            np.testing.assert_allclose(found.double().numpy(), wanted, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_that_stay_where_they_are(method):
    """Gradients that are set to zero, and not to None, have the next backward add to the tensor of the last result."""
    found = []
    for keep in (True, False):
        parameters = make_parameters(SHAPES)
        optimizer = distributed(parameters, build(method, parameters))
        for t in range(4):
            for parameter in parameters.values():
                parameter.grad = parameter.grad.zero_() if keep and parameter.grad is not None else None
            gradients = draw(SHAPES, t, hvd.rank())
            branches = [parameter.view_as(parameter) for parameter in parameters.values()]
            torch.autograd.backward(branches, [as_gradient(p, gradients[name]) for name, p in parameters.items()])
            optimizer.step()
        found.append({name: parameter.detach().clone() for name, parameter in parameters.items()})
    for name in SHAPES:
        assert torch.equal(found[0][name], found[1][name])


@pytest.mark.parametrize("method", METHODS)
def test_a_step_that_was_given_up_keeps_its_buffers(method):
    """Horovod may write to its input until the all-reduce is done, even if no one waits for it."""
    parameters = make_parameters(SHAPES)
    compression = build(method, parameters)
    drive(compression, parameters, draw(SHAPES, 0, hvd.rank()))
    given_up, other = [], draw(SHAPES, 9, hvd.rank())
    for name in ("bias", "scale", "kernel"):  # the last to come would start an exchange, which all ranks must end
        parameters[name].grad = as_gradient(parameters[name], other[name])
        given_up.append(Caller(compression).compress(parameters[name].grad)[0])
    compression._step._presence.pending.wait()  # its name is then free
    before = [tensor.clone() for tensor in given_up]
    results = drive(compression, parameters, draw(SHAPES, 1, hvd.rank()))
    for tensor, then in zip(given_up, before, strict=True):
        assert torch.equal(tensor, then)
    for name in ("bias", "scale", "kernel"):
        wanted = expected(method, 2, parameters, name)[1]
        np.testing.assert_allclose(results[name].double().numpy(), wanted, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("method", METHODS)
def test_they_share_a_message_and_a_state_is_that_of_each(method):
    """Saved and loaded in the middle, into buffers that exist and into new ones, training is the same bit for bit."""
    runs = []
    for loads in (False, True):
        parameters = make_parameters(SHAPES)
        compression, results = build(method, parameters), []
        for t in range(6):
            if loads and t in (2, 4):
                state = compression.state_dict()
                if t == 4:
                    compression = build(method, parameters)
                compression.load_state_dict(state)
            results.append(drive(compression, parameters, draw(SHAPES, t, hvd.rank())))
        runs.append((results, compression.state_dict()["memory"]))
    for found, wanted in zip(runs[1][0], runs[0][0], strict=True):
        assert all(torch.equal(found[name], wanted[name]) for name in SHAPES)
    assert all(
        torch.equal(buffer, runs[0][1][name][kind])
        for name, buffers in runs[1][1].items()
        for kind, buffer in buffers.items()
    )


@pytest.mark.parametrize("method", METHODS)
def test_horovod_carries_tokens_in_their_place(method):
    parameters = make_parameters(SHAPES)
    compression = build(method, parameters)
    for t in range(2):
        gradients, pairs = draw(SHAPES, t, hvd.rank()), []
        for name, parameter in parameters.items():
            parameter.grad = as_gradient(parameter, gradients[name])
            pairs.append((name, *Caller(compression).compress(parameter.grad)))
        assert all(carried.tolist() == [1.0, hvd.rank() + 1.0] for _, carried, _ in pairs)
        for name, carried, context in pairs:
            reduced = hvd.synchronize(hvd.allreduce_async_(carried, name=f"tokens.{name}", op=hvd.Sum))
            compression.decompress(reduced, context)
    assert compression.stats()["step"]["density"] > 0.05  # all of the small ones, and a twentieth of the large one
