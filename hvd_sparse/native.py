"""The native functions on NumPy arrays, without any framework, for parameter servers and workers.

What a function computes is specified by the one of the same name in `hvd_sparse.reference`, in NumPy. Arrays are
float32, one-dimensional and contiguous; indices int64. Bad arguments and damaged payloads raise ValueError. Calls run
in the caller's thread, and let others run meanwhile.
"""

import ctypes
import functools
from collections.abc import Sequence

import numpy as np

from hvd_sparse.library import find_library
from hvd_sparse.wire import CODINGS, LEVELS, VALUE_DTYPES, Segments, payload_size, resolve_coding

MESSAGE_BYTES = 512
OUT_OF_MEMORY = 3
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


class _Rule(ctypes.Structure):
    _fields_ = [
        ("factor", ctypes.c_float),
        ("momentum", ctypes.c_float),
        ("weight_decay", ctypes.c_float),
        ("nesterov", ctypes.c_int32),
    ]


class _Form(ctypes.Structure):
    _fields_ = [
        ("n", _SIZE),
        ("k", _SIZE),
        ("coding", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("segments", _POINTER),
        ("segment_count", _SIZE),
    ]


_SELECTED = [_POINTER, _POINTER]  # indices, info
_ACCUMULATED = [_POINTER, _SIZE, _POINTER, _POINTER, _POINTER, _POINTER]
_ARGUMENTS = {
    "accumulate": [*_ACCUMULATED, _POINTER],
    "accumulate_top_k": [*_ACCUMULATED, _SIZE, ctypes.c_uint64, ctypes.c_double, *_SELECTED, _POINTER],
    "select_top_k": [_POINTER, _SIZE, _SIZE, ctypes.c_uint64, ctypes.c_double, *_SELECTED],
    "filter_threshold": [_POINTER, _SIZE, ctypes.c_double, _POINTER, _POINTER],
    "crc32": [_POINTER, _SIZE, _POINTER],
    "quantize": [_POINTER, ctypes.c_int32, _POINTER, _POINTER, _POINTER],
    "pack": [_POINTER, _POINTER, _POINTER, _SIZE, _POINTER],
    "unpack": [_POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _POINTER],
    "unpack_payloads": [_POINTER, _SIZE, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _POINTER],
}


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(find_library("numpy"))


@functools.cache
def _function(name: str):
    function = getattr(_library(), f"hvd_sparse_{name}")
    function.argtypes, function.restype = [*_ARGUMENTS[name], ctypes.c_char_p], ctypes.c_int
    return function


def _call(name: str, *arguments) -> None:
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    status = _function(name)(*arguments, message)
    if status != 0:
        error = MemoryError if status == OUT_OF_MEMORY else ValueError
        raise error(f"hvd_sparse.{name}: {message.value.decode()}")


def _checked(name: str, array: np.ndarray, dtype: type, size: int | None = None) -> np.ndarray:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
        found = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ValueError(f"{name} must be a contiguous array {np.dtype(dtype)}[n], got {found}")
    if size is not None and array.size != size:
        raise ValueError(f"{name} must have {size} elements, got {array.size}")
    return array


def _address(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


def _check_changed(name: str, array: np.ndarray, size: int | None = None, dtype: type = np.float32) -> None:
    if not _checked(name, array, dtype, size).flags.writeable:
        raise ValueError(f"{name} is changed in place, got an array that is read-only")


def _accumulation(gradient, residual, velocity, parameter, factor, momentum, nesterov, weight_decay):
    """Return the arguments that all accumulating functions share."""
    n = _checked("gradient", gradient, np.float32).size
    _check_changed("residual", residual, n)
    if velocity is not None:
        _check_changed("velocity", velocity, n)
    if weight_decay == 0.0:
        parameter = None
    elif parameter is None:
        raise ValueError("weight_decay needs the parameter")
    else:
        _checked("parameter", parameter, np.float32, n)
    rule = _Rule(factor, momentum, weight_decay, nesterov)
    return _address(gradient), n, ctypes.byref(rule), _address(parameter), _address(residual), _address(velocity)


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
    """Bring a gradient into `residual` and `velocity`, in place; return whether it was finite everywhere."""
    arguments = _accumulation(gradient, residual, velocity, parameter, factor, momentum, nesterov, weight_decay)
    finite = ctypes.c_int32()
    _call("accumulate", *arguments, ctypes.byref(finite))
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

    Returns indices int64[k], values float32[k], the two numbers of `select_top_k`, and whether the gradient was finite.
    """
    arguments = _accumulation(gradient, residual, velocity, parameter, factor, momentum, nesterov, weight_decay)
    _check_count(k, gradient.size)
    indices, info, finite = np.empty(k, np.int64), np.empty(2), ctypes.c_int32()
    found = (_address(indices), _address(info), ctypes.byref(finite))
    _call("accumulate_top_k", *arguments, k, seed, threshold_hint, *found)
    return indices, residual[indices], info, bool(finite.value)


def select_top_k(
    values: np.ndarray, k: int, seed: int = 0, threshold_hint: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Select exactly the k elements of largest magnitude; the hint changes the cost but never the result.

    Returns ascending indices int64[k], values[k], and float64[2]: the smallest selected magnitude, and how many
    elements were found to reach the hint (exact up to 2k; fewer than k: the data had to be read again).
    """
    n = _checked("values", values, np.float32).size
    _check_count(k, n)
    indices, info = np.empty(k, np.int64), np.empty(2)
    _call("select_top_k", _address(values), n, k, seed, threshold_hint, _address(indices), _address(info))
    return indices, values[indices], info


def filter_threshold(values: np.ndarray, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Select all elements whose magnitude is at least a threshold of 0 or more; never NaN.

    Returns ascending indices int64[k], and values[indices].
    """
    n, count = _checked("values", values, np.float32).size, ctypes.c_int64()
    room = np.empty(n, np.int64)  # the part that is not written takes no memory
    _call("filter_threshold", _address(values), n, threshold, _address(room), ctypes.byref(count))
    indices = room[: count.value].copy()
    return indices, values[indices]


def crc32(data: np.ndarray) -> int:
    """Return the CRC-32 of bytes, uint8[n]: that of zlib."""
    size, found = _checked("data", data, np.uint8).size, ctypes.c_uint32()
    _call("crc32", _address(data), size, ctypes.byref(found))
    return found.value


def quantize(
    values: np.ndarray,
    value_dtype: str,
    level: str = "mean",
    indices: np.ndarray | None = None,
    segments: np.ndarray | None = None,
) -> np.ndarray:
    """Return the float32 values that survive the wire as `value_dtype`; see `hvd_sparse.wire` for segments."""
    k = _checked("values", values, np.float32).size
    if segments is not None and len(segments) > 0:
        _checked("indices", indices, np.int64, k)
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}; got {level!r}")
    form = _form(2**48, k, "dense", value_dtype, segments)
    result = np.empty(k, np.float32)
    addresses = (_address(values), _address(indices), _address(result))
    _call("quantize", ctypes.byref(form), LEVELS.index(level), *addresses)
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
    """Return the payload, uint8[payload_size], of k entries, or of none."""
    payload = np.empty(payload_size(n, k, coding, value_dtype, segments), np.uint8)
    _checked("indices", indices, np.int64)
    _checked("values", values, _values_type(value_dtype), indices.size)
    form = _form(n, k, coding, value_dtype, segments)
    _call("pack", ctypes.byref(form), _address(indices), _address(values), indices.size, _address(payload))
    return payload


def unpack(
    payload: np.ndarray,
    n: int,
    k: int,
    coding: str = "run_length",
    value_dtype: str = "float32",
    segments: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Check a payload, uint8[payload_size], and return its indices int64 and values float32 (or float64)."""
    _checked("payload", payload, np.uint8)
    payload_size(n, k, coding, value_dtype, segments)  # checks them before memory is asked for
    form, entries = _form(n, k, coding, value_dtype, segments), ctypes.c_int64()
    indices, values = np.empty(k, np.int64), np.empty(k, _values_type(value_dtype))
    found = (_address(indices), _address(values), ctypes.byref(entries))
    _call("unpack", ctypes.byref(form), _address(payload), payload.size, *found)
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

    Returns indices, int64[m], counted from the first element of the first payload, and values, float32[m].
    """
    _checked("payloads", payloads, np.uint8, sum(payload_size(n, k, coding) for n, k in zip(ns, ks, strict=True)))
    codings = np.array([CODINGS[resolve_coding(coding, n, k)] for n, k in zip(ns, ks, strict=True)], np.int32)
    forms = [np.array(ns, np.int64), np.array(ks, np.int64), codings]
    indices, values, entries = np.empty(sum(ks), np.int64), np.empty(sum(ks), np.float32), ctypes.c_int64()
    found = (_address(indices), _address(values), ctypes.byref(entries))
    _call("unpack_payloads", _address(payloads), payloads.size, *map(_address, forms), len(ns), *found)
    return indices[: entries.value], values[: entries.value]


def _check_count(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k must be in [1, n = {n}], got {k}")


def _values_type(value_dtype: str) -> type:
    return np.float64 if value_dtype == "float64" else np.float32


def _form(n: int, k: int, coding: str, value_dtype: str, segments: Segments) -> _Form:
    if value_dtype not in VALUE_DTYPES:
        raise ValueError(f"value_dtype must be one of {', '.join(VALUE_DTYPES)}; got {value_dtype!r}")
    rows = np.ascontiguousarray(np.empty((0, 2)) if segments is None or len(segments) == 0 else segments, np.int64)
    if rows.ndim != 2 or rows.shape[1] != 2:
        raise ValueError(f"segments must be pairs of begin and channels, got an array of shape {list(rows.shape)}")
    form = _Form(n, k, CODINGS[resolve_coding(coding, n, k)], VALUE_DTYPES[value_dtype], _address(rows), rows.size // 2)
    form.rows = rows  # keeps the memory alive
    return form
