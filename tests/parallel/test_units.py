"""clip_norm, weight_decay and thresholds have the same meaning with every op, loss scale and step."""

import functools

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from gradients import SCOPES, SHAPES, draw, whole_numbers
from helpers import Caller, assert_alive, backward, distributed, drive, everywhere, make_parameters, memory_of
from oracle import Method
from test_oracle import Trial

from hvd_sparse.torch import Compression

STEPS = 25
REDUCTIONS = {
    "average": {"op": hvd.Average},
    "sum": {"op": hvd.Sum},
    "predivide": {"op": hvd.Average, "gradient_predivide_factor": 3.0},
}
PLACES = {"dense": {"min_numel": 10**6}, "payload": {"min_numel": 0}}  # how a tensor is sent


def scaled_step(optimizer, parameters, gradients, compression, scale, order=None):
    """Make a step as a loss scaler does: gradients are scaled when they are reduced, and not when they are applied."""
    compression.loss_scale = scale
    optimizer.zero_grad()
    backward(parameters, {name: np.asarray(gradient) * scale for name, gradient in gradients.items()}, order)
    optimizer.synchronize()
    for parameter in parameters.values():
        parameter.grad.div_(scale)
    with optimizer.skip_synchronize():
        optimizer.step()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("dgc", {"momentum": 0.0}),
        ("dgc", {"momentum": 0.0, "scope": "model"}),
        ("dgc", {"momentum": 0.0, "scope": "model", "clip_scope": "model"}),
        ("samomentum", {"momentum": 0.0}),
    ],
)
def test_clip_norm_bounds_the_reduced_gradient(method, settings, reduction, place):
    """Orthogonal gradients, far above the bound: their clipped sum has the norm that was asked for, in each step."""
    parameters = make_parameters({"only": (64,)})
    make = functools.partial(getattr(Compression, method), density=0.5, clip_norm=0.25, dense_fallback=None)
    compression = make(parameters.items(), **settings, **PLACES[place])
    optimizer = distributed(parameters, compression, **REDUCTIONS[reduction])
    for scale in (1.0, 1.0, 4096.0):
        gradient = np.zeros(64)
        gradient[2 * hvd.rank()] = 7.0 + hvd.rank()
        scaled_step(optimizer, parameters, {"only": gradient}, compression, scale)
        assert float(parameters["only"].grad.norm()) == pytest.approx(0.25, rel=1e-5)
        assert parameters["only"].grad.count_nonzero() == hvd.size()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("method", "scope"), [("dgc", "tensor"), ("dgc", "model"), ("samomentum", "tensor")])
def test_weight_decay_counts_once(method, scope, reduction, place):
    """20 steps of SGD with weight decay 0.1 and learning rate 0.1, no gradients: 2 * 0.99^20, at any loss scale."""
    parameters = {"only": torch.nn.Parameter(torch.full((50,), 2.0))}
    make = getattr(Compression, method)
    settings = {"density": 0.999, "momentum": 0.0, "weight_decay": 0.1, "scope": scope}  # all 50 in a payload
    settings["dense_fallback"] = None
    compression = make(parameters.items(), **settings, **PLACES[place])
    optimizer = distributed(parameters, compression, lr=0.1, **REDUCTIONS[reduction])
    for t in range(20):
        scaled_step(optimizer, parameters, {"only": np.zeros(50)}, compression, (1.0, 65536.0, 3000.0)[t % 3])
    np.testing.assert_allclose(parameters["only"].detach().numpy(), 2.0 * 0.99**20, rtol=1e-5)


class ScaledTrial(Trial):
    """A trial under a loss scale that changes; the oracle knows of none."""

    SCALES = (1024.0, 1024.0, 65536.0, 300.0, 2.0)

    def make_step(self, step):
        gradients = self.draw(step, hvd.rank(), self.seed)
        scale = self.SCALES[step % len(self.SCALES)]
        scaled_step(self.optimizer, self.parameters, gradients, self.compression, scale)


EVERYTHING = {"momentum": 0.7, "nesterov": True, "weight_decay": 0.05, "clip_norm": 8.0, "density": 0.05}
WHOLE = {"momentum": 0.9, "clip_norm": 10.0, "clip_scope": "model", "scope": "model", "density": 0.05}
TRIALS = {
    "everything": ("dgc", Method(**EVERYTHING), EVERYTHING),
    "everything, model": ("dgc", Method(scope="model", **EVERYTHING), {"scope": "model", **EVERYTHING}),
    "clipped as a whole": ("dgc", Method(**WHOLE), WHOLE),
    "samomentum": (
        "samomentum",
        Method(momentum=0.7, weight_decay=0.05, samomentum=True, clip_norm=8.0),
        {"momentum": 0.7, "weight_decay": 0.05, "clip_norm": 8.0, "density": 0.05},
    ),
    "dct": ("dct", Method(lifespan=1000), {"lifespan": 1000, "density": 0.05}),
    "hard": ("hard_threshold", Method(value=2.5), {"value": 2.5}),
    "sidco": ("sidco", Method(stages=1), {"density": 0.05}),
    "cltk": ("cltk", Method(scope="model", cyclic=True), {"density": 0.05}),
}


@pytest.mark.parametrize("average", [True, False], ids=["average", "sum"])
def test_a_loss_scale_changes_nothing_but_the_gradients(average):
    """Every trial does, in 25 steps under scales from 2 to 65536, what the papers' algorithms do without one."""
    trials = []
    for title, (method, oracle, settings) in TRIALS.items():
        make = functools.partial(getattr(Compression, method), min_numel=100, **settings)
        trials.append(ScaledTrial(f"scaled.{title}", oracle, make, STEPS, average=average))
    for step in range(STEPS):
        for trial in trials:
            trial.make_step(step)
    for trial in trials:
        trial.check()


METHODS = {
    "dgc": {"weight_decay": 0.01, "clip_norm": 9.0},
    "gradient_dropping": {"values": "int2"},
    "topk": {},
    "dct": {"lifespan": 1000},
    "sidco": {},
    "cltk": {},
    "micro": {},
    "micro_scaling": {"controller": "scaling"},
    "random_k": {"values": "bfloat16"},
    "samomentum": {"weight_decay": 0.01},
}


@pytest.mark.parametrize("method", METHODS)
def test_what_is_remembered_does_not_depend_on_the_scale(method):
    """Powers of two are exact: gradients, memories and densities are, bit for bit, those without a loss scale."""
    found = []
    for scales in ((1.0,), (65536.0, 4096.0, 4096.0, 2.0)):
        parameters = make_parameters()
        make = getattr(Compression, method.removesuffix("_scaling"))
        compression = make(parameters.items(), density=0.05, min_numel=100, **METHODS[method])
        for t in range(16):
            compression.loss_scale = scale = scales[t % len(scales)]
            gradients = {name: gradient * scale for name, gradient in draw(SHAPES, t, hvd.rank()).items()}
            reduced = drive(compression, parameters, gradients, op=hvd.Sum)
            found.append({name: result / scale for name, result in reduced.items()})
        density = compression.stats()["total"]["density"]
        found.append([density, *(memory_of(compression, parameters, name) for name in SHAPES)])
    half = len(found) // 2
    exact = {"rtol": 0.0, "atol": 0.0} if hvd.size() <= 2 else {"rtol": 1e-5, "atol": 1e-5}  # an allreduce may round
    torch.testing.assert_close(found[:half], found[half:], **exact)
    assert compression.stats()["residual_norm"] > 0.0


def decayed(name, parameter):
    """Return no decay for biases, norms and scalars, as is common."""
    return 0.05 if parameter.dim() > 1 else 0.0


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("method", ["dgc", "samomentum"])
def test_weight_decay_of_each_parameter(method, scope):
    """By a function and by a mapping, the oracle's with these decays, in payloads and in dense messages."""
    trials = []
    for kind in ("function", "mapping"):
        names = {name: f"{kind}.{method}.{name}" for name in SHAPES}
        decays = {names[name]: 0.05 if len(shape) > 1 else 0.0 for name, shape in SHAPES.items()}
        given = decayed if kind == "function" else {name: decay for name, decay in decays.items() if decay}
        settings = {"momentum": 0.7, "density": 0.05, "scope": scope, "min_numel": 100}
        make = functools.partial(getattr(Compression, method), weight_decay=given, **settings)
        oracle = Method(weight_decay=decays, samomentum=method == "samomentum", **settings)
        trials.append(ScaledTrial(f"{kind}.{method}", oracle, make, 20, average=kind == "mapping"))
    for step in range(20):
        for trial in trials:
            trial.make_step(step)
    for trial in trials:
        trial.check()


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"head.wait": 0.1}, ValueError, "head.wait.*no parameter is called.*head.weight"),
        ({"head.weight": -0.1}, ValueError, r"weight_decay\['head.weight'\] must be at least 0, got -0.1"),
        (lambda name, parameter: None, TypeError, "weight_decay returns for 'body.weight'.*None"),
        (lambda name, parameter: float("nan"), ValueError, "weight_decay returns for 'body.weight'.*nan"),
        (lambda name: 0.1, TypeError, "weight_decay must be a function of name and parameter, got .*lambda"),
        ("0.1", TypeError, "weight_decay must be a number at least 0.*'0.1'"),
    ],
)
def test_a_wrong_weight_decay_is_named(given, error, match):
    with pytest.raises(error, match=match):
        Compression.dgc(make_parameters().items(), weight_decay=given)


@pytest.mark.skipif(hvd.size() == 1, reason="one rank agrees with itself")
def test_ranks_must_agree_on_weight_decay():
    parameters = make_parameters()
    differs = Compression.dgc(parameters.items(), weight_decay=lambda name, p: 0.1 if hvd.rank() and p.dim() else 0.0)
    with pytest.raises(ValueError, match=r"rank 1 has 'weight_decay of .* = 0.1'.* where rank 0 has nothing"):
        drive(differs, parameters, draw(SHAPES, 0, hvd.rank()))
    assert_alive()


@pytest.mark.parametrize("value", [0.0, -2.0, float("nan"), float("inf"), "2", True, None])
def test_a_wrong_loss_scale_is_refused(value):
    compression = Compression.topk(make_parameters().items())
    with pytest.raises((ValueError, TypeError), match=r"loss_scale must be .*above 0"):
        compression.loss_scale = value
    assert compression.loss_scale == 1.0


@pytest.mark.skipif(hvd.size() == 1, reason="one rank agrees with itself")
@pytest.mark.parametrize("scope", SCOPES)
def test_ranks_must_agree_on_the_loss_scale(scope):
    parameters = make_parameters()
    compression = Compression.dgc(parameters.items(), density=0.05, scope=scope)
    drive(compression, parameters, draw(SHAPES, 0, hvd.rank()))
    compression.loss_scale = 3.0 if hvd.rank() == 0 else 1.5
    with pytest.raises(RuntimeError, match=r"loss_scale is .* on this rank, the mean over the ranks is") as raised:
        drive(compression, parameters, draw(SHAPES, 1, hvd.rank()))
    assert f"is {compression.loss_scale:g} on" in str(raised.value)
    assert all("loss_scale" in text for text in everywhere(str(raised.value)))
    assert_alive()


@pytest.mark.rank_counts
@pytest.mark.skipif(hvd.size() == 1, reason="several hosts need several ranks")
def test_ranks_of_all_hosts_must_agree_on_the_loss_scale():
    """Rank 0 differs. In a hierarchical exchange not every rank sends it payloads: of three, rank 1 does not."""
    parameters = make_parameters()
    settings = {"exchange": "hierarchical", "ranks_per_host": [hvd.size() - 1, 1], "min_numel": 10}
    compression = Compression.dgc(parameters.items(), density=0.05, **settings)
    drive(compression, parameters, draw(SHAPES, 0, hvd.rank()))
    compression.loss_scale = 3.0 if hvd.rank() == 0 else 1.5
    with pytest.raises(RuntimeError, match=r"loss_scale is .* on this rank, the mean over the ranks is"):
        drive(compression, parameters, draw(SHAPES, 1, hvd.rank()))
    assert_alive()


def test_a_reduction_that_nobody_tells_is_refused_where_it_matters():
    """Without clipping and decay, the reduced token shows the reduction in time; with them, too late."""
    for settings, matters in (({}, False), ({"weight_decay": 0.1}, True), ({"clip_norm": 1.0}, True)):
        parameters = make_parameters({"only": (2000,)})
        compression = Compression.dgc(parameters.items(), **settings)
        parameters["only"].grad = torch.ones(2000)
        if matters:
            with pytest.raises(ValueError, match="clip_norm and weight_decay depend on op"):
                compression.compress(parameters["only"].grad)
            continue
        carried, context = compression.compress(parameters["only"].grad)
        reduced = hvd.synchronize(hvd.allreduce_async(carried, op=hvd.Sum, name="told.by.nobody"))
        assert float(compression.decompress(reduced, context).max()) == hvd.size()
    assert_alive()


@pytest.mark.skipif(hvd.size() == 1, reason="one rank's average is its sum")
def test_another_reduction_than_the_optimizers_is_refused():
    parameters = make_parameters({"only": (2000,)})
    compression = Compression.dgc(parameters.items(), clip_norm=1.0)
    parameters["only"].grad = torch.ones(2000)
    carried, context = Caller(compression, op=hvd.Average).compress(parameters["only"].grad)
    reduced = hvd.synchronize(hvd.allreduce_async(carried, op=hvd.Sum, name="told.wrong"))
    with pytest.raises(ValueError, match=r"sum over ranks with 1, where the optimizer's op says 0\."):
        compression.decompress(reduced, context)
    assert_alive()


@pytest.mark.skipif(hvd.size() == 1, reason="one rank's average is its sum")
@pytest.mark.parametrize("scope", SCOPES)
def test_gradients_of_one_message_that_are_reduced_in_two_ways_are_refused(scope):
    """Without an optimizer that tells its op, tokens of one step may differ in it."""
    parameters = make_parameters({"first": (2000,), "second": (2000,)})
    compression = Compression.gradient_dropping(parameters.items(), scope=scope)
    ops, contexts = {"first": hvd.Sum, "second": hvd.Average}, {}
    drive(compression, parameters, draw({name: (2000,) for name in ops}, 0, hvd.rank()))  # to share a message later
    for name, parameter in parameters.items():
        parameter.grad = torch.ones(2000)
        carried, context = compression.compress(parameter.grad)
        contexts[name] = hvd.allreduce_async(carried, op=ops[name], name=f"two.ways.{name}"), context
    (first, context), (second, other) = contexts.values()
    assert compression.decompress(hvd.synchronize(first), context).any()
    second = hvd.synchronize(second)
    with pytest.raises(ValueError, match=r"second scales by 0\.\d+, .* by 1\.0: reduce all gradients .* alike"):
        compression.decompress(second, other)
    assert_alive()


@pytest.mark.parametrize("scope", SCOPES)
def test_a_checkpoint_serves_any_loss_scale(scope):
    """What waits is in units of the unscaled gradient: a run that continues at another scale loses nothing."""
    parameters = make_parameters()
    first = Compression.gradient_dropping(parameters.items(), density=0.05, scope=scope, min_numel=100)
    first.loss_scale = 1024.0
    gradients = whole_numbers(SHAPES, 0, hvd.rank())
    drive(first, parameters, {name: gradient * 1024.0 for name, gradient in gradients.items()})
    second = Compression.gradient_dropping(parameters.items(), density=1.0, scope=scope, min_numel=100)
    second.load_state_dict(first.state_dict())
    second.loss_scale = 8.0
    reduced = drive(second, parameters, {name: np.zeros(shape) for name, shape in SHAPES.items()})
    waiting = {name: memory_of(first, parameters, name) for name in SHAPES}
    sums = {name: hvd.allreduce(one, op=hvd.Sum, name=f"waiting.{name}") for name, one in waiting.items()}
    for name, result in reduced.items():
        assert torch.equal(result.double().reshape(-1), 8.0 * sums[name])
