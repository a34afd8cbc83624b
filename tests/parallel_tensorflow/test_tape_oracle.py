"""Many steps on any number of ranks equal the papers' algorithms: parameters, residuals and velocities.

The trials of a test train side by side in one graph, each with a separate compressor. Their exchanges interleave.
"""

import functools

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from gradients import SCOPES, SHAPES, draw
from oracle import STEPS, Method, train_without_ties
from tf_helpers import as_gradients, make_variables, memory_of, reduce_through_tape, several

from hvd_sparse.schedule import WarmUp
from hvd_sparse.tensorflow import Compression

pytestmark = several
LR = 0.1
FEW = {"body.weight": (30, 20), "body.bias": (20,), "head.weight": (500,)}
DGC = {
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "unmasked": {"momentum": 0.8, "factor_masking": False},
    "decayed": {"momentum": 0.9, "weight_decay": 0.05},
    "clipped": {"momentum": 0.9, "clip_norm": 8.0},
    "everything": {"momentum": 0.7, "nesterov": True, "weight_decay": 0.05, "clip_norm": 8.0},
}


class Trial:
    """One method on separate variables, and the oracle's results for it."""

    def __init__(self, title, method, make, steps, shapes=FEW, dtype=tf.float32, average=True):
        self.title, self.method, self.shapes, self.dtype = title, method, shapes, dtype
        self.variables = make_variables({f"{title}.{name}": shape for name, shape in shapes.items()}, dtype)
        self.compression = make(list(self.variables.values()))
        self._op = hvd.Average if average else hvd.Sum
        start = {name: tf.cast(variable, tf.float64).numpy() for name, variable in self.variables.items()}
        self.is_half = dtype in (tf.float16, tf.bfloat16)
        self.expected, self.seed = train_without_ties(
            method, start, self.draw, hvd.size(), steps, LR, average, self.as_held if self.is_half else None
        )

    def as_held(self, array):
        """Return what a gradient holds of an array, float64."""
        return tf.cast(tf.cast(tf.cast(array, tf.float32), self.dtype), tf.float64).numpy()

    def draw(self, step, rank, seed):
        drawn = draw(self.shapes, step, rank, seed)
        if self.is_half:
            drawn = {name: self.as_held(value) for name, value in drawn.items()}
        return {f"{self.title}.{name}": value for name, value in drawn.items()}

    def gradients(self, step):
        return as_gradients(self.variables, self.draw(step, hvd.rank(), self.seed))

    def descend(self, gradients):
        """Make one step of plain SGD."""
        reduced = reduce_through_tape(self.variables, gradients, self.compression, op=self._op)
        for name, variable in self.variables.items():
            variable.assign_sub(reduced[name] * tf.constant(LR, self.dtype))

    def check(self):
        assert self.compression.step.numpy() == self.compression.stats()["steps"] > 0
        own = hvd.rank()
        for name, variable in self.variables.items():
            if self.dtype == tf.float32:  # others round the parameter in every step
                self.close(variable.numpy(), self.expected.parameters[name], f"parameter {name}")
            residual = memory_of(self.compression, name)
            if self.method.samomentum:  # it keeps what the next step starts from
                self.close(residual, self.method.momentum * self.expected.v[own][name], f"m * u {name}")
                continue
            self.close(residual, self.expected.v[own][name], f"residual {name}")
            if not self.is_half:  # there, what rounding left of what was sent is not always zero in both
                np.testing.assert_array_equal(residual == 0, self.expected.v[own][name].reshape(-1) == 0, err_msg=name)
            if self.method.momentum:
                self.close(
                    memory_of(self.compression, name, "velocity"), self.expected.u[own][name], f"velocity {name}"
                )

    def close(self, found, expected, what):
        # a residual that is never cleared, but only made smaller, adds up the roundings of all steps
        tolerance = 2e-5 if self.method.values == "float32" else 2e-4
        found, expected = found.reshape(-1), np.reshape(expected, -1)
        if self.is_half:  # a value halfway between two others is sometimes rounded to the other one
            other = ~np.isclose(found, expected, rtol=tolerance, atol=tolerance)
            assert other.sum() <= 3 and np.abs(found - expected).max() < 0.05, what
            found = np.where(other, expected, found)
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance, err_msg=what)


def run(trials, steps):
    """Train, with one trace for all steps and trials."""

    @tf.function(autograph=False)  # it takes a fifth of the time; other tests have it
    def descend(gradients):
        for trial, own in zip(trials, gradients, strict=True):
            trial.descend(own)

    for step in range(steps):
        descend([trial.gradients(step) for trial in trials])
    assert descend.experimental_get_tracing_count() == 1
    for trial in trials:
        trial.check()


def dgc(**settings):
    return lambda variables: Compression.dgc(variables, **settings)


def dropping(**settings):
    return lambda variables: Compression.gradient_dropping(variables, **settings)


@pytest.mark.parametrize("scope", SCOPES)
def test_dgc_is_that_of_the_paper(scope):
    trials = []
    for title, variant in DGC.items():
        settings = {**variant, "density": 0.05, "scope": scope, "min_numel": 100}
        trials.append(Trial(title, Method(**settings), dgc(**settings), STEPS))
    if scope == "model":
        settings = {"momentum": 0.9, "density": 0.05, "scope": "model", "clip_norm": 10.0, "clip_scope": "model"}
        trials.append(Trial("clipped_whole", Method(**settings), dgc(min_numel=100, **settings), STEPS))
    run(trials, STEPS)
    assert all(any(np.any(v) for v in trial.expected.v[0].values()) for trial in trials), "all must be sparse"


def test_samomentum_is_that_of_the_paper():
    trials = []
    for scope in SCOPES:
        settings = {"momentum": 0.7, "density": 0.05, "scope": scope, "min_numel": 100, "weight_decay": 0.05}
        make = functools.partial(Compression.samomentum, **settings)
        trials.append(Trial(scope, Method(samomentum=True, **settings), make, STEPS))
    settings |= {"clip_norm": 10.0, "clip_scope": "model"}
    make = functools.partial(Compression.samomentum, **settings)
    trials.append(Trial("clipped_whole", Method(samomentum=True, **settings), make, STEPS))
    run(trials, STEPS)


def test_gradient_dropping_is_that_of_the_paper():
    trials = []
    for scope in SCOPES:
        for min_numel in (0, 100):
            settings = {"density": 0.1, "scope": scope, "min_numel": min_numel}
            # a single element is always sent whole, and has no edge
            shapes = SHAPES if min_numel else FEW
            title = f"{scope}.{min_numel}"
            trials.append(Trial(title, Method(**settings), dropping(**settings), STEPS, shapes, average=False))
    run(trials, STEPS)


def test_warm_up_follows_the_papers_densities():
    """25 % and a quarter of it each stage; for 0.001 four stages, here of 6 steps each."""
    stages = (0.25, 0.0625, 0.015625, 0.00390625)

    def density(step):
        return stages[step // 6] if step < 24 else 0.001

    shapes = {"weight": (60, 50), "bias": (60,)}
    trials = [
        Trial(
            scope,
            Method(density=density, scope=scope, momentum=0.9, min_numel=1024),
            dgc(density=0.001, warmup=24, momentum=0.9, scope=scope),
            steps=40,
            shapes=shapes,
        )
        for scope in SCOPES
    ]
    run(trials, 40)


def test_warm_up_from_dense_keeps_the_momentum():
    """Dense steps send the velocity and mask nothing; the sparse steps continue with it."""

    def density(step):
        return 1.0 if step < 10 else 0.2 if step < 20 else 0.05

    schedule = WarmUp(0.05, steps=20, initial=1.0, factor=0.2)
    trials = []
    for scope, nesterov in zip(SCOPES, (False, True), strict=True):
        settings = {"scope": scope, "nesterov": nesterov, "momentum": 0.9, "min_numel": 100}
        make = dgc(density=0.05, warmup=schedule, **settings)
        trials.append(Trial(scope, Method(density=density, **settings), make, 40))
    run(trials, 40)


def test_the_memory_is_float32_whatever_the_gradients_type():
    """Low-precision gradients are accumulated without losing small ones; the memories are those of the oracle."""
    trials = []
    for dtype, scope in ((tf.float16, "tensor"), (tf.bfloat16, "model"), (tf.float64, "tensor")):
        settings = {"density": 0.05, "momentum": 0.9, "scope": scope}
        trials.append(Trial(dtype.name, Method(**settings), dgc(**settings), 30, {"weight": (40, 30)}, dtype))
    run(trials, 30)
