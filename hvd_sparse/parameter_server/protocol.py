"""The messages between workers and servers, and their validation. The code checks every byte before it uses it.

A message is a header and a body, both little-endian:

    header 56: u32 magic "HVDP", u8 version, u8 kind, u8 reason, u8 form, u32 worker, u32 incarnation, u64 sequence,
               u64 clock, u64 k, u64 bytes of the body, u32 CRC-32 of the body, u32 CRC-32 of the 52 bytes before

Kinds of messages, and their bodies:

    HELLO      worker -> server  the worker's model and method, as text; answered by WELCOME
    WELCOME    server -> worker  all parameters, float32[n]; the header has the clock
    PUSH       worker -> server  an update; answered by REPLY
    REPLY      server -> worker  the changed elements: new values, or differences to add (see form)
    REFUSED    server -> worker  the reason why the server rejected a message, as text
    BUFFERS    worker -> server  buffers, such as the statistics of batch normalisation, float32[n]
    ASK        anyone -> server  a request, as text; answered by STATE
    STATE      server -> anyone  parameters, buffers or statistics, as JSON and arrays
    ALIVE      worker -> server  no body; tells that the worker still runs
    LEAVE      worker -> server  the last message of a worker; after an error, the error as text

The body of PUSH and REPLY is a payload of k of n elements (`hvd_sparse.wire`). It is empty if k is 0. If k is n and the
values are float32, it is plain float32[n].

Fields of the header:

    sequence     number of a worker's push, from 1; repeated in the REPLY or REFUSED that answers the push
    clock        number of pushes that the server has applied; in a PUSH, the clock of the last REPLY applied
    incarnation  differs when a worker starts again; the server rejects messages of a previous incarnation
    k            number of elements in a payload; in an ASK, a number that its STATE repeats; in a REFUSED by a server
                 that no longer knows the worker, the sequence of the last push it applied

MPI delivers messages in order and does not lose any, so the protocol does not detect lost messages. Senders repeat
damaged messages, and receivers ignore repeated ones.
"""

import enum
import json
import struct
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hvd_sparse import native
from hvd_sparse.mailbox import DamagedMessage

MAGIC = 0x50445648  # the bytes "HVDP"
VERSION = 1
HEADER = struct.Struct("<IBBBBIIQQQQII")
HEADER_BYTES = HEADER.size


class Kind(enum.IntEnum):
    """The kind of a message."""

    HELLO = 1
    WELCOME = 2
    PUSH = 3
    REPLY = 4
    REFUSED = 5
    BUFFERS = 6
    ASK = 7
    STATE = 8
    ALIVE = 9
    LEAVE = 10


class Reason(enum.IntEnum):
    """Why a server rejected a message. DAMAGED: send it again. UNKNOWN_WORKER: send HELLO again. WRONG: give up."""

    NONE = 0
    DAMAGED = 1
    UNKNOWN_WORKER = 2
    WRONG = 3


class Form(enum.IntEnum):
    """The meaning of a reply's values: new values, or differences to add."""

    NONE = 0
    VALUES = 1
    DIFFERENCES = 2


class Message(NamedTuple):
    """A validated message. body: uint8[bytes]."""

    kind: Kind
    worker: int = 0
    incarnation: int = 0
    sequence: int = 0
    clock: int = 0
    k: int = 0
    reason: Reason = Reason.NONE
    form: Form = Form.NONE
    body: np.ndarray = np.empty(0, np.uint8)

    @property
    def text(self) -> str:
        """The body as text."""
        return bytes(self.body).decode(errors="replace")


@dataclass
class PushCounters:
    """What a worker has sent and received; bytes include the headers of messages."""

    pushes: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    entries_up: int = 0
    entries_down: int = 0
    repeated: int = 0
    non_finite: int = 0


def frame(size: int) -> np.ndarray:
    """Allocate a message with a body of `size` bytes, uint8[HEADER_BYTES + size]. `seal` writes its header."""
    return np.empty(HEADER_BYTES + size, np.uint8)


def seal(encoded: np.ndarray, message: Message, body_check: int | None = None) -> np.ndarray:
    """Write the header of a message before the body that is there, and return it; message.body does not count.

    body_check: The CRC-32 of the body, if it is known.
    """
    numbers = (message.worker, message.incarnation, message.sequence, message.clock, message.k)
    body = encoded[HEADER_BYTES:]
    check = native.crc32(body) if body_check is None else body_check
    fields = (MAGIC, VERSION, message.kind, message.reason, message.form, *numbers, body.size, check)
    HEADER.pack_into(encoded, 0, *fields, 0)
    struct.pack_into("<I", encoded, HEADER_BYTES - 4, zlib.crc32(encoded[: HEADER_BYTES - 4]))
    return encoded


def encode(message: Message) -> np.ndarray:
    """Return the encoded message, uint8[bytes]."""
    encoded = frame(message.body.size)
    encoded[HEADER_BYTES:] = message.body
    return seal(encoded, message)


def decode(data: np.ndarray) -> Message:
    """Validate and decode a message, uint8[bytes]. Raise DamagedMessage, which says what is wrong."""
    if data.size < HEADER_BYTES:
        raise DamagedMessage(f"a message has at least {HEADER_BYTES} bytes, got {data.size}")
    *fields, check = HEADER.unpack_from(data)
    magic, version, kind, reason, form, worker, incarnation, sequence, clock, k, size, body_check = fields
    if magic != MAGIC or zlib.crc32(data[: HEADER_BYTES - 4]) != check:
        raise DamagedMessage("the header's checksum does not match")
    if version != VERSION:
        raise DamagedMessage(f"version {version} of the protocol; this is version {VERSION}: install the same on all")
    if data.size - HEADER_BYTES != size:
        raise DamagedMessage(f"a body of {size} bytes was announced, got {data.size - HEADER_BYTES}")
    try:
        kind, reason, form = Kind(kind), Reason(reason), Form(form)
    except ValueError as error:
        raise DamagedMessage(str(error)) from None
    body = data[HEADER_BYTES:]
    if native.crc32(body) != body_check:
        raise DamagedMessage(f"the checksum of the body of a {kind.name} does not match")
    return Message(kind, worker, incarnation, sequence, clock, k, reason, form, body)


def as_body(text: str) -> np.ndarray:
    """Return text as the body of a message, uint8[bytes]."""
    return np.frombuffer(text.encode(), np.uint8)


def encode_state(message: Message, description: dict, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Encode a message whose body is a description as JSON, followed by arrays of float32 or float64.

    The arrays, which may be a whole model, are copied once. message: Its body does not count. `decode_state` reads it.
    """
    table = {name: [str(array.dtype), array.size] for name, array in arrays.items()}
    head = json.dumps({"description": description, "arrays": table}).encode()
    head += b" " * (-len(head) % 8)  # so that the arrays are aligned where they arrive
    parts = [np.frombuffer(struct.pack("<Q", len(head)) + head, np.uint8)]
    parts += [np.ascontiguousarray(array).view(np.uint8) for array in arrays.values()]
    encoded = frame(sum(part.size for part in parts))
    np.concatenate(parts, out=encoded[HEADER_BYTES:])
    return seal(encoded, message)


def decode_state(body: np.ndarray) -> tuple[dict, dict[str, np.ndarray]]:
    """Return the description and the arrays of `encode_state`, which are views of the body where they are aligned.

    Raise DamagedMessage if the body is damaged.
    """
    try:
        (length,) = struct.unpack_from("<Q", body)
        head = json.loads(bytes(body[8 : 8 + length]))
        arrays, at = {}, 8 + length
        for name, (dtype, size) in head["arrays"].items():
            if dtype not in ("float32", "float64"):
                raise ValueError(f"{name} is of {dtype}")
            end = at + np.dtype(dtype).itemsize * size
            arrays[name] = np.require(body[at:end].view(dtype), requirements="A")
            at = end
        if at != body.size or any(arrays[name].size != size for name, (_, size) in head["arrays"].items()):
            raise ValueError("its arrays have another size than they say")
        return head["description"], arrays
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, struct.error) as error:
        raise DamagedMessage(f"the body of a state cannot be read: {error}") from None
