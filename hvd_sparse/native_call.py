"""What the native functions on NumPy arrays share: the library, their signatures, checks of arrays, errors.

`native`, `native_rows` and `native_changes` declare the functions of theirs and call them.
"""

import ctypes
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from hvd_sparse.library import find_library
from hvd_sparse.wire import CODINGS, VALUE_DTYPES, Segments, resolve_coding

POINTER, SIZE = ctypes.c_void_p, ctypes.c_int64
MESSAGE_BYTES = 512
ERRORS = {1: ValueError, 2: ValueError, 3: MemoryError, 4: RuntimeError}  # what csrc/numpy/report.h returns

_signatures: dict[str, Sequence] = {}


class PayloadFormat(ctypes.Structure):
    """The format of a payload, as the library takes it."""

    _fields_ = [
        ("n", SIZE),
        ("k", SIZE),
        ("coding", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("segments", POINTER),
        ("segment_count", SIZE),
    ]


def declare(signatures: Mapping[str, Sequence]) -> None:
    """Tell the types of arguments of native functions, by name, without the last argument, the message of an error."""
    _signatures.update(signatures)


def call(name: str, *arguments) -> None:
    """Call a declared function.

    Raises:
        ValueError: for wrong arguments and damaged payloads.
        MemoryError: if there is not enough memory.
        RuntimeError: for any other failure.
    """
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    status = _function(name)(*arguments, message)
    if status != 0:
        raise ERRORS[status](f"hvd_sparse.{name}: {message.value.decode()}")


def checked(name: str, array: np.ndarray, dtype: type, size: int | None = None) -> np.ndarray:
    """Return an array if the library can take it, else raise a ValueError that names the argument."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
        found = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ValueError(f"{name} must be a contiguous array {np.dtype(dtype)}[n], got {found}")
    check_aligned(name, array)
    if size is not None and array.size != size:
        raise ValueError(f"{name} must have {size} elements, got {array.size}")
    return array


def check_aligned(name: str, array: np.ndarray) -> None:
    """Raise a ValueError if an array does not begin at a multiple of the size of its elements."""
    if not array.flags.aligned:
        raise ValueError(
            f"{name} must begin at a multiple of {array.dtype.alignment} bytes, got address {address(array):#x}: "
            f"pass a copy, {name}.copy()"
        )


def check_changed(name: str, array: np.ndarray, size: int | None = None, dtype: type = np.float32) -> None:
    """Check an array that the library changes."""
    if not checked(name, array, dtype, size).flags.writeable:
        raise ValueError(f"{name} is changed in place, got an array that is read-only")


def check_count(k: int, n: int) -> None:
    """Raise a ValueError unless k of n elements can be selected."""
    if not 1 <= k <= n:
        raise ValueError(f"k must be in [1, n = {n}], got {k}")


def address(array: np.ndarray | None) -> int | None:
    """Return where an array's data begins; None, which the library takes as a null pointer, if there is no array."""
    return None if array is None else array.ctypes.data


def values_type(value_dtype: str) -> type:
    """Return the type of the values to pack, and of those unpacked."""
    return np.float64 if value_dtype == "float64" else np.float32


def make_form(n: int, k: int, coding: str, value_dtype: str, segments: Segments) -> PayloadFormat:
    """Return the format of a payload; its attribute `rows` keeps the memory of the segments alive."""
    if value_dtype not in VALUE_DTYPES:
        raise ValueError(f"value_dtype must be one of {', '.join(VALUE_DTYPES)}; got {value_dtype!r}")
    rows = np.require(np.empty((0, 2)) if segments is None or len(segments) == 0 else segments, np.int64, ["C", "A"])
    if rows.ndim != 2 or rows.shape[1] != 2:
        raise ValueError(f"segments must be pairs of begin and channels, got an array of shape {list(rows.shape)}")
    form = PayloadFormat(
        n, k, CODINGS[resolve_coding(coding, n, k)], VALUE_DTYPES[value_dtype], address(rows), rows.size // 2
    )
    form.rows = rows
    return form


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(find_library("numpy"))


@functools.cache
def _function(name: str):
    function = getattr(_library(), f"hvd_sparse_{name}")
    function.argtypes, function.restype = [*_signatures[name], ctypes.c_char_p], ctypes.c_int
    return function
