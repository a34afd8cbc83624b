"""Gradients of 16 bits: what fits the type is delivered, the rest stays in the residual, and nothing is lost."""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from tf_helpers import Reducer, make_variables, memory_of, several, total

from hvd_sparse.tensorflow import Compression

pytestmark = several
SHAPES = {"weight": (40, 50), "bias": (10,)}
CASES = [
    ("gradient_dropping", tf.float16, hvd.Average, {}),
    ("gradient_dropping", tf.bfloat16, hvd.Sum, {"scope": "model"}),
    ("gradient_dropping", tf.float16, hvd.Sum, {"values": "float16"}),
    ("gradient_dropping", tf.float16, hvd.Average, {"exchange": "reduce_scatter"}),
    ("dgc", tf.float16, hvd.Sum, {"momentum": 0.0, "exchange": "reduce_scatter", "complete": True}),
    ("dct", tf.float16, hvd.Sum, {}),
    ("cltk", tf.float16, hvd.Average, {}),
]


def make(method, dtype, op, **settings):
    variables = make_variables(SHAPES, dtype)
    return Reducer(variables, getattr(Compression, method)(list(variables.values()), **settings), op=op)


@pytest.mark.parametrize(("method", "dtype", "op", "settings"), CASES)
def test_what_is_delivered_and_what_waits_are_what_was_fed(method, dtype, op, settings):
    """512 a step, and 30,720 at some elements: 60 steps bring up to 1.8 million where float16 ends at 65,504."""
    reduce = make(method, dtype, op, density=0.01, min_numel=100, **settings)
    gradients = {name: np.full(shape, 512.0) for name, shape in SHAPES.items()}
    gradients["weight"].reshape(-1)[::3] = 30720.0
    sent = np.zeros(2000)
    for _ in range(60):
        reduced = reduce(gradients)
        assert all(np.isfinite(one).all() for one in reduced.values())
        sent += reduced["weight"].reshape(-1)
    ranks = hvd.size()
    waiting = total(memory_of(reduce.compression, "weight")) / (ranks if op == hvd.Average else 1)
    fed = 60 * gradients["weight"].reshape(-1) * (1 if op == hvd.Average else ranks)
    exact = ranks & (ranks - 1) == 0 or op == hvd.Sum  # 1/3 of a sum is rounded
    np.testing.assert_allclose(sent + waiting, fed, rtol=0 if exact else 1e-6, atol=0)
    assert dtype != tf.float16 or sent.max() >= 65504.0, "more than one message can hold had waited"


@pytest.mark.parametrize("groups", [None, 1])
@pytest.mark.parametrize("method", ["gradient_dropping", "dgc"])
def test_the_mean_of_small_tensors_may_need_a_larger_sum(method, groups):
    """The sum of two gradients of 40,000 is beyond float16, their mean is not."""
    variables = make_variables(SHAPES, tf.float16)
    compression = getattr(Compression, method)(list(variables.values()), density=0.01, min_numel=100)
    reduce = Reducer(variables, compression, op=hvd.Average, groups=groups)
    reduced = reduce({"weight": np.ones((40, 50)), "bias": np.full(10, 40000.0)})
    assert reduced["bias"].tolist() == [40000.0] * 10


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (tf.float16, {}),
        (tf.float16, {"exchange": "reduce_scatter", "scope": "model"}),
        (tf.float16, {"exchange": "hierarchical", "ranks_per_host": 1}),
        (tf.float32, {"exchange": "reduce_scatter", "values": "int2"}),
    ],
)
def test_samomentum_has_kept_a_part_of_what_comes_back(dtype, settings):
    """Sending u leaves m u (DGS, Algorithm 3): what is delivered, times 1 - m, and what waits are what was fed."""
    settings = {"momentum": 0.75, "density": 0.1, "min_numel": 100, "dense_fallback": None, **settings}
    reduce = make("samomentum", dtype, hvd.Sum, **settings)
    gradients = {name: np.full(shape, 512.0) for name, shape in SHAPES.items()}
    gradients["weight"].reshape(-1)[::30] = 30720.0
    sent = np.zeros(2000)
    for t in range(40):
        reduced = reduce({name: one * (t < 10) for name, one in gradients.items()})
        assert all(np.isfinite(one).all() for one in reduced.values())
        sent += reduced["weight"].reshape(-1)
    fed = 10 * gradients["weight"].reshape(-1) * hvd.size()
    waiting = total(memory_of(reduce.compression, "weight"))
    np.testing.assert_allclose(0.25 * sent + waiting, fed, rtol=0, atol=1e-6 * fed.max())


@pytest.mark.parametrize("method", ["dgc", "samomentum"])
def test_a_velocity_beyond_float16_travels_in_parts(method):
    """Dense: momentum 0.75 makes four times the gradient of it, which is 30,720. All comes, later."""
    reduce = make(method, tf.float16, hvd.Average, density=1.0, momentum=0.75)
    fed, velocity, moved = 0.0, 0.0, np.zeros(10)
    for t in range(30):
        gradient = 30720.0 if t < 6 else 0.0
        velocity = 0.75 * velocity + gradient
        fed += velocity
        reduced = reduce({name: np.full(shape, gradient) for name, shape in SHAPES.items()})
        assert all(np.isfinite(one).all() for one in reduced.values())
        moved += reduced["bias"]
    np.testing.assert_allclose(moved, fed, rtol=2e-2)
