"""Thresholds that decide what is sent are part of the state. DCT renews a threshold when the count leaves its band."""

import itertools

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from gradients import draw
from tf_helpers import Reducer, make_variables, several
from turns import Ages, Alternating

from hvd_sparse.checkpoint import load_state, save_state
from hvd_sparse.tensorflow import Compression

pytestmark = several
SHAPES = {"weight": (60, 50), "head": (2000,), "bias": (20,)}
METHODS = {"dct": {"lifespan": 50}, "sidco": {"stages": 2}, "micro": {}, "micro, scaling": {"controller": "scaling"}}


def make(method, **settings):
    variables = make_variables(SHAPES)
    settings = {"density": 0.01, "min_numel": 100, **METHODS[method], **settings}
    return Reducer(
        variables, getattr(Compression, method.split(",")[0])(list(variables.values()), **settings), op=hvd.Sum
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("means", ["state_dict", pytest.param("tf.train.Checkpoint", marks=pytest.mark.exhaustive)])
def test_a_resumed_run_is_the_uninterrupted_one(means, method, tmp_path):
    """Saved after 17 steps, amid a life-span and five steps of SIDCo; through a file, into a new compressor."""
    whole, resumed = make(method), make(method)
    for t in range(17):
        whole(draw(SHAPES, t, hvd.rank()))
    if means == "state_dict":
        save_state(tmp_path / "state", whole.compression.state_dict())
        resumed.compression.load_state_dict(load_state(tmp_path / "state"))
    else:
        path = tf.train.Checkpoint(compression=whole.compression).save(str(tmp_path / "checkpoint"))
        restored = tf.train.Checkpoint(compression=resumed.compression).restore(path)
        restored.assert_existing_objects_matched().assert_consumed()
    for t in range(17, 30):
        one, other = whole(draw(SHAPES, t, hvd.rank())), resumed(draw(SHAPES, t, hvd.rank()))
        for name in SHAPES:
            np.testing.assert_array_equal(one[name], other[name])
    own, summed = whole.compression.state_dict(), whole.compression.state_dict(summed=True)
    assert own["thresholds"] and not summed["thresholds"]
    resumed.compression.load_state_dict(summed)
    assert not any(numbers.any() for numbers in resumed.compression.state_dict()["thresholds"].values())


@pytest.mark.parametrize("factor", [20.0, 0.05])
def test_a_jump_of_the_gradients_scale_brings_a_new_threshold(factor):
    """k is 20 of `head`: the step after one that sent over 80, or under 5, has exactly 20 again."""
    variables, counts = make_variables({"head": (2000,)}), []
    compression = Compression.dct(list(variables.values()), density=0.01, lifespan=1000, min_numel=100)
    reduce = Reducer(variables, compression, op=hvd.Sum)
    for t in range(30):
        scale = factor if t >= 15 and hvd.rank() == hvd.size() - 1 else 1.0
        reduce({"head": draw(SHAPES, t, hvd.rank())["head"] * scale})
        counts.append(round(compression.stats()["step"]["density"] * 2000))
    for before, after in itertools.pairwise(counts):
        assert 5 <= before <= 80 or after == 20, counts
    if hvd.rank() == hvd.size() - 1 and factor > 1.0:
        assert counts[15] > 1000 and counts[16] == 20


def test_a_turn_in_a_drained_step_is_made_up_for():
    """Turns fall into drained steps, one in four: no threshold is used for much longer than its 8 steps."""
    reduce = make("dct", lifespan=8, drain=4, band=None)
    last, ages = {}, []
    for t in range(80):
        reduce(draw(SHAPES, t, hvd.rank()))
        thresholds = reduce.compression.state_dict()["thresholds"]
        for name in ("weight", "head"):
            (value, _), (before, age) = thresholds[name], last.get(name, (0.0, 0))
            last[name] = value, age + 1 if value == before else 1
        ages.append(max(age for _, age in last.values()))
    assert 8 <= max(ages) <= 11, ages


@pytest.mark.parametrize("kind", ["dense", "absent", "all absent"])
def test_a_turn_in_a_step_that_does_not_use_the_threshold_is_made_up_for(kind):
    """No threshold is used for much longer than its 8 steps, though each variable has its turns in such steps."""
    shapes, ages = {"one": (2000,), "other": (1500,), "small": (20,)}, Ages()
    density = Alternating() if kind == "dense" else 0.01
    variables = make_variables(shapes)
    compression = Compression.dct(list(variables.values()), density, lifespan=8, band=None, min_numel=100)
    reduce = Reducer(variables, compression, op=hvd.Sum)
    for t in range(80):
        gradients = draw(shapes, t, hvd.rank())
        if kind == "absent":
            del gradients["one" if t % 2 else "other"]
        if kind == "all absent" and t % 2:
            gradients = {"small": gradients["small"]}
        reduce(gradients)
        thresholds = compression.state_dict()["thresholds"]
        for name in ("one", "other"):
            ages.note(name, float(thresholds[name][0]))
    assert 6 <= ages.oldest <= 10


def few(t):
    """Return gradients of which 4 elements are nonzero."""
    return {"head": np.where(np.arange(2000) < 4, draw({"head": (2000,)}, t, hvd.rank())["head"], 0).astype(np.float32)}


def test_a_threshold_is_kept_where_fewer_than_k_residuals_are_nonzero():
    variables = make_variables({"head": (2000,)})
    settings = {"density": 0.01, "lifespan": 1000, "min_numel": 100}
    compression = Compression.dct(list(variables.values()), **settings)
    reduce = Reducer(variables, compression, op=hvd.Sum)
    for t in range(10):
        reduce(few(t))
        assert round(compression.stats()["step"]["density"] * 2000) == 4
        (numbers,) = compression.state_dict()["thresholds"].values()
        assert numbers.tolist() == [2.0**-149, 20.0]


def test_the_scaled_threshold_has_a_lowest_value():
    reduce = make("micro, scaling")
    reduce({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
    state = reduce.compression.state_dict()
    ((name, numbers),) = state["thresholds"].items()
    state["thresholds"] = {name: np.array([1e-321, numbers[1]])}
    reduce.compression.load_state_dict(state)
    for t in range(2):
        reduce(draw(SHAPES, t, hvd.rank()))
        ((_, numbers),) = reduce.compression.state_dict()["thresholds"].items()
        assert numbers[0] == 2.0**-149 * 1.005**t
