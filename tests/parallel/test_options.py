"""Every option of hvd.DistributedOptimizer has the same meaning with and without compression.

The compressor is Gradient Dropping, with whole-numbered gradients. So the result of a step is known exactly: the sum of
all ranks' selections.
"""

import warnings

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from gradients import SCOPES, SHAPES, draw, shuffled, whole_numbers
from helpers import assert_ranks_agree, backward, distributed, drive, make_parameters, memory_of, step, total

from hvd_sparse.torch import Compression

pytestmark = pytest.mark.rank_counts

needs_two = pytest.mark.skipif(hvd.size() < 2, reason="a process set of a part of the job needs two processes")
SETTINGS = {"density": 0.05, "min_numel": 100}


def compressor_for(parameters, scope, **settings):
    return Compression.gradient_dropping(parameters.items(), scope=scope, **{**SETTINGS, **settings})


def reference_steps(scope, steps, divisor=1.0, draws=draw):
    """Return the gradients of some steps as `drive`, tested elsewhere, reduces them with Sum, and the residuals."""
    parameters = make_parameters()
    compressor = compressor_for(parameters, scope)
    reduced = []
    for t in range(steps):
        result = drive(compressor, parameters, draws(SHAPES, t, hvd.rank()))
        reduced.append({name: value.detach() / divisor for name, value in result.items()})
    return reduced, {name: memory_of(compressor, parameters, name) for name in SHAPES}


OPTIONS = {
    "sum": ({"op": hvd.Sum}, 1),
    "average": ({"op": hvd.Average}, hvd.size()),
    "predivide": ({"gradient_predivide_factor": 8.0}, hvd.size()),
    "predivide_odd": ({"gradient_predivide_factor": 1.7}, hvd.size()),
    "one_group": ({"groups": 1}, hvd.size()),
    "three_groups": ({"groups": 3, "op": hvd.Sum}, 1),
}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("option", OPTIONS)
def test_the_reduction_asked_for_is_the_one_applied(option, scope):
    options, divisor = OPTIONS[option]
    expected, residuals = reference_steps(scope, 4, divisor)
    parameters = make_parameters()
    compressor = compressor_for(parameters, scope)
    optimizer = distributed(parameters, compressor, **options)
    for t in range(4):
        step(optimizer, parameters, draw(SHAPES, t, hvd.rank()), shuffled(SHAPES, t, hvd.rank()))
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter.grad, expected[t][name], rtol=1e-5, atol=1e-6)
    for name in SHAPES:
        assert torch.equal(memory_of(compressor, parameters, name), residuals[name]), name


@pytest.mark.parametrize("scope", SCOPES)
def test_groups_given_as_lists_of_tensors(scope):
    """Two listed groups; a parameter in neither forms a separate group. All types may mix with their tokens."""
    expected, _ = reference_steps(scope, 3)
    parameters = make_parameters()
    groups = [[parameters["body.bias"], parameters["head.weight"]], [parameters["body.weight"]]]
    optimizer = distributed(parameters, compressor_for(parameters, scope), op=hvd.Sum, groups=groups)
    for t in range(3):
        step(optimizer, parameters, draw(SHAPES, t, hvd.rank()), shuffled(SHAPES, t, hvd.rank()))
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter.grad, expected[t][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("passes", [2, 3])
def test_backward_passes_per_step(passes, scope):
    """The accumulated gradient enters the error feedback once per step, after the last pass."""

    def accumulated(shapes, t, rank):
        parts = [whole_numbers(shapes, passes * t + i, rank) for i in range(passes)]
        return {name: sum(part[name] for part in parts) for name in shapes}

    expected, residuals = reference_steps(scope, 4, draws=accumulated)
    parameters = make_parameters()
    compressor = compressor_for(parameters, scope)
    optimizer = distributed(parameters, compressor, op=hvd.Sum, backward_passes_per_step=passes)
    for t in range(4):
        optimizer.zero_grad()
        for i in range(passes):
            order = shuffled(SHAPES, 7 * t + i, hvd.rank())
            backward(parameters, whole_numbers(SHAPES, passes * t + i, hvd.rank()), order)
        optimizer.step()
        for name, parameter in parameters.items():
            assert torch.equal(parameter.grad, expected[t][name]), name
    assert compressor.stats()["steps"] == 4
    for name in SHAPES:
        assert torch.equal(memory_of(compressor, parameters, name), residuals[name]), name


@pytest.mark.parametrize("scope", SCOPES)
def test_a_step_before_all_passes_were_made(scope):
    """Horovod then compresses in synchronize what it has; parameters differ in how many passes they saw."""
    parameters = make_parameters()
    compressor = compressor_for(parameters, scope, density=1.0)
    optimizer = distributed(parameters, compressor, op=hvd.Sum, backward_passes_per_step=2)
    gradients = whole_numbers(SHAPES, 0, hvd.rank())
    backward(parameters, gradients)
    backward(parameters, {"head.weight": gradients["head.weight"]})
    optimizer.step()
    for name, parameter in parameters.items():
        expected = total(gradients[name]) * (2 if name == "head.weight" else 1)
        assert torch.equal(parameter.grad.double(), expected), name


@pytest.mark.parametrize("scope", SCOPES)
def test_synchronize_and_skip_synchronize(scope):
    """The reduced gradients may be read and changed in place before the step, as for clipping them."""
    expected, _ = reference_steps(scope, 3)
    parameters = make_parameters()
    optimizer = distributed(parameters, compressor_for(parameters, scope), lr=1.0, op=hvd.Sum)
    for t in range(3):
        optimizer.zero_grad()
        backward(parameters, draw(SHAPES, t, hvd.rank()))
        optimizer.synchronize()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        exact = np.sqrt(sum(float(value.double().square().sum()) for value in expected[t].values()))
        assert float(norm) == pytest.approx(exact, rel=1e-5)
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        with warnings.catch_warnings(), optimizer.skip_synchronize():
            warnings.simplefilter("error")
            optimizer.step()
        moved = np.sqrt(sum(float((before[name] - parameters[name].detach()).square().sum()) for name in SHAPES))
        assert moved == pytest.approx(1.0, rel=1e-3)
    assert_ranks_agree(parameters)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_cleared_either_way(to_none, scope):
    """Gradients zeroed in place are the buffers returned in the previous step: nothing else may still use them."""
    expected, _ = reference_steps(scope, 5)
    parameters = make_parameters()
    optimizer = distributed(parameters, compressor_for(parameters, scope), op=hvd.Sum)
    for t in range(5):
        for parameter in parameters.values():
            if parameter.grad is not None and not to_none:
                parameter.grad.zero_()
            else:
                parameter.grad = None
        backward(parameters, draw(SHAPES, t, hvd.rank()))
        optimizer.step()
        kept = {name: parameter.grad.clone() for name, parameter in parameters.items()}
        for name in SHAPES:
            torch.testing.assert_close(kept[name], expected[t][name], rtol=1e-5, atol=1e-6)


@needs_two
@pytest.mark.parametrize("scope", SCOPES)
def test_a_process_set_and_the_whole_job_side_by_side(scope):
    """One compressor on a part of the ranks, one on all, of the same names; both are averaged over their own ranks."""
    members = list(range(max(1, hvd.size() - 1)))
    part = hvd.add_process_set(members)
    try:
        inner, outer = make_parameters(), make_parameters(seed=2)
        partial = compressor_for(inner, scope, process_set=part)
        whole = compressor_for(outer, scope)
        renamed = {f"part.{name}": parameter for name, parameter in inner.items()}
        first = distributed(renamed, partial, lr=1.0, process_set=part)
        second = distributed(outer, whole, lr=1.0)
        fed = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        start = {name: parameter.detach().double() for name, parameter in inner.items()}
        for t in range(6):
            gradients = whole_numbers(SHAPES, t, hvd.rank())
            fed = {name: fed[name] + gradients[name] for name in SHAPES}
            step(first, renamed, {f"part.{name}": value for name, value in gradients.items()})
            step(second, outer, gradients)
        assert_ranks_agree(outer)
        if part.included():
            assert_ranks_agree(inner, part)
            for name in SHAPES:
                sent = (start[name] - inner[name].detach().double()).reshape(-1) * len(members)
                balance = total(fed[name], part).reshape(-1) - sent - total(memory_of(partial, inner, name), part)
                assert balance.abs().max() < 1e-2, name
            assert partial.stats()["steps"] == 6
        else:
            assert partial.stats()["steps"] == 0
            for name in SHAPES:  # it trains alone
                alone = start[name] - inner[name].detach().double()
                assert (alone - torch.tensor(fed[name])).abs().max() < 1e-2, name
        assert whole.stats()["steps"] == 6
    finally:
        assert hvd.remove_process_set(part)


@pytest.mark.skipif(hvd.size() < 3, reason="two overlapping parts of a job need three processes")
@pytest.mark.parametrize("scope", SCOPES)
def test_two_overlapping_process_sets(scope):
    sets = [hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])]
    try:
        models, optimizers = [], []
        for number, members in enumerate(sets):
            parameters = make_parameters({f"{number}.{name}": shape for name, shape in SHAPES.items()})
            compressor = compressor_for(parameters, scope, process_set=members)
            models.append(parameters)
            optimizers.append(distributed(parameters, compressor, op=hvd.Sum, process_set=members))
        for t in range(3):
            for number, members in enumerate(sets):
                if members.included():
                    gradients = whole_numbers(SHAPES, t, hvd.rank(), seed=number)
                    step(optimizers[number], models[number], {f"{number}.{n}": v for n, v in gradients.items()})
        for number, members in enumerate(sets):
            if members.included():
                assert_ranks_agree(models[number], members)
                exact = sum(whole_numbers(SHAPES, 2, rank, seed=number)["scale"] for rank in members.ranks)
                assert models[number][f"{number}.scale"].grad.item() == exact
    finally:
        assert all([hvd.remove_process_set(members) for members in sets])


def test_the_model_and_a_mapping_are_as_good_as_pairs():
    results = []
    for form in (lambda model: model, lambda model: dict(model.named_parameters()), lambda m: m.named_parameters()):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.ReLU(), torch.nn.Linear(30, 20))
        compression = Compression.dgc(form(model), density=0.1, min_numel=100)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=compression
        )
        for t in range(3):
            optimizer.zero_grad()
            model(torch.from_numpy(draw({"x": (5, 40)}, t, hvd.rank())["x"]).float()).square().sum().backward()
            optimizer.step()
        memory = compression.state_dict()["memory"].items()
        buffers = [(f"{name}.{kind}", buffer) for name, own in memory for kind, buffer in own.items()]
        results.append([*model.state_dict().items(), *buffers])
    for other in results[1:]:
        for (name, found), (expected_name, expected) in zip(other, results[0], strict=True):
            assert name == expected_name and torch.equal(found, expected)
