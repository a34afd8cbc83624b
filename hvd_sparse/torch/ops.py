"""Typed calls into the native operators on single tensors, `torch.ops.hvd_sparse.*`, on CPU and CUDA tensors.

What a function computes is specified by the one of the same name in `hvd_sparse.reference`, in NumPy; `bucket_ops` and
`varying_ops` do the same for several tensors in one call. Bad arguments and damaged payloads raise ValueError. Values
may be float32, float64, float16 or bfloat16 and of any shape: they are read flattened, in row-major order. A seed is
any integer that fits 64 bits. `segments` lists the groups of elements that share the quantization levels of low-bit
values, see `hvd_sparse.wire`. Autograd sees no change in place.

All tensors of a call are on one device, and so are the results; only `segments` and the places of located payloads are
always on the CPU. docs/cuda-operators.md lists the differences on CUDA devices: above all, damage is recorded
(`take_decode_status`) instead of raised.
"""

import torch

from hvd_sparse.library import has_cuda, load_library
from hvd_sparse.sampling import signed
from hvd_sparse.torch import fakes

load_library("torch", torch.ops.load_library)
fakes.register(with_cuda=has_cuda("torch"))
_ops = torch.ops.hvd_sparse  # of `bucket_ops`, `varying_ops` and `row_ops`, too

_CHECKS = "magic, version, coding, value dtype, reserved field, element count n, entries, checksum, positions"
FAILED_CHECKS = tuple(_CHECKS.split(", "))  # as `take_decode_status` numbers them, from 1


def accumulate(
    gradient: torch.Tensor,
    residual: torch.Tensor,
    velocity: torch.Tensor | None = None,
    parameter: torch.Tensor | None = None,
    *,
    factor: float = 1.0,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> torch.Tensor:
    """Accumulate a gradient of n elements in `residual` and `velocity`, in place, in one pass.

    g is the gradient in float32, with zeros for elements that are not finite, times factor, plus weight_decay *
    parameter. Where g overflows, it is zero too. Without a velocity: residual += g. With one: velocity = momentum *
    velocity + g and residual += velocity; with nesterov, velocity = momentum * (velocity + g) and residual += velocity,
    then += g. A velocity below the smallest normal float32 is zero. Where this overflows, both buffers keep their
    values. Every product and sum is rounded.

    Args:
        gradient: float32, float64, float16 or bfloat16; n elements in any shape.
        residual: float32, n elements, contiguous; changed.
        velocity: float32, n elements, contiguous; changed. None: no momentum.
        parameter: float32, n elements, contiguous; only read with weight decay.
        factor: Of the gradient.
        momentum: Of the velocity, in [0, 1).
        nesterov: Whether the momentum is Nesterov's.
        weight_decay: Factor of the parameter.

    Returns:
        A bool scalar: whether all elements of the gradient, and all updates, were finite.

    Raises:
        ValueError: A tensor has another type, size or device or is not contiguous, or weight decay lacks the parameter.
    """
    return _ops.accumulate(gradient, residual, velocity, parameter, factor, momentum, nesterov, weight_decay)


def select_top_k(
    values: torch.Tensor, k: int, seed: int = 0, threshold_hint: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
        ValueError: k is out of range, or values have another type.
    """
    return _ops.select_top_k(values, k, signed(seed), threshold_hint)


def filter_threshold(values: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Select every element whose magnitude is at least a threshold; never NaN.

    Args:
        values: float32, float64, float16 or bfloat16; n elements in any shape.
        threshold: At least 0.

    Returns:
        Ascending indices, int64[m], and values[indices].

    Raises:
        ValueError: The threshold is negative or NaN, or values have another type.
    """
    return _ops.filter_threshold(values, threshold)


def select_threshold(
    values: torch.Tensor, k: int, method: str = "exact", sample_fraction: float = 0.005, seed: int = 0
) -> torch.Tensor:
    """Return a threshold that k elements reach; "sampled" (Deep Gradient Compression, section 5): about k.

    Args:
        values: float32, float64, float16 or bfloat16; n elements in any shape.
        k: Number of elements, in [1, n].
        method: "exact": the k-th largest magnitude; "sampled": the same quantile of a sample.
        sample_fraction: Part of the elements in the sample, in (0, 1]. Small samples are made larger; where they would
            have half of the elements, all are read.
        seed: Of the sample.

    Returns:
        A float64 scalar. NaN counts as magnitude 0.

    Raises:
        ValueError: The method is unknown, a number is out of range, or values have another type.
    """
    return _ops.select_threshold(values, k, method, sample_fraction, signed(seed))


def all_finite(values: torch.Tensor) -> torch.Tensor:
    """Return, as a bool scalar tensor, whether every element is a finite float32."""
    return _ops.all_finite(values)


def payload_size(
    n: int, k: int, coding: str = "run_length", value_dtype: str = "float32", segments: torch.Tensor | None = None
) -> int:
    """Return the size of the payload of k of n elements.

    Args:
        n, k, coding, value_dtype, segments: As in `pack`.

    Returns:
        The size in bytes, a multiple of 8.

    Raises:
        ValueError: A number is out of range, a name is unknown, or the segments do not fit.
    """
    return _ops.payload_size(n, k, coding, value_dtype, segments)


def pack(
    indices: torch.Tensor,
    values: torch.Tensor,
    n: int,
    k: int,
    out: torch.Tensor,
    coding: str = "run_length",
    value_dtype: str = "float32",
    segments: torch.Tensor | None = None,
) -> None:
    """Write the payload of k of n elements, or of none, in the format of `hvd_sparse.wire`.

    Args:
        indices: int64[k], strictly ascending in [0, n); or int64[0].
        values: float32, as many as indices; float64 for value_dtype "float64"; for low-bit types a result of
            `quantize`.
        n: Elements of the tensor.
        k: Entries that the payload has room for, from 1 to n.
        out: uint8[payload_size], written.
        coding: "run_length", "elias_fano", "bitmap", "dense" or "auto".
        value_dtype: As in `quantize`.
        segments: As in `quantize`.

    Returns:
        None.

    Raises:
        ValueError: An argument is out of range, unknown or of another type or size, or indices do not ascend.
    """
    _ops.pack(indices, values, n, k, out, coding, value_dtype, segments)


def unpack(
    payload: torch.Tensor,
    n: int,
    k: int,
    coding: str = "run_length",
    value_dtype: str = "float32",
    segments: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check a payload, and return its entries.

    Args:
        payload: uint8[payload_size].
        n, k, coding, value_dtype, segments: As in `pack`, equal to those that it was packed with.

    Returns:
        Ascending indices, int64[k], and values, float32[k] (float64[k] for that type); both are empty if it was packed
        without entries.

    Raises:
        ValueError: The payload is damaged or of another format; also on a CUDA device.
    """
    return _ops.unpack(payload, n, k, coding, value_dtype, segments)


def reduce_payloads(
    gathered: torch.Tensor,
    offset: int,
    n: int,
    k: int,
    out: torch.Tensor,
    scale: float = 1.0,
    coding: str = "run_length",
    value_dtype: str = "float32",
    segments: torch.Tensor | None = None,
) -> None:
    """Set `out` to scale times the sum, in rank order, of the payloads of all ranks.

    Args:
        gathered: uint8[ranks, bytes], a message of each rank.
        offset: Where the payload begins in each message, in bytes.
        n, k, coding, value_dtype, segments: As in `pack`, equal to those that the payloads were packed with.
        out: float32, n elements, contiguous; written.
        scale: Of the sum.

    Returns:
        None.

    Raises:
        ValueError: A tensor has another type or size, or a payload is damaged or of another format: the message names
            its rank. Every payload is checked before `out` is touched.
    """
    _ops.reduce_payloads(gathered, offset, n, k, out, scale, coding, value_dtype, segments)


def quantize(
    values: torch.Tensor,
    value_dtype: str,
    level: str = "mean",
    indices: torch.Tensor | None = None,
    segments: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the values that a receiver decodes when `values` are sent as another type.

    Args:
        values: float32, k elements, contiguous.
        value_dtype: "float32", "float64", "float16", "bfloat16", "int2", "int1" or "none". "int2" and "int1" send signs
            and quantization levels (Gradient Dropping, section 5.4).
        level: The magnitude that "int2" and "int1" send: the "mean" of those that share it, or their "min".
        indices: int64[k], ascending; only read with segments.
        segments: int64[segments, 2], on the CPU: the groups that share a level, see `hvd_sparse.wire`; None: one group.

    Returns:
        float32 in the shape of values.

    Raises:
        ValueError: A name is unknown, a tensor has another type or size, or segments lack indices or do not fit.
    """
    return _ops.quantize(values, value_dtype, level, indices, segments)


def take_decode_status(like: torch.Tensor) -> torch.Tensor:
    """Return and reset the record of damaged payloads on the device of `like`, a CUDA tensor: int64[2].

    The first number counts the selections of `reduce_payloads`, `reduce_located`, `reduce_bucket` and `clear_bucket`
    with a payload that failed a check. The second is rank * 256 + check (see `FAILED_CHECKS`) of the first failure; of
    several in one call, any. Reading the result waits for the device.
    """
    return _ops.take_decode_status(like)
