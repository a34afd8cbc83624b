"""Typed calls into the native operators on rows of a matrix, eagerly or in a tf.function.

Every function has a twin of the same name and arguments in `hvd_sparse.reference`, which specifies it. Bad arguments
raise tf.errors.InvalidArgumentError; what TensorFlow sees while it traces, such as a wrong rank, is a ValueError there.
Values are a matrix [B, f] of float32, float64, float16 or bfloat16; numbers may be Python's or scalar tensors. A mask
has no gradient: it is for tf.where.
"""

import tensorflow as tf

from hvd_sparse.tensorflow.ops import Integer, Real, _integer, _number, _ops, _seed


def select_top_k_rows(values: tf.Tensor, k: Integer, seed: Integer = 0) -> tuple[tf.Tensor, tf.Tensor]:
    """Mask the k entries of largest magnitude of each row, exactly k in every row.

    NaN come first, by lower column; equal magnitudes are cut by a seeded hash of the column; zeros come last, by lower
    column. (Dynamic Communication Thresholding, Algorithm 2; the cut of ties is ours.)

    Args:
        values: A matrix [B, f] of float32, float64, float16 or bfloat16.
        k: Number of entries of each row, in [1, f].
        seed: Of the hash that breaks ties.

    Returns:
        The mask, bool[B, f]; and thresholds, float64[B]: the magnitude of the k-th entry, NaN if that is NaN.

    Raises:
        tf.errors.InvalidArgumentError: k is out of range, or values are no such matrix.
    """
    return tuple(_ops.hvd_sparse_select_top_k_rows(values, _integer(k), _seed(seed)))


def laplace_threshold_rows(values: tf.Tensor, density: Real) -> tf.Tensor:
    """Return for each row the magnitude that a part `density` of a Laplace distribution reaches.

    That is the row's mean magnitude, in which NaN and infinities count as zero, times -ln(density). (Dynamic
    Communication Thresholding, section 2.2.)

    Args:
        values: A matrix [B, f] of float32, float64, float16 or bfloat16.
        density: In (0, 1].

    Returns:
        float64[B].

    Raises:
        tf.errors.InvalidArgumentError: The density is out of range, or values are no such matrix.
    """
    return _ops.hvd_sparse_laplace_threshold_rows(values, _number(density, tf.float64))


def filter_threshold_rows(values: tf.Tensor, thresholds: tf.Tensor) -> tf.Tensor:
    """Mask NaN and nonzero elements that reach their row's threshold (as float64).

    Args:
        values: A matrix [B, f] of float32, float64, float16 or bfloat16.
        thresholds: float64[B], or [1] for all rows; at least 0. On a GPU, a wrong threshold raises no error: a
            negative one counts as 0, and NaN as infinity.

    Returns:
        The mask, bool[B, f].

    Raises:
        tf.errors.InvalidArgumentError: A threshold is negative or NaN, their number differs, or values are no such
            matrix.
    """
    return _ops.hvd_sparse_filter_threshold_rows(values, thresholds)
