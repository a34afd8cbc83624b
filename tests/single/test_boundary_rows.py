"""The default row of a boundary is a whole sample, as in the paper (section 2.2), in both frameworks."""

import numpy as np
import pytest
import tensorflow as tf
import torch

from hvd_sparse.tensorflow import model_parallel as in_tensorflow
from hvd_sparse.torch import model_parallel as in_torch

SHAPES = [(4, 7, 7, 24), (3, 24, 7, 7), (2, 5, 16), (6, 40)]  # feature maps in both orders, sequences, features


def masked(shape):
    """Return activations, and where the largest 5 % of each sample are, by sorting; no two are equal."""
    activations = np.random.default_rng(0).permutation(int(np.prod(shape))).reshape(shape).astype(np.float32) + 1.0
    rows = activations.reshape(shape[0], -1)
    kept = int(0.05 * rows.shape[1] + 0.5)
    return activations, (rows >= np.sort(rows, axis=1)[:, -kept:][:, :1]).reshape(shape), kept / rows.shape[1]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_density_is_that_of_a_sample(shape):
    activations, mask, occupancy = masked(shape)
    expected = np.where(mask, activations, 0.0)
    boundary = in_torch.ThresholdBoundary(0.05)
    np.testing.assert_array_equal(boundary(torch.from_numpy(activations)).numpy(), expected)
    assert boundary.stats()["occupancy"] == occupancy
    boundary = in_tensorflow.ThresholdBoundary(0.05)
    np.testing.assert_array_equal(boundary(activations).numpy(), expected)
    assert boundary.stats()["occupancy"] == occupancy


def test_so_it_is_where_sizes_are_unknown_while_tracing():
    activations, mask, _ = masked((4, 7, 7, 24))
    run = tf.function(in_tensorflow.ThresholdBoundary(0.05), input_signature=[tf.TensorSpec([None, None, None, 24])])
    np.testing.assert_array_equal(run(activations).numpy(), np.where(mask, activations, 0.0))
