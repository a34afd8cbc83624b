"""The wire format in numbers: constants, and a payload's size as a pure function of (n, k, coding, value_dtype).

A payload is a fixed-size run of little-endian bytes, so that every rank knows every size without asking:

    header 32 | block counts u16 | bitmap of full blocks, only if k >= 65536 | run lengths u16[k] | values[k]

    header: u32 magic, u8 version, u8 coding, u8 value dtype, u8 zero, u64 n, u64 entries (k or 0),
            u32 CRC-32 of the payload with this field taken as zero, u32 zero

Runs start at a multiple of 2 bytes, values at a multiple of their item size, the payload ends at a multiple of 8;
padding is zero. The tensor is cut into blocks of 65,536 elements, so a 16-bit run of zeros never overflows. Counts
travel modulo 65536; a block of which every element is sent (count 65536) is marked in the bitmap, bit b % 8 of byte
b // 8. With the value dtype "none" there are no values: a payload is a set of indices.
`hvd_sparse.reference` packs and unpacks; this module needs neither NumPy nor a framework.

Difference from Deep Gradient Compression (section 3.1), which names 32-bit values and 16-bit run lengths and no more:
blocks with counts (for parallel decoding and no filler entries), a header and a checksum.
"""

import math
import numbers
import operator
from typing import NamedTuple

MAGIC = 0x53445648  # the bytes "HVDS"
VERSION = 1
BLOCK = 65536
HEADER_BYTES = 32
HEADER_FORMAT = "<IBBBBQQII"  # for the struct module
CHECKSUM_OFFSET = 24
PAYLOAD_ALIGNMENT = 8
CODINGS = {"run_length": 0}
VALUE_DTYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3, "none": 4}  # none: indices alone
VALUE_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "none": 0}


class Layout(NamedTuple):
    """Byte offsets of a payload's sections, from its start; `bitmap_bytes` is 0 where there is no bitmap."""

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


def payload_layout(n: int, k: int, coding: str = "run_length", value_dtype: str = "float32") -> Layout:
    """Return where each section of a payload of k of n entries lies.

    Raises ValueError unless 1 <= k <= n and coding and value_dtype are known ones.
    """
    n = checked_integer("n", n, 1)
    k = checked_integer("k", k, 1)
    if k > n:
        raise ValueError(f"k must be at most n = {n}, got {k}")
    if coding not in CODINGS:
        raise ValueError(f"coding must be one of {', '.join(CODINGS)}; got {coding!r}")
    if value_dtype not in VALUE_DTYPES:
        raise ValueError(f"value_dtype must be one of {', '.join(VALUE_DTYPES)}; got {value_dtype!r}")
    item = VALUE_BYTES[value_dtype]
    blocks = block_count(n)
    bitmap = HEADER_BYTES + 2 * blocks
    bitmap_bytes = -(-blocks // 8) if k >= BLOCK else 0
    runs = round_up(bitmap + bitmap_bytes, 2)
    values = round_up(runs + 2 * k, max(1, item))
    return Layout(
        blocks=blocks,
        counts=HEADER_BYTES,
        bitmap=bitmap,
        bitmap_bytes=bitmap_bytes,
        runs=runs,
        values=values,
        size=round_up(values + item * k, PAYLOAD_ALIGNMENT),
    )


def payload_size(n: int, k: int, coding: str = "run_length", value_dtype: str = "float32") -> int:
    """Return the bytes of a payload of k of n entries: a multiple of 8, the same on every rank.

    Raises ValueError as `payload_layout` does.
    """
    return payload_layout(n, k, coding, value_dtype).size


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
