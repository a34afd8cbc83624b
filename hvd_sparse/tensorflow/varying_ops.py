"""Typed calls into the native operators whose numbers of entries vary from step to step.

What they share with `ops` (types, errors, numbers) is said there.
"""

from collections.abc import Sequence

import tensorflow as tf

from hvd_sparse.buckets import of_each
from hvd_sparse.tensorflow.ops import Integer, Real, _integer, _number, _ops, _seed


def locate_payloads(
    gathered: tf.Tensor,
    ns: list[int],
    ranks: Integer,
    coding: str = "run_length",
    value_dtype: str = "float32",
    channels: Sequence[int] = (),
) -> tf.Tensor:
    """Find payloads whose numbers of entries differ between ranks. Checks only the fields that it reads.

    Args:
        gathered: uint8[bytes]: for each rank, one payload for each size in `ns`.
        ns: Elements of each tensor; at least one tensor.
        ranks: Number of ranks, from 1 to 2^23.
        coding: As in `ops.pack`.
        value_dtype: As in `ops.quantize`.
        channels: For low-bit values, the number of groups of each tensor; empty for other values, or for one group.

    Returns:
        int64[2, ranks, len(ns)]: byte offset and k of each payload. k is its number of entries, at least 1.

    Raises:
        tf.errors.InvalidArgumentError: A number is out of range, a name is unknown, or a payload is damaged: the
            message names the rank of the first one.
    """
    form = {"ns": ns, "coding": coding, "value_dtype": value_dtype, "channels": list(channels)}
    return _ops.hvd_sparse_locate_payloads(gathered, _integer(ranks), **form)


def filter_bucket(
    gradients: Sequence[tf.Tensor],
    residuals: Sequence[tf.Variable],
    velocities: Sequence[tf.Variable] = (),
    parameters: Sequence[tf.Tensor] = (),
    *,
    factors: tf.Tensor,
    thresholds: tf.Tensor,
    ks: tf.Tensor,
    is_active: bool | tf.Tensor = True,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float | Sequence[float] = 0.0,
    coding: str = "run_length",
    value_dtype: str = "float32",
    level: str = "mean",
    channels: Sequence[int] = (),
    stages: tf.Tensor | None = None,
    distribution: str = "exponential",
    seed: int | tf.Tensor = 0,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Do `accumulate`, a selection by thresholds, `quantize` and `pack` for the variables of a bucket.

    Args:
        gradients, residuals, velocities, parameters: As in `ops.accumulate`, one for each member; velocities and
            parameters may be empty. The parameter of a member whose weight_decay is 0 is not read.
        factors: float32[members], the factor of each gradient.
        thresholds: float64[members], at least 0.
        ks: int64[members]. 0: the residuals that reach the threshold are selected. If k > 0, the threshold is that of
            the k largest accumulated residuals, and at least the smallest positive float32; `thresholds` is then a
            guess that only changes the cost, 0.0 for none.
        is_active: If false, no gradient is accumulated.
        momentum, nesterov: As in `ops.accumulate`.
        weight_decay: A number, or one for each member.
        coding: As in `ops.pack`.
        value_dtype, level: As in `ops.quantize`.
        channels: As in `locate_payloads`.
        stages: int64[members]; None: zeros. If above 0, a threshold that about k residuals reach is fitted in this
            number of stages; `thresholds` has a guess at it (SIDCo, section 2; without momentum and weight decay).
        distribution: Of the first stage: "exponential", "gamma" or "pareto".
        seed: Of the sample that is fitted.

    Returns:
        The concatenated payloads, uint8[bytes]; bool[members]: was each gradient finite everywhere? And
        float64[members, 2]: threshold and number of entries. A payload's k is its entries, at least 1.

    Raises:
        tf.errors.InvalidArgumentError: A list has another length, a tensor another type or size, a number is out of
            range, a name is unknown, a variable is given twice, or weight decay lacks the parameters. Then no buffer
            has changed.
    """
    lists = (list(gradients), *([one.handle for one in buffers] for buffers in (residuals, velocities)))
    stages = tf.zeros([len(gradients)], tf.int64) if stages is None else stages
    numbers = (factors, is_active, thresholds, ks, stages, _seed(seed))
    rule = {"momentum": momentum, "nesterov": nesterov, "weight_decays": of_each(weight_decay, gradients)}
    form = {"coding": coding, "value_dtype": value_dtype, "channels": list(channels), "level": level}
    form["distribution"] = distribution
    return tuple(_ops.hvd_sparse_filter_bucket(*lists, list(parameters), *numbers, **rule, **form))


def accumulate_partition(
    gradients: Sequence[tf.Tensor],
    residuals: Sequence[tf.Variable],
    *,
    factors: tf.Tensor,
    begin: Integer,
    end: Integer,
    threshold: Real,
    share: Real = -1.0,
    sample: Integer = 0,
    seed: Integer = 0,
    is_active: bool | tf.Tensor = True,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Do `accumulate` for variables that form one vector, and select from elements [begin, end) (MiCRO, Algorithm 1).

    Args:
        gradients, residuals: As in `ops.accumulate`, one for each member, one after the other in the vector.
        factors: float32[members], the factor of each gradient.
        begin, end: The partition: elements [begin, end) of the vector.
        threshold: Elements that reach it are selected; at least 0, infinity if unknown.
        share: The expected number of these. If none, fewer than 0.92 share - 4 or more than 1.08 share + 4 reach the
            threshold, the `share` largest are selected instead, without zeros; for a fraction, one now and then. Below
            0: the selection is never corrected.
        sample: The number of elements of the partition in the histogram, in runs of 16; at least one run.
        seed: Of the sample, of a fraction of the share, and of the order of equal magnitudes.
        is_active: If false, nothing is accumulated or selected.

    Returns:
        Ascending indices into the vector, int64[m]; a sketch, float32[65], of a histogram with bins of 1/16 octave (the
        number of its first bin, the counts of that bin and the next ones, the last one with all elements above; zeros
        if share is below 0); bool[members]: was each gradient finite everywhere?

    Raises:
        tf.errors.InvalidArgumentError: A list has another length, a tensor another type or size, a number is out of
            range, or a variable is given twice.
    """
    numbers = (*map(_integer, (begin, end)), *(_number(one, tf.float64) for one in (threshold, share)))
    lists = (list(gradients), [one.handle for one in residuals])
    numbers += (_integer(sample), _seed(seed))
    return tuple(_ops.hvd_sparse_accumulate_partition(*lists, [], [], factors, is_active, *numbers))


def reduce_located_bucket(
    gathered: tf.Tensor,
    ns: Sequence[int],
    ranks: Integer,
    scale: Real = 1.0,
    coding: str = "run_length",
    value_dtype: str = "float32",
    channels: Sequence[int] = (),
) -> list[tf.Tensor]:
    """Do `locate_payloads`, then sum the payloads of each variable of a bucket.

    Args:
        gathered, ns, ranks, coding, value_dtype, channels: As in `locate_payloads`.
        scale: Of the sums.

    Returns:
        float32[n] for each member.

    Raises:
        tf.errors.InvalidArgumentError: As in `locate_payloads`; or a payload is damaged, in any field.
    """
    form = {"M": len(ns), "ns": list(ns), "coding": coding, "value_dtype": value_dtype, "channels": list(channels)}
    numbers = (_integer(ranks), _number(scale, tf.float32))
    return _ops.hvd_sparse_reduce_located_bucket(gathered, *numbers, **form)
