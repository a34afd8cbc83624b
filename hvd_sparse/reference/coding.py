"""Run lengths, values and payloads: the twin of run_length, quantize, payload and reduce."""

import struct
import zlib

import numpy as np

from hvd_sparse.reference.low_bit import decode_low_bit, encode_low_bit, quantize_low_bit
from hvd_sparse.reference.positions import decode_bitmap, decode_elias_fano, encode_bitmap, encode_elias_fano
from hvd_sparse.reference.selection import flatten
from hvd_sparse.wire import (
    BLOCK,
    CHECKSUM_OFFSET,
    CODINGS,
    HEADER_BYTES,
    HEADER_FORMAT,
    LOW_BITS,
    MAGIC,
    VALUE_DTYPES,
    VERSION,
    PayloadLayout,
    Segments,
    block_count,
    payload_layout,
    payload_size,
    positions_size,
)

FLOAT16_MAX = np.float32(65504.0)
BFLOAT16_MAX_BITS = np.uint32(0x7F7F)


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
    steps_so_far = np.cumsum(steps)
    before_block = np.concatenate(([0], steps_so_far))[np.cumsum(counts) - counts]
    indices = steps_so_far - 1 + np.repeat(start - before_block, counts)
    if (indices >= np.repeat(end, counts)).any():
        raise ValueError("runs: a run leaves its block")
    return indices


def encode_values(values, value_dtype: str) -> np.ndarray:
    """Return values as they are sent: little-endian float32, float64 or float16, or uint16 holding bfloat16 bits.

    Values are converted to float32 first (not for float64), then rounded to nearest even. A finite value beyond the
    largest finite float16 or bfloat16 becomes that, with its sign; infinity stays what it is, and so does NaN, of whose
    bits the sign alone is kept. "none": void.
    """
    if value_dtype == "none":
        return np.zeros(flatten(values).size, "V0")
    with np.errstate(over="ignore", invalid="ignore"):
        values = flatten(values).astype("<f8" if value_dtype == "float64" else "<f4")
    if value_dtype in ("float32", "float64"):
        return values
    finite = np.isfinite(values)
    if value_dtype == "float16":
        with np.errstate(invalid="ignore"):
            halves = np.where(finite, np.clip(values, -FLOAT16_MAX, FLOAT16_MAX), values).astype("<f2")
        return np.where(np.isnan(values), np.copysign(np.float16(np.nan), halves), halves).astype("<f2")
    bits = values.view("<u4")
    sign, magnitude = bits >> 31 << 15, bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFF + (magnitude >> 16 & 1)) >> 16
    rounded = np.where(finite, np.minimum(rounded, BFLOAT16_MAX_BITS), np.where(np.isnan(values), 0x7FC0, 0x7F80))
    return (sign | rounded).astype("<u2")


def decode_values(encoded: np.ndarray, value_dtype: str) -> np.ndarray:
    """Decode the result of `encode_values` exactly: float64 for float64, else float32; zeros for "none"."""
    if value_dtype == "none":
        return np.zeros(encoded.size, np.float32)
    if value_dtype == "bfloat16":
        return (encoded.astype(np.uint32) << 16).view(np.float32)
    return encoded.astype(np.float64 if value_dtype == "float64" else np.float32)


def quantize(
    values, value_dtype: str = "float32", level: str = "mean", indices=None, segments: Segments = None
) -> np.ndarray:
    """Return what of float32[n] values survives the wire, as float32[n]; the rest belongs in the residual.

    Rounding is that of `encode_values`; float32 and float64 change nothing. "int2" and "int1" are `quantize_low_bit`'s,
    which alone looks at the other arguments. ValueError for another value_dtype or other values.
    Source: Gradient Dropping, section 5.4 (fewer bits for what survives).
    """
    values = flatten(values)
    if values.dtype != np.float32:
        raise ValueError(f"values must be of dtype float32, got {values.dtype.name}")
    payload_layout(1, 1, value_dtype=value_dtype)
    if value_dtype in LOW_BITS:
        return quantize_low_bit(values, value_dtype, level, indices, segments)
    return decode_values(encode_values(values, value_dtype), value_dtype).astype(np.float32)


def checksum(payload: np.ndarray) -> int:
    """Return the CRC-32 (zlib's) of a payload, uint8[size], with its checksum field taken as zero."""
    payload = payload.copy()
    payload[CHECKSUM_OFFSET : CHECKSUM_OFFSET + 4] = 0
    return zlib.crc32(payload.tobytes())


def unpack_payloads(payloads, ns, ks, coding="run_length"):
    """Return the entries of consecutive payloads of float32. Indices count through all payloads."""
    indices, values, at, begin = [np.empty(0, np.int64)], [np.empty(0, np.float32)], 0, 0
    for n, k in zip(ns, ks, strict=True):
        size = payload_size(n, k, coding)
        own = unpack(payloads[at : at + size], n, k, coding)
        indices.append(own[0] + begin)
        values.append(own[1])
        at, begin = at + size, begin + n
    return np.concatenate(indices), np.concatenate(values)


def pack(
    indices,
    values,
    n: int,
    k: int,
    coding: str = "run_length",
    value_dtype: str = "float32",
    segments: Segments = None,
) -> np.ndarray:
    """Pack k entries, or none, into a payload: uint8[payload_size(n, k, coding, value_dtype, segments)].

    indices: integers[k or 0], strictly ascending in [0, n); values: as many, of any value type; for "int2" and "int1"
    what `quantize` gave. No entries make an empty contribution of the same size: all zero after the header. ValueError
    for other arguments. The layout is in `hvd_sparse.wire`. Source: Deep Gradient Compression, section 3.1, `encode()`.
    """
    layout = payload_layout(n, k, coding, value_dtype, segments)
    indices, values = np.asarray(indices).reshape(-1), flatten(values)
    entries = indices.size
    if entries not in (0, k):
        raise ValueError(f"indices must hold k = {k} entries or none, got {entries}")
    if values.size != entries:
        raise ValueError(f"values must hold as many entries as indices, {entries}; got {values.size}")
    counts, runs = encode_run_length(indices, n)
    payload = np.zeros(layout.size, np.uint8)

    def place(offset: int, section: bytes) -> None:
        """Write a section into the payload."""
        payload[offset : offset + len(section)] = np.frombuffer(section, np.uint8)

    if layout.coding == "run_length":
        place(layout.counts, (counts % BLOCK).astype("<u2").tobytes())
        place(layout.runs, runs.astype("<u2").tobytes())
        if layout.bitmap_bytes:
            place(layout.bitmap, np.packbits(counts == BLOCK, bitorder="little").tobytes())
    elif entries and layout.coding in ("elias_fano", "bitmap"):
        encode = encode_elias_fano if layout.coding == "elias_fano" else encode_bitmap
        place(HEADER_BYTES, encode(indices, n).tobytes())
    if value_dtype not in LOW_BITS:
        place(layout.values, encode_values(values, value_dtype).tobytes())
    elif entries:
        place(layout.values, encode_low_bit(values, indices, n, value_dtype, segments))
    header = (MAGIC, VERSION, CODINGS[layout.coding], VALUE_DTYPES[value_dtype], 0, n, entries)
    struct.pack_into(HEADER_FORMAT, payload, 0, *header, 0, 0)
    struct.pack_into(HEADER_FORMAT, payload, 0, *header, checksum(payload), 0)
    return payload


def check_header(payload: np.ndarray, n: int, k: int, coding: str, value_dtype: str, size: int) -> int:
    """Return the number of entries, k or 0, of a payload; ValueError if its size, header or checksum is wrong."""
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
    payload, n: int, k: int, coding: str = "run_length", value_dtype: str = "float32", segments: Segments = None
) -> tuple[np.ndarray, np.ndarray]:
    """Validate a payload, uint8[payload_size(...)], and return its entries.

    Returns (indices int64[k or 0] ascending, values float32, or float64 where that is the value dtype). ValueError,
    naming what is wrong, for a payload of another size, magic, version, coding, dtype, n or number of entries, with
    reserved bytes that are not zero, a wrong checksum, counts that do not add up or exceed a block, or a run that
    leaves its block. Bytes of padding are covered by the checksum and otherwise ignored.
    """
    payload = np.ascontiguousarray(payload)
    layout = payload_layout(n, k, coding, value_dtype, segments)
    entries = check_header(payload, n, k, layout.coding, value_dtype, layout.size)
    indices = _read_positions(payload, n, entries, layout)
    if value_dtype == "none":
        return indices, np.zeros(entries, np.float32)
    if value_dtype in LOW_BITS:
        return indices, decode_low_bit(payload[layout.values :].tobytes(), indices, n, value_dtype, segments)
    wire_type = {"float32": "<f4", "float64": "<f8"}.get(value_dtype, "<f2" if value_dtype == "float16" else "<u2")
    encoded = np.frombuffer(payload.tobytes(), wire_type, entries, layout.values)
    return indices, decode_values(encoded, value_dtype)


def _read_positions(payload: np.ndarray, n: int, entries: int, layout: PayloadLayout) -> np.ndarray:
    if layout.coding != "run_length":
        section = payload[HEADER_BYTES : HEADER_BYTES + positions_size(layout.coding, n, layout.k)]
        if not entries and section.any():
            raise ValueError("payload positions: there are some, but no entries")
        if layout.coding == "dense" or not entries:
            return np.arange(entries)
        return (decode_elias_fano if layout.coding == "elias_fano" else decode_bitmap)(section, entries, n)
    counts = payload[layout.counts : layout.bitmap].view("<u2").astype(np.int64)
    if layout.bitmap_bytes:
        bitmap = payload[layout.bitmap : layout.bitmap + layout.bitmap_bytes]
        counts += BLOCK * np.unpackbits(bitmap, count=layout.blocks, bitorder="little").astype(np.int64)
    runs = np.frombuffer(payload.tobytes(), "<u2", entries, layout.runs)
    return decode_run_length(counts, runs.astype(np.uint16), n)


def locate_payloads(
    gathered, ns, ranks: int, coding: str = "run_length", value_dtype: str = "float32", channels=None
) -> np.ndarray:
    """Find payloads whose numbers of entries differ between ranks; int64[2, ranks, len(ns)]: byte offsets, and k.

    gathered, uint8[bytes]: for each rank, one payload of each of `ns` elements, a matrix of as many `channels` each if
    these are given, which only low-bit values heed. k: its entries, at least 1. ValueError if a header says more
    entries than n, or if bytes are missing or left over.
    """
    gathered, ns = np.asarray(gathered), list(ns)
    places, at = np.zeros((2, ranks, len(ns)), np.int64), 0
    for rank in range(ranks):
        for member, n in enumerate(ns):
            header = gathered[at : at + HEADER_BYTES].tobytes()
            if len(header) < HEADER_BYTES:
                raise ValueError(f"rank {rank}: payload needs {HEADER_BYTES} bytes, only {len(header)} are left")
            k = max(1, struct.unpack(HEADER_FORMAT, header)[6])
            if k > n:
                raise ValueError(f"rank {rank}: payload has {k} entries, but the tensor has n = {n} elements")
            places[:, rank, member] = at, k
            segments = None if channels is None else [(0, channels[member])]
            size, left = payload_layout(n, k, coding, value_dtype, segments).size, gathered.size - at
            if size > left:
                raise ValueError(f"rank {rank}: payload needs {size} bytes, only {left} are left")
            at += size
    if at != gathered.size:
        raise ValueError(f"the messages of all ranks have {gathered.size} bytes, but their payloads end at {at}")
    return places


def reduce_located(
    gathered,
    places,
    n: int,
    coding: str = "run_length",
    value_dtype: str = "float32",
    scale: float = 1.0,
    segments: Segments = None,
) -> np.ndarray:
    """Do `reduce_payloads` where `locate_payloads` found them; places: int64[2, ranks], offsets and k."""
    out = np.zeros(n, np.float32)
    for rank, (offset, k) in enumerate(np.asarray(places).T.tolist()):
        size = payload_layout(n, k, coding, value_dtype, segments).size
        row = np.asarray(gathered)[None, offset : offset + size]
        try:
            out += reduce_payloads(row, 0, n, k, coding, value_dtype, scale, segments)
        except ValueError as error:
            raise ValueError(str(error).replace("rank 0", f"rank {rank}", 1)) from error
    return out


def reduce_payloads(
    gathered,
    offset: int,
    n: int,
    k: int,
    coding: str = "run_length",
    value_dtype: str = "float32",
    scale: float = 1.0,
    segments: Segments = None,
) -> np.ndarray:
    """Sum the payloads of all ranks, in rank order, into float32[n], so that every rank has the same bits.

    gathered: uint8[ranks, row_bytes]; the payload of rank r is row r from byte `offset` on. Per rank:
    out[index] += float32(scale) * float32(value), product and sum each rounded to float32. ValueError if a payload
    does not fit in its row, or as `unpack` raises.
    """
    gathered = np.asarray(gathered)
    size = payload_layout(n, k, coding, value_dtype, segments).size
    if gathered.dtype != np.uint8 or gathered.ndim != 2:
        raise ValueError(f"gathered must be uint8 of two dimensions, got {gathered.dtype.name} of {gathered.ndim}")
    if not 0 <= offset <= gathered.shape[1] - size:
        raise ValueError(f"offset must leave {size} bytes in a row of {gathered.shape[1]}, got {offset}")
    out = np.zeros(n, np.float32)
    for rank, row in enumerate(gathered):
        try:
            indices, values = unpack(row[offset : offset + size], n, k, coding, value_dtype, segments)
        except ValueError as error:
            raise ValueError(f"rank {rank}: {error}") from error
        with np.errstate(over="ignore", invalid="ignore"):
            out[indices] += np.float32(scale) * values.astype(np.float32)
    return out
