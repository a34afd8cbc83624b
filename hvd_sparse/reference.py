"""The plain NumPy twin of every native function: the specification in runnable form, and the oracle of the tests.

Clear rather than fast. Every function takes arrays of any shape in row-major order, as the flattened gradient, and
leaves its inputs unchanged. Value types: float32, float64, float16, and ml_dtypes.bfloat16 where the caller has it.

Magnitude order, the total order behind "the k largest": larger |x| first (infinity is the largest); equal non-zero
magnitudes by smaller `hash_index(seed, index)`, so that ties are cut without favour to any position; then zeros, then
NaN, each by lower index.

Differences from Deep Gradient Compression: the cut is exactly k and unbiased (the paper leaves ties open), sampling is
stratified, and the wire format adds blocks, a header and a checksum (see `hvd_sparse.wire`).
"""

import math
import struct
import zlib

import numpy as np

from hvd_sparse.wire import (
    BLOCK,
    CHECKSUM_OFFSET,
    CODINGS,
    HEADER_BYTES,
    HEADER_FORMAT,
    MAGIC,
    VALUE_DTYPES,
    VERSION,
    block_count,
    payload_layout,
)

SCALAR_TYPES = ("float32", "float64", "float16", "bfloat16")
FLOAT16_MAX = np.float32(65504.0)
BFLOAT16_MAX_BITS = np.uint32(0x7F7F)
MIN_SAMPLE = 1024


def flatten(values) -> np.ndarray:
    """Return values as a one-dimensional array; ValueError unless it is of one of the four value types."""
    values = np.asarray(values)
    if values.dtype.name not in SCALAR_TYPES:
        raise ValueError(f"values must be of dtype {', '.join(SCALAR_TYPES)}; got {values.dtype.name}")
    return values.reshape(-1)


def magnitudes(values) -> np.ndarray:
    """Return |values| as float64[n], exact for all four types; NaN stays NaN. ValueError for another dtype."""
    values = flatten(values)
    if values.dtype.name != "float64":
        values = values.astype(np.float32)
    return np.abs(values.astype(np.float64))


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


def magnitude_order(values, seed: int = 0) -> np.ndarray:
    """Return the indices, int64[n], of values from first to last in magnitude order (see the module docstring)."""
    magnitude = magnitudes(values)
    missing = np.isnan(magnitude)
    kind = np.where(missing, 2, np.where(magnitude == 0, 1, 0))
    magnitude[missing] = 0.0
    position = np.arange(magnitude.size, dtype=np.uint64)
    tie = np.where(kind == 0, hash_index(seed, position), position)
    return np.lexsort((tie, -magnitude, kind)).astype(np.int64)


def check_count(k: int, n: int) -> None:
    """Raise ValueError unless 1 <= k <= n."""
    if not 1 <= k <= n:
        raise ValueError(f"k must be between 1 and the number of values, {n}; got {k}")


def select_top_k(values, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, float]:
    """Select exactly k entries, the first k in magnitude order.

    Returns (indices int64[k] ascending, values[indices] in the type of values, threshold). The threshold is the
    magnitude of the k-th entry, 0.0 if that is a zero or NaN. ValueError unless 1 <= k <= n (so for n = 0 always).
    Source: Deep Gradient Compression, algorithm 1; the unbiased cut is ours.
    """
    values = flatten(values)
    check_count(k, values.size)
    order = magnitude_order(values, seed)[:k]
    last = float(magnitudes(values[order[-1:]])[0])
    indices = np.sort(order)
    return indices, values[indices], 0.0 if math.isnan(last) else last


def filter_threshold(values, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Select every entry with |value| >= threshold, compared exactly (both as float64); NaN never passes.

    Returns (indices int64 ascending, values[indices] in the type of values). ValueError if the threshold is negative
    or NaN. Source: Dynamic Communication Thresholding, algorithm 1 (data parallel).
    """
    values = flatten(values)
    if not threshold >= 0.0:
        raise ValueError(f"threshold must be at least 0, got {threshold}")
    indices = np.flatnonzero(magnitudes(values) >= np.float64(threshold)).astype(np.int64)
    return indices, values[indices]


def sample_size(n: int, k: int, sample_fraction: float) -> int:
    """Return how many of n values a sampled threshold looks at: enough for about 32 of the k largest, 1024 or more."""
    return min(n, max(math.ceil(sample_fraction * n), -(-32 * n // k), MIN_SAMPLE))


def stratified_sample(n: int, size: int, seed: int) -> np.ndarray:
    """Return one index, int64[size] ascending, from each of `size` equal strata of range(n), chosen by hash.

    Stratum j covers [j * n // size, (j + 1) * n // size). Needs 1 <= size <= n and n * size below 2**63.
    """
    stratum = np.arange(size, dtype=np.int64)
    start = stratum * n // size
    length = (stratum + 1) * n // size - start
    return start + (hash_index(seed, stratum) % length.astype(np.uint64)).astype(np.int64)


def select_threshold(values, k: int, method: str = "exact", sample_fraction: float = 0.005, seed: int = 0) -> float:
    """Return a magnitude that about k values reach ("sampled"), or the k-th largest magnitude itself ("exact").

    NaN counts as 0. Sampled: the r-th largest of a stratified sample of s values, r = k * s / n rounded half up, at
    least 1; where the sample would be half of the values or more, exact. ValueError unless 1 <= k <= n, the method is
    one of the two and sample_fraction is in (0, 1]. Source: Deep Gradient Compression, section 5 (hierarchical
    sampling; the exact second stage is `select_top_k`).
    """
    values = flatten(values)
    n = values.size
    check_count(k, n)
    if method not in ("exact", "sampled"):
        raise ValueError(f'method must be "exact" or "sampled", got {method!r}')
    if not 0.0 < sample_fraction <= 1.0:
        raise ValueError(f"sample_fraction must be in (0, 1], got {sample_fraction}")
    rank = k
    size = sample_size(n, k, sample_fraction)
    if method == "sampled" and 2 * size < n:
        values = values[stratified_sample(n, size, seed)]
        rank = max(1, (2 * k * size + n) // (2 * n))
    magnitude = magnitudes(values)
    magnitude[np.isnan(magnitude)] = 0.0
    return float(np.sort(magnitude)[-rank])


def all_finite(values) -> bool:
    """Return whether every value, converted to float32, is finite: False for float64 1e300. True for no values."""
    with np.errstate(over="ignore"):
        return bool(np.isfinite(flatten(values).astype(np.float32)).all())


def encode_run_length(indices, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Encode positions as the number of entries of each block and the run of zeros before each entry.

    indices: integers[k], strictly ascending in [0, n). Returns (counts uint32[blocks], runs uint16[k]), blocks =
    ceil(n / 65536); a run counts from the entry before, or from the block's start. ValueError for other indices.
    Source: Deep Gradient Compression, section 3.1 (16-bit run lengths); the blocks are ours.
    """
    indices = np.asarray(indices).reshape(-1)
    if indices.size == 0:
        return np.zeros(block_count(n), np.uint32), np.zeros(0, np.uint16)
    if indices.dtype.kind not in "iu":
        raise ValueError(f"indices must be integers, got dtype {indices.dtype.name}")
    indices = indices.astype(np.int64)
    if indices[0] < 0 or indices[-1] >= n or (np.diff(indices) <= 0).any():
        raise ValueError(f"indices must be strictly ascending in [0, {n})")
    block = indices // BLOCK
    previous = np.maximum(np.concatenate(([-1], indices[:-1])), block * BLOCK - 1)
    counts = np.bincount(block, minlength=block_count(n)).astype(np.uint32)
    return counts, (indices - previous - 1).astype(np.uint16)


def decode_run_length(counts, runs, n: int) -> np.ndarray:
    """Return the indices, int64[k] ascending, that `encode_run_length` encoded.

    counts: integers[ceil(n / 65536)]; runs: uint16[k]. ValueError if there is not one count a block, if the counts do
    not sum to k, if a count is negative or above its block's length, or if a run leaves its block.
    """
    counts = np.asarray(counts).astype(np.int64).reshape(-1)
    runs = np.asarray(runs)
    if runs.dtype != np.uint16:
        raise ValueError(f"runs must be of dtype uint16, got {runs.dtype.name}")
    steps = runs.reshape(-1).astype(np.int64) + 1
    start = np.arange(block_count(n), dtype=np.int64) * BLOCK
    if counts.size != start.size:
        raise ValueError(f"counts must have one entry for each of {start.size} blocks, got {counts.size}")
    end = np.minimum(start + BLOCK, n)
    if (counts < 0).any() or (counts > end - start).any():
        raise ValueError("counts: a count is above its block's length, or negative")
    if counts.sum() != steps.size:
        raise ValueError(f"counts must sum to the number of runs, {steps.size}; got {counts.sum()}")
    travelled = np.cumsum(steps)
    before_block = np.concatenate(([0], travelled))[np.cumsum(counts) - counts]
    indices = travelled - 1 + np.repeat(start - before_block, counts)
    if (indices >= np.repeat(end, counts)).any():
        raise ValueError("runs: a run leaves its block")
    return indices


def encode_values(values, value_dtype: str) -> np.ndarray:
    """Return values as they travel: little-endian float32, float64 or float16, or uint16 holding bfloat16 bits.

    Values are converted to float32 first (not for float64), then rounded to nearest even. A finite value beyond the
    largest finite float16 or bfloat16 becomes that, with its sign; infinity and NaN stay what they are.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        values = flatten(values).astype("<f8" if value_dtype == "float64" else "<f4")
    if value_dtype in ("float32", "float64"):
        return values
    finite = np.isfinite(values)
    if value_dtype == "float16":
        return np.where(finite, np.clip(values, -FLOAT16_MAX, FLOAT16_MAX), values).astype("<f2")
    bits = values.view("<u4")
    sign, magnitude = bits >> 31 << 15, bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFF + (magnitude >> 16 & 1)) >> 16
    rounded = np.where(finite, np.minimum(rounded, BFLOAT16_MAX_BITS), np.where(np.isnan(values), 0x7FC0, 0x7F80))
    return (sign | rounded).astype("<u2")


def decode_values(encoded: np.ndarray, value_dtype: str) -> np.ndarray:
    """Return what `encode_values` made as float32, or float64 for float64; exact."""
    if value_dtype == "bfloat16":
        return (encoded.astype(np.uint32) << 16).view(np.float32)
    return encoded.astype(np.float64 if value_dtype == "float64" else np.float32)


def quantize(values, value_dtype: str = "float32") -> np.ndarray:
    """Return what of float32[n] values survives the wire, as float32[n]; the rest belongs in the residual.

    Rounding is that of `encode_values`; float32 and float64 change nothing. ValueError for another value_dtype or
    other values. Source: after Gradient Dropping, section 5.4 (fewer bits for what survives; 1 there, 16 here).
    """
    values = flatten(values)
    if values.dtype != np.float32:
        raise ValueError(f"values must be of dtype float32, got {values.dtype.name}")
    payload_layout(1, 1, value_dtype=value_dtype)
    return decode_values(encode_values(values, value_dtype), value_dtype).astype(np.float32)


def checksum(payload: np.ndarray) -> int:
    """Return the CRC-32 (zlib's) of a payload, uint8[size], with its checksum field taken as zero."""
    payload = payload.copy()
    payload[CHECKSUM_OFFSET : CHECKSUM_OFFSET + 4] = 0
    return zlib.crc32(payload.tobytes())


def pack(indices, values, n: int, k: int, coding: str = "run_length", value_dtype: str = "float32") -> np.ndarray:
    """Pack k entries, or none, into a payload: uint8[payload_size(n, k, coding, value_dtype)].

    indices: integers[k or 0], strictly ascending in [0, n); values: as many, of any value type. No entries make an
    empty contribution of the same size: all zero after the header. ValueError for other arguments. The layout is in
    `hvd_sparse.wire`. Source: Deep Gradient Compression, section 3.1, `encode()`.
    """
    layout = payload_layout(n, k, coding, value_dtype)
    indices, values = np.asarray(indices).reshape(-1), flatten(values)
    entries = indices.size
    if entries not in (0, k):
        raise ValueError(f"indices must hold k = {k} entries or none, got {entries}")
    if values.size != entries:
        raise ValueError(f"values must hold as many entries as indices, {entries}; got {values.size}")
    counts, runs = encode_run_length(indices, n)
    payload = np.zeros(layout.size, np.uint8)

    def place(offset: int, section: np.ndarray) -> None:
        """Write a section's bytes into the payload."""
        data = np.frombuffer(section.tobytes(), np.uint8)
        payload[offset : offset + data.size] = data

    place(layout.counts, (counts % BLOCK).astype("<u2"))
    if layout.bitmap_bytes:
        place(layout.bitmap, np.packbits(counts == BLOCK, bitorder="little"))
    place(layout.runs, runs.astype("<u2"))
    place(layout.values, encode_values(values, value_dtype))
    header = (MAGIC, VERSION, CODINGS[coding], VALUE_DTYPES[value_dtype], 0, n, entries)
    struct.pack_into(HEADER_FORMAT, payload, 0, *header, 0, 0)
    struct.pack_into(HEADER_FORMAT, payload, 0, *header, checksum(payload), 0)
    return payload


def check_header(payload: np.ndarray, n: int, k: int, coding: str, value_dtype: str) -> int:
    """Return the number of entries, k or 0, of a payload; ValueError if its size, header or checksum is wrong."""
    size = payload_layout(n, k, coding, value_dtype).size
    if payload.dtype != np.uint8 or payload.ndim != 1:
        raise ValueError(f"payload must be uint8 of one dimension, got {payload.dtype.name} of {payload.ndim}")
    if payload.size != size:
        raise ValueError(f"payload: wrong size, {payload.size} bytes; expected {size}")
    header = struct.unpack(HEADER_FORMAT, payload[:HEADER_BYTES].tobytes())
    magic, version, coding_code, dtype_code, reserved, length, entries, crc, reserved_end = header
    expectations = (
        ("magic", magic, MAGIC),
        ("version", version, VERSION),
        ("coding", coding_code, CODINGS[coding]),
        ("value dtype", dtype_code, VALUE_DTYPES[value_dtype]),
        ("reserved bytes", reserved | reserved_end, 0),
        ("n", length, n),
    )
    for name, found, expected in expectations:
        if found != expected:
            raise ValueError(f"payload: wrong {name}, {found}; expected {expected}")
    if entries not in (0, k):
        raise ValueError(f"payload: wrong entries, {entries}; expected {k} or 0")
    if crc != checksum(payload):
        raise ValueError(f"payload: wrong checksum, {crc:#010x}; expected {checksum(payload):#010x}")
    return entries


def unpack(
    payload, n: int, k: int, coding: str = "run_length", value_dtype: str = "float32"
) -> tuple[np.ndarray, np.ndarray]:
    """Validate a payload, uint8[payload_size(...)], and return its entries.

    Returns (indices int64[k or 0] ascending, values float32, or float64 where that is the value dtype). ValueError,
    naming what is wrong, for a payload of another size, magic, version, coding, dtype, n or number of entries, with
    reserved bytes that are not zero, a wrong checksum, counts that do not add up or exceed a block, or a run that
    leaves its block. Bytes of padding are covered by the checksum and otherwise ignored.
    """
    payload = np.ascontiguousarray(payload)
    entries = check_header(payload, n, k, coding, value_dtype)
    layout = payload_layout(n, k, coding, value_dtype)
    counts = payload[layout.counts : layout.bitmap].view("<u2").astype(np.int64)
    if layout.bitmap_bytes:
        bitmap = payload[layout.bitmap : layout.bitmap + layout.bitmap_bytes]
        counts += BLOCK * np.unpackbits(bitmap, count=layout.blocks, bitorder="little").astype(np.int64)
    runs = np.frombuffer(payload.tobytes(), "<u2", entries, layout.runs)
    wire_type = {"float32": "<f4", "float64": "<f8"}.get(value_dtype, "<f2" if value_dtype == "float16" else "<u2")
    encoded = np.frombuffer(payload.tobytes(), wire_type, entries, layout.values)
    return decode_run_length(counts, runs.astype(np.uint16), n), decode_values(encoded, value_dtype)


def reduce_payloads(
    gathered,
    offset: int,
    n: int,
    k: int,
    coding: str = "run_length",
    value_dtype: str = "float32",
    scale: float = 1.0,
) -> np.ndarray:
    """Sum the payloads of all ranks, in rank order, into float32[n], so that every rank has the same bits.

    gathered: uint8[ranks, row_bytes]; the payload of rank r is row r from byte `offset` on. Per rank:
    out[index] += float32(scale) * float32(value), product and sum each rounded to float32. ValueError if a payload
    does not fit in its row, or as `unpack` raises.
    """
    gathered = np.asarray(gathered)
    size = payload_layout(n, k, coding, value_dtype).size
    if gathered.dtype != np.uint8 or gathered.ndim != 2:
        raise ValueError(f"gathered must be uint8 of two dimensions, got {gathered.dtype.name} of {gathered.ndim}")
    if not 0 <= offset <= gathered.shape[1] - size:
        raise ValueError(f"offset must leave {size} bytes in a row of {gathered.shape[1]}, got {offset}")
    out = np.zeros(n, np.float32)
    for rank, row in enumerate(gathered):
        try:
            indices, values = unpack(row[offset : offset + size], n, k, coding, value_dtype)
        except ValueError as error:
            raise ValueError(f"rank {rank}: {error}") from error
        with np.errstate(over="ignore", invalid="ignore"):
            out[indices] += np.float32(scale) * values.astype(np.float32)
    return out
