"""The wire format in numbers: constants, and a payload's size as a pure function of (n, k, coding, value_dtype).

A payload is a fixed-size run of little-endian bytes, so that every rank knows every size without asking:

    header 32 | positions | values[k]

    header: u32 magic, u8 version, u8 coding, u8 value dtype, u8 zero, u64 n, u64 entries (k or 0),
            u32 CRC-32 of the payload with this field taken as zero, u32 zero

Values start at a multiple of their item size, the payload ends at a multiple of 8; padding is zero. Positions:

    "run_length"  block counts u16 | bitmap of full blocks, only if k >= 65536 | run lengths u16[k], at a multiple of 2
    "elias_fano"  k times the low bits of an index | upper section, with a bit for each entry; each in whole bytes
    "bitmap"      a bit for each of n elements
    "dense"       nothing: k = n, all elements are sent
    "auto"        the smallest of these for (n, k), the last one where there are several; never in a header

For run lengths the tensor is cut into blocks of 65,536 elements, so a 16-bit run of zeros never overflows. Counts
are sent modulo 65536; a block of which every element is sent (count 65536) is marked in the bitmap. Bit i of any such
section is bit i % 8 of byte i // 8. Elias-Fano: see `elias_fano_low_bits`.

With the value dtype "none" there are no values: a payload is a set of indices. The values of "int2" and "int1" start at
a multiple of 4: float32 levels, then codes.

    "int1": a level for each group that holds an entry, in the order of groups; 1 bit an entry, its sign
    "int2": two levels for each, the smaller first; 2 bits an entry: its sign, and whether it has the second level.
            Where a group has one magnitude, both levels are that, and the entries have the first

There is room for as many groups as k entries could meet; the rest is zero. Code j is at bit j * bits % 8 of its byte. A
group is all n elements, or a channel (column) of a matrix: `segments`, rows (begin, channels), say that elements from
`begin` to the next row's are a matrix of so many channels, row after row.
`hvd_sparse.reference` packs and unpacks; this module needs neither NumPy nor a framework.

Difference from Deep Gradient Compression (section 3.1), which names 32-bit values and 16-bit run lengths and no more:
blocks with counts (for parallel decoding and no filler entries), a header and a checksum.
"""

import functools
import math
import numbers
import operator
import struct
from collections.abc import Sequence
from typing import NamedTuple

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


Segments = (
    Sequence[tuple[int, int]] | None
)  # (begin, channels) of each; an array [segments, 2] will do; None: one group


class PayloadLayout(NamedTuple):
    """The coding, and byte offsets of a payload's sections, from its start.

    counts, bitmap, runs: those of run lengths; `bitmap_bytes` is 0 where there is no bitmap.
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
    """Return how many blocks of 65,536 elements hold n elements (the last one may be short)."""
    return -(-n // BLOCK)


def top_k_count(n: int, density: float) -> int:
    """Return k, the number of entries sent of n at this density: max(1, min(n, floor(density * n + 0.5))).

    Raises ValueError unless n is an integer of at least 1 and density in (0, 1]; TypeError if density is no number.
    """
    n = checked_integer("n", n, 1)
    return max(1, min(n, math.floor(checked_density("density", density) * n + 0.5)))


def payload_layout(
    n: int, k: int, coding: str = "run_length", value_dtype: str = "float32", segments: Segments = None
) -> PayloadLayout:
    """Return where each section of a payload of k of n entries lies.

    Raises ValueError unless 1 <= k <= n, coding and value_dtype are known ones, k = n if coding is "dense", and the
    segments begin at 0, ascend below n, and have 1 to as many channels as elements.
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
    """Return a size in bytes, a multiple of 8, that no payload of up to k of n entries exceeds.

    A payload grows with its entries, but for what aligns its sections.
    """
    return payload_size(n, k, coding, value_dtype, segments) + 8 * PAYLOAD_ALIGNMENT


def positions_size(coding: str, n: int, k: int) -> int:
    """Return the bytes that the positions of k of n entries take."""
    if coding == "run_length":
        bitmap_bytes = -(-block_count(n) // 8) if k >= BLOCK else 0
        return round_up(2 * block_count(n) + bitmap_bytes, 2) + 2 * k
    if coding == "elias_fano":
        low = elias_fano_low_bits(n, k)
        return -(-k * low // 8) + -(-(((n - 1) >> low) + k) // 8)
    return -(-n // 8) if coding == "bitmap" else 0


@functools.lru_cache(maxsize=4096)
def elias_fano_low_bits(n: int, k: int) -> int:
    """Return how many low bits make the code of k of n shortest, k * low + ((n - 1) >> low) + k bits: the fewest."""
    return min(range((n - 1).bit_length() + 1), key=lambda low: k * low + ((n - 1) >> low))


def resolve_coding(coding: str, n: int, k: int) -> str:
    """Return the coding that "auto" stands for; others as they are."""
    if coding != "auto":
        return coding
    if k == n:
        return "dense"
    return min(("bitmap", "elias_fano"), key=lambda one: positions_size(one, n, k))  # run lengths are longer always


def _values_form(n: int, k: int, value_dtype: str, segments: Segments) -> tuple[int, int]:
    """Return what the offset of the values is a multiple of, and their bytes."""
    if value_dtype not in LOW_BITS:
        return max(1, VALUE_BYTES[value_dtype]), VALUE_BYTES[value_dtype] * k
    bits, groups = LOW_BITS[value_dtype], group_count(segments, n)
    return LEVEL_BYTES, bits * LEVEL_BYTES * min(k, groups) + -(-bits * k // 8)


def group_count(segments: Segments, n: int) -> int:
    """Return how many groups n elements have; ValueError, as above, for segments that do not fit."""
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
    """Return the bytes of a payload of k of n entries: a multiple of 8, the same on every rank.

    Raises ValueError as `payload_layout` does.
    """
    return payload_layout(n, k, coding, value_dtype, segments).size


def entries_of(payload, n: int) -> int:
    """Return how many entries a payload has, by its header alone; payload: uint8[bytes], of at most n elements.

    Raises ValueError if it ends before, or if there are more than n.
    """
    header = bytes(payload[:HEADER_BYTES])
    if len(header) < HEADER_BYTES:
        raise ValueError(f"payload is cut off: {len(header)} bytes, a header has {HEADER_BYTES}")
    entries = struct.unpack(HEADER_FORMAT, header)[6]
    if entries > n:
        raise ValueError(f"payload entries are {entries}, of n = {n} elements")
    return entries


def compression_ratio(n: int, k: int, coding: str = "run_length", value_dtype: str = "float32") -> float:
    """Return the bytes of n float32 over the bytes of the payload (the ratio of Deep Gradient Compression, section 4).

    Raises ValueError as `payload_layout` does.
    """
    return 4.0 * n / payload_size(n, k, coding, value_dtype)


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple


def checked_integer(name: str, value: int, least: int) -> int:
    """Return value as an int; ValueError naming the argument if it is no integer, a bool, or below `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return number


def checked_density(name: str, value: float) -> float:
    """Return value as a float in (0, 1]; ValueError if out of it or NaN, TypeError if a bool or no number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number in (0, 1], got {value!r} of type {type(value).__name__}")
    number = float(value)
    if not 0.0 < number <= 1.0:
        raise ValueError(f"{name} must be in (0, 1], got {number!r}")
    return number
