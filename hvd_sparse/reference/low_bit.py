"""Values of 2 bits or 1, and their shared levels: the twin of low_bit."""

import numpy as np

from hvd_sparse.granularity import group_of
from hvd_sparse.reference.selection import flatten
from hvd_sparse.wire import LEVEL_BYTES, LEVELS, LOW_BITS, Segments, group_count

MOST_ELEMENTS = 1 << 48
CHUNK = 512


def slots_of(indices, segments: Segments) -> tuple[np.ndarray, int]:
    """Number the groups that hold any of the indices, in their order; return that of each, int64[k], and how many."""
    groups, slots = np.unique(group_of(indices, segments), return_inverse=True)
    return slots.reshape(-1).astype(np.int64), groups.size


def quantize_low_bit(values, value_dtype: str, level: str = "mean", indices=None, segments=None) -> np.ndarray:
    """Return float32[k] values as they will be decoded: signs, and their group's one ("int1") or two ("int2") levels.

    level: "mean" of the magnitudes, or "min", the smallest. "int2" has one for magnitudes below the group's mean and
    one for the others. Zeros count in none and take the smaller. Means are summed in float64: CHUNK entries of a group
    in order, then these sums in order. ValueError for another level, or indices that do not ascend from 0.
    Source: Gradient Dropping, section 5.4; two levels after its conclusion (small and large values).
    """
    values = flatten(values)
    single = segments is None or len(segments) == 0
    if not single and indices is None:
        raise ValueError("segments need the indices")
    group_count(segments, MOST_ELEMENTS)  # refuses segments that fit nothing
    indices = np.arange(values.size) if single else np.asarray(indices, np.int64).reshape(-1)
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(map(repr, LEVELS))}; got {level!r}")
    if indices.size != values.size or (np.diff(indices, prepend=-1) <= 0).any():
        raise ValueError(f"indices must ascend from 0, one a value; got {indices.size} for {values.size} values")
    slots, count = slots_of(indices, segments)
    magnitudes = np.abs(values).astype(np.float64)
    classes = 2 * slots
    if value_dtype == "int2":
        classes += magnitudes >= _means(slots, slots, magnitudes, count)[slots]
    if level == "mean":
        levels = _means(classes, slots, magnitudes, 2 * count)
    else:
        levels = np.full(2 * count, np.inf)
        np.minimum.at(levels, classes[magnitudes > 0], magnitudes[magnitudes > 0])
        levels[~np.isin(np.arange(2 * count), classes[magnitudes > 0])] = 0.0
    return np.copysign(levels[classes].astype(np.float32), values)


def _means(classes: np.ndarray, slots: np.ndarray, magnitudes: np.ndarray, count: int) -> np.ndarray:
    """Return the mean of the nonzero magnitudes in each class; 0.0 for an empty class."""
    order = np.argsort(slots, kind="stable")
    in_order = slots[order]
    chunks = np.empty(slots.size, np.int64)  # which chunk of its group an entry is in
    chunks[order] = (np.arange(slots.size) - np.searchsorted(in_order, in_order)) // CHUNK
    parts, part_of = np.unique(np.stack([classes, chunks]), axis=1, return_inverse=True)
    part_sums = np.bincount(part_of.reshape(-1), weights=magnitudes)
    sums = np.bincount(parts[0], weights=part_sums, minlength=count)
    counts = np.bincount(classes[magnitudes > 0], minlength=count)
    return np.divide(sums, counts, out=np.zeros(count), where=counts > 0)


def encode_low_bit(values, indices, n: int, value_dtype: str, segments: Segments) -> bytes:
    """Return levels and codes, as `hvd_sparse.wire` has them, of what `quantize_low_bit` gave; else ValueError."""
    values, bits = flatten(values).astype(np.float32), LOW_BITS[value_dtype]
    slots, count = slots_of(indices, segments)
    magnitudes = np.abs(values)
    levels = np.zeros((min(values.size, group_count(segments, n)), bits), "<f4")
    levels[:count, 0] = np.inf
    np.minimum.at(levels[:, 0], slots, magnitudes)
    if bits == 2:
        np.maximum.at(levels[:, 1], slots, magnitudes)
    is_large = magnitudes != levels[slots, 0]
    if (magnitudes != np.where(is_large, levels[slots, bits - 1], magnitudes)).any():
        raise ValueError("values have more magnitudes in a group than their type; quantize them first")
    codes = np.stack([np.signbit(values), is_large], axis=1)[:, :bits]
    return levels.tobytes() + np.packbits(codes.reshape(-1), bitorder="little").tobytes()


def decode_low_bit(section: bytes, indices, n: int, value_dtype: str, segments: Segments) -> np.ndarray:
    """Return the values, float32[k], of a section that `encode_low_bit` made for k = len(indices) entries."""
    bits, k = LOW_BITS[value_dtype], len(indices)
    room = bits * min(k, group_count(segments, n))
    levels = np.abs(np.frombuffer(section, "<f4", room)).reshape(-1, bits)
    codes = np.frombuffer(section, np.uint8, -(-bits * k // 8), LEVEL_BYTES * room)
    codes = np.unpackbits(codes, count=bits * k, bitorder="little").reshape(k, bits)
    slots, _ = slots_of(indices, segments)
    magnitudes = levels[slots, codes[:, 1] if bits == 2 else 0]
    return np.where(codes[:, 0] == 1, -magnitudes, magnitudes).astype(np.float32)
