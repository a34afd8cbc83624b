"""Entries of several ranks merged, and the changes of a parameter server. The twin of merge and changes."""

import numpy as np

from hvd_sparse.reference.selection import select_top_k


def add_entries(indices, values, counts) -> tuple[np.ndarray, np.ndarray]:
    """Return each index that occurs, ascending, and the float32 sum of its values, in the order of the parts."""
    found, place = np.unique(indices, return_inverse=True)
    sums, at = np.zeros(found.size, np.float32), 0
    for count in counts:
        part = np.arange(at, at + count)
        if (np.diff(indices[part], prepend=-1) <= 0).any():
            raise ValueError("indices of a part must ascend from 0")
        sums[place[part]] += values[part]
        at += count
    return found, sums


def find_common(indices, others) -> np.ndarray:
    """Return, bool[m], which indices are among others."""
    return np.isin(indices, others)


def select_top_k_of_difference(minuend, subtrahend, k, seed=0):
    """Do `select_top_k` of a difference in float32."""
    with np.errstate(all="ignore"):
        return select_top_k(np.subtract(minuend, subtrahend, dtype=np.float32), k, seed)
