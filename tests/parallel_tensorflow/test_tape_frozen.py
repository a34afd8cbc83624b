"""Frozen variables: integer ones are ignored, others take no part in a selection while they are frozen."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from gradients import draw
from tf_helpers import Reducer, make_variables, several

from hvd_sparse.tensorflow import Compression

SHAPES = {"a": (1000,), "b": (3000,)}


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
        sent = compression.stats()["step"]["density"] * sum(SHAPES[name][0] for name in names)
        assert round(sent) == k
        assert all(np.isfinite(one).all() for one in reduced.values())
        if "b" not in names:
            np.testing.assert_array_equal(before, compression.feedback["b"].residual.numpy())
