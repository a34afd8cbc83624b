"""Calls into the native functions that merge entries of several ranks, and find changes for a parameter server.

On NumPy arrays, without any framework, as `hvd_sparse.native`; every function has a twin of the same name in
`hvd_sparse.reference`. Indices are int64, values float32, clocks uint32.
"""

import ctypes

import numpy as np

from hvd_sparse.native import _ARGUMENTS, _POINTER, _SIZE, _address, _call, _check_changed, _check_count, _checked

_ARGUMENTS.update(
    {
        "add_entries": [_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _POINTER],
        "find_common": [_POINTER, _SIZE, _POINTER, _SIZE, _POINTER],
        "apply_update": [_POINTER, _POINTER, _SIZE, ctypes.c_uint32, _POINTER, _POINTER, _SIZE],
        "changed_after": [_POINTER, _SIZE, ctypes.c_uint32, _POINTER, _POINTER],
        "select_top_k_of_difference": [
            *[_POINTER, _POINTER, _SIZE, _SIZE, ctypes.c_uint64, ctypes.c_double, _POINTER, _POINTER]
        ],
    }
)


def add_entries(indices: np.ndarray, values: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Add entries of several parts, in the order of the parts.

    Args:
        indices: int64[m], those of one part after the other; in each they ascend from 0.
        values: float32[m].
        counts: int64[parts], how many entries each has.

    Returns each index that occurs, ascending, and the sum of its values.
    """
    m = _checked("indices", indices, np.int64).size
    _checked("values", values, np.float32, m)
    _check_parts(counts, m)
    found, sums, many = np.empty(m, np.int64), np.empty(m, np.float32), ctypes.c_int64()
    given = [_address(array) for array in (indices, values, counts)]
    _call("add_entries", *given, counts.size, _address(found), _address(sums), ctypes.byref(many))
    return found[: many.value], sums[: many.value]


def find_common(indices: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return, bool[m], which indices, int64[m], are among others; both ascend."""
    m, many = _checked("indices", indices, np.int64).size, _checked("others", others, np.int64).size
    common = np.empty(m, bool)
    _call("find_common", _address(indices), m, _address(others), many, _address(common))
    return common


def unite(indices: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return each index that occurs in several parts, ascending; arguments as of `add_entries`."""
    m = _checked("indices", indices, np.int64).size
    _check_parts(counts, m)
    found, many = np.empty(m, np.int64), ctypes.c_int64()
    _call(
        "add_entries",
        *(_address(indices), None, _address(counts), counts.size, _address(found), None, ctypes.byref(many)),
    )
    return found[: many.value]


def apply_update(
    parameters: np.ndarray, clocks: np.ndarray, indices: np.ndarray, values: np.ndarray, clock: int
) -> None:
    """Subtract values from parameters at these indices, and set the clocks there, all in place."""
    n = _checked("parameters", parameters, np.float32).size
    _check_changed("parameters", parameters, n)
    _checked("clocks", clocks, np.uint32, n)
    m = _checked("indices", indices, np.int64).size
    _checked("values", values, np.float32, m)
    given = (_address(indices), _address(values), m, clock)
    _call("apply_update", *given, _address(parameters), _address(clocks), n)


def changed_after(clocks: np.ndarray, clock: int) -> np.ndarray:
    """Return the ascending indices of the clocks, uint32[n], that are above a clock."""
    n, many = _checked("clocks", clocks, np.uint32).size, ctypes.c_int64()
    indices = np.empty(n, np.int64)  # of which memory only what is written takes any
    _call("changed_after", _address(clocks), n, clock, _address(indices), ctypes.byref(many))
    return indices[: many.value].copy()


def select_top_k_of_difference(
    minuend: np.ndarray, subtrahend: np.ndarray, k: int, seed: int = 0, threshold_hint: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Do `select_top_k` of minuend - subtrahend, float32[n] both, without keeping the difference."""
    n = _checked("minuend", minuend, np.float32).size
    _checked("subtrahend", subtrahend, np.float32, n)
    _check_count(k, n)
    indices, info = np.empty(k, np.int64), np.empty(2)
    given = (_address(minuend), _address(subtrahend), n, k, seed, threshold_hint)
    _call("select_top_k_of_difference", *given, _address(indices), _address(info))
    return indices, minuend[indices] - subtrahend[indices], info


def _check_parts(counts: np.ndarray, m: int) -> None:
    if (_checked("counts", counts, np.int64) < 0).any() or counts.sum() != m:
        raise ValueError(f"counts must add up to the number of entries, {m}, got {counts.tolist()}")
