"""Typed calls into the native operators on buckets: the functions of `ops`, for several tensors in one call.

What they share with `ops` (types, errors, numbers) is said there.
"""

from collections.abc import Sequence

import tensorflow as tf

from hvd_sparse.buckets import of_each
from hvd_sparse.tensorflow.ops import Integer, Real, _integer, _number, _ops, _seed


def accumulate_bucket(
    gradients: Sequence[tf.Tensor],
    residuals: Sequence[tf.Variable],
    velocities: Sequence[tf.Variable] = (),
    parameters: Sequence[tf.Tensor] = (),
    *,
    factors: tf.Tensor,
    ks: tf.Tensor,
    threshold_hints: tf.Tensor,
    seed: Integer = 0,
    is_active: bool | tf.Tensor = True,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float | Sequence[float] = 0.0,
    coding: str = "run_length",
    value_dtype: str = "float32",
    level: str = "mean",
    channels: Sequence[int] = (),
    joint: bool = False,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Do `accumulate`, `select_top_k`, `quantize` and `pack` for the variables of a bucket.

    Reads the buffers once if the hints are good.

    Args:
        gradients, residuals, velocities, parameters: As in `ops.accumulate`, one for each member; velocities and
            parameters may be empty. The parameter of a member whose weight_decay is 0 is not read.
        factors: float32[members], the factor of each gradient.
        ks: int64[selections], the number of entries of each selection.
        threshold_hints: float64[selections], as in `ops.select_top_k`.
        seed: As in `ops.select_top_k`.
        is_active: If false, no gradient is accumulated.
        momentum, nesterov: As in `ops.accumulate`.
        weight_decay: A number, or one for each member.
        coding: As in `ops.pack`.
        value_dtype, level: As in `ops.quantize`.
        channels: For low-bit values, the number of groups of each member; empty for other values, or for one group.
        joint: If true, one selection covers the concatenation of all variables; else each has its own.

    Returns:
        The concatenated payloads, uint8[bytes]; bool[members]: was each gradient finite everywhere? And
        float64[selections, 2]: threshold, and the number of elements that reached the hint.

    Raises:
        tf.errors.InvalidArgumentError: A list has another length, a tensor another type or size, a number is out of
            range, a name is unknown, a variable is given twice, or weight decay lacks the parameters. Then no buffer
            has changed.
    """
    lists = (list(gradients), *([one.handle for one in buffers] for buffers in (residuals, velocities)))
    numbers = (factors, is_active, ks, _seed(seed), threshold_hints)
    rule = {"momentum": momentum, "nesterov": nesterov, "weight_decays": of_each(weight_decay, gradients)}
    form = {"coding": coding, "value_dtype": value_dtype, "channels": list(channels), "joint": joint, "level": level}
    return tuple(_ops.hvd_sparse_accumulate_bucket(*lists, list(parameters), *numbers, **rule, **form))


def clear_bucket(
    message: tf.Tensor,
    ks: tf.Tensor,
    is_skipped: bool | tf.Tensor,
    residuals: Sequence[tf.Variable],
    velocities: Sequence[tf.Variable] = (),
    coding: str = "run_length",
    value_dtype: str = "float32",
    channels: Sequence[int] = (),
    joint: bool = False,
    retained: float = 0.0,
) -> tf.Operation:
    """Subtract a rank's own message from the residuals, and set the velocities to zero at its entries.

    The residual is then zero for float32 values, and the rounding error for other types; after this, `retained` times
    the sent value is added.

    Args:
        message: uint8[bytes], the payload of each selection, one after the other.
        ks: int64[selections], the k of each payload.
        is_skipped: If true, no buffer changes.
        residuals, velocities: As in `accumulate_bucket`, changed.
        coding, value_dtype, channels, joint: As in `accumulate_bucket`, equal to those of the call that made the
            message.
        retained: The retained fraction of the sent values.

    Returns:
        The operation in a graph; None eagerly.

    Raises:
        tf.errors.InvalidArgumentError: A list has another length, the message or a variable another size, a number is
            out of range, a name is unknown, a variable is given twice, or a payload is damaged.
    """
    buffers = ([one.handle for one in residuals], [one.handle for one in velocities])
    form = {
        "coding": coding,
        "value_dtype": value_dtype,
        "channels": list(channels),
        "joint": joint,
        "retained": retained,
    }
    return _ops.hvd_sparse_clear_bucket(message, ks, is_skipped, *buffers, **form)


def reduce_bucket(
    gathered: tf.Tensor,
    ns: Sequence[int],
    ranks: Integer,
    ks: tf.Tensor,
    scale: Real = 1.0,
    coding: str = "run_length",
    value_dtype: str = "float32",
    channels: Sequence[int] = (),
    joint: bool = False,
) -> list[tf.Tensor]:
    """Do `reduce_payloads` for the variables of a bucket.

    Args:
        gathered: uint8[bytes]: the messages of all ranks, concatenated in rank order.
        ns: Elements of each member.
        ranks: Number of ranks, from 1 to 2^23.
        ks: int64[selections], the k of each payload.
        scale: Of the sums.
        coding, value_dtype, channels, joint: As in `accumulate_bucket`.

    Returns:
        float32[n] for each member.

    Raises:
        tf.errors.InvalidArgumentError: The messages or a list have another size, a number is out of range, a name is
            unknown, or a payload is damaged: the message names its rank.
    """
    form = {"coding": coding, "value_dtype": value_dtype, "channels": list(channels), "joint": joint}
    form |= {"M": len(ns), "ns": list(ns)}
    numbers = (_integer(ranks), ks, _number(scale, tf.float32))
    return _ops.hvd_sparse_reduce_bucket(gathered, *numbers, **form)
