"""Sums of squares in float64, as squares may overflow float32.

The float64 copies of a whole gradient would take several times its memory, so a span is copied at a time.
"""

import tensorflow as tf

from hvd_sparse.tensorflow.devices import CPU

SPAN = 1 << 18  # elements
GPU_SPAN = 1 << 22  # starting the operations on a smaller one takes longer than the operations


def sum_of_squares(values: tf.Tensor | tf.Variable, device: str = CPU) -> tf.Tensor:
    """Return the sum of squares of all elements in float32, as float64; elements that are not finite count as zero.

    device: where it is computed.
    """
    span = SPAN if device == CPU else GPU_SPAN
    flat = tf.reshape(tf.cast(values, tf.float32), [-1])
    n = flat.shape.num_elements()
    if n is not None and n <= span:
        return _of_span(flat)

    def add(begin: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Add the squares of the span at `begin`; return the next span's start, and the new total."""
        return begin + span, total + _of_span(flat[begin : begin + span])

    size = tf.size(flat, out_type=tf.int64)
    start = tf.zeros([], tf.int64), tf.zeros([], tf.float64)
    return tf.while_loop(lambda begin, _: begin < size, add, start, parallel_iterations=1)[1]


def _of_span(values: tf.Tensor) -> tf.Tensor:
    finite = tf.where(tf.math.is_finite(values), values, tf.zeros_like(values))
    return tf.reduce_sum(tf.square(tf.cast(finite, tf.float64)))
