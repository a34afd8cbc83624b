"""Overflows in error feedback and bad numbers in checkpoints never enter a residual and are never sent."""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
import tiers
from gradients import draw
from tf_helpers import Reducer, assert_alive, make_variables, memory_of, several, total

from hvd_sparse.tensorflow import Compression

pytestmark = several
SHAPES = {"weight": (30, 20), "head": (500,), "bias": (20,)}
METHODS = {
    "dgc": {"momentum": 0.9},
    "dgc, dense": {"momentum": 0.9, "density": 1.0},
    "samomentum": {},
    "dct": {},
    "sidco": {},
    "cltk": {},
}


def make(kind):
    variables = make_variables(SHAPES)
    settings = {"density": 0.05, "min_numel": 100, **METHODS[kind]}
    compression = getattr(Compression, kind.split(",")[0])(list(variables.values()), **settings)
    return Reducer(variables, compression, op=hvd.Average)


def huge(step):
    """The gradients of the last rank, distinct, each finite; any two of them together are not. Others have zeros."""
    is_last = hvd.rank() == hvd.size() - 1
    return {name: (2.6e38 + 1e37 * np.tanh(value)) * is_last for name, value in draw(SHAPES, step, 0).items()}


@pytest.mark.parametrize("kind", tiers.choice(METHODS, "dgc, dense", "samomentum", "cltk"))
def test_an_overflow_in_the_memory_voids_the_step_and_leaves_the_memory(kind):
    reduce = make(kind)
    first = reduce(huge(0))
    assert all(np.isfinite(result).all() for result in first.values())
    for t in (1, 2):
        assert all(np.isnan(result).all() for result in reduce(huge(t)).values()), t
    for name in SHAPES:
        waited = (first[name] == 0).reshape(-1)  # what was not sent stands there as it came
        residual = memory_of(reduce.compression, name)
        assert np.isfinite(residual).all() and np.isfinite(memory_of(reduce.compression, name, "velocity")).all()
        if name != "bias":
            expected = np.float32(huge(0)[name]).astype(np.float64).reshape(-1)
            np.testing.assert_array_equal(residual[waited], expected[waited], err_msg=name)


@pytest.mark.parametrize("settings", [{}, {"exchange": "reduce_scatter"}], ids=["gather", "reduce_scatter"])
def test_an_infinite_sum_of_bfloat16_leaves_nothing_in_the_memory(settings):
    """Each rank's gradient is finite, and their sum is not: it is clamped, and what is beyond has no finite size."""
    variables = make_variables(SHAPES, tf.bfloat16)
    options = {"density": 0.05, "min_numel": 100, **settings}
    compression = Compression.gradient_dropping(list(variables.values()), **options)
    reduce = Reducer(variables, compression, op=hvd.Sum)
    same = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    same["head"][7] = 3e38
    assert reduce(same)["head"][7] == tf.bfloat16.max
    assert all(np.isfinite(memory_of(compression, name)).all() for name in SHAPES)
    small = draw(SHAPES, 1, 0)
    assert all(np.isfinite(found).all() for found in reduce(small).values())


def test_a_sum_of_residuals_beyond_float32_is_clamped():
    compression = make("dgc").compression
    state = compression.state_dict()
    state["memory"]["weight"]["residual"][:3] = [3e38, -3e38, 1.0]
    compression.load_state_dict(state)
    summed = compression.state_dict(summed=True)
    largest = float(np.finfo(np.float32).max)
    assert summed["memory"]["weight"]["residual"][:3].tolist() == [largest, -largest, hvd.size()]
    compression.load_state_dict(summed)
    assert total(memory_of(compression, "weight"))[:3].tolist() == [largest, -largest, hvd.size()]


def test_a_state_of_another_method_is_refused_on_every_rank():
    """A residual of CLT-k would be worth 1 / (1 - m) times as much in SAMomentum. Older states have no method."""
    theirs, ours = make("cltk"), make("samomentum").compression
    theirs(draw(SHAPES, 0, hvd.rank()))
    state, before = theirs.compression.state_dict(), ours.state_dict()
    message = f"rank {hvd.size() - 1}: the state is of another method: cltk there, samomentum here"
    with pytest.raises(ValueError, match=message):
        ours.load_state_dict(state if hvd.rank() == hvd.size() - 1 else before)
    assert not memory_of(ours, "weight").any()
    ours.load_state_dict({key: part for key, part in state.items() if key != "method"})
    assert memory_of(ours, "weight").any()


def test_a_checkpoint_of_another_method_is_refused_on_every_rank(tmp_path):
    theirs, ours = make("cltk"), make("samomentum")
    theirs(draw(SHAPES, 0, hvd.rank()))
    path = tf.train.Checkpoint(compression=theirs.compression).save(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(compression=ours.compression).restore(path)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"has restored the error .*another method"):
        ours(draw(SHAPES, 1, hvd.rank()))
    assert_alive()


@pytest.mark.parametrize("kind", ["residual", "velocity"])
def test_a_state_that_is_not_finite_is_refused_on_every_rank(kind):
    """On one rank alone it is bad; every rank hears which one, and of which buffer, and keeps what it had."""
    reduce = make("dgc")
    reduce(draw(SHAPES, 0, hvd.rank()))
    before = memory_of(reduce.compression, "weight", kind)
    state = reduce.compression.state_dict()
    if hvd.rank() == hvd.size() - 1:
        state["memory"]["weight"][kind][7] = np.inf
    with pytest.raises(ValueError, match=rf"rank {hvd.size() - 1}: weight: the state's {kind} must be finite"):
        reduce.compression.load_state_dict(state)
    np.testing.assert_array_equal(before, memory_of(reduce.compression, "weight", kind))
    reduce(draw(SHAPES, 1, hvd.rank()))
    assert_alive()
