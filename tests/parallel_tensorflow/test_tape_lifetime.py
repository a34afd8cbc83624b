"""A compressor that is built in the training step, so that each step has another, is refused or warned of."""

import warnings

import horovod.tensorflow as hvd
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


def warnings_of(steps):
    """Return how many compressors have been built before each warning, given the compressor and variable of steps."""
    told = []
    for number, (compression, variable) in enumerate(steps, 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            reduce_through_tape({"w": variable}, {"w": tf.ones([30])}, compression)
        told += [number for one in caught if "a new compressor is built in each step" in str(one.message)]
    return told


@several
def test_built_in_each_step_of_an_eager_loop_is_warned_of_once():
    variable = tf.Variable(tf.zeros([30]))
    assert warnings_of((make(variable), variable) for _ in range(4)) == ([3] if hvd.rank() == 0 else [])


@several
def test_compressors_that_follow_each_other_are_not():
    """One for each phase, of two steps; several from the start, for tapes; others' variables; a state passed on."""
    variable, others = tf.Variable(tf.zeros([30])), [tf.Variable(tf.zeros([30])) for _ in range(3)]
    assert warnings_of((one, variable) for one in (make(variable) for _ in range(3)) for _ in range(2)) == []
    from_the_start = [make(variable) for _ in range(3)]
    assert warnings_of((one, variable) for one in from_the_start) == []
    assert warnings_of((make(other), other) for other in others) == []

    def passed_on():
        state = None
        for _ in range(3):
            compression = make(others[0])
            if state:
                compression.load_state_dict(state)
            yield compression, others[0]
            state = compression.state_dict()

    assert warnings_of(passed_on()) == []
