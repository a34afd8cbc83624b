"""NaN and infinity: the step is skipped on every rank, error feedback stays finite, no finite element is lost."""

import functools

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from gradients import SCOPES, draw, whole_numbers
from tf_helpers import Reducer, make_variables, memory_of, several, total

from hvd_sparse.schedule import Schedule
from hvd_sparse.tensorflow import Compression

pytestmark = [several, pytest.mark.each_value]
SHAPES = {"weight": (30, 20), "head": (500,), "bias": (20,)}
SPARSE = ("weight", "head")  # the bias is small and sent dense
BAD = {"nan": np.nan, "inf": np.inf, "minus_inf": -np.inf}


@functools.cache
def traced(method, scope, op=hvd.Sum, dtype=tf.float32, **settings):
    """Return the one reducer of these settings: tests share its graph."""
    variables = make_variables(SHAPES, dtype)
    settings = {"density": 0.05, "min_numel": 100, **settings}
    compression = getattr(Compression, method)(list(variables.values()), scope=scope, **settings)
    return Reducer(variables, compression, op=op)


def fresh(*arguments, **settings):
    """Return a reducer whose memory is empty."""
    reduce = traced(*arguments, **settings)
    reduce.compression.reset()
    return reduce


def spoilt(gradients, name, value):
    """Return the gradients with one element of one tensor replaced."""
    damaged = {key: np.array(gradient) for key, gradient in gradients.items()}
    damaged[name].reshape(-1)[-1] = value
    return damaged


def assert_nothing_entered(compression):
    for name, memory in compression.feedback.items():
        for kind, buffer in memory.buffers.items():
            assert np.isfinite(buffer.numpy()).all(), (name, kind)


def assert_skipped(reduced, is_skipped):
    for name, result in reduced.items():
        assert np.isnan(result).all() if is_skipped else np.isfinite(result).all(), name


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("method", ["gradient_dropping", "dgc"])
def test_one_bad_gradient_voids_the_step_on_every_rank(method, scope, bad):
    """In every tensor in turn, on one rank or the other; the first step too. Then the books balance."""
    reduce = fresh(method, scope, **({"momentum": 0.0} if method == "dgc" else {}))
    balance = {name: np.zeros(SHAPES[name]) for name in SPARSE}
    velocity = np.zeros(SHAPES["bias"])  # without momentum, the gradient of the last step that counted
    for t in range(12):
        gradients = whole_numbers(SHAPES, t, hvd.rank())
        victim = list(SHAPES)[t // 2 % 3] if t % 2 == 0 else None
        hit = victim is not None and hvd.rank() == t // 2 % hvd.size()
        reduced = reduce(spoilt(gradients, victim, BAD[bad]) if hit else gradients)
        assert_skipped(reduced, victim is not None)
        assert_nothing_entered(reduce.compression)
        for name in SPARSE:
            balance[name] += total(spoilt(gradients, name, 0.0)[name] if hit and name == victim else gradients[name])
            balance[name] -= 0.0 if victim else reduced[name]
        if method == "dgc":
            velocity = velocity if victim else gradients["bias"]
            np.testing.assert_array_equal(memory_of(reduce.compression, "bias", "velocity"), velocity)
        assert reduce.compression.stats()["skipped"] == t // 2 + 1
    for name in SPARSE:
        waiting = total(memory_of(reduce.compression, name))
        np.testing.assert_array_equal(waiting, balance[name].reshape(-1), err_msg=name)
        assert waiting.any()
    assert reduce.compression.stats()["steps"] == 12


@pytest.mark.parametrize("dtype", [tf.float64, tf.float16, tf.bfloat16], ids=lambda dtype: dtype.name)
def test_of_every_type(dtype):
    """In float64 a finite number beyond float32 is none that a memory can hold."""
    values = [np.inf, np.nan] + [1e300] * (dtype == tf.float64)
    reduce = fresh("dgc", "tensor", dtype=dtype)
    for t in range(2 * len(values)):
        fed = draw(SHAPES, t, hvd.rank())
        is_skipped = t % 2 == 1
        if is_skipped and hvd.rank() == hvd.size() - 1:
            fed = spoilt(fed, list(SHAPES)[t // 2], values[t // 2])
        assert_skipped(reduce(fed), is_skipped)
        assert_nothing_entered(reduce.compression)


@pytest.mark.parametrize("bad", ["inf", "minus_inf"])
@pytest.mark.parametrize("density", [0.05, 1.0])
@pytest.mark.parametrize("method", ["dgc", "samomentum"])
def test_an_infinity_in_a_dense_float16_gradient_is_not_clamped_away(method, density, bad):
    """A dense float16 tensor is clamped to what float16 holds: the check for infinity has to come before that."""
    reduce = fresh(method, "tensor", dtype=tf.float16, density=density)
    for t in range(4):
        is_skipped, fed = t % 2 == 1, draw(SHAPES, t, hvd.rank())
        before = {name: memory_of(reduce.compression, name) for name in ("weight", "bias")}
        if is_skipped and hvd.rank() == hvd.size() - 1:
            fed = spoilt(fed, "bias" if t == 1 or density < 1.0 else "weight", BAD[bad])
        assert_skipped(reduce(fed), is_skipped)
        assert_nothing_entered(reduce.compression)
        if is_skipped:
            np.testing.assert_array_equal(memory_of(reduce.compression, "bias"), before["bias"])


@pytest.fixture(params=SCOPES)
def clipped(request):
    """A reducer that sends everything, without momentum, clipped to a norm of 3 by each tensor or by the whole."""
    settings = {"momentum": 0.0, "clip_norm": 3.0, "clip_scope": request.param, "density": 0.9999}
    settings["dense_fallback"] = None
    return fresh("dgc", "model", op=hvd.Average, **settings)


def zeros():
    return {name: np.zeros(shape) for name, shape in SHAPES.items()}


def test_a_huge_finite_gradient_is_clipped_to_the_bound(clipped):
    """Its squares are beyond float32; it still has a direction."""
    reduced = clipped({**zeros(), "head": draw(SHAPES, 0, 0)["head"] * 1e25})
    assert np.linalg.norm(reduced["head"]) == pytest.approx(3.0 * hvd.size() ** 0.5, rel=1e-4)


def test_a_gradient_that_is_not_finite_clips_no_other(clipped):
    """The finite gradients of two skipped steps stay in the residuals unclipped; the next step sends them."""
    small = {**zeros(), "weight": draw(SHAPES, 1, 0)["weight"] * 1e-3}
    for bad in (np.nan, np.inf):
        assert_skipped(clipped(spoilt(small, "head", bad) if hvd.rank() == 0 else small), True)
    reduced = clipped(zeros())
    np.testing.assert_allclose(reduced["weight"], 2.0 * small["weight"], rtol=1e-5)
    assert not reduced["head"].any()


class DenseInOddSteps(Schedule):
    def density(self, step):
        return 1.0 if step % 2 else 0.1

    def describe(self):
        return "dense in odd steps"


@pytest.mark.parametrize("scope", SCOPES)
def test_a_void_dense_step_has_not_been(scope):
    """A skipped dense step changes no residual: with density 1, a loss scaler skips it, as with Horovod alone."""
    reduce = fresh("gradient_dropping", scope, density=DenseInOddSteps())
    balance = {name: np.zeros(SHAPES[name]) for name in SPARSE}
    for t in range(6):
        gradients = whole_numbers(SHAPES, t, hvd.rank())
        is_skipped = t in (1, 3)
        before = {name: memory_of(reduce.compression, name) for name in SPARSE}
        victim = ("weight", "bias")[t // 2 % 2]
        reduced = reduce(spoilt(gradients, victim, np.nan) if is_skipped and hvd.rank() == 0 else gradients)
        assert_skipped(reduced, is_skipped)
        for name in SPARSE:
            after = memory_of(reduce.compression, name)
            if is_skipped:
                np.testing.assert_array_equal(after, before[name], err_msg=name)
            else:
                balance[name] += total(gradients[name]) - reduced[name]
            np.testing.assert_array_equal(total(after), balance[name].reshape(-1), err_msg=name)
            assert after.any() == (t != 5), "a dense step sends all"


@pytest.mark.parametrize("density", [1.0, DenseInOddSteps()], ids=["density 1", "schedule"])
def test_a_void_dense_step_leaves_the_velocity(density):
    """The momentum of all tensors is that of SGD which skips the step."""
    reduce = fresh("dgc", "tensor", op=hvd.Average, density=density, momentum=0.5)
    velocity = {name: np.zeros(SHAPES[name]) for name in SHAPES}
    for t in range(6):
        reduce.compression.step.assign(2 * t + 1)  # only the odd ones
        drawn = [draw(SHAPES, t, rank) for rank in range(hvd.size())]
        is_skipped = t in (2, 3)
        hit = is_skipped and hvd.rank() == 0
        reduced = reduce(spoilt(drawn[0], "head", np.nan) if hit else drawn[hvd.rank()])
        assert_skipped(reduced, is_skipped)
        for name in () if is_skipped else SHAPES:
            velocity[name] = 0.5 * velocity[name] + sum(one[name] for one in drawn) / hvd.size()
            np.testing.assert_allclose(reduced[name], velocity[name], rtol=1e-5, atol=1e-5, err_msg=name)
