"""Calls into the native functions that pack the masked elements of matrices, on NumPy arrays, without any framework.

Every function has a twin of the same name in `hvd_sparse.reference`, which specifies it. Values are a contiguous matrix
of float32, float64, float16, ml_dtypes.bfloat16, or, where `value_dtype="bfloat16"` says so, of the bits of bfloat16 as
uint16; masks are bool. Bad arguments and damaged payloads raise ValueError, a size that is no integer TypeError.
Calls run in the caller's thread, and let others run meanwhile.
"""

import ctypes

import numpy as np

from hvd_sparse.checks import checked_integer
from hvd_sparse.native_call import (
    POINTER,
    SIZE,
    address,
    call,
    check_aligned,
    checked,
    declare,
    make_form,
)
from hvd_sparse.wire import VALUE_BYTES, VALUE_DTYPES, payload_size

_TYPES = tuple(name for name, size in VALUE_BYTES.items() if size > 0)


class _Matrix(ctypes.Structure):
    _fields_ = [("data", POINTER), ("rows", SIZE), ("columns", SIZE), ("dtype", ctypes.c_int32)]


declare(
    {
        "count_kept": [POINTER, SIZE, POINTER],
        "pack_rows": [POINTER, POINTER, POINTER, POINTER],
        "pack_kept": [POINTER, POINTER, POINTER, POINTER],
        "unpack_rows": [POINTER, POINTER, SIZE, POINTER, POINTER],
        "unpack_kept": [ctypes.c_int32, POINTER, SIZE, POINTER, SIZE, POINTER],
    }
)


def pack_rows(values: np.ndarray, mask: np.ndarray, coding: str = "auto", value_dtype: str | None = None) -> np.ndarray:
    """Return the payload of the elements that a mask selects: positions and values of the matrix' type.

    It is a payload of k of n = B * f elements; if the mask selects none, an empty one with k = 1.

    Args:
        values: A matrix [B, f] of float32, float64, float16 or bfloat16, contiguous.
        mask: bool[B, f], contiguous.
        coding: "run_length", "elias_fano", "bitmap", "auto", or with k = n "dense".
        value_dtype: "bfloat16" if values are uint16 with the bits of bfloat16; None: the dtype of values.

    Returns:
        uint8[bytes]; `hvd_sparse.wire.payload_size` has the size.

    Raises:
        ValueError: Values or mask are no such matrix or differ in shape, there are no rows, or the coding is unknown.
    """
    kept = max(1, _count_kept(mask))
    return _pack("pack_rows", values, mask, (values.size, kept, coding), value_dtype)


def pack_kept(values: np.ndarray, mask: np.ndarray, value_dtype: str | None = None) -> np.ndarray:
    """Return the payload of the values that a mask selects, without positions: for a receiver that has the mask.

    Args:
        values, mask, value_dtype: As in `pack_rows`.

    Returns:
        uint8[bytes], a dense payload; if the mask selects none, an empty one with n = 1.

    Raises:
        ValueError: Values or mask are no such matrix, or differ in shape.
    """
    kept = max(1, _count_kept(mask))
    return _pack("pack_kept", values, mask, (kept, kept, "dense"), value_dtype)


def unpack_rows(
    payload: np.ndarray,
    shape: tuple[int, int],
    k: int,
    value_dtype: str,
    coding: str = "auto",
) -> tuple[np.ndarray, np.ndarray]:
    """Check a payload of `pack_rows`, and return its entries.

    Args:
        payload: uint8[payload_size].
        shape: [B, f].
        k: Entries that the payload has room for, from 1 to B * f.
        value_dtype: "float32", "float64", "float16" or "bfloat16", the type of the matrix.
        coding: As in `pack_rows`.

    Returns:
        Values [B, f] of the payload's type, bfloat16 as uint16 of its bits, zero where there is no entry; and the mask
        of the entries, bool[B, f].

    Raises:
        ValueError: The payload is damaged or of another format, or an argument is out of range or unknown.
        TypeError: A size is no integer.
    """
    checked("payload", payload, np.uint8)
    rows, columns = (checked_integer("shape", side, 0) for side in shape)
    found = _stored_type(value_dtype)
    payload_size(rows * columns, k, coding, value_dtype)  # checks them before memory is asked for
    form = make_form(rows * columns, k, coding, value_dtype, None)
    values, mask = np.empty((rows, columns), found), np.empty((rows, columns), np.bool_)
    arrays = (address(values), address(mask))
    call("unpack_rows", ctypes.byref(form), address(payload), payload.size, *arrays)
    return values, mask


def unpack_kept(payload: np.ndarray, mask: np.ndarray, value_dtype: str) -> np.ndarray:
    """Check a payload of `pack_kept`, and return its values where the mask keeps.

    Args:
        payload: uint8[payload_size].
        mask: bool[B, f], contiguous, equal to the one that it was packed with.
        value_dtype: As in `unpack_rows`.

    Returns:
        Values [B, f], zero elsewhere, typed as in `unpack_rows`.

    Raises:
        ValueError: The payload is damaged, of another format, or has another number of values than the mask keeps.
    """
    checked("payload", payload, np.uint8)
    found = _stored_type(value_dtype)
    _check_mask(mask)
    values = np.empty(mask.shape, found)
    arrays = (address(mask), mask.size, address(values))
    call("unpack_kept", VALUE_DTYPES[value_dtype], address(payload), payload.size, *arrays)
    return values


def _matrix(values: np.ndarray, value_dtype: str | None) -> tuple[_Matrix, str]:
    """Return a matrix as the library takes it, and the name of its type."""
    if not isinstance(values, np.ndarray) or values.ndim != 2 or values.shape[1] == 0:
        found = list(values.shape) if isinstance(values, np.ndarray) else type(values).__name__
        raise ValueError(f"values must be a matrix with at least one column, got {found}")
    name = values.dtype.name if value_dtype is None else value_dtype
    stored = {values.dtype.name} | ({"bfloat16"} if values.dtype == np.uint16 else set())
    if name not in _TYPES or name not in stored:
        asked = "" if value_dtype is None else f' with value_dtype="{value_dtype}"'
        raise ValueError(
            f'values must be of dtype {", ".join(_TYPES)}, or uint16 with value_dtype="bfloat16"; '
            f"got {values.dtype.name}{asked}"
        )
    if not values.flags.c_contiguous:
        raise ValueError(f"values must be contiguous, got strides {list(values.strides)} of {list(values.shape)}")
    check_aligned("values", values)
    return _Matrix(address(values), *values.shape, VALUE_DTYPES[name]), name


def _check_mask(mask: np.ndarray, shape: tuple[int, ...] | None = None) -> None:
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or not mask.flags.c_contiguous:
        found = f"{mask.dtype}{list(mask.shape)}" if isinstance(mask, np.ndarray) else type(mask).__name__
        raise ValueError(f"mask must be a contiguous array of bool, got {found}")
    if shape is not None and mask.shape != shape:
        raise ValueError(f"mask must have the shape of the values, {list(shape)}; got {list(mask.shape)}")


def _count_kept(mask: np.ndarray) -> int:
    _check_mask(mask)
    kept = ctypes.c_int64()
    call("count_kept", address(mask), mask.size, ctypes.byref(kept))
    return kept.value


def _pack(name: str, values: np.ndarray, mask: np.ndarray, form: tuple, value_dtype: str | None) -> np.ndarray:
    matrix, dtype = _matrix(values, value_dtype)
    _check_mask(mask, values.shape)
    payload = np.empty(payload_size(*form, dtype), np.uint8)
    arrays = (ctypes.byref(matrix), address(mask), address(payload))
    call(name, ctypes.byref(make_form(*form, dtype, None)), *arrays)
    return payload


def _stored_type(value_dtype: str) -> np.dtype:
    if value_dtype not in _TYPES:
        raise ValueError(f"value_dtype must be one of {', '.join(_TYPES)}; got {value_dtype!r}")
    return np.dtype("uint16" if value_dtype == "bfloat16" else value_dtype)
