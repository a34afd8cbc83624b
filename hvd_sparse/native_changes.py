"""Calls into the native functions that merge entries of several ranks, and find changes for a parameter server.

On NumPy arrays, without any framework, as `hvd_sparse.native`; every function has a twin of the same name in
`hvd_sparse.reference`. Indices are int64, values float32, clocks uint32.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hvd_sparse.checks import checked_integer
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
)
from hvd_sparse.threshold import SMALLEST
from hvd_sparse.wire import BLOCK, HEADER_BYTES, payload_size

MOST_CLOCK = 2**32 - 1  # clocks are uint32

declare(
    {
        "add_entries": [POINTER, POINTER, POINTER, SIZE, POINTER, POINTER, POINTER],
        "find_common": [POINTER, SIZE, POINTER, SIZE, POINTER],
        "apply_update": [POINTER, POINTER, SIZE, POINTER, SIZE, POINTER, POINTER],
        "set_clocks": [POINTER, POINTER, SIZE, ctypes.c_uint32, POINTER],
        "mark_updates": [POINTER, POINTER, SIZE, SIZE, POINTER, POINTER],
        "mark_changed_after": [POINTER, SIZE, ctypes.c_uint32, POINTER, POINTER],
        "pack_marked": [POINTER, POINTER, POINTER, POINTER],
        "sealed_crc": [POINTER, SIZE, POINTER],
        "select_marked": [
            *[POINTER, POINTER, SIZE, SIZE, SIZE, ctypes.c_uint64, ctypes.c_double],
            *[POINTER, POINTER, POINTER, POINTER],
        ],
        "add_marked": [POINTER, POINTER, SIZE, POINTER, ctypes.c_double, SIZE, POINTER, POINTER],
        "select_top_k_of_difference": [
            *[POINTER, POINTER, SIZE, SIZE, ctypes.c_uint64, ctypes.c_double, POINTER, POINTER]
        ],
    }
)


def add_entries(indices: np.ndarray, values: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Add entries of several parts, in the order of the parts.

    Args:
        indices: int64[m], those of one part after the other; in each they ascend from 0.
        values: float32[m].
        counts: int64[parts], how many entries each has.

    Returns:
        Each index that occurs, ascending, int64[found], and the sum of its values, float32[found].

    Raises:
        ValueError: An array has another type or size, counts do not add up to m, or indices of a part do not ascend.
    """
    m = checked("indices", indices, np.int64).size
    checked("values", values, np.float32, m)
    _check_parts(counts, m)
    found, sums, many = np.empty(m, np.int64), np.empty(m, np.float32), ctypes.c_int64()
    given = [address(array) for array in (indices, values, counts)]
    call("add_entries", *given, counts.size, address(found), address(sums), ctypes.byref(many))
    return found[: many.value], sums[: many.value]


def find_common(indices: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Find out which indices are among others.

    Args:
        indices: int64[m], ascending.
        others: int64[any number], ascending.

    Returns:
        bool[m].

    Raises:
        ValueError: An array has another type. The order is not checked.
    """
    m, many = checked("indices", indices, np.int64).size, checked("others", others, np.int64).size
    common = np.empty(m, bool)
    call("find_common", address(indices), m, address(others), many, address(common))
    return common


class Changed(NamedTuple):
    """What an update changed: how many elements of each block of 65,536, uint32[blocks], their places in it, uint16."""

    counts: np.ndarray
    places: np.ndarray


class Marked(NamedTuple):
    """What `select_marked` found. indices: int64, ascending, counted from the start of the part; values: differences.

    reaching: how many reach the floor. floor: the floor for the next call: the old one, or, if more than 2k elements
    reached it, the magnitude that 3k/2 elements reach. has_nan: a marked difference is NaN.
    """

    indices: np.ndarray
    values: np.ndarray
    reaching: int
    floor: float
    has_nan: bool


def make_marks(n: int) -> np.ndarray:
    """Return marks of n elements, uint64[(n + 63) // 64], none of which is marked: bit i % 64 of word i // 64."""
    return np.zeros(-(-n // 64), np.uint64)


def set_marks(marks: np.ndarray, indices: np.ndarray) -> None:
    """Mark elements, in place. marks: see `make_marks`; indices: int64[m]."""
    places = indices.astype(np.uint64)
    np.bitwise_or.at(marks, places >> np.uint64(6), np.uint64(1) << (places & np.uint64(63)))


def apply_update(parameters: np.ndarray, indices: np.ndarray, values: np.ndarray) -> Changed:
    """Subtract values from parameters at ascending indices, in place.

    Args:
        parameters: float32[n], changed.
        indices: int64[m], strictly ascending in [0, n).
        values: float32[m].

    Returns:
        The changed elements, for `set_clocks` and `mark_updates`.

    Raises:
        ValueError: An array has another type or size or is read-only, or indices do not ascend in [0, n).
    """
    n = checked("parameters", parameters, np.float32).size
    check_changed("parameters", parameters, n)
    m = checked("indices", indices, np.int64).size
    checked("values", values, np.float32, m)
    changed = Changed(np.empty(-(-n // BLOCK), np.uint32), np.empty(m, np.uint16))
    given = (address(indices), address(values), m, address(parameters), n)
    call("apply_update", *given, *map(address, changed))
    return changed


def set_clocks(changed: Changed, clocks: np.ndarray, clock: int) -> None:
    """Set the clocks of what an update changed, in place.

    Args:
        changed: A result of `apply_update` for n parameters.
        clocks: uint32[n], changed.
        clock: The new clock, in [0, 2^32).

    Returns:
        None.

    Raises:
        ValueError: An array has another type or size or is read-only, a place is not below n, or the clock is out of
            range.
        TypeError: The clock is no integer.
    """
    check_changed("clocks", clocks, dtype=np.uint32)
    n = clocks.size
    _check_update(changed, n)
    clock = checked_integer("clock", clock, 0, MOST_CLOCK)
    call("set_clocks", *map(address, changed), n, clock, address(clocks))


def mark_updates(updates: Sequence[Changed], n: int, marks: np.ndarray) -> int:
    """Mark what updates of n elements changed, beside what is marked already.

    Args:
        updates: Results of `apply_update` for n parameters.
        n: Number of elements.
        marks: uint64[(n + 63) // 64], changed; see `make_marks`.

    Returns:
        How many marks there are.

    Raises:
        ValueError: An array has another type or size or is read-only, or a place is not below n. Then nothing is
            marked.
    """
    _check_marks(marks, n)
    for update in updates:
        _check_update(update, n)
    counts, places = (np.array([address(update[which]) for update in updates], np.uint64) for which in (0, 1))
    marked = ctypes.c_int64()
    given = (address(counts), address(places), len(updates), n)
    call("mark_updates", *given, address(marks), ctypes.byref(marked))
    return marked.value


def mark_changed_after(clocks: np.ndarray, clock: int, marks: np.ndarray) -> int:
    """Mark the clocks that are above a clock, and nothing else.

    Args:
        clocks: uint32[n].
        clock: In [0, 2^32).
        marks: uint64[(n + 63) // 64], changed.

    Returns:
        How many marks there are.

    Raises:
        ValueError: An array has another type or size or is read-only, or the clock is out of range.
        TypeError: The clock is no integer.
    """
    n, marked = checked("clocks", clocks, np.uint32).size, ctypes.c_int64()
    clock = checked_integer("clock", clock, 0, MOST_CLOCK)
    _check_marks(marks, n)
    call("mark_changed_after", address(clocks), n, clock, address(marks), ctypes.byref(marked))
    return marked.value


def pack_marked(marks: np.ndarray, values: np.ndarray, k: int, coding: str, payload: np.ndarray) -> None:
    """Write the payload of the values that are marked: that of `native.pack`.

    Args:
        marks: uint64[(n + 63) // 64].
        values: float32[n].
        k: Number of marks, at least 1.
        coding: As in `native.pack`.
        payload: uint8[payload_size], written.

    Returns:
        None.

    Raises:
        ValueError: An array has another type or size, the payload or the marks are read-only, k is not the number of
            marks, an element from n on is marked, or the coding is unknown.
        TypeError: k is no integer.
    """
    n = checked("values", values, np.float32).size
    _check_marks(marks, n)
    check_changed("payload", payload, payload_size(n, k, coding), np.uint8)
    form = make_form(n, k, coding, "float32", None)
    call("pack_marked", ctypes.byref(form), address(values), address(marks), address(payload))


def sealed_crc(payload: np.ndarray) -> int:
    """Return the CRC-32 of a payload, uint8[payload_size], that was just packed, from its checksum."""
    size, found = checked("payload", payload, np.uint8).size, ctypes.c_uint32()
    if size < HEADER_BYTES:
        raise ValueError(f"payload must have at least {HEADER_BYTES} bytes, got {size}")
    call("sealed_crc", address(payload), size, ctypes.byref(found))
    return found.value


def select_marked(
    minuend: np.ndarray,
    subtrahend: np.ndarray,
    marks: np.ndarray,
    k: int,
    part: tuple[int, int] | None = None,
    seed: int = 0,
    floor: float = SMALLEST,
) -> Marked:
    """Select among marked elements the k largest of minuend - subtrahend that reach a floor.

    All of them if there are fewer. Takes away the marks of numbers below the floor. If at least k reach it, and all
    that do are marked, the result is that of `select_top_k_of_difference`.

    Args:
        minuend: float32[n].
        subtrahend: float32[n].
        marks: uint64[(n + 63) // 64], changed in place.
        k: How many, from 1 to the size of the part.
        part: Elements [begin, end) to look at; None: all.
        seed: Breaks ties.
        floor: A magnitude above 0.

    Returns:
        The selected indices and differences, and numbers for the next selection: see `Marked`.

    Raises:
        ValueError: An array has another type or size, the marks are read-only, or k, the part or the floor is out of
            range.
    """
    n = checked("minuend", minuend, np.float32).size
    checked("subtrahend", subtrahend, np.float32, n)
    _check_marks(marks, n)
    begin, end = part or (0, n)
    if not 0 <= begin <= end <= n:
        raise ValueError(f"part must lie in [0, {n}), got {part}")
    check_count(k, end - begin)
    indices, values, info = np.empty(k, np.int64), np.empty(k, np.float32), np.empty(4)
    given = (address(minuend), address(subtrahend), begin, end, k, seed, floor)
    call("select_marked", *given, *map(address, (marks, indices, values, info)))
    count = int(info[0])
    return Marked(indices[:count], values[:count], int(info[1]), float(info[2]), bool(info[3]))


def add_marked(
    subtrahend: np.ndarray,
    minuend: np.ndarray,
    marks: np.ndarray,
    indices: np.ndarray,
    values: np.ndarray,
    floor: float = SMALLEST,
) -> None:
    """Add values to subtrahend at indices; take away the marks where minuend - subtrahend is then below the floor.

    Args:
        subtrahend: float32[n], changed.
        minuend: float32[n].
        marks: uint64[(n + 63) // 64], changed.
        indices: int64[m], in [0, n).
        values: float32[m].
        floor: A magnitude above 0.

    Returns:
        None.

    Raises:
        ValueError: An array has another type or size or is read-only, or an index or the floor is out of range. Then
            nothing has changed.
    """
    n = checked("minuend", minuend, np.float32).size
    check_changed("subtrahend", subtrahend, n)
    _check_marks(marks, n)
    m = checked("indices", indices, np.int64).size
    checked("values", values, np.float32, m)
    given = (address(indices), address(values), m, address(minuend), floor, n)
    call("add_marked", *given, address(subtrahend), address(marks))


def select_top_k_of_difference(
    minuend: np.ndarray, subtrahend: np.ndarray, k: int, seed: int = 0, threshold_hint: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Do `native.select_top_k` of minuend - subtrahend, without keeping the difference.

    Args:
        minuend: float32[n].
        subtrahend: float32[n].
        k, seed, threshold_hint: As in `native.select_top_k`.

    Returns:
        As `native.select_top_k`: indices, int64[k]; the differences there, float32[k]; and its two numbers, float64[2].

    Raises:
        ValueError: k is out of range, or an array has another type or size.
    """
    n = checked("minuend", minuend, np.float32).size
    checked("subtrahend", subtrahend, np.float32, n)
    check_count(k, n)
    indices, info = np.empty(k, np.int64), np.empty(2)
    given = (address(minuend), address(subtrahend), n, k, seed, threshold_hint)
    call("select_top_k_of_difference", *given, address(indices), address(info))
    return indices, subtract(minuend[indices], subtrahend[indices]), info


def subtract(minuend: np.ndarray, subtrahend: np.ndarray) -> np.ndarray:
    """Return the difference of arrays as the core has it: what overflows is infinite or NaN, without a warning.

    Whoever receives such a difference refuses it: the training has diverged.

    Args:
        minuend: float32[n].
        subtrahend: float32[n].

    Returns:
        float32[n].

    Raises:
        ValueError: The sizes do not fit together.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return minuend - subtrahend


def _check_update(update: Changed, n: int) -> None:
    checked("counts", update.counts, np.uint32, -(-n // BLOCK))
    checked("places", update.places, np.uint16, int(update.counts.sum(dtype=np.int64)))


def _check_marks(marks: np.ndarray, n: int) -> None:
    check_changed("marks", marks, -(-n // 64), np.uint64)


def _check_parts(counts: np.ndarray, m: int) -> None:
    if (checked("counts", counts, np.int64) < 0).any() or counts.sum() != m:
        raise ValueError(f"counts must add up to the number of entries, {m}, got {counts.tolist()}")
