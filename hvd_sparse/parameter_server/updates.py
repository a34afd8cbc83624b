"""Updates, a few elements of a vector: selected, rounded, packed, and unpacked with every byte checked."""

from typing import NamedTuple

import numpy as np

from hvd_sparse import native
from hvd_sparse.parameter_server.layout import Piece
from hvd_sparse.parameter_server.methods import Method
from hvd_sparse.parameter_server.protocol import DamagedMessage, Message
from hvd_sparse.wire import LOW_BITS, payload_size, top_k_count


class Update(NamedTuple):
    """Elements of a vector. indices: int64[k], ascending; values: float32[k]."""

    indices: np.ndarray
    values: np.ndarray


def select(values: np.ndarray, pieces: list[Piece], begin: int, density: float, method: Method) -> np.ndarray:
    """Return the ascending indices of the largest of values, float32[n], the elements of pieces from `begin` on.

    k = round(density * n) of each piece, or of all that are not dense together; all of those that are.
    """
    groups = [(piece.begin - begin, piece.end - begin, piece.is_dense) for piece in pieces]
    if method.scope == "model":
        groups = joined(groups)
    found = []
    for first, last, is_dense in groups:
        if is_dense or density >= 1.0:
            found.append(np.arange(first, last))
        else:
            k = top_k_count(last - first, density)
            found.append(first + native.select_top_k(values[first:last], k, method.seed)[0])
    return np.concatenate(found)


def joined(groups: list[tuple[int, int, bool]]) -> list[tuple[int, int, bool]]:
    """Return groups (begin, end, is_dense), those that are not dense first, with each kind as one."""
    ends = {is_dense: end for _, end, is_dense in groups}
    begins = {is_dense: begin for begin, _, is_dense in reversed(groups)}
    return [(begins[kind], ends[kind], kind) for kind in (False, True) if kind in ends]


def rounded(update: Update, method: Method, values: str, segments: np.ndarray) -> Update:
    """Return an update as it survives the wire, without its zeros. segments: a group of centres each."""
    indices, numbers = update
    if values != "float32":
        numbers = native.quantize(numbers, values, method.centre, indices, low_bit_segments(values, segments))
    sent = numbers != 0.0
    return update if sent.all() and numbers is update.values else Update(indices[sent], numbers[sent])


def pack(update: Update, n: int, coding: str, values: str, segments: np.ndarray) -> tuple[int, np.ndarray]:
    """Return k and a payload of an update of n elements; 0 and no bytes where nothing is sent."""
    k = update.indices.size
    if k == 0:
        return 0, np.empty(0, np.uint8)
    form = (n, k, "dense" if k == n else coding, values, low_bit_segments(values, segments))
    return k, native.pack(update.indices, update.values, *form)


def unpack(message: Message, n: int, coding: str, values: str, segments: np.ndarray) -> Update:
    """Return the update in a message; DamagedMessage unless its payload is one of k of n elements."""
    k = message.k
    if k == 0 and message.body.size == 0:
        return Update(np.empty(0, np.int64), np.empty(0, np.float32))
    if not 1 <= k <= n:
        raise DamagedMessage(f"{k} entries of {n} elements, in {message.body.size} bytes")
    form = (n, k, "dense" if k == n else coding, values, low_bit_segments(values, segments))
    if message.body.size != payload_size(*form):
        raise DamagedMessage(f"{k} of {n} elements take {payload_size(*form)} bytes, got {message.body.size}")
    try:
        update = Update(*native.unpack(message.body, *form))
    except ValueError as error:
        raise DamagedMessage(str(error)) from None
    if update.indices.size != k or not np.isfinite(update.values).all():
        raise DamagedMessage(f"{k} finite values were announced")
    return update


def low_bit_segments(values: str, segments: np.ndarray) -> np.ndarray | None:
    """Return the segments where values have centres."""
    return segments if values in LOW_BITS else None
