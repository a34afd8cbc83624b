"""Positions as Elias-Fano codes and bitmaps: the twin of elias_fano and positions."""

import numpy as np

from hvd_sparse.wire import elias_fano_low_bits


def encode_elias_fano(indices, n: int) -> np.ndarray:
    """Return the bytes, uint8, of strictly ascending indices, integers[k] of [0, n): low bits, then the upper section.

    Each index is cut into `elias_fano_low_bits(n, k)` low bits, stored one after the other, and the rest: bit
    (index >> low) + j of the upper section is set for entry j. Both are padded to whole bytes; bit i is bit i % 8 of
    byte i // 8. Source: Elias (1974) and Fano (1971), "quasi-succinct" indices.
    """
    indices = np.asarray(indices, np.int64).reshape(-1)
    k = indices.size
    low = elias_fano_low_bits(n, k)
    lower = (indices[:, None] >> np.arange(low)) & 1
    upper = np.zeros(((n - 1) >> low) + k, np.uint8)
    upper[(indices >> low) + np.arange(k)] = 1
    packed = [np.packbits(bits.reshape(-1).astype(np.uint8), bitorder="little") for bits in (lower, upper)]
    return np.concatenate(packed)


def decode_elias_fano(section, k: int, n: int) -> np.ndarray:
    """Return the indices, int64[k], that `encode_elias_fano` encoded; ValueError unless they ascend in [0, n)."""
    section = np.asarray(section, np.uint8).reshape(-1)
    low = elias_fano_low_bits(n, k)
    start = -(-k * low // 8)
    positions = _find_bits(section[start:], ((n - 1) >> low) + k, k)
    lower = np.unpackbits(section[:start], count=k * low, bitorder="little").reshape(k, low).astype(np.int64)
    indices = ((positions - np.arange(k)) << low) + (lower << np.arange(low)).sum(1)
    if (np.diff(indices, prepend=-1) <= 0).any() or (indices >= n).any():
        raise ValueError(f"payload positions must ascend in [0, {n})")
    return indices


def encode_bitmap(indices, n: int) -> np.ndarray:
    """Return ceil(n / 8) bytes, uint8, in which bit i % 8 of byte i // 8 tells whether index i is among the indices."""
    bits = np.zeros(n, np.uint8)
    bits[np.asarray(indices, np.int64)] = 1
    return np.packbits(bits, bitorder="little")


def decode_bitmap(section, k: int, n: int) -> np.ndarray:
    """Return the indices, int64[k], that `encode_bitmap` encoded; ValueError unless there are k, all below n."""
    return _find_bits(np.asarray(section, np.uint8).reshape(-1), n, k)


def _find_bits(section: np.ndarray, bits: int, k: int) -> np.ndarray:
    positions = np.flatnonzero(np.unpackbits(section, bitorder="little"))
    if positions.size != k or (positions >= bits).any():
        raise ValueError(f"payload positions: {positions.size} bits are set, expected {k} of the first {bits}")
    return positions.astype(np.int64)
