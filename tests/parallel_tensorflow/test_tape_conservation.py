"""Nothing is lost: sum of gradients = sum of results + residuals, exactly, on whole numbers."""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
import tiers
from gradients import SCOPES, SHAPES, whole_numbers
from tf_helpers import Reducer, assert_ranks_agree, make_variables, reduce_through_tape, residual_of, total

from hvd_sparse.schedule import Schedule
from hvd_sparse.tensorflow import Compression

pytestmark = pytest.mark.skipif(hvd.size() == 1, reason="Horovod compresses nothing with one process")


class NowAndThenDense(Schedule):
    """Sends everything dense in every third step."""

    def density(self, step):
        return 1.0 if step % 3 == 2 else 0.05

    def describe(self):
        return "now and then dense"


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("density", [0.02, 0.3, "warm-up", "now and then dense"])
def test_sum_in_is_sum_out(density, scope, graph):
    settings = {"density": density}
    if density == "warm-up":
        settings = {"density": 0.01, "warmup": 10}
    elif density == "now and then dense":
        settings = {"density": NowAndThenDense()}
    variables = make_variables()
    compression = Compression.gradient_dropping(list(variables.values()), scope=scope, min_numel=50, **settings)
    reduce = Reducer(variables, compression, graph, op=hvd.Sum)
    fed = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    out = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(16):
        for rank in range(hvd.size()):
            for name, gradient in whole_numbers(SHAPES, step, rank).items():
                fed[name] += gradient
        reduced = reduce(whole_numbers(SHAPES, step, hvd.rank()))
        assert_ranks_agree(reduced)
        for name in SHAPES:
            out[name] += reduced[name]
    for name in SHAPES:
        left = total(residual_of(compression, name)).reshape(SHAPES[name])
        np.testing.assert_array_equal(out[name] + left, fed[name], err_msg=name)
    sent = compression.stats()
    assert sent["steps"] == 16
    assert 0 < sent["total"]["density"] < 1


@pytest.mark.parametrize("scope", SCOPES)
def test_what_rounding_keeps_back_is_not_lost(scope):
    """bfloat16 has 8 bits: most of these whole numbers do not survive the wire, and nothing else is held back."""
    variables = make_variables()
    settings = {"density": 0.9999, "min_numel": 50, "values": "bfloat16", "scope": scope, "dense_fallback": None}
    compression = Compression.gradient_dropping(list(variables.values()), **settings)
    reduce = Reducer(variables, compression, op=hvd.Sum)
    fed, out = np.zeros(500), np.zeros(500)
    for step in range(8):
        reduced = reduce(whole_numbers(SHAPES, step, hvd.rank(), most=5000))
        assert_ranks_agree(reduced)
        fed += sum(whole_numbers(SHAPES, step, rank, most=5000)["head.weight"] for rank in range(hvd.size()))
        out += reduced["head.weight"]
    left = total(residual_of(compression, "head.weight"))
    np.testing.assert_array_equal(out + left, fed)
    assert np.count_nonzero(left) > 250


@pytest.mark.parametrize("scope", SCOPES)
def test_in_a_graph_of_tensorflow_1(scope):
    """The graph does not order operations: a sparse step and a dense one must not undo each other."""
    v1 = tf.compat.v1
    fed = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    out = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    with tf.Graph().as_default(), v1.Session() as session:
        variables = make_variables()
        own = {name: v1.placeholder(tf.float32, shape) for name, shape in SHAPES.items()}
        settings = {"density": NowAndThenDense(), "min_numel": 50, "scope": scope}
        compression = Compression.gradient_dropping(list(variables.values()), **settings)
        reduced = reduce_through_tape(variables, own, compression, op=hvd.Sum)
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        for step in range(16):
            drawn = [whole_numbers(SHAPES, step, rank) for rank in range(hvd.size())]
            found = session.run(reduced, {own[name]: drawn[hvd.rank()][name] for name in SHAPES})
            for name in SHAPES:
                fed[name] += sum(one[name] for one in drawn)
                out[name] += found[name]
        memory = compression.state_dict(summed=True, session=session)["memory"]
    for name in SHAPES:
        left = memory[name].get("residual", np.zeros(fed[name].size)).reshape(SHAPES[name])
        np.testing.assert_array_equal(out[name] + left, fed[name], err_msg=name)
    assert memory["head.weight"]["residual"].any()


METHODS = {
    "dct": {},
    "sidco": {},
    "micro": {},
    "hard_threshold": {"density": None, "value": 3.0},
    "dgc": {"momentum": 0.9, "clip_norm": 1.0, "warmup": 3},
}


@pytest.mark.parametrize("method", tiers.choice(METHODS, "sidco", "micro", "dgc"))
def test_numbers_of_its_own_are_finite(method):
    """So that a search for NaN with TensorFlow's check of all operations finds those of the user only."""
    settings = {"density": 0.05, **METHODS[method]}
    settings = {name: value for name, value in settings.items() if value is not None}
    tf.debugging.enable_check_numerics()
    try:
        variables = make_variables()
        compression = getattr(Compression, method)(list(variables.values()), **settings)
        reduce = Reducer(variables, compression, True)
        for step in range(3):
            gradients = whole_numbers(SHAPES, step, hvd.rank())
            dead = next(iter(gradients))
            reduce({**gradients, dead: np.zeros_like(gradients[dead])})
        assert compression.stats()["steps"] == 3
        if method == "dgc":  # the check works
            with pytest.raises(tf.errors.InvalidArgumentError, match="NaN"):
                reduce({name: np.full_like(gradient, np.nan) for name, gradient in gradients.items()})
    finally:
        tf.debugging.disable_check_numerics()
