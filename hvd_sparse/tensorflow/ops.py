"""Typed calls into the native operators on single tensors, eagerly or in a tf.function.

What a function computes is specified by the one of the same name in `hvd_sparse.reference`, in NumPy; `bucket_ops` and
`varying_ops` do the same for several tensors in one call. Bad arguments and damaged payloads raise
tf.errors.InvalidArgumentError; errors that TensorFlow detects during tracing, such as a wrong tensor rank, are a
ValueError or TypeError there. Values may be float32, float64, float16 or bfloat16 and of any shape: they are read
flattened, in row-major order. Numbers (k, n, offset, seed, ...) may be Python numbers, or scalar tensors, which may
change from step to step inside a tf.function. A seed is any integer that fits 64 bits. `segments` lists the groups of
elements that share the quantization levels of low-bit values, see `hvd_sparse.wire`.
"""

from typing import TypeAlias

import tensorflow as tf

from hvd_sparse.library import load_library
from hvd_sparse.sampling import signed

_ops = load_library("tensorflow", tf.load_op_library)  # of `bucket_ops`, `varying_ops` and `row_ops`, too
for _type in filter(lambda name: name.startswith("HvdSparse"), dir(_ops)):
    tf.no_gradient(_type)  # else a tape that is active during a reduction would raise LookupError

Integer: TypeAlias = int | tf.Tensor
Real: TypeAlias = float | tf.Tensor


def _number(value: Integer | Real, dtype: tf.DType) -> tf.Tensor:
    """Return a scalar tensor of this type."""
    return tf.cast(value, dtype) if tf.is_tensor(value) else tf.convert_to_tensor(value, dtype)


def _integer(value: Integer) -> tf.Tensor:
    return _number(value, tf.int64)


def _seed(seed: Integer) -> tf.Tensor:
    """Return a seed as the signed 64-bit integer that the operators expect."""
    return _integer(seed if tf.is_tensor(seed) else signed(int(seed)))


def _segments(segments: tf.Tensor | None) -> tf.Tensor:
    """Return segments in the form that the operators expect."""
    return tf.zeros([0, 2], tf.int64) if segments is None else tf.cast(segments, tf.int64)


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
    """Accumulate a gradient of n elements in `residual` and `velocity`, in place, in one pass.

    g is the gradient in float32, with zeros for elements that are not finite, times factor, plus weight_decay *
    parameter. Where g overflows, it is zero too. Without a velocity: residual += g. With one: velocity = momentum *
    velocity + g and residual += velocity; with nesterov, velocity = momentum * (velocity + g) and residual += velocity,
    then += g. A velocity below the smallest normal float32 is zero. Where this overflows, both buffers keep their
    values. Every product and sum is rounded.

    Args:
        gradient: float32, float64, float16 or bfloat16; n elements in any shape.
        residual: A variable float32[n], changed.
        velocity: Another variable float32[n], changed; None: no momentum.
        parameter: float32, n elements in any shape; only read with weight decay.
        factor: Of the gradient.
        is_active: If false, the buffers do not change.
        momentum: Of the velocity, in [0, 1).
        nesterov: Whether the momentum is Nesterov's.
        weight_decay: Factor of the parameter.

    Returns:
        A bool scalar: whether all elements of the gradient, and all updates, were finite.

    Raises:
        tf.errors.InvalidArgumentError: A tensor has another type or size, a variable is given twice, or weight decay
            lacks the parameter.
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

    Args:
        values: float32, float64, float16 or bfloat16; n elements in any shape.
        k: Number of elements, in [1, n].
        seed: Of the hash of the index that breaks ties.
        threshold_hint: A guess at the smallest selected magnitude; 0.0: none. It changes the cost, never the result.

    Returns:
        Ascending indices, int64[k]; values[indices]; and float64[2]: the smallest selected magnitude, and the number of
        elements that reached the hint (exact up to 2k; below k, the data was read a second time).

    Raises:
        tf.errors.InvalidArgumentError: k is out of range, or values have another type.
    """
    return tuple(_ops.hvd_sparse_select_top_k(values, _integer(k), _seed(seed), _number(threshold_hint, tf.float64)))


def all_finite(values: tf.Tensor) -> tf.Tensor:
    """Return, as a bool scalar tensor, whether every element is a finite float32."""
    return _ops.hvd_sparse_all_finite(values)


def pack(
    indices: tf.Tensor,
    values: tf.Tensor,
    n: Integer,
    k: Integer,
    coding: str = "run_length",
    value_dtype: str = "float32",
    segments: tf.Tensor | None = None,
) -> tf.Tensor:
    """Return the payload of k of n elements, or of none, in the format of `hvd_sparse.wire`.

    Args:
        indices: int64[k], strictly ascending in [0, n); or int64[0].
        values: float32, as many as indices; float64 for value_dtype "float64"; for low-bit types a result of
            `quantize`.
        n: Elements of the tensor.
        k: Entries that the payload has room for, from 1 to n.
        coding: "run_length", "elias_fano", "bitmap", "dense" or "auto".
        value_dtype: As in `quantize`.
        segments: As in `quantize`.

    Returns:
        uint8[payload_size]; `hvd_sparse.wire.payload_size` has the size.

    Raises:
        tf.errors.InvalidArgumentError: An argument is out of range, unknown or of another type, or indices do not
            ascend.
    """
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
    """Check a payload, and return its entries.

    Args:
        payload: uint8[payload_size].
        n, k, coding, value_dtype, segments: As in `pack`, equal to those that it was packed with.

    Returns:
        Ascending indices, int64[k], and values, float32[k] (float64[k] for that type); both are empty if it was packed
        without entries.

    Raises:
        tf.errors.InvalidArgumentError: The payload is damaged or of another format.
    """
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
    """Return scale times the sum, in rank order, of the payloads of all ranks.

    Args:
        gathered: uint8[ranks, bytes], a message of each rank.
        offset: Where the payload begins in each message, in bytes.
        n, k, coding, value_dtype, segments: As in `pack`, equal to those that the payloads were packed with.
        scale: Of the sum.

    Returns:
        float32[n].

    Raises:
        tf.errors.InvalidArgumentError: An argument is out of range or unknown, or a payload is damaged or of another
            format: the message names its rank. Every payload is checked before anything is added.
    """
    place = (_integer(offset), _integer(n), _integer(k), _number(scale, tf.float32), _segments(segments))
    return _ops.hvd_sparse_reduce_payloads(gathered, *place, coding=coding, value_dtype=value_dtype)


def quantize(
    values: tf.Tensor,
    value_dtype: str,
    level: str = "mean",
    indices: tf.Tensor | None = None,
    segments: tf.Tensor | None = None,
) -> tf.Tensor:
    """Return the values that a receiver decodes when `values` are sent as another type.

    Args:
        values: float32, k elements in any shape.
        value_dtype: "float32", "float64", "float16", "bfloat16", "int2", "int1" or "none". "int2" and "int1" send signs
            and quantization levels (Gradient Dropping, section 5.4).
        level: The magnitude that "int2" and "int1" send: the "mean" of those that share it, or their "min".
        indices: int64[k], ascending; only read with segments.
        segments: int64[segments, 2], the groups that share a level, see `hvd_sparse.wire`; None: one group.

    Returns:
        float32 in the shape of values.

    Raises:
        tf.errors.InvalidArgumentError: A name is unknown, or segments lack indices or do not fit.
    """
    indices = tf.zeros([0], tf.int64) if indices is None else indices
    return _ops.hvd_sparse_quantize(values, indices, _segments(segments), value_dtype=value_dtype, level=level)


def token(rank: Integer) -> tf.Tensor:
    """Return the token that a rank sends instead of a gradient, float32[2]: 1 and rank + 1. Runs in every step."""
    return _ops.hvd_sparse_token(_integer(rank))


def scatter_update(variable: tf.Variable, indices: tf.Tensor, values: tf.Tensor) -> tf.Operation:
    """Set variable[indices] = values, in place.

    Unlike `tf.Variable.scatter_update`, it does not make later reads of the whole variable copy it.

    Args:
        variable: float32[n], changed.
        indices: int64[m], in [0, n).
        values: float32[m].

    Returns:
        The operation in a graph; None eagerly.

    Raises:
        tf.errors.InvalidArgumentError: An index is out of range, or a tensor has another type or size.
    """
    return _ops.hvd_sparse_scatter_update(variable.handle, indices, values)


def take_sum(
    total: tf.Tensor, token: tf.Tensor, expected: Real, is_skipped: bool | tf.Tensor, shape: tf.TensorShape
) -> tf.Tensor:
    """Return a sum in the shape of its gradient, without a copy, after a check of how Horovod reduced it.

    Args:
        total: float32, as many elements as the shape has.
        token: float32[1 or more]: the reduced result of a `token`, whose first number was 1 before.
        expected: What the first number of the token has to be now, but for a relative error of 0.001.
        is_skipped: If true, the result is NaN everywhere.
        shape: That of the result, fully known.

    Returns:
        float32 in this shape.

    Raises:
        tf.errors.InvalidArgumentError: The token has another value, or the sum another number of elements.
    """
    return _ops.hvd_sparse_take_sum(total, token, _number(expected, tf.float32), is_skipped, shape=shape)
