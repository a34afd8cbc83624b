"""Typed calls into the native operators, on CPU tensors, eagerly or in a tf.function.

What a function computes is specified by the one of the same name in `hvd_sparse.reference`, in NumPy. Bad arguments
and damaged payloads raise tf.errors.InvalidArgumentError; errors that TensorFlow detects during tracing, such as a
wrong tensor rank, are a ValueError or TypeError there. Values may be float32, float64, float16 or bfloat16 and of any
shape: they are read flattened, in row-major order. Numbers (k, n, offset, seed, ...) may be Python numbers, or scalar
tensors, which may change from step to step inside a tf.function. A seed is any integer that fits 64 bits. `segments`,
int64[segments, 2], lists the groups of elements that share the quantization levels of low-bit values, see
`hvd_sparse.wire`; None: all elements are one group.
"""

from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf

from hvd_sparse.library import find_library

_ops = tf.load_op_library(find_library("tensorflow"))

Integer: TypeAlias = int | tf.Tensor
Real: TypeAlias = float | tf.Tensor


def _number(value: Integer | Real, dtype: tf.DType) -> tf.Tensor:
    """Return a scalar tensor of this type."""
    return tf.cast(value, dtype) if tf.is_tensor(value) else tf.convert_to_tensor(value, dtype)


def _integer(value: Integer) -> tf.Tensor:
    return _number(value, tf.int64)


def _seed(seed: Integer) -> tf.Tensor:
    """Return a seed as the signed 64-bit integer that the operators expect."""
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
    """Accumulate a gradient of n elements in `residual` and `velocity`, variables float32[n], in place, in one pass.

    g is the gradient in float32, with zeros for elements that are not finite, times factor, plus weight_decay *
    parameter (float32[n]). Where g overflows, it is zero too, and the gradient counts as not finite. Without a
    velocity: residual += g. With one: velocity = momentum * velocity + g and residual += velocity; with nesterov,
    velocity = momentum * (velocity + g) and residual += velocity, then += g. A velocity below the smallest
    normal float32 is zero. Where this overflows, both buffers keep their values, and the gradient counts as not finite.
    Every product and sum is rounded. Returns, as a bool scalar,
    whether the gradient was finite everywhere. With is_active=False, the buffers do not change.
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

    A seeded hash of the index breaks ties. The hint, a guess at the threshold, changes the cost but never the result.
    Returns ascending indices int64[k], values[k], and float64[2]: the smallest selected magnitude, and the number of
    elements that reached the hint (exact up to 2k; below k, the data was read a second time).
    """
    return tuple(_ops.hvd_sparse_select_top_k(values, _integer(k), _seed(seed), _number(threshold_hint, tf.float64)))


def filter_threshold(values: tf.Tensor, threshold: Real) -> tuple[tf.Tensor, tf.Tensor]:
    """Select every element whose magnitude is at least `threshold`: ascending indices int64[m], values[m]."""
    return tuple(_ops.hvd_sparse_filter_threshold(values, _number(threshold, tf.float64)))


def all_finite(values: tf.Tensor) -> tf.Tensor:
    """Return, as a bool scalar tensor, whether every element is a finite float32."""
    return _ops.hvd_sparse_all_finite(values)


def _segments(segments: tf.Tensor | None) -> tf.Tensor:
    """Return segments in the form that the operators expect."""
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

    `gathered`, uint8[bytes]: for each rank, one payload for each size in `ns`. `channels`: for low-bit values, the
    number of groups of each tensor; empty for other values. k: the payload's number of entries, at least 1.
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
    """Return the float32 values that a receiver decodes when `values` are sent as `value_dtype`, in the same shape.

    "int2" and "int1" send signs and a quantization level, the "mean" or "min", of all values, or with segments, of
    each group.
    """
    indices = tf.zeros([0], tf.int64) if indices is None else indices
    return _ops.hvd_sparse_quantize(values, indices, _segments(segments), value_dtype=value_dtype, level=level)


def token(rank: Integer) -> tf.Tensor:
    """Return the token that a rank sends instead of a gradient, float32[2]: 1 and rank + 1. Runs in every step."""
    return _ops.hvd_sparse_token(_integer(rank))


def scatter_update(variable: tf.Variable, indices: tf.Tensor, values: tf.Tensor) -> tf.Operation:
    """Set variable[indices] = values in place: a variable float32[n], indices int64[m], values float32[m].

    Unlike `tf.Variable.scatter_update`, it does not make later reads of the whole variable copy it.
    """
    return _ops.hvd_sparse_scatter_update(variable.handle, indices, values)


def _of_each(weight_decay: float | Sequence[float], members: Sequence) -> list[float]:
    """Return one weight decay for each member."""
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

    Reads the buffers once if the hints are good. Each variable has its own selection; if `joint` is true, one selection
    covers their concatenation. Velocities and parameters: one for each gradient, or empty. weight_decay: a number, or
    one for each member; the parameter of a member whose weight_decay is 0 is not read. factors: float32[members]. ks:
    int64[selections]. threshold_hints: float64[selections]. channels: see `locate_payloads`. Returns the concatenated
    payloads, uint8[bytes]; whether each gradient was finite, bool[members]; and the float64[selections, 2] of
    `select_top_k`.
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

    factors: float32[members]. thresholds: float64[members]. ks, int64[members]: if k > 0, the threshold is that of the
    k largest accumulated residuals, and at least the smallest positive float32; `thresholds` is then a guess that only
    changes the cost, 0.0 for none. If k < 0, at most the -k largest residuals are selected, without zeros. stages,
    int64[members]: if above 0, a threshold that about k residuals reach is fitted in this number of stages, the first
    with `distribution`, on a sample that the seed chooses, and `thresholds` has a guess at it (SIDCo; without momentum
    and weight decay). Returns the concatenated payloads, uint8[bytes]; whether each gradient was finite,
    bool[members]; and float64[members, 2]: threshold and number of entries. The k of a payload is its number of
    entries, but at least 1.
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
    """Do `accumulate` for variables that form one vector, and select from its elements [begin, end).

    Elements that reach the threshold are selected. share: the expected number of these; if fewer than 0.92 share - 4,
    more than 1.08 share + 4, or no elements reach the threshold, the `share` largest are selected instead, without
    zeros; for a fraction, one element now and then. Below 0: the selection is never corrected. sample: the number of
    elements of the partition in the histogram, in runs of 16. Returns ascending indices into the vector, int64[m]; a
    sketch, float32[65], of a histogram with bins of 1/16 octave: the number of its first bin, then the counts of that
    bin and the next ones, the last one with all elements above, and zeros if share is below 0; and whether each
    gradient was finite, bool[members]. Unless is_active, nothing is accumulated or selected.
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
    """Subtract a rank's own message, uint8[bytes], from the residuals, and set the velocities to zero at its entries.

    The residual is then zero for float32 values, and the rounding error for other types; after this, `retained` times
    the sent value is added. If is_void, no buffer changes.
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

    `gathered`, uint8[bytes]: the messages of all ranks, concatenated in rank order.
    """
    form = {"coding": coding, "value_dtype": value_dtype, "channels": list(channels), "joint": joint}
    form |= {"M": len(ns), "ns": list(ns)}
    numbers = (_integer(ranks), ks, _number(scale, tf.float32))
    return _ops.hvd_sparse_reduce_bucket(gathered, *numbers, **form)


def take_sum(
    total: tf.Tensor, token: tf.Tensor, expected: Real, is_void: bool | tf.Tensor, shape: tf.TensorShape
) -> tf.Tensor:
    """Return a sum, float32[n], in this shape, without a copy; NaN everywhere if is_void.

    Raises tf.errors.InvalidArgumentError unless token[0], which was 1 before Horovod reduced it, equals `expected`.
    """
    return _ops.hvd_sparse_take_sum(total, token, _number(expected, tf.float32), is_void, shape=shape)
