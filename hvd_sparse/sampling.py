"""Random choices that are equal on every rank and in both frameworks: by a hash of seed and index.

The native functions draw in the same way.
"""

import numpy as np


def hash_index(seed: int, index) -> np.ndarray:
    """Return a well-mixed uint64 for each index: the finaliser of splitmix64 of seed * 0x9E3779B97F4A7C15 + index.

    All arithmetic is modulo 2**64, the seed too (it may be negative). For one seed no two indices share a hash.
    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    start = (int(seed) * 0x9E3779B97F4A7C15) % 2**64
    with np.errstate(over="ignore"):
        z = np.asarray(index).astype(np.uint64) + np.uint64(start)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def signed(seed: int) -> int:
    """Return a seed modulo 2**64 as a signed integer of 64 bits, the type that the operators take."""
    return (seed + 2**63) % 2**64 - 2**63


def stratified_sample(n: int, size: int, seed: int) -> np.ndarray:
    """Return one index, int64[size] ascending, from each of `size` equal strata of range(n), chosen by hash.

    Stratum j covers [j * n // size, (j + 1) * n // size). Needs 1 <= size <= n and n * size below 2**63.
    """
    stratum = np.arange(size, dtype=np.int64)
    start = stratum * n // size
    length = (stratum + 1) * n // size - start
    return start + (hash_index(seed, stratum) % length.astype(np.uint64)).astype(np.int64)
