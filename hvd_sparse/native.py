"""The native functions on NumPy arrays, without any framework: for parameter servers, reduce-scatters and `plan`.

What a function computes is specified by the one of the same name in `hvd_sparse.reference`, in NumPy. Arrays are
one-dimensional and contiguous, float32 unless a function says otherwise; indices int64. Bad arguments and damaged
payloads raise ValueError. Calls run in the caller's thread, and let others run meanwhile.
"""

import ctypes
from collections.abc import Sequence

import numpy as np

from hvd_sparse.native_call import (
    POINTER,
    SIZE,
    address,
    call,
    check_changed,
    check_count,
    checked,
    declare,
    make_form,
    values_type,
)
from hvd_sparse.wire import CODINGS, LEVELS, payload_size, resolve_coding


class _Rule(ctypes.Structure):
    _fields_ = [
        ("factor", ctypes.c_float),
        ("momentum", ctypes.c_float),
        ("weight_decay", ctypes.c_float),
        ("nesterov", ctypes.c_int32),
    ]


_SELECTED = [POINTER, POINTER]  # indices, info
_ACCUMULATED = [POINTER, SIZE, POINTER, POINTER, POINTER, POINTER]
declare(
    {
        "accumulate": [*_ACCUMULATED, POINTER],
        "accumulate_top_k": [*_ACCUMULATED, SIZE, ctypes.c_uint64, ctypes.c_double, *_SELECTED, POINTER],
        "select_top_k": [POINTER, SIZE, SIZE, ctypes.c_uint64, ctypes.c_double, *_SELECTED],
        "filter_threshold": [POINTER, SIZE, ctypes.c_double, POINTER, POINTER],
        "crc32": [POINTER, SIZE, POINTER],
        "quantize": [POINTER, ctypes.c_int32, POINTER, POINTER, POINTER],
        "pack": [POINTER, POINTER, POINTER, SIZE, POINTER],
        "unpack": [POINTER, POINTER, SIZE, POINTER, POINTER, POINTER],
        "unpack_payloads": [POINTER, SIZE, POINTER, POINTER, POINTER, SIZE, POINTER, POINTER, POINTER],
    }
)


def _accumulation(gradient, residual, velocity, parameter, factor, momentum, nesterov, weight_decay):
    """Return the arguments that all accumulating functions share."""
    n = checked("gradient", gradient, np.float32).size
    check_changed("residual", residual, n)
    if velocity is not None:
        check_changed("velocity", velocity, n)
    if weight_decay == 0.0:
        parameter = None
    elif parameter is None:
        raise ValueError("weight_decay needs the parameter")
    else:
        checked("parameter", parameter, np.float32, n)
    rule = _Rule(factor, momentum, weight_decay, nesterov)
    return address(gradient), n, ctypes.byref(rule), address(parameter), address(residual), address(velocity)


def accumulate(
    gradient: np.ndarray,
    residual: np.ndarray,
    velocity: np.ndarray | None = None,
    parameter: np.ndarray | None = None,
    *,
    factor: float = 1.0,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> bool:
    """Accumulate a gradient of n elements in `residual` and `velocity`, in place, in one pass.

    g = factor * gradient + weight_decay * parameter, with zeros for elements that are not finite. Without a velocity:
    residual += g. With one: velocity = momentum * velocity + g and residual += velocity; with nesterov, velocity =
    momentum * (velocity + g) and residual += velocity, then += g.

    Args:
        gradient: float32[n].
        residual: float32[n], changed.
        velocity: float32[n], changed; None: no momentum.
        parameter: float32[n]; only read with weight decay.
        factor: Of the gradient.
        momentum: Of the velocity, in [0, 1).
        nesterov: Whether the momentum is Nesterov's.
        weight_decay: Factor of the parameter.

    Returns:
        Whether all elements of the gradient, and all sums, were finite.

    Raises:
        ValueError: An array has another type or size, is read-only, or weight decay lacks the parameter.
    """
    arguments = _accumulation(gradient, residual, velocity, parameter, factor, momentum, nesterov, weight_decay)
    finite = ctypes.c_int32()
    call("accumulate", *arguments, ctypes.byref(finite))
    return bool(finite.value)


def accumulate_top_k(
    gradient: np.ndarray,
    residual: np.ndarray,
    velocity: np.ndarray | None = None,
    parameter: np.ndarray | None = None,
    *,
    k: int,
    seed: int = 0,
    threshold_hint: float = 0.0,
    factor: float = 1.0,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    """Do `accumulate`, then `select_top_k` in the residual, in one pass if the hint is good.

    Args:
        gradient, residual, velocity, parameter, factor, momentum, nesterov, weight_decay: As in `accumulate`.
        k, seed, threshold_hint: As in `select_top_k`.

    Returns:
        Indices, int64[k]; values, float32[k]; the two numbers of `select_top_k`; and whether the gradient was finite.

    Raises:
        ValueError: As in `accumulate`; or k is not in [1, n].
    """
    arguments = _accumulation(gradient, residual, velocity, parameter, factor, momentum, nesterov, weight_decay)
    check_count(k, gradient.size)
    indices, info, finite = np.empty(k, np.int64), np.empty(2), ctypes.c_int32()
    found = (address(indices), address(info), ctypes.byref(finite))
    call("accumulate_top_k", *arguments, k, seed, threshold_hint, *found)
    return indices, residual[indices], info, bool(finite.value)


def select_top_k(
    values: np.ndarray, k: int, seed: int = 0, threshold_hint: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Select exactly the k elements of largest magnitude.

    Args:
        values: float32[n].
        k: Number of elements, in [1, n].
        seed: Of the order of equal magnitudes.
        threshold_hint: A guess at the smallest selected magnitude; 0.0: none. It changes the cost, never the result.

    Returns:
        Ascending indices, int64[k]; values[indices]; and float64[2]: the smallest selected magnitude, and how many
        elements were found to reach the hint (exact up to 2k; fewer than k: the data had to be read again).

    Raises:
        ValueError: k is out of range, or values are no float32[n].
    """
    n = checked("values", values, np.float32).size
    check_count(k, n)
    indices, info = np.empty(k, np.int64), np.empty(2)
    call("select_top_k", address(values), n, k, seed, threshold_hint, address(indices), address(info))
    return indices, values[indices], info


def filter_threshold(values: np.ndarray, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Select all elements whose magnitude is at least a threshold; never NaN.

    Args:
        values: float32[n].
        threshold: At least 0.

    Returns:
        Ascending indices, int64[k], and values[indices].

    Raises:
        ValueError: The threshold is negative or NaN, or values are no float32[n].
    """
    n, count = checked("values", values, np.float32).size, ctypes.c_int64()
    room = np.empty(n, np.int64)  # the part that is not written takes no memory
    call("filter_threshold", address(values), n, threshold, address(room), ctypes.byref(count))
    indices = room[: count.value].copy()
    return indices, values[indices]


def crc32(data: np.ndarray) -> int:
    """Return the CRC-32 of bytes, uint8[n]: that of zlib."""
    size, found = checked("data", data, np.uint8).size, ctypes.c_uint32()
    call("crc32", address(data), size, ctypes.byref(found))
    return found.value


def quantize(
    values: np.ndarray,
    value_dtype: str,
    level: str = "mean",
    indices: np.ndarray | None = None,
    segments: np.ndarray | None = None,
) -> np.ndarray:
    """Return the values that a receiver decodes when `values` are sent as another type.

    Args:
        values: float32[k].
        value_dtype: "float32", "float64", "float16", "bfloat16", "int2", "int1" or "none".
        level: The magnitude that "int2" and "int1" send: the "mean" of those that share it, or their "min".
        indices: int64[k], ascending; only read with segments.
        segments: int64[segments, 2], the groups that share a level, see `hvd_sparse.wire`; None: one group.

    Returns:
        float32[k].

    Raises:
        ValueError: A name is unknown, or segments lack indices or do not fit.
    """
    k = checked("values", values, np.float32).size
    if segments is not None and len(segments) > 0:
        checked("indices", indices, np.int64, k)
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}; got {level!r}")
    form = make_form(2**48, k, "dense", value_dtype, segments)
    result = np.empty(k, np.float32)
    addresses = (address(values), address(indices), address(result))
    call("quantize", ctypes.byref(form), LEVELS.index(level), *addresses)
    return result


def pack(
    indices: np.ndarray,
    values: np.ndarray,
    n: int,
    k: int,
    coding: str = "run_length",
    value_dtype: str = "float32",
    segments: np.ndarray | None = None,
) -> np.ndarray:
    """Return the payload of k of n elements, or of none, in the format of `hvd_sparse.wire`.

    Args:
        indices: int64[k], strictly ascending in [0, n); or int64[0].
        values: float32[k], float64[k] for value_dtype "float64"; for low-bit types a result of `quantize`.
        n: Elements of the tensor.
        k: Entries that the payload has room for, from 1 to n.
        coding: "run_length", "elias_fano", "bitmap", "dense" or "auto".
        value_dtype: As in `quantize`.
        segments: As in `quantize`.

    Returns:
        uint8[payload_size].

    Raises:
        ValueError: An argument is out of range or of another type, or indices do not ascend.
    """
    payload = np.empty(payload_size(n, k, coding, value_dtype, segments), np.uint8)
    checked("indices", indices, np.int64)
    checked("values", values, values_type(value_dtype), indices.size)
    form = make_form(n, k, coding, value_dtype, segments)
    call("pack", ctypes.byref(form), address(indices), address(values), indices.size, address(payload))
    return payload


def unpack(
    payload: np.ndarray,
    n: int,
    k: int,
    coding: str = "run_length",
    value_dtype: str = "float32",
    segments: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Check a payload, and return its entries.

    Args:
        payload: uint8[payload_size].
        n, k, coding, value_dtype, segments: As in `pack`, equal to those that it was packed with.

    Returns:
        Ascending indices, int64[k], and values, float32[k] (float64[k] for that type); both are empty if it was packed
        without entries.

    Raises:
        ValueError: The payload is damaged or of another format.
    """
    checked("payload", payload, np.uint8)
    payload_size(n, k, coding, value_dtype, segments)  # checks them before memory is asked for
    form, entries = make_form(n, k, coding, value_dtype, segments), ctypes.c_int64()
    indices, values = np.empty(k, np.int64), np.empty(k, values_type(value_dtype))
    found = (address(indices), address(values), ctypes.byref(entries))
    call("unpack", ctypes.byref(form), address(payload), payload.size, *found)
    return indices[: entries.value], values[: entries.value]


def unpack_payloads(
    payloads: np.ndarray, ns: Sequence[int], ks: Sequence[int], coding: str = "run_length"
) -> tuple[np.ndarray, np.ndarray]:
    """Check payloads of float32, uint8[bytes], that lie one after the other; return all of their entries.

    Args:
        payloads: Those of k of n elements each, for as many n and k as there are.
        ns: The elements of each.
        ks: The entries that each has at most.
        coding: Of all.

    Returns:
        Indices, int64[m], counted from the first element of the first payload, and values, float32[m].

    Raises:
        ValueError: A payload is damaged or of another format.
    """
    checked("payloads", payloads, np.uint8, sum(payload_size(n, k, coding) for n, k in zip(ns, ks, strict=True)))
    codings = np.array([CODINGS[resolve_coding(coding, n, k)] for n, k in zip(ns, ks, strict=True)], np.int32)
    forms = [np.array(ns, np.int64), np.array(ks, np.int64), codings]
    indices, values, entries = np.empty(sum(ks), np.int64), np.empty(sum(ks), np.float32), ctypes.c_int64()
    found = (address(indices), address(values), ctypes.byref(entries))
    call("unpack_payloads", address(payloads), payloads.size, *map(address, forms), len(ns), *found)
    return indices[: entries.value], values[: entries.value]
