"""The messages between stages, and their validation. The code checks every byte before it uses it.

A message is a header, a description and a body, little-endian:

    header 32: u32 magic "HVDM", u8 version, u8 kind, u16 flags, u32 step, u16 micro-batch, u16 micro-batches of
               the step, u32 rows of the micro-batch, u32 rows of the step, u32 bytes of the description,
               u32 CRC-32 of header (this field taken as zero), description and body

    FORWARD    to the next stage     activations: values and masks
    BACKWARD   to the previous stage gradients: only values, because both stages have the masks; no description
    TARGETS    first to last stage   the targets of the loss
    LOSS       last stage to all     the loss of the batch, float64; 0 at the end of a prediction

Description: u16 bytes of the structure, structure as JSON (`tree.flatten`), then for each tensor
    u8 dtype, u8 form, u8 whether a gradient is wanted, u8 dimensions, u32 f, u64 entries kept, u32 each dimension
Body: the concatenated tensors. Form WHOLE: raw elements. Form MASKED: a payload of positions and values
(`hvd_sparse.wire`; all of B * f elements, coding `mask_coding`). In BACKWARD: raw elements, or a payload without
positions.

Decoding allocates memory only in proportion to the bytes of the message, whatever sizes the message claims.
"""

import contextlib
import enum
import json
import math
import struct
import zlib
from typing import NamedTuple

import numpy as np

from hvd_sparse import native_rows
from hvd_sparse.mailbox import DamagedMessage
from hvd_sparse.model_parallel import tree
from hvd_sparse.wire import payload_size

MAGIC = 0x4D445648  # the bytes "HVDM"
VERSION = 2  # 1 had no checksum over raw elements
HEADER = struct.Struct("<IBBHIHHIIII")
TENSOR = struct.Struct("<BBBBIQ")
DTYPES = (
    "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex64 complex128"
).split()
MASKABLE = DTYPES[:4]
DIFFERENTIABLE = (*MASKABLE, "complex64", "complex128")
WHOLE, MASKED = 0, 1
MOST_MICRO_BATCHES = 2**16 - 1
SPARSEST = 1024  # largest ratio of all to kept elements at which a mask is coded by positions
EVALUATING, TARGETS_FOLLOW, PREDICTING = 1, 2, 4  # flags; a prediction is an evaluation without targets
CALL = EVALUATING | PREDICTING  # which call of a pipeline's a message belongs to


class Kind(enum.IntEnum):
    """The kind of a message, and the offset of its tag."""

    FORWARD = 1
    BACKWARD = 2
    TARGETS = 3
    LOSS = 4


class Head(NamedTuple):
    """The position of a message in the run."""

    kind: Kind
    step: int = 0
    micro: int = 0
    micros: int = 1
    rows: int = 0
    total_rows: int = 0
    flags: int = 0

    def __str__(self) -> str:
        call = {0: "step", EVALUATING: "evaluation"}.get(self.flags & CALL, "prediction")
        return f"{self.kind.name} of micro-batch {self.micro} in {call} {self.step}"


class Tensor(NamedTuple):
    """A tensor in a message. array: bfloat16 as uint16. mask: bool[B, f], the elements to send; None: all."""

    array: np.ndarray
    dtype: str
    mask: np.ndarray | None = None
    gradient: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return self.array.nbytes


def item_type(dtype: str) -> np.dtype:
    """Return NumPy's name for the elements of a dtype: uint16 for bfloat16."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def encode(head: Head, structure=None, tensors: list[Tensor] = (), describe: bool = True) -> np.ndarray:
    """Return the encoded message, uint8[bytes]. describe: False for BACKWARD, whose receiver knows the masks."""
    bodies = [_body(tensor, positions=describe) for tensor in tensors]
    description = b""
    if describe:
        text = json.dumps(structure, separators=(",", ":")).encode()
        description = struct.pack("<H", len(text)) + text + b"".join(map(_describe, tensors))
    fields = (MAGIC, VERSION, head.kind, head.flags, head.step, head.micro, head.micros, head.rows, head.total_rows)
    start = HEADER.pack(*fields, len(description), 0)
    check = zlib.crc32(start)
    for part in (description, *bodies):
        check = zlib.crc32(part, check)
    parts = [HEADER.pack(*fields, len(description), check), description, *bodies]
    return np.concatenate([np.frombuffer(part, np.uint8) for part in parts])


def decode_head(data: np.ndarray) -> tuple[Head, bytes, np.ndarray]:
    """Return head, description and body of a message. Raise DamagedMessage, which says what is wrong."""
    if data.size < HEADER.size:
        raise DamagedMessage(f"a message has at least {HEADER.size} bytes, got {data.size}")
    magic, version, kind, flags, step, micro, micros, rows, total, size, check = HEADER.unpack_from(data)
    if magic != MAGIC or HEADER.size + size > data.size:
        raise DamagedMessage("this is no message of a pipeline")
    description = bytes(data[HEADER.size : HEADER.size + size])
    zeroed = bytes(data[: HEADER.size - 4]) + bytes(4)
    if zlib.crc32(data[HEADER.size :], zlib.crc32(zeroed)) != check:
        raise DamagedMessage("the checksum does not match")
    if version != VERSION:
        raise DamagedMessage(f"version {version} of the protocol; this is version {VERSION}: install the same on all")
    if kind not in list(Kind):
        raise DamagedMessage(f"unknown kind of message {kind}")
    expected = total // max(1, micros) + (micro < total % max(1, micros))  # `schedule.split_rows`
    if kind != Kind.LOSS and not (micro < micros <= total and rows == expected):
        raise DamagedMessage(f"{rows} rows of {total} cannot be micro-batch {micro} of {micros}")
    return Head(Kind(kind), step, micro, micros, rows, total, flags), description, data[HEADER.size + size :]


def decode_tensors(description: bytes, body: np.ndarray) -> tuple[object, list[Tensor]]:
    """Return structure and tensors of a message with a description. Raise DamagedMessage, which says what is wrong."""
    tensors, reader = [], _Reader(body)
    with _damage_reported("a tensor cannot be read"):
        (size,) = struct.unpack_from("<H", description)
        structure, place = json.loads(description[2 : 2 + size]), 2 + size
        while place < len(description):
            number, form, gradient, ndim, columns, kept = TENSOR.unpack_from(description, place)
            shape = struct.unpack_from(f"<{ndim}I", description, place + TENSOR.size)
            place += TENSOR.size + 4 * ndim
            dtype, mask = DTYPES[number], None
            if form not in (WHOLE, MASKED) or (gradient and dtype not in DIFFERENTIABLE):
                raise ValueError(f"no tensor of {dtype} has form {form} and gradient {gradient}")
            if form == WHOLE:
                array = reader.whole(shape, dtype)
            else:
                array, mask = reader.masked(shape, dtype, columns, kept)
            tensors.append(Tensor(array, dtype, mask, bool(gradient)))
        tree.check(structure, len(tensors))
    if reader.left:
        raise DamagedMessage(f"{reader.left} bytes are left over")
    return structure, tensors


def decode_gradients(body: np.ndarray, likes: list[Tensor]) -> list[Tensor]:
    """Return the gradients of tensors, with the same masks. Raise DamagedMessage if the bytes do not fit."""
    gradients, reader = [], _Reader(body)
    with _damage_reported("a gradient cannot be read"):
        for like in likes:
            shape, mask = like.array.shape, like.mask
            array = reader.whole(shape, like.dtype) if mask is None else reader.kept(shape, like.dtype, mask)
            gradients.append(Tensor(array, like.dtype, mask, gradient=True))
    if reader.left:
        raise DamagedMessage(
            f"gradients of {body.size - reader.left} bytes were expected, got {body.size}: the next stage's gradients "
            "have other shapes"
        )
    return gradients


def decode_loss(description: bytes, body: np.ndarray) -> float:
    """Return the number in a LOSS message. Raise DamagedMessage if there is none."""
    _, tensors = decode_tensors(description, body)
    found = [(tensor.dtype, tensor.array.shape) for tensor in tensors]
    if found != [("float64", ())]:
        raise DamagedMessage(f"a loss is one float64, got {found}")
    return float(tensors[0].array)


def mask_coding(numel: int, kept: int) -> str:
    """Return the coding of positions: the shortest one, but a bitmap if almost no elements are kept.

    With codes of a few positions, a few bytes could claim any amount of memory.
    """
    return "auto" if numel <= SPARSEST * max(1, kept) else "bitmap"


@contextlib.contextmanager
def _damage_reported(what: str):
    """Convert all errors that a message's bytes can cause to DamagedMessage."""
    try:
        yield
    except DamagedMessage:
        raise
    except (struct.error, ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise DamagedMessage(f"{what}: {error}") from error


def _body(tensor: Tensor, positions: bool) -> np.ndarray:
    array = np.ascontiguousarray(tensor.array)
    if tensor.mask is None:
        return array.reshape(-1).view(np.uint8)
    rows = array.reshape(tensor.mask.shape)
    if not positions:
        return native_rows.pack_kept(rows, tensor.mask, value_dtype=tensor.dtype)
    coding = mask_coding(rows.size, int(np.count_nonzero(tensor.mask)))
    return native_rows.pack_rows(rows, tensor.mask, coding, value_dtype=tensor.dtype)


def _describe(tensor: Tensor) -> bytes:
    form, columns, kept = WHOLE, 0, 0
    if tensor.mask is not None:
        form, columns, kept = MASKED, tensor.mask.shape[1], int(np.count_nonzero(tensor.mask))
    shape = tensor.array.shape
    start = TENSOR.pack(DTYPES.index(tensor.dtype), form, tensor.gradient, len(shape), columns, kept)
    return start + struct.pack(f"<{len(shape)}I", *shape)


class _Reader:
    """Reads the body of a message, tensor after tensor."""

    def __init__(self, body: np.ndarray):
        self._body, self.left = body, body.size

    def whole(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Return a tensor of raw elements."""
        part = self._take(math.prod(shape) * item_type(dtype).itemsize)
        if dtype == "bool" and part.size and part.max() > 1:
            raise ValueError(f"a bool is 0 or 1, got {part.max()}")
        return part.view(item_type(dtype)).reshape(shape)

    def masked(self, shape: tuple[int, ...], dtype: str, columns: int, kept: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a tensor of which positions and values were sent, and its mask, bool[B, columns]."""
        numel = math.prod(shape)
        if dtype not in MASKABLE or columns == 0 or numel % columns or numel == 0:
            raise ValueError(f"a mask of {columns} columns does not fit {dtype}{list(shape)}")
        rows, k = (numel // columns, columns), max(1, kept)
        coding = mask_coding(numel, k)
        payload = self._take(payload_size(numel, k, coding, dtype))
        values, mask = native_rows.unpack_rows(payload, rows, k, dtype, coding)
        return values.reshape(shape), mask

    def kept(self, shape: tuple[int, ...], dtype: str, mask: np.ndarray) -> np.ndarray:
        """Return a tensor of which values were sent, to a receiver that has the mask."""
        k = max(1, int(np.count_nonzero(mask)))
        payload = self._take(payload_size(k, k, "dense", dtype))
        return native_rows.unpack_kept(payload, mask, dtype).reshape(shape)

    def _take(self, size: int) -> np.ndarray:
        """Return the next bytes: a copy, so that their elements are aligned."""
        if size > self.left:
            raise DamagedMessage(f"{size} bytes were announced, {self.left} are there")
        begin = self._body.size - self.left
        self.left -= size
        return self._body[begin : begin + size].copy()
