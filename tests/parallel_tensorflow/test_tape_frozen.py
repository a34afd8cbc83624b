"""Variables without a gradient: frozen integers are ignored, others take no part in a step that has no gradient."""

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import pytest
import tensorflow as tf
import tiers
from gradients import draw, whole_numbers
from tf_helpers import Reducer, as_gradients, assert_ranks_agree, loss_with, make_variables, several, total

from hvd_sparse.tensorflow import Compression

SHAPES = {"a": (1000,), "b": (60, 50)}
SCATTER = {"exchange": "reduce_scatter", "dense_fallback": None}
HOSTS = {"exchange": "hierarchical", "dense_fallback": None}
CASES = {
    "reduce_scatter": ("gradient_dropping", SCATTER),
    "reduce_scatter, joint": ("gradient_dropping", {"scope": "model", **SCATTER}),
    "reduce_scatter, completed": ("dgc", {"momentum": 0.0, "complete": True, **SCATTER}),
    "hierarchical": ("gradient_dropping", {"ranks_per_host": 2 if hvd.size() % 2 == 0 else 1, **HOSTS}),
    "hierarchical, joint": ("dgc", {"momentum": 0.0, "scope": "model", "ranks_per_host": 1, **HOSTS}),
    "dct": ("dct", {"lifespan": 3}),
    "sidco": ("sidco", {}),
    "micro": ("micro", {}),
    "cltk": ("cltk", {}),
    "random_k": ("random_k", {}),
}
QUICK = ("reduce_scatter, completed", "hierarchical", "dct", "micro")


def test_frozen_integers_are_left_out():
    variables = [tf.Variable(tf.zeros([5])), tf.Variable([1, 2], trainable=False), tf.Variable(True, trainable=False)]
    compression = Compression.gradient_dropping(variables, density=0.01)
    assert list(compression.state_dict()["memory"]) == [variables[0].name.removesuffix(":0")]


@several
def test_what_has_no_gradient_does_not_count():
    """A step without `b` sends k of the 1000 elements of `a`, and the residual of `b` stays; the next step has both."""
    variables = make_variables(SHAPES)
    compression = Compression.topk(list(variables.values()), density=0.01, min_numel=100)
    reduce = Reducer(variables, compression, op=hvd.Sum)
    for t, (names, k) in enumerate([("ab", 40), ("a", 10), ("ab", 40)]):
        before = compression.feedback["b"].residual.numpy()
        reduced = reduce({name: draw(SHAPES, t, hvd.rank())[name] for name in names})
        sent = compression.stats()["step"]["density"] * sum(np.prod(SHAPES[name]) for name in names)
        assert round(sent) == k
        assert all(np.isfinite(one).all() for one in reduced.values())
        if "b" not in names:
            np.testing.assert_array_equal(before, compression.feedback["b"].residual.numpy())


def reduce_eagerly(variables, compression, gradients):
    """Return {name: sum} of these gradients, from a tape that is asked for all variables: the others' are None."""
    with tf.GradientTape() as tape:
        loss = loss_with(variables, as_gradients(variables, gradients))
    tape = hvd.DistributedGradientTape(tape, compression=compression, op=hvd.Sum)
    found = dict(zip(variables, tape.gradient(loss, list(variables.values())), strict=True))
    assert {name for name, gradient in found.items() if gradient is None} == set(variables) - set(gradients)
    return {name: found[name].numpy().astype(np.float64) for name in gradients}


@several
@pytest.mark.parametrize("case", tiers.choice(CASES, *QUICK))
@pytest.mark.parametrize(
    "graph", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["None", "other trace"]
)
def test_nothing_is_lost_where_gradients_are_missing(graph, case):
    """In steps of both variables, the first, both, the second; what has no gradient keeps its error feedback."""
    variables = make_variables(SHAPES)
    method, settings = CASES[case]
    compression = getattr(Compression, method)(list(variables.values()), density=0.05, min_numel=100, **settings)
    traced = Reducer(variables, compression, op=hvd.Sum)
    fed, out = ({name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))
    for t, names in enumerate(["ab", "a", "ab", "b", "ab"]):
        before = compression.state_dict()["memory"]
        gradients = {name: whole_numbers(SHAPES, t, hvd.rank())[name] for name in names}
        reduced = traced(gradients) if graph else reduce_eagerly(variables, compression, gradients)
        assert_ranks_agree(reduced)
        for name in names:
            fed[name] += total(gradients[name])
            out[name] += reduced[name]
        for name in set(SHAPES) - set(names):
            after = compression.state_dict()["memory"][name]
            assert before[name]["residual"].any()
            for kind, kept in before[name].items():
                np.testing.assert_array_equal(after[kind], kept, err_msg=f"{t} {name}.{kind}")
    left = compression.state_dict(summed=True)["memory"]
    for name, shape in SHAPES.items():
        assert out[name].any()
        np.testing.assert_array_equal(out[name] + left[name]["residual"].reshape(shape), fed[name], err_msg=name)


@several
@pytest.mark.filterwarnings("ignore:hvd_sparse. this call reduces 2 of")
def test_a_new_keras_optimizer_tells_equal_layers_apart():
    """Three equal layers, of which another one is frozen in the second phase, with one compressor."""
    model = tf.keras.Sequential([tf.keras.Input([8]), *(tf.keras.layers.Dense(8, use_bias=False) for _ in range(3))])
    compression = Compression.gradient_dropping(model, density=0.1, min_numel=0)
    inputs, steps = np.random.default_rng(hvd.rank()).normal(size=(8, 8)), 0

    def numbers():
        residuals = [memory["residual"] for memory in compression.state_dict()["memory"].values()]
        return [weights.ravel() for weights in model.get_weights()], residuals

    for trained in ((0, 1), (1, 2)):
        for place, layer in enumerate(model.layers):
            layer.trainable = place in trained
        optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), compression=compression)
        model.compile(optimizer, "mse")
        for _ in range(2):
            before = numbers()
            model.train_on_batch(inputs, inputs[:, ::-1])
            for old, new in zip(before, numbers(), strict=True):  # weights, then residuals
                assert {place for place in range(3) if (new[place] != old[place]).any()} == set(trained)
            steps += 1
    assert compression.stats()["steps"] == steps
