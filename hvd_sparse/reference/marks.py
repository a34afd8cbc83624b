"""Elements that updates changed, as bitmaps: bit i % 64 of word i // 64. The twin of marks."""

import zlib

import numpy as np

from hvd_sparse.reference.changes import select_top_k_of_difference
from hvd_sparse.reference.coding import pack
from hvd_sparse.wire import BLOCK


def marked_indices(marks, n) -> np.ndarray:
    """Return the ascending indices of the marks."""
    return np.flatnonzero(np.unpackbits(marks.astype("<u8").view(np.uint8), bitorder="little")[:n])


def marks_of(indices, n) -> np.ndarray:
    """Return the marks of these indices."""
    flags = np.zeros(-(-n // 64) * 64, np.uint8)
    flags[indices] = 1
    return np.packbits(flags, bitorder="little").view("<u8").astype(np.uint64)


def apply_update(parameters, indices, values) -> tuple[np.ndarray, np.ndarray]:
    """Subtract values from parameters, in place; return counts of blocks, and places in these."""
    parameters[indices] -= values
    blocks = -(-parameters.size // BLOCK)
    return np.bincount(indices // BLOCK, minlength=blocks).astype(np.uint32), (indices % BLOCK).astype(np.uint16)


def changed_indices(counts, places) -> np.ndarray:
    """Return the ascending indices of what an update changed."""
    return np.repeat(np.arange(counts.size), counts) * BLOCK + places


def set_clocks(changed, clocks, clock) -> None:
    """Set the clocks of what an update changed, in place."""
    clocks[changed_indices(*changed)] = clock


def mark_updates(updates, n, marks) -> int:
    """Mark what updates changed, in place; return how many marks there are."""
    found = [marked_indices(marks, n)]
    found += [changed_indices(counts, places) for counts, places in updates]
    indices = np.unique(np.concatenate(found))
    marks[:] = marks_of(indices, n)
    return indices.size


def mark_changed_after(clocks, clock, marks) -> int:
    """Mark the clocks that are above a clock, in place; return how many there are."""
    indices = np.flatnonzero(clocks > clock)
    marks[:] = marks_of(indices, clocks.size)
    return indices.size


def pack_marked(marks, values, k, coding) -> np.ndarray:
    """Return the payload of the marked values."""
    indices = marked_indices(marks, values.size)
    return pack(indices, values[indices], values.size, k, coding)


def sealed_crc(payload) -> int:
    """Return the CRC-32 of a payload."""
    return zlib.crc32(payload)


def select_marked(minuend, subtrahend, marks, k, part, seed, floor):
    """Return indices, differences, how many reach the floor, the next floor, and whether there is NaN; change marks."""
    begin, end = part
    chosen = marked_indices(marks, minuend.size)
    chosen = chosen[(begin <= chosen) & (chosen < end)]
    with np.errstate(all="ignore"):
        differences = minuend[chosen] - subtrahend[chosen]
        magnitudes = np.abs(differences).astype(np.float64)
    below, reaching = magnitudes < floor, magnitudes >= floor
    marks[:] = marks_of(np.setdiff1d(marked_indices(marks, minuend.size), chosen[below]), minuend.size)
    found, values = chosen[reaching], differences[reaching]
    if reaching.sum() > 2 * k:
        floor = np.sort(magnitudes[reaching])[-(k + k // 2)]
    if found.size > k:  # among the others, which are zero, so that each has the hash of its index
        whole = np.zeros(end - begin, np.float32)
        whole[found - begin] = values
        found = begin + select_top_k_of_difference(whole, np.zeros_like(whole), k, seed)[0]
        values = whole[found - begin]
    return found - begin, values, int(reaching.sum()), float(floor), bool(np.isnan(magnitudes).any())


def add_marked(subtrahend, minuend, marks, indices, values, floor) -> None:
    """Add values, in place, and take away the marks where the difference is then below the floor."""
    with np.errstate(all="ignore"):
        subtrahend[indices] += values
        below = np.abs(minuend[indices] - subtrahend[indices]).astype(np.float64) < floor
    n = minuend.size
    marks[:] = marks_of(np.setdiff1d(marked_indices(marks, n), indices[below]), n)
