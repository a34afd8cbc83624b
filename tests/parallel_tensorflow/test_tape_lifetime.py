"""A compressor that is built in the training step, so that each step has another, is refused."""

import numpy as np
import pytest
import tensorflow as tf
from tf_helpers import assert_alive, reduce_through_tape, several

from hvd_sparse.tensorflow import Compression


def make(variable):
    """Return a compressor of one variable."""
    return Compression.gradient_dropping([variable], density=0.05, min_numel=0)


@several
@pytest.mark.parametrize("autograph", [False, True])
def test_built_in_a_function_is_refused(autograph):
    """TensorFlow traces a function again if it has made variables, and permits none then."""
    variable = tf.Variable(tf.zeros([300]))

    @tf.function(autograph=autograph)
    def step():
        return reduce_through_tape({"w": variable}, {"w": tf.ones([300])}, make(variable))

    with pytest.raises(RuntimeError, match=r"build the compressor once, outside the tf\.function"):
        step()
    assert_alive()


@several
def test_built_in_the_first_trace_only_is_not():
    variable, made = tf.Variable(tf.zeros([300])), []

    @tf.function
    def step():
        if not made:
            made.append(make(variable))
        return reduce_through_tape({"w": variable}, {"w": tf.ones([300])}, made[0])["w"]

    assert np.count_nonzero(step().numpy()) == 15
    assert made[0].stats()["steps"] == 1
