"""The presence check: an all-reduce at the start of a step tells whether all ranks take part in it, and in the same.

If one rank is in hvd.join() while the others submit an all-gather, Horovod's background thread on that rank dies, and
the others wait forever. So every other collective of a step waits for this check. It also compares the numbers of the
steps, the loss scales, and the settings and names of the gradients, as a digest: for all of this it needs the sums
over ranks of a few numbers and of their squares.
"""

import tensorflow as tf

from hvd_sparse.announcement import BETWEEN_STEPS, RANKS_APART, STEP_MODULUS
from hvd_sparse.tensorflow.exchange import PRESENCE_NUMBERS, Exchange, digest_numbers

JOINED = "hvd_sparse does not work with hvd.join(): Horovod cannot gather from ranks that joined. Ranks that take part"
STEPS_DIFFER = "hvd_sparse: the ranks are not at the same step; load the state on every rank or on none. Step number"
SCALES_DIFFER = "hvd_sparse: loss_scale must be a number above 0, the same on every rank. Loss scale"
MISPLACED = (
    "hvd_sparse: a checkpoint has restored the error feedback of another rank, of another number of ranks, of another "
    "method, or of variables with other names. Each rank saves and restores its own, of the same method and a model "
    "with the same names, or all load one state_dict(summed=True). Ranks with another's"
)
SETTINGS_DIFFER = (
    "hvd_sparse: the ranks do not agree on model, settings or the gradients that are there. Number in their digest"
)
BETWEEN = f"hvd_sparse: some {RANKS_APART}. Announcements"
SCALES_TOLERANCE = 1e-9  # relative, of squares: a loss scale need not be a whole number
MUST_BE_ZERO = -1.0  # as a tolerance


def check_presence(
    exchange: Exchange, suffix: str, step: tf.Tensor, loss_scale: tf.Tensor, misplaced: tf.Tensor, lines: list[str]
) -> tf.Operation:
    """Compare what must be the same on all ranks; return the check.

    Over N ranks, let S be the sum of x and Q the sum of x^2. All x are equal if and only if S^2 = N * Q
    (Cauchy-Schwarz): exactly for whole numbers, and up to rounding for a loss scale.

    Args:
        exchange: That of the compressor.
        suffix: Distinguishes several calls in one graph.
        step: The number of the step, an int64 scalar.
        loss_scale: A float64 scalar.
        misplaced: 1.0 if this rank has the error feedback of another, else 0.0: a float64 scalar.
        lines: The settings and the names of the gradients.
    """
    digests = digest_numbers(lines)
    messages = [JOINED, STEPS_DIFFER, SCALES_DIFFER, MISPLACED, *[SETTINGS_DIFFER] * len(digests), BETWEEN]
    tolerances = [0.0, 0.0, SCALES_TOLERANCE, MUST_BE_ZERO, *[0.0] * len(digests)]
    is_scale = [message is SCALES_DIFFER for message in messages[:-1]]
    own = tf.stack([1.0, tf.cast(step % STEP_MODULUS, tf.float64), loss_scale, misplaced, *digests])
    sent, ranks = tf.ensure_shape(tf.concat([own, tf.square(own)], 0), [PRESENCE_NUMBERS]), exchange.size()

    sums, squares = tf.split(exchange.allreduce(f"present{suffix}", sent), 2)
    squared = tf.square(sums)
    equal = tf.abs(squared - squares * ranks) <= squared * tf.constant(tolerances, tf.float64)  # false for NaN
    right = equal & ((loss_scale > 0.0) | tf.logical_not(is_scale))
    # Which message: that of the first wrong number, or the last if some rank waits between two steps.
    order = tf.range(len(tolerances), 0, -1)
    first = tf.argmax(tf.where(right, 0, order))
    message = tf.where(sums[0] < BETWEEN_STEPS, first, len(tolerances))
    whole = tf.where(tf.equal(first, 1), tf.cast(step - step % STEP_MODULUS, tf.float64), 0.0)  # of a step number
    own_and_mean = ["on this rank:", tf.gather(own, first) + whole, "mean:", tf.gather(sums, first) / ranks + whole]
    # Not tf.debugging.Assert, which traces a tf.cond around its operation.
    return tf.raw_ops.Assert(condition=tf.reduce_all(right), data=[tf.gather(messages, message), *own_and_mean])
