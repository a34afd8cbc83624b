"""The TensorFlow operators on rows equal the reference, eagerly and in graphs; errors."""

import numpy as np
import pytest
import tensorflow as tf
from drawn import WIDTHS
from drawn_rows import DENSITIES, WIDE_SEEDS, as_array, bars, every_kind, matrices, row_counts
from hypothesis import given
from hypothesis import strategies as st
from test_rows import same
from test_tensorflow_ops import Invalid, from_torch
from tiers import examples

from hvd_sparse import reference
from hvd_sparse.tensorflow import row_ops

pytestmark = pytest.mark.each_value  # the core and its twin are compared elsewhere, pair by pair


def check(values, k, density, thresholds, seed):
    array, tensor = as_array(values), from_torch(values)
    for found, expected in zip(
        row_ops.select_top_k_rows(tensor, k, seed), reference.select_top_k_rows(array, k, seed), strict=True
    ):
        same(found, expected)
    with np.errstate(all="ignore"):
        same(row_ops.laplace_threshold_rows(tensor, density), reference.laplace_threshold_rows(array, density))
    same(row_ops.filter_threshold_rows(tensor, thresholds), reference.filter_threshold_rows(array, thresholds))


@given(st.data(), matrices(), WIDE_SEEDS, DENSITIES)
@examples(200)
def test_rows(data, values, seed, density):
    check(values, data.draw(row_counts(values.shape[1])), density, data.draw(bars(values)), seed)


@pytest.mark.parametrize("shape", [(6, 500), (1, 70_000), (200, 1), (30, 17)])
@pytest.mark.parametrize("dtype", sorted(WIDTHS))
def test_every_kind_of_rows(dtype, shape):
    for _, values in every_kind(shape, dtype):
        for k in {1, -(-shape[1] // 20), shape[1]}:
            check(values, k, 0.05, np.full(shape[0], 0.5), 11)


def test_one_graph_serves_all_sizes_and_numbers():
    traces = []

    @tf.function(input_signature=[tf.TensorSpec([None, None]), tf.TensorSpec([], tf.int64), tf.TensorSpec([])])
    def keep(values, k, density):
        traces.append(0)
        mask, thresholds = row_ops.select_top_k_rows(values, k, k)
        passed = row_ops.filter_threshold_rows(values, row_ops.laplace_threshold_rows(values, density))
        assert mask.shape.rank == passed.shape.rank == 2 and thresholds.shape.rank == 1
        return mask, thresholds, passed

    for rows, columns, k in ((4, 9, 2), (7, 33, 33), (0, 5, 1)):
        values = tf.random.stateless_normal([rows, columns], [1, k])
        mask, thresholds, passed = keep(values, k, 0.25)
        expected = reference.select_top_k_rows(values.numpy(), k, k)
        same(mask, expected[0])
        same(thresholds, expected[1])
        bars_of_rows = reference.laplace_threshold_rows(values.numpy(), 0.25)
        same(passed, reference.filter_threshold_rows(values.numpy(), bars_of_rows))
    assert len(traces) == 1


def test_shapes_are_known_while_tracing():
    @tf.function
    def trace(values):
        mask, thresholds = row_ops.select_top_k_rows(values, 2)
        assert mask.shape == [4, 9] and thresholds.shape == [4]
        assert row_ops.laplace_threshold_rows(values, 0.5).shape == [4]
        assert row_ops.filter_threshold_rows(values, thresholds).shape == [4, 9]
        return mask

    trace(tf.zeros([4, 9]))


def test_gradients_pass_where_the_mask_keeps():
    values = tf.Variable(tf.random.stateless_normal([5, 20], [3, 4]))
    with tf.GradientTape() as tape:
        mask, thresholds = row_ops.select_top_k_rows(values, 3)
        kept = tf.where(mask, values, 0.0)
        loss = tf.reduce_sum(kept) + 0.0 * tf.cast(tf.reduce_sum(thresholds), tf.float32)
    same(tape.gradient(loss, values), tf.cast(mask, tf.float32))


def test_what_is_refused():
    values = tf.zeros([2, 3])
    refused = {
        "k must be between 1 and the number of columns, 3; got 4": lambda: row_ops.select_top_k_rows(values, 4),
        "number of columns, 3; got 0": lambda: row_ops.select_top_k_rows(values, 0),
        r"at least one column, got shape \[4,0\]": lambda: row_ops.select_top_k_rows(tf.zeros([4, 0]), 1),
        r"at least one column, got shape \[4\]": lambda: row_ops.select_top_k_rows(tf.zeros([4]), 1),
        r"density must be in \(0, 1\], got 1.5": lambda: row_ops.laplace_threshold_rows(values, 1.5),
        "thresholds must have 1 or 2 elements, got 3": lambda: row_ops.filter_threshold_rows(values, np.ones(3)),
        "thresholds must be at least 0, got -1": lambda: row_ops.filter_threshold_rows(values, [-1.0]),
        "thresholds must be at least 0, got nan": lambda: row_ops.filter_threshold_rows(values, [np.nan]),
    }
    for message, call in refused.items():
        with pytest.raises(Invalid, match=message):
            call()
