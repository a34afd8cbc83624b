"""Sums of squares for clipping and for statistics: NumPy's float64 sum is the oracle, in both frameworks."""

import numpy as np
import pytest
import tensorflow as tf
import torch

from hvd_sparse.tensorflow import norm as tensorflow_norm
from hvd_sparse.torch import norm as torch_norm

SPAN = torch_norm.SPAN


def sums(values, dtype="float32"):
    """Return PyTorch's, TensorFlow's and TensorFlow's sum in a graph that does not know the size."""
    graph = tf.function(tensorflow_norm.sum_of_squares, input_signature=[tf.TensorSpec(None, tf.as_dtype(dtype))])
    tensor = tf.cast(values, dtype)
    return (
        torch_norm.sum_of_squares(torch.from_numpy(values).to(getattr(torch, dtype))),
        float(tensorflow_norm.sum_of_squares(tensor)),
        float(graph(tensor)),
    )


def test_both_frameworks_take_equal_spans():
    assert tensorflow_norm.SPAN == SPAN


@pytest.mark.parametrize("n", [0, 1, 1000, SPAN - 1, SPAN, SPAN + 1, 3 * SPAN + 17])
def test_every_element_counts_once(n):
    values = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    expected = np.sum(values.astype(np.float64) ** 2)
    np.testing.assert_allclose(sums(values), expected, rtol=1e-11)


def test_shapes_do_not_matter():
    values = np.random.default_rng(0).standard_normal((3, 5, SPAN // 7)).astype(np.float32)
    np.testing.assert_allclose(sums(values), np.sum(values.astype(np.float64) ** 2), rtol=1e-11)
    crossed = torch.from_numpy(values).permute(2, 0, 1)
    assert torch_norm.sum_of_squares(crossed) == pytest.approx(np.sum(values.astype(np.float64) ** 2), rel=1e-11)


@pytest.mark.parametrize("n", [5, 2 * SPAN + 5])
def test_elements_that_are_not_finite_count_as_zero(n):
    values = np.ones(n, np.float32)
    values[[0, n // 2, n - 1]] = np.nan, np.inf, -np.inf
    assert sums(values) == pytest.approx([n - 3] * 3)


@pytest.mark.parametrize("magnitude", [1e30, 1e-30])
def test_squares_outside_the_range_of_float32(magnitude):
    values = np.full(SPAN + 3, magnitude, np.float32)
    expected = (SPAN + 3) * np.float64(np.float32(magnitude)) ** 2
    np.testing.assert_allclose(sums(values), expected, rtol=1e-11)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_types_count_as_float32(dtype):
    values = np.random.default_rng(1).standard_normal(SPAN + 9).astype(np.float32)
    as_sent = torch.from_numpy(values).to(getattr(torch, dtype)).float().numpy()
    np.testing.assert_allclose(sums(values, dtype), np.sum(as_sent.astype(np.float64) ** 2), rtol=1e-11)


def test_a_sum_of_many_is_exact_where_a_sum_in_float32_is_not():
    values = torch.ones(1 << 25)
    values[0] = 4096.0  # 2 ** 24, above which float32 loses single ones
    assert torch_norm.sum_of_squares(values) == pytest.approx(2**25 - 1 + 2**24, rel=1e-12)
