"""The wire format in numbers: constants, and a payload's size as a pure function of (n, k, coding, value_dtype).

A payload has a fixed size, in little-endian bytes, so that ranks need not exchange sizes:

    header 32 | positions | values[k]

    header: u32 magic, u8 version, u8 coding, u8 value dtype, u8 zero, u64 n, u64 entries (k or 0),
            u32 CRC-32 of the payload with this field taken as zero, u32 zero

Values start at a multiple of their item size, the payload ends at a multiple of 8; padding is zero. Positions:

    "run_length"  block counts u16 | bitmap of full blocks, only if k >= 65536 | run lengths u16[k], at a multiple of 2
    "elias_fano"  k times the low bits of an index | upper section, with a bit for each entry; each in whole bytes
    "bitmap"      a bit for each of n elements
    "dense"       nothing: k = n, all elements are sent
    "auto"        the smallest of these for (n, k), the last one of several; never in a header

For run lengths the tensor has blocks of 65,536 elements, so that a 16-bit run of zeros never overflows. Counts are
modulo 65536; the bitmap marks blocks that send every element (count 65536). Bit i of such a section is bit i % 8 of
byte i // 8. Elias-Fano: see `elias_fano_low_bits`.

With the value dtype "none" a payload is a set of indices, without values. The values of "int2" and "int1" start at a
multiple of 4: float32 levels, then codes.

    "int1": one level per group with an entry, in the order of groups; 1 bit per entry, its sign
    "int2": two levels per group, the smaller first; 2 bits per entry: its sign, and whether it has the second level.
            If a group has one magnitude, both levels equal it, and the entries have the first

There is room for the largest number of groups that k entries can be in; unused levels are zero. Code j is at bit
j * bits % 8 of its byte. A group is all n elements, or a channel (column) of a matrix: each row (begin, channels) of
`segments` describes the elements up to the next row's `begin` as a row-major matrix with this number of channels.
`hvd_sparse.reference` packs and unpacks; this module needs neither NumPy nor a framework.

Differences from Deep Gradient Compression (section 3.1), which has 32-bit values and 16-bit run lengths: blocks with
counts (for parallel decoding, without filler entries), a header and a checksum.
"""

import functools
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

from hvd_sparse.checks import checked_density, checked_integer

MAGIC = 0x53445648  # the bytes "HVDS"
VERSION = 1
BLOCK = 65536
HEADER_BYTES = 32
HEADER_FORMAT = "<IBBBBQQII"  # for the struct module
CHECKSUM_OFFSET = 24
PAYLOAD_ALIGNMENT = 8
CODINGS = {"run_length": 0, "dense": 1, "elias_fano": 2, "bitmap": 3}
VALUE_DTYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3, "none": 4, "int2": 5, "int1": 6}
VALUE_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "none": 0}
LOW_BITS = {"int2": 2, "int1": 1}  # bits an entry, and levels a group
LEVEL_BYTES = 4
LEVELS = ("mean", "min")

# (begin, channels) of each segment; an array [segments, 2] will do. None: all elements are one group.
Segments = Sequence[tuple[int, int]] | None


class PayloadLayout(NamedTuple):
    """The coding of a payload, and the byte offsets of its sections.

    counts, bitmap, runs: the sections of run lengths; `bitmap_bytes` is 0 without a bitmap.
    """

    coding: str
    k: int
    blocks: int
    counts: int
    bitmap: int
    bitmap_bytes: int
    runs: int
    values: int
    size: int


def block_count(n: int) -> int:
    """Return the number of blocks of 65,536 elements in n elements (the last one may be short)."""
    return -(-n // BLOCK)


def top_k_count(n: int, density: float) -> int:
    """Return the number of elements to send at a density.

    Args:
        n: Number of elements of the tensor, at least 1.
        density: Part of them to send, in (0, 1].

    Returns:
        k = max(1, min(n, floor(density * n + 0.5))).

    Raises:
        TypeError: `n` is no integer, or `density` no number.
        ValueError: A value is out of range.
    """
    n = checked_integer("n", n, 1)
    return max(1, min(n, math.floor(checked_density("density", density) * n + 0.5)))


def payload_layout(
    n: int, k: int, coding: str = "run_length", value_dtype: str = "float32", segments: Segments = None
) -> PayloadLayout:
    """Return the offsets of the sections of a payload of k of n elements.

    Args:
        n, k, coding, value_dtype, segments: As in `payload_size`.

    Returns:
        The coding, which is not "auto", and the offsets in bytes.

    Raises:
        TypeError: n or k is no integer.
        ValueError: k is not in [1, n], coding or value_dtype is unknown, k is not n though coding is "dense", or the
            segments do not begin at 0, do not ascend below n, or one has less than 1 channel or more than elements.
    """
    n = checked_integer("n", n, 1)
    k = checked_integer("k", k, 1)
    if k > n:
        raise ValueError(f"k must be at most n = {n}, got {k}")
    if coding not in CODINGS and coding != "auto":
        raise ValueError(f"coding must be one of {', '.join(CODINGS)}, auto; got {coding!r}")
    if value_dtype not in VALUE_DTYPES:
        raise ValueError(f"value_dtype must be one of {', '.join(VALUE_DTYPES)}; got {value_dtype!r}")
    if coding == "dense" and k != n:
        raise ValueError(f"k must be n = {n} where all are sent, got {k}")
    coding = resolve_coding(coding, n, k)
    bitmap = HEADER_BYTES + 2 * block_count(n)
    bitmap_bytes = -(-block_count(n) // 8) if k >= BLOCK else 0
    runs = round_up(bitmap + bitmap_bytes, 2)
    alignment, length = _values_form(n, k, value_dtype, segments)
    values = round_up(HEADER_BYTES + positions_size(coding, n, k), alignment)
    size = round_up(values + length, PAYLOAD_ALIGNMENT)
    return PayloadLayout(coding, k, block_count(n), HEADER_BYTES, bitmap, bitmap_bytes, runs, values, size)


def largest_payload(
    n: int, k: int, coding: str = "run_length", value_dtype: str = "float32", segments: Segments = None
) -> int:
    """Return an upper bound for payloads of up to k of n elements.

    A payload grows with its entries, except for the padding of its sections, and except that with "auto" a payload of
    all elements has no positions: with fewer, they take up to a bit for each element.

    Args:
        n, k, coding, value_dtype, segments: As in `payload_size`.

    Returns:
        The size in bytes, a multiple of 8.

    Raises:
        TypeError: n or k is no integer.
        ValueError: A value is out of range or unknown, or the segments do not fit.
    """
    bitmap = round_up(-(-n // 8), PAYLOAD_ALIGNMENT) if coding == "auto" and k == n else 0
    return payload_size(n, k, coding, value_dtype, segments) + bitmap + 8 * PAYLOAD_ALIGNMENT


def positions_size(coding: str, n: int, k: int) -> int:
    """Return the bytes of the positions of k of n elements, before padding. coding: not "auto"."""
    if coding == "run_length":
        bitmap_bytes = -(-block_count(n) // 8) if k >= BLOCK else 0
        return round_up(2 * block_count(n) + bitmap_bytes, 2) + 2 * k
    if coding == "elias_fano":
        low = elias_fano_low_bits(n, k)
        return -(-k * low // 8) + -(-(((n - 1) >> low) + k) // 8)
    return -(-n // 8) if coding == "bitmap" else 0


@functools.lru_cache(maxsize=4096)
def elias_fano_low_bits(n: int, k: int) -> int:
    """Return the smallest number of low bits that minimizes the code's length, k * low + ((n - 1) >> low) + k bits."""
    return min(range((n - 1).bit_length() + 1), key=lambda low: k * low + ((n - 1) >> low))


def resolve_coding(coding: str, n: int, k: int) -> str:
    """Return the coding that "auto" stands for; other codings unchanged.

    "auto" is "dense" if k = n; else the smaller one of "bitmap" and "elias_fano", "bitmap" if they are equal.
    """
    if coding != "auto":
        return coding
    if k == n:
        return "dense"
    return min(("bitmap", "elias_fano"), key=lambda one: positions_size(one, n, k))  # run lengths are longer always


def _values_form(n: int, k: int, value_dtype: str, segments: Segments) -> tuple[int, int]:
    """Return the alignment of the values' section, and its size in bytes."""
    if value_dtype not in LOW_BITS:
        return max(1, VALUE_BYTES[value_dtype]), VALUE_BYTES[value_dtype] * k
    bits, groups = LOW_BITS[value_dtype], group_count(segments, n)
    return LEVEL_BYTES, bits * LEVEL_BYTES * min(k, groups) + -(-bits * k // 8)


def group_count(segments: Segments, n: int) -> int:
    """Return the number of groups in n elements, the sum of the segments' channels; ValueError unless they fit n."""
    if segments is None or len(segments) == 0:
        return 1
    begins = [int(begin) for begin, _ in segments]
    channels = [int(number) for _, number in segments]
    for number, begin, end in zip(channels, begins, [*begins[1:], n], strict=True):
        if begins[0] != 0 or not 1 <= number <= end - begin:
            raise ValueError(f"segments: from {begin} to {end} of n = {n} elements, there cannot be {number} channels")
    return sum(channels)


def payload_size(
    n: int, k: int, coding: str = "run_length", value_dtype: str = "float32", segments: Segments = None
) -> int:
    """Return the size of a payload, which is the same on every rank.

    Args:
        n: Number of elements of the tensor, at least 1.
        k: Number of entries of the payload, from 1 to n.
        coding: Coding of positions: "run_length", "elias_fano", "bitmap", "auto", or with k = n "dense".
        value_dtype: Type of the values: "float32", "float64", "float16", "bfloat16", "int2", "int1", or "none".
        segments: The groups that share the levels of "int2" and "int1", (begin, channels) each; None: one group.

    Returns:
        The size in bytes, a multiple of 8.

    Raises:
        TypeError: `n` or `k` is no integer.
        ValueError: A value is out of range or unknown, or the segments do not fit.
    """
    return payload_layout(n, k, coding, value_dtype, segments).size


def entries_of(payload, n: int) -> int:
    """Return the number of entries of a payload, from its header.

    Args:
        payload: uint8[bytes], or bytes.
        n: Number of elements of the tensor.

    Returns:
        The number of entries, 0 if it was packed without.

    Raises:
        ValueError: The header is incomplete, or has more than n entries.
    """
    header = bytes(payload[:HEADER_BYTES])
    if len(header) < HEADER_BYTES:
        raise ValueError(f"payload is cut off: {len(header)} bytes, a header has {HEADER_BYTES}")
    entries = struct.unpack(HEADER_FORMAT, header)[6]
    if entries > n:
        raise ValueError(f"payload entries are {entries}, of n = {n} elements")
    return entries


def compression_ratio(n: int, k: int, coding: str = "run_length", value_dtype: str = "float32") -> float:
    """Return by what factor a payload is smaller than the dense tensor (Deep Gradient Compression, section 4).

    Args:
        n: Number of elements of the tensor, at least 1.
        k: Number of entries of the payload, from 1 to n.
        coding: Coding of positions, as in `payload_size`.
        value_dtype: Type of the values, as in `payload_size`.

    Returns:
        The bytes of n float32 / the bytes of the payload.

    Raises:
        TypeError: `n` or `k` is no integer.
        ValueError: A value is out of range or unknown.
    """
    return 4.0 * n / payload_size(n, k, coding, value_dtype)


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple
