"""Accumulation in TensorFlow: the operators equal their NumPy twin, eagerly, traced, and in a v1 graph."""

import math

import numpy as np
import pytest
import tensorflow as tf
from test_accumulate import DTYPES, RULES, buffers, draw
from test_ops import same
from test_tensorflow_ops import Invalid, from_torch

from hvd_sparse import reference
from hvd_sparse.tensorflow import bucket_ops, ops

pytestmark = pytest.mark.each_value  # the core and its twin are compared elsewhere, pair by pair


@pytest.fixture(params=RULES)
def rule(request):
    """Every rule in turn."""
    return RULES[request.param]


def memory_of(arrays):
    """Residual and velocity as variables, the parameter as a tensor."""
    *memory, parameter = arrays
    variables = [None if array is None else tf.Variable(array) for array in memory]
    return *variables, None if parameter is None else tf.constant(parameter)


def assert_same_memory(found, expected):
    for variable, array in zip(found[:2], expected[:2], strict=True):
        if array is not None:
            same(variable.read_value(), array)


def accumulate_and_select(gradient, residual, velocity=None, parameter=None, *, k, hint, factor=1.0, **rule):
    """A bucket of one variable: whether the gradient was finite, the message, and float64[2]."""
    lists = [[] if one is None else [one] for one in (velocity, parameter)]
    numbers = {"factors": [factor], "ks": [k], "threshold_hints": tf.convert_to_tensor([hint], tf.float64)}
    message, finite, info = bucket_ops.accumulate_bucket([gradient], [residual], *lists, **numbers, **rule)
    return finite[0], message, info[0]


def calls(function):
    """The function itself, and traced."""
    return function, tf.function(function, autograph=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulate(make, kind, dtype, rule):
    gradient = from_torch(make(kind, 2049, dtype))
    for call in calls(lambda *memory: ops.accumulate(gradient, *memory, **rule)):
        expected = buffers(2049, rule)
        found = memory_of(expected)
        assert bool(call(*found)) is reference.accumulate(gradient.numpy(), *expected, **rule)
        assert_same_memory(found, expected)


@pytest.mark.parametrize("hint", [0.0, 0.5, 0.98, 1.0, 1.01, math.inf])
def test_accumulate_and_select(make, kind, hint, rule):
    gradient, k = from_torch(make(kind, 2049)), 41
    expected = buffers(2049, rule)
    indices, values, threshold, finite = reference.accumulate_top_k(gradient.numpy(), *expected, k=k, seed=3, **rule)
    choice = {"k": k, "seed": 3, "hint": threshold * hint}
    for call in calls(lambda *memory: accumulate_and_select(gradient, *memory, **choice, **rule)):
        found = memory_of(buffers(2049, rule))
        result = call(*found)
        assert bool(result[0]) is finite
        same(result[1], reference.pack(indices, values, 2049, k))
        assert result[2][0] == threshold
        assert_same_memory(found, expected)


def test_inactive_it_only_looks(rule):
    before = buffers(500, rule)
    indices, values, threshold = reference.select_top_k(before[0], 9)
    for bad, gradient in ((False, draw(500, 4)), (True, np.full(500, np.inf, np.float32))):
        for active in (False, tf.constant(False)):
            found = memory_of(before)
            assert bool(ops.accumulate(gradient, *found, is_active=active, **rule)) is not bad
            result = accumulate_and_select(gradient, *found, k=9, hint=0.0, is_active=active, **rule)
            assert bool(result[0]) is not bad
            same(result[1], reference.pack(indices, values, 500, 9))
            assert result[2][0] == threshold
            assert_same_memory(found, before)


def test_numbers_may_be_tensors_and_nothing_is_traced_again():
    residual = tf.Variable(tf.zeros([100]))

    @tf.function(autograph=False)
    def call(gradient, factor, k, hint):
        """Pass all numbers as tensors."""
        return accumulate_and_select(gradient, residual, factor=factor, k=k, hint=hint)

    expected = np.zeros(100, np.float32)
    for step, factor in enumerate((1.0, 0.5, 0.25)):
        gradient = draw(100, step)
        indices, values, *_ = reference.accumulate_top_k(gradient, expected, factor=factor, k=step + 1)
        numbers = (tf.constant(step + 1, tf.int64), tf.constant(0.5 * step, tf.float64))
        message = call(gradient, tf.constant(factor), *numbers)[1]
        same(message, reference.pack(indices, values, 100, step + 1))
        same(residual.read_value(), expected)
    assert call.experimental_get_tracing_count() == 1


def test_a_value_that_was_read_stays_what_it_was():
    residual = tf.Variable(tf.zeros([5]))
    before = residual.read_value()
    ops.accumulate(tf.ones([5]), residual)
    assert not before.numpy().any() and residual.numpy().all()


def test_in_a_graph_of_tensorflow_1():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        residual = tf.compat.v1.get_variable("residual", initializer=tf.zeros([5]), use_resource=True)
        finite = ops.accumulate(tf.constant([1.0, 2.0, math.nan, 4.0, 5.0]), residual)
        session.run(residual.initializer)
        assert [bool(session.run(finite)) for _ in range(2)] == [False, False]
        assert session.run(residual).tolist() == [2.0, 4.0, 0.0, 8.0, 10.0]


def zeros(*shape, dtype=tf.float32):
    return tf.Variable(tf.zeros(shape, dtype))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.accumulate(tf.ones([5]), zeros(4)), "accumulate: residual must have 5 elements.* got 4"),
        (lambda: ops.accumulate(tf.ones([5]), zeros(5), zeros(6)), "accumulate: velocity must have 5"),
        (lambda: ops.accumulate(tf.ones([5]), zeros(5, 1)), "float32 with one dimension"),
        (lambda: ops.accumulate(tf.ones([5]), zeros(5, dtype=tf.float64)), "float32 with one dimension"),
        (lambda: ops.accumulate(tf.ones([5]), zeros(5), weight_decay=0.1), "weight_decay needs the parameter"),
        (lambda: ops.accumulate(tf.ones([5]), zeros(5), None, tf.ones([4]), weight_decay=0.1), "parameter must have 5"),
        (lambda: ops.accumulate(tf.ones([5], tf.int32), zeros(5)), "int32"),
        (lambda: ops.accumulate(tf.ones([5]), zeros(5), factor=tf.ones([2])), "factor must be a scalar"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(Invalid, match=message):
        call()


def stacked_handles():
    return tf.stack([zeros(5).handle] * 2)


def accumulate_raw(residual, velocity):
    ops._ops.hvd_sparse_accumulate(tf.ones([5]), 1.0, residual, velocity, [], True)


def clear_raw(residual, velocity):
    message = tf.zeros([8], tf.uint8)
    ops._ops.hvd_sparse_clear_bucket(message, tf.constant([1], tf.int64), False, [residual], velocity)


@pytest.mark.parametrize(
    ("verb", "call"),
    [
        ("accumulate", lambda: accumulate_raw(stacked_handles(), [])),
        ("accumulate", lambda: accumulate_raw(zeros(5).handle, [stacked_handles()])),
        ("clear_bucket", lambda: clear_raw(stacked_handles(), [])),
        ("clear_bucket", lambda: clear_raw(zeros(5).handle, [stacked_handles()])),
        ("scatter_update", lambda: ops._ops.hvd_sparse_scatter_update(stacked_handles(), np.zeros(1, int), [1.0])),
    ],
)
def test_several_handles_in_place_of_one_are_refused(verb, call):
    with pytest.raises(Invalid, match=rf"hvd_sparse.{verb}: a variable's handle must be a scalar, got shape \[2\]"):
        call()


def test_a_variable_that_is_given_twice_is_refused():
    """It would wait for its own lock, for ever."""
    variable = tf.Variable(tf.zeros([8]))
    with pytest.raises(Invalid, match="a variable is given twice"):
        ops.accumulate(tf.ones([8]), variable, variable, momentum=0.9)
    assert not variable.numpy().any()
