"""Typed calls into the native operators, on CPU tensors, eagerly or in a tf.function.

Every function has a twin of the same name and arguments in `hvd_sparse.reference`, which specifies it. Bad arguments
and damaged payloads raise tf.errors.InvalidArgumentError; what TensorFlow sees while it traces, such as a wrong rank,
is a ValueError or TypeError there. Values may be float32, float64, float16 or bfloat16 and of any shape: they are read
flattened, in row-major order. Numbers (k, n, offset, seed, ...) may be Python's or scalar tensors, which may change
from step to step inside a tf.function. A seed is any integer that fits 64 bits. `segments`, int64[segments, 2]: what
shares the levels of low-bit values, see `hvd_sparse.wire`; None: all elements.
"""

from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf

from hvd_sparse.library import find_library

_ops = tf.load_op_library(find_library("tensorflow"))

Integer: TypeAlias = int | tf.Tensor
Real: TypeAlias = float | tf.Tensor


def _number(value: Integer | Real, dtype: tf.DType) -> tf.Tensor:
    """A scalar tensor of this type."""
    return tf.cast(value, dtype) if tf.is_tensor(value) else tf.convert_to_tensor(value, dtype)


def _integer(value: Integer) -> tf.Tensor:
    return _number(value, tf.int64)


def _seed(seed: Integer) -> tf.Tensor:
    """A seed as the signed 64-bit integer that operators take."""
    return _integer(seed if tf.is_tensor(seed) else (int(seed) + 2**63) % 2**64 - 2**63)


def accumulate(
    gradient: tf.Tensor,
    residual: tf.Variable,
    velocity: tf.Variable | None = None,
    parameter: tf.Tensor | None = None,
    *,
    factor: Real = 1.0,
    is_active: bool | tf.Tensor = True,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> tf.Tensor:
    """Bring a gradient of n elements into `residual` and `velocity`, variables float32[n], in place, in one pass.

    g is the gradient in float32, what is not finite as zero, times factor, plus weight_decay * parameter (float32[n]);
    where that overflows, zero too, and the gradient counts as not finite. No velocity: residual += g. Else velocity =
    momentum * velocity + g and residual += velocity; with nesterov velocity = momentum * (velocity + g) and residual +=
    velocity, then g. Where that overflows, both stay as they are, and the gradient counts as not finite. Every product
    and sum is rounded. Returns, as a bool scalar, whether the gradient was finite everywhere. is_active=False: that
    alone, the memory stays.
    """
    velocities = [] if velocity is None else [velocity.handle]
    parameters = [] if parameter is None else [parameter]
    inputs = (gradient, _number(factor, tf.float32), residual.handle, velocities, parameters, is_active)
    rule = {"momentum": momentum, "nesterov": nesterov, "weight_decays": [weight_decay]}
    return _ops.hvd_sparse_accumulate(*inputs, **rule)


def select_top_k(
    values: tf.Tensor, k: Integer, seed: Integer = 0, threshold_hint: Real = 0.0
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Select exactly the k elements of largest magnitude.

    Ties are broken by a seeded hash of the index. The hint, a guess at the threshold, changes the cost but never the
    result. Returns ascending indices int64[k], values[k], and float64[2]: the smallest selected magnitude, and how
    many elements were found to reach the hint (exact up to 2k; fewer than k: the data had to be read again).
    """
    return tuple(_ops.hvd_sparse_select_top_k(values, _integer(k), _seed(seed), _number(threshold_hint, tf.float64)))


def filter_threshold(values: tf.Tensor, threshold: Real) -> tuple[tf.Tensor, tf.Tensor]:
    """Select every element whose magnitude is at least `threshold`: ascending indices int64[m], values[m]."""
    return tuple(_ops.hvd_sparse_filter_threshold(values, _number(threshold, tf.float64)))


def all_finite(values: tf.Tensor) -> tf.Tensor:
    """Return, as a bool scalar tensor, whether every element is a finite float32."""
    return _ops.hvd_sparse_all_finite(values)


def _segments(segments: tf.Tensor | None) -> tf.Tensor:
    """Segments as operators take them."""
    return tf.zeros([0, 2], tf.int64) if segments is None else tf.cast(segments, tf.int64)


def pack(
    indices: tf.Tensor,
    values: tf.Tensor,
    n: Integer,
    k: Integer,
    coding: str = "run_length",
    value_dtype: str = "float32",
    segments: tf.Tensor | None = None,
) -> tf.Tensor:
    """Return the payload, uint8[payload_size], of k entries or of none: indices int64, values float32 (or float64)."""
    form = {"coding": coding, "value_dtype": value_dtype}
    return _ops.hvd_sparse_pack(indices, values, _integer(n), _integer(k), _segments(segments), **form)


def unpack(
    payload: tf.Tensor,
    n: Integer,
    k: Integer,
    coding: str = "run_length",
    value_dtype: str = "float32",
    segments: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Check a payload, uint8[payload_size], and return its indices int64 and values float32 (or float64)."""
    wide = tf.float64 if value_dtype == "float64" else tf.float32
    form = {"coding": coding, "value_dtype": value_dtype, "V": wide}
    return tuple(_ops.hvd_sparse_unpack(payload, _integer(n), _integer(k), _segments(segments), **form))


def reduce_payloads(
    gathered: tf.Tensor,
    offset: Integer,
    n: Integer,
    k: Integer,
    scale: Real = 1.0,
    coding: str = "run_length",
    value_dtype: str = "float32",
    segments: tf.Tensor | None = None,
) -> tf.Tensor:
    """Return, as float32[n], scale times the sum, in rank order, of the payloads at gathered[:, offset:].

    `gathered`: uint8[ranks, bytes]. Every payload is checked before anything is added.
    """
    place = (_integer(offset), _integer(n), _integer(k), _number(scale, tf.float32), _segments(segments))
    return _ops.hvd_sparse_reduce_payloads(gathered, *place, coding=coding, value_dtype=value_dtype)


def locate_payloads(
    gathered: tf.Tensor,
    ns: list[int],
    ranks: Integer,
    coding: str = "run_length",
    value_dtype: str = "float32",
    channels: Sequence[int] = (),
) -> tf.Tensor:
    """Find payloads whose numbers of entries differ between ranks; int64[2, ranks, len(ns)]: byte offsets, and k.

    `gathered`, uint8[bytes]: for each rank, one payload of each of `ns` elements. `channels`: of low-bit values, how
    many groups each has; empty for other values. k: its entries, at least 1.
    """
    form = {"ns": ns, "coding": coding, "value_dtype": value_dtype, "channels": list(channels)}
    return _ops.hvd_sparse_locate_payloads(gathered, _integer(ranks), **form)


def quantize(
    values: tf.Tensor,
    value_dtype: str,
    level: str = "mean",
    indices: tf.Tensor | None = None,
    segments: tf.Tensor | None = None,
) -> tf.Tensor:
    """Return the float32 values that survive the wire as `value_dtype`, in the shape of `values`.

    "int2" and "int1": signs and levels, "mean" or "min", of all values, or with segments, of those of each group.
    """
    indices = tf.zeros([0], tf.int64) if indices is None else indices
    return _ops.hvd_sparse_quantize(values, indices, _segments(segments), value_dtype=value_dtype, level=level)


def token(rank: Integer) -> tf.Tensor:
    """Return float32[2], 1 and rank + 1: what a rank sends in place of a gradient. Runs anew in every step."""
    return _ops.hvd_sparse_token(_integer(rank))


def scatter_update(variable: tf.Variable, indices: tf.Tensor, values: tf.Tensor) -> tf.Operation:
    """Set variable[indices] = values in place: a variable float32[n], indices int64[m], values float32[m].

    Unlike `tf.Variable.scatter_update` it leaves later reads of the whole variable free of copies.
    """
    return _ops.hvd_sparse_scatter_update(variable.handle, indices, values)


def _of_each(weight_decay: float | Sequence[float], members: Sequence) -> list[float]:
    """A weight decay for each member."""
    return [weight_decay] * len(members) if isinstance(weight_decay, int | float) else list(weight_decay)


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
    """Do `accumulate`, `select_top_k`, `quantize` and `pack` for the variables of a bucket, one list entry each.

    One pass over memory if the hints are good. Each has a selection of its own; if joint they share one, laid out one
    after the other. Velocities and parameters are as many as gradients, or none; weight_decay: a number, or one a
    member; the parameter of a member that has 0 is not read; factors float32[members], ks int64[selections],
    threshold_hints float64[selections]; channels: see `locate_payloads`. Returns the payloads, uint8[bytes], one after
    the other, whether each gradient was finite, bool[members], and the float64[selections, 2] of `select_top_k`.
    """
    lists = (list(gradients), *([one.handle for one in buffers] for buffers in (residuals, velocities)))
    numbers = (factors, is_active, ks, _seed(seed), threshold_hints)
    rule = {"momentum": momentum, "nesterov": nesterov, "weight_decays": _of_each(weight_decay, gradients)}
    form = {"coding": coding, "value_dtype": value_dtype, "channels": list(channels), "joint": joint, "level": level}
    return tuple(_ops.hvd_sparse_accumulate_bucket(*lists, list(parameters), *numbers, **rule, **form))


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
    """Do `accumulate`, `filter_threshold`, `quantize` and `pack` for the variables of a bucket, one list entry each.

    factors float32[members], thresholds float64[members], ks int64[members]: where above 0, the threshold is that of
    the k largest residuals, once these are accumulated, and at least the smallest float32 above zero, and what
    thresholds says a guess that only changes the cost, 0.0 for none; where below 0, the -k largest are selected and no
    more, zeros left out. stages, int64[members]: where above 0, a threshold that about k
    residuals reach is fitted in so many, the first to this distribution, by a sample that the seed chooses, and
    thresholds has a guess at it (SIDCo; without momentum and weight decay). Returns the payloads, uint8[bytes], one
    after the other, whether each gradient was finite, bool[members], and float64[members, 3], threshold, entries, and
    of a fit, how many of the sample reached it over how many should. The k of a payload is its entries, but at least 1.
    """
    lists = (list(gradients), *([one.handle for one in buffers] for buffers in (residuals, velocities)))
    stages = tf.zeros([len(gradients)], tf.int64) if stages is None else stages
    numbers = (factors, is_active, thresholds, ks, stages, _seed(seed))
    rule = {"momentum": momentum, "nesterov": nesterov, "weight_decays": _of_each(weight_decay, gradients)}
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
    """Do `accumulate` for variables that are one vector, and select in elements [begin, end) of it.

    What reaches the threshold is selected. share: how many should; if fewer than 0.92 share - 4 do, or more than 1.08
    share + 4, or none, that many of the largest are, but for zeros; of a fraction, one now and then; below 0: as many
    as do. sample: the elements of the partition that are counted, in runs of 16. Returns ascending indices into the
    vector, int64[m]; a sketch, float32[65]: of a histogram whose bins are 1/16 of an octave, the number of a bin, and
    how many elements are in it and the next ones, the last with all above, zeros where share is below 0; and whether
    each gradient was finite, bool[members]. Unless active nothing is accumulated, nor selected.
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
    """Do `locate_payloads`, then sum the payloads of each variable of a bucket, of n elements: float32[n] each."""
    form = {"M": len(ns), "ns": list(ns), "coding": coding, "value_dtype": value_dtype, "channels": list(channels)}
    numbers = (_integer(ranks), _number(scale, tf.float32))
    return _ops.hvd_sparse_reduce_located_bucket(gathered, *numbers, **form)


def clear_bucket(
    message: tf.Tensor,
    ks: tf.Tensor,
    is_void: bool | tf.Tensor,
    residuals: Sequence[tf.Variable],
    velocities: Sequence[tf.Variable] = (),
    coding: str = "run_length",
    value_dtype: str = "float32",
    channels: Sequence[int] = (),
    joint: bool = False,
    retained: float = 0.0,
) -> tf.Operation:
    """Take what a rank's own message, uint8[bytes], says out of the residuals, and set the velocities to zero there.

    Nothing is left of float32 values; of others, what rounding kept back; then `retained` times what was sent is added.
    Nothing is done if void.
    """
    buffers = ([one.handle for one in residuals], [one.handle for one in velocities])
    form = {
        "coding": coding,
        "value_dtype": value_dtype,
        "channels": list(channels),
        "joint": joint,
        "retained": retained,
    }
    return _ops.hvd_sparse_clear_bucket(message, ks, is_void, *buffers, **form)


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
    """Do `reduce_payloads` for the variables of a bucket, of n elements each: float32[n] each.

    `gathered`, uint8[bytes]: the messages of all ranks, one after the other.
    """
    form = {"coding": coding, "value_dtype": value_dtype, "channels": list(channels), "joint": joint}
    form |= {"M": len(ns), "ns": list(ns)}
    numbers = (_integer(ranks), ks, _number(scale, tf.float32))
    return _ops.hvd_sparse_reduce_bucket(gathered, *numbers, **form)


def take_sum(
    total: tf.Tensor, token: tf.Tensor, expected: Real, is_void: bool | tf.Tensor, shape: tf.TensorShape
) -> tf.Tensor:
    """Return a sum, float32[n], in this shape, without a copy; NaN everywhere if void.

    Raises tf.errors.InvalidArgumentError unless token[0], which was 1 before Horovod reduced it, is as `expected`.
    """
    return _ops.hvd_sparse_take_sum(total, token, _number(expected, tf.float32), is_void, shape=shape)
