"""clip_norm, weight_decay and thresholds have the same meaning with every op, loss scale and step.

The trials of a test are traced once, side by side in one graph.
"""

import functools

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from gradients import SHAPES, draw
from oracle import Method
from test_tape_oracle import FEW, Trial
from tf_helpers import (
    Reducer,
    as_gradients,
    assert_alive,
    make_variables,
    memory_of,
    reduce_through_tape,
    several,
)

from hvd_sparse.tensorflow import Compression, norm

pytestmark = several
STEPS = 25
SCALES = (1024.0, 1024.0, 65536.0, 300.0, 2.0)
REDUCTIONS = {
    "average": {"op": hvd.Average},
    "sum": {"op": hvd.Sum},
    "predivide": {"op": hvd.Average, "gradient_predivide_factor": 3.0},
}
PLACES = {"dense": {"min_numel": 10**6}, "payload": {"min_numel": 0}}  # how a variable is sent
SETTINGS = {
    "tensor": ("dgc", {"clip_norm": 0.25}),
    "model": ("dgc", {"clip_norm": 0.25, "scope": "model", "clip_scope": "model"}),
    "samomentum": ("samomentum", {"clip_norm": 0.25}),
    "decay": ("dgc", {"weight_decay": 0.1}),
    "decay, model": ("dgc", {"weight_decay": 0.1, "scope": "model"}),
    "decay, samomentum": ("samomentum", {"weight_decay": 0.1}),
}

REDUCED = [  # which settings, how they are reduced, and how they are sent
    ("tensor", "average", "payload"),
    ("tensor", "predivide", "dense"),
    ("model", "sum", "payload"),
    ("model", "average", "dense"),
    ("samomentum", "predivide", "payload"),
    ("decay", "sum", "payload"),
    ("decay", "average", "dense"),
    ("decay, model", "predivide", "payload"),
    ("decay, samomentum", "sum", "dense"),
]


def test_clip_norm_and_weight_decay_are_of_the_reduced_gradient(monkeypatch):
    """Orthogonal gradients far above the bound sum up to it; 20 steps of decay 0.1 at rate 0.1 leave 2 * 0.99^20."""
    monkeypatch.setattr(norm, "SPAN", 10)  # a loop in the graph, as for large tensors
    variables = {name: tf.Variable(tf.fill([64], 2.0), name="/".join(name)) for name in REDUCED}
    compressions = {}
    for kind, reduction, place in variables:
        method, settings = SETTINGS[kind]
        make = functools.partial(getattr(Compression, method), density=0.999, momentum=0.0, dense_fallback=None)
        compressions[kind, reduction, place] = make([variables[kind, reduction, place]], **settings, **PLACES[place])

    @tf.function(autograph=False)  # with it: test_models.py
    def step(gradient, scale):
        """Return what is reduced, without the loss scale; whatever decays descends."""
        found = {}
        for name, variable in variables.items():
            kind, reduction, _ = name
            compressions[name].loss_scale = scale
            own = gradient * 0.0 if kind.startswith("decay") else gradient
            reduced = reduce_through_tape({0: variable}, {0: own * scale}, compressions[name], **REDUCTIONS[reduction])
            found["/".join(name)] = reduced[0] / scale
            if kind.startswith("decay"):
                variable.assign_sub(0.1 * reduced[0] / scale)
        return found

    gradient = np.zeros(64, np.float32)
    gradient[2 * hvd.rank()] = 7.0 + hvd.rank()
    for t in range(20):
        reduced = step(gradient, tf.constant((1.0, 65536.0, 3000.0)[t % 3]))
        for name, result in reduced.items():
            if not name.startswith("decay") and t < 4:
                assert np.linalg.norm(result.numpy()) == pytest.approx(0.25, rel=1e-5), (name, t)
                assert np.count_nonzero(result.numpy()) == hvd.size(), name
    for (kind, *_), variable in variables.items():
        if kind.startswith("decay"):
            np.testing.assert_allclose(variable.numpy(), 2.0 * 0.99**20, rtol=1e-5)


class ScaledTrial(Trial):
    """A trial under a loss scale that is set in the graph; the oracle knows of none."""

    def descend(self, gradients, scale):
        self.compression.loss_scale = scale
        scaled = {name: gradient * scale for name, gradient in gradients.items()}
        reduced = reduce_through_tape(self.variables, scaled, self.compression, op=self._op)
        for name, variable in self.variables.items():
            variable.assign_sub(reduced[name] / scale * 0.1)


EVERYTHING = {"momentum": 0.7, "nesterov": True, "weight_decay": 0.05, "clip_norm": 8.0, "density": 0.05}
WHOLE = {"momentum": 0.9, "clip_norm": 10.0, "clip_scope": "model", "scope": "model", "density": 0.05}
SAMOMENTUM = {"momentum": 0.7, "weight_decay": 0.05, "clip_norm": 8.0, "density": 0.05}
TRIALS = {
    "everything": ("dgc", Method(**EVERYTHING), EVERYTHING, True),
    "everything.summed": ("dgc", Method(**EVERYTHING), EVERYTHING, False),
    "whole": ("dgc", Method(**WHOLE), WHOLE, True),
    "samomentum": ("samomentum", Method(samomentum=True, **SAMOMENTUM), SAMOMENTUM, False),
    "dct": ("dct", Method(lifespan=1000), {"lifespan": 1000, "density": 0.05}, True),
    "hard": ("hard_threshold", Method(value=2.5), {"value": 2.5}, True),
    "sidco": ("sidco", Method(stages=1), {"density": 0.05}, False),
    "cltk": ("cltk", Method(scope="model", cyclic=True), {"density": 0.05}, True),
}


def train_side_by_side(trials):
    @tf.function(autograph=False)  # with it: test_models.py
    def descend(gradients, scale):
        for trial, own in zip(trials, gradients, strict=True):
            trial.descend(own, scale)

    for step in range(STEPS):
        descend([trial.gradients(step) for trial in trials], tf.constant(SCALES[step % len(SCALES)]))
    assert descend.experimental_get_tracing_count() == 1
    for trial in trials:
        trial.check()


def test_a_loss_scale_changes_nothing_but_the_gradients():
    """Under scales from 2 to 65536 every trial does what the papers' algorithms do without one."""
    trials = []
    for title, (method, oracle, settings, average) in TRIALS.items():
        make = functools.partial(getattr(Compression, method), min_numel=100, **settings)
        trials.append(ScaledTrial(f"scaled.{title}", oracle, make, STEPS, average=average))
    train_side_by_side(trials)


def test_weight_decay_of_each_variable():
    """By a function and by a mapping, the oracle's with these decays, in payloads and in dense messages."""
    trials = []
    for kind, method, scope in (
        ("function", "dgc", "tensor"),
        ("mapping", "dgc", "model"),
        ("by", "samomentum", "tensor"),
    ):
        decays = {f"each.{kind}.{name}": 0.05 if len(shape) > 1 else 0.0 for name, shape in FEW.items()}
        given = {name: decay for name, decay in decays.items() if decay}
        if kind == "function":

            def given(name, variable):
                return 0.05 if len(variable.shape) > 1 else 0.0

        settings = {"momentum": 0.7, "density": 0.05, "scope": scope, "min_numel": 100}
        make = functools.partial(getattr(Compression, method), weight_decay=given, **settings)
        oracle = Method(weight_decay=decays, samomentum=method == "samomentum", **settings)
        trials.append(ScaledTrial(f"each.{kind}", oracle, make, STEPS, average=kind == "mapping"))
    train_side_by_side(trials)


def test_thresholds_that_are_scaled_do_not_depend_on_the_scale():
    """MiCRO's own controller: gradients, residuals and densities are those without a loss scale."""
    found = []
    for scales in ((1.0,), (65536.0, 4096.0, 4096.0, 2.0)):
        variables = make_variables(SHAPES)
        compression = Compression.micro(list(variables.values()), 0.05, min_numel=100, controller="scaling")
        reduce = Reducer(variables, compression, op=hvd.Sum)
        for t in range(12):
            compression.loss_scale = scale = scales[t % len(scales)]
            reduced = reduce({name: gradient * scale for name, gradient in draw(SHAPES, t, hvd.rank()).items()})
            found.append(np.concatenate([reduced[name].reshape(-1) / scale for name in SHAPES]))
        found.append(np.concatenate([memory_of(compression, name) for name in SHAPES]))
        found.append(compression.stats()["total"]["density"])
    half = len(found) // 2
    for without, scaled in zip(found[:half], found[half:], strict=True):
        np.testing.assert_allclose(scaled, without, rtol=1e-5, atol=1e-5)
    assert found[half - 2].any()


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"head.wait": 0.1}, ValueError, r"head\.wait.*no parameter is called.*body\.weight"),
        ({"head.weight": -0.1}, ValueError, r"weight_decay\['head.weight'\] must be at least 0, got -0.1"),
        (lambda name, variable: None, TypeError, r"weight_decay returns for 'body\.weight'.*None"),
    ],
)
def test_a_wrong_weight_decay_is_named(given, error, match):
    with pytest.raises(error, match=match):
        Compression.dgc(list(make_variables(FEW).values()), weight_decay=given)


@pytest.mark.parametrize("value", [0.0, -2.0, float("nan"), "2", True])
def test_a_wrong_loss_scale_is_refused(value):
    compression = Compression.topk(list(make_variables(FEW).values()))
    with pytest.raises((ValueError, TypeError), match=r"loss_scale must be .*above 0"):
        compression.loss_scale = value
    assert compression.loss_scale.numpy() == 1.0


def test_a_graph_of_tensorflow_1_sets_the_loss_scale_when_it_runs():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("only", [2000], initializer=tf.compat.v1.zeros_initializer())
        compression = Compression.topk([variable])
        with pytest.raises(RuntimeError, match=r"session\.run\(compression\.loss_scale\.assign"):
            compression.loss_scale = 2.0
        session.run(compression.loss_scale.assign(2.0))
        assert session.run(compression.loss_scale) == 2.0


def test_ranks_must_agree_on_weight_decay_and_loss_scale():
    variables = make_variables(FEW)
    differs = Compression.dgc(list(variables.values()), weight_decay=lambda name, v: 0.1 if hvd.rank() else 0.0)
    gradients = as_gradients(variables, draw(FEW, 0, hvd.rank()))
    with pytest.raises(ValueError, match=r"rank 1 has 'weight_decay of .* = 0.1'.* where rank 0 has nothing"):
        reduce_through_tape(variables, gradients, differs)
    compression = Compression.dgc(list(variables.values()), density=0.05)
    reduce = Reducer(variables, compression)
    for scale in (3.0 if hvd.rank() == 0 else 1.5, 3.0 + 1e-3 * hvd.rank(), 0.0, -2.0, float("nan")):
        compression.loss_scale.assign(scale)  # as a session of TensorFlow 1 does, without a check
        with pytest.raises(tf.errors.InvalidArgumentError, match="loss_scale must be a number above 0, the same on"):
            reduce(draw(FEW, 0, hvd.rank()))
    compression.loss_scale.assign(0.1)  # whose square is rounded
    reduce(draw(FEW, 0, hvd.rank()))
    assert_alive()
