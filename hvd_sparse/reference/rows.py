"""Selection in each row of a matrix, and masked matrices in messages: the twin of row_select and mask.

A matrix is B x f: a row is what a stage says of one sample. NaN comes first here, unlike in a gradient's selection: an
activation that is broken must reach the loss, where one sees it.
"""

import math

import numpy as np

from hvd_sparse.reference.coding import pack, unpack
from hvd_sparse.reference.selection import check_count, hash_index, magnitudes
from hvd_sparse.wire import resolve_coding

SUM_LANES = 16


def _matrix(values) -> np.ndarray:
    """Return values as an array; ValueError unless it is a matrix with at least one column."""
    values = np.asarray(values)
    if values.ndim != 2 or values.shape[1] == 0:
        raise ValueError(f"values must be a matrix with at least one column, got shape {list(values.shape)}")
    return values


def select_top_k_rows(values, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Mask the k entries of largest magnitude of each row, exactly k in every row.

    In order: NaN by lower column; larger magnitude first, equal ones by smaller `hash_index(seed, column)`; zeros by
    lower column. What a row keeps does not depend on the other rows.

    Returns (mask bool[B, f], thresholds float64[B]: the magnitude of the k-th entry, NaN if that is NaN). ValueError
    unless 1 <= k <= f. Source: Dynamic Communication Thresholding, algorithm 2; the cut of ties is ours.
    """
    values = _matrix(values)
    rows, columns = values.shape
    check_count(k, columns)
    magnitude = magnitudes(values).reshape(rows, columns)
    place = np.arange(columns, dtype=np.uint64)
    hashed = hash_index(seed, place)
    mask, thresholds = np.zeros((rows, columns), bool), np.empty(rows)
    for row in range(rows):
        missing = np.isnan(magnitude[row])
        kind = np.where(missing, 0, np.where(magnitude[row] == 0, 2, 1))
        tie = np.where(kind == 1, hashed, place)
        kept = np.lexsort((tie, -np.where(missing, 0.0, magnitude[row]), kind))[:k]
        mask[row, kept] = True
        thresholds[row] = magnitude[row, kept[-1]]
    return mask, thresholds


def laplace_threshold_rows(values, density: float) -> np.ndarray:
    """Return float64[B]: for each row the magnitude that a part `density` of a Laplace distribution reaches.

    That is b * -ln(density), b the mean magnitude of the row, in which NaN and infinities count as zero; 0 for a row of
    zeros. Summed as float64 in 16 lanes, column c in lane c % 16, then lane after lane: the same bits everywhere.
    ValueError unless 0 < density <= 1. Source: Dynamic Communication Thresholding, section 2.2, of mean zero.
    """
    values = _matrix(values)
    if not 0.0 < density <= 1.0:
        raise ValueError(f"density must be in (0, 1], got {density}")
    rows, columns = values.shape
    magnitude = magnitudes(values).reshape(rows, columns)
    padded = np.zeros((rows, -(-columns // SUM_LANES) * SUM_LANES))
    padded[:, :columns] = np.where(np.isfinite(magnitude), magnitude, 0.0)
    lanes = np.zeros((rows, SUM_LANES))
    for start in range(0, padded.shape[1], SUM_LANES):
        lanes += padded[:, start : start + SUM_LANES]
    total = np.zeros(rows)
    for lane in range(SUM_LANES):
        total += lanes[:, lane]
    return total / columns * -math.log(density)


def filter_threshold_rows(values, thresholds) -> np.ndarray:
    """Return a mask, bool[B, f], of NaN and of nonzero elements that reach their row's threshold (as float64).

    thresholds: float64[B], or [1] for all rows. ValueError if one is negative or NaN. Source: Dynamic Communication
    Thresholding, algorithm 2, which selects zeros if the threshold is 0.
    """
    values = _matrix(values)
    thresholds = np.asarray(thresholds, np.float64)
    if thresholds.ndim != 1 or thresholds.size not in (1, values.shape[0]):
        raise ValueError(f"thresholds must have 1 or {values.shape[0]} elements, got shape {list(thresholds.shape)}")
    if not (thresholds >= 0.0).all():
        raise ValueError(f"thresholds must be at least 0, got {thresholds[~(thresholds >= 0.0)][0]}")
    magnitude = magnitudes(values).reshape(values.shape)
    return np.isnan(magnitude) | ((magnitude > 0) & (magnitude >= thresholds[:, None]))


def pack_rows(values, mask, coding: str = "auto") -> np.ndarray:
    """Return the payload, uint8[bytes], of the elements that a mask selects: positions and values of the matrix' type.

    It is a payload of k of n = B * f elements by `pack`; if the mask selects none, an empty one with k = 1.
    """
    values, indices = _matrix(values), np.flatnonzero(mask)
    k, n = max(1, indices.size), values.size
    coding = resolve_coding(coding, n, k)
    kept = _wide(values.reshape(-1)[indices])
    return pack(indices, kept, n, k, coding=coding, value_dtype=values.dtype.name)


def unpack_rows(payload, shape: tuple[int, int], k: int, value_dtype: str, coding: str = "auto"):
    """Return (values float32[B, f], float64 for that type, zero elsewhere; mask bool[B, f]) of a `pack_rows` payload.

    ValueError if the payload is not one of k of B * f entries.
    """
    n = shape[0] * shape[1]
    indices, kept = unpack(payload, n, k, coding=resolve_coding(coding, n, k), value_dtype=value_dtype)
    values, mask = np.zeros(n, kept.dtype), np.zeros(n, bool)
    values[indices], mask[indices] = kept, True
    return values.reshape(shape), mask.reshape(shape)


def pack_kept(values, mask) -> np.ndarray:
    """Return the payload, uint8[bytes], of the values that a mask selects, without positions.

    It is a dense payload of n selected elements; if the mask selects none, an empty one with n = 1.
    """
    kept = _wide(_matrix(values)[np.asarray(mask)])
    n = max(1, kept.size)
    return pack(np.arange(kept.size), kept, n, n, coding="dense", value_dtype=values.dtype.name)


def unpack_kept(payload, mask, value_dtype: str) -> np.ndarray:
    """Return float32[B, f], float64 for that type: the values of a `pack_kept` payload at the mask, zero elsewhere.

    ValueError if the number of values differs from the mask's.
    """
    count = int(np.count_nonzero(mask))
    _, kept = unpack(payload, max(1, count), max(1, count), coding="dense", value_dtype=value_dtype)
    if kept.size != count:
        raise ValueError(f"payload must have as many values as the mask keeps, {count}; got {kept.size}")
    values = np.zeros(np.shape(mask), kept.dtype)
    values[np.asarray(mask)] = kept
    return values


def _wide(values: np.ndarray) -> np.ndarray:
    """Return values as what payloads are packed from: float64 as it is, all others as float32, which is exact."""
    return values if values.dtype == np.float64 else values.astype(np.float32)
