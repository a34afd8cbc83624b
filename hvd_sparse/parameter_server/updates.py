"""Sparse updates of a vector: selection, rounding, packing into payloads, and checked unpacking."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from hvd_sparse import native
from hvd_sparse.mailbox import DamagedMessage
from hvd_sparse.parameter_server.layout import Piece
from hvd_sparse.parameter_server.methods import DCTAsync, Method
from hvd_sparse.parameter_server.protocol import Message
from hvd_sparse.threshold import SMALLEST, KeptThreshold, ThresholdHint
from hvd_sparse.wire import LOW_BITS, payload_size, top_k_count


class NotFinite(DamagedMessage):
    """A message is not damaged, but has NaN or infinity: to send it again does not help."""


class Update(NamedTuple):
    """Elements of a vector. indices: int64[k], ascending; None: all elements. values: float32[k]."""

    indices: np.ndarray | None
    values: np.ndarray

    @property
    def at(self) -> np.ndarray | slice:
        """The index expression that selects these elements in a vector."""
        return slice(None) if self.indices is None else self.indices

    def part(self, begin: int, end: int) -> "Update":
        """Return the elements in [begin, end), with indices relative to `begin`."""
        if self.indices is None:
            return Update(None, self.values[begin:end])
        first, last = np.searchsorted(self.indices, (begin, end))
        return Update(self.indices[first:last] - begin, self.values[first:last])


class Group:
    """Elements [begin, end) of a vector that are selected jointly: those of one tensor, or of several."""

    def __init__(self, begin: int, end: int, is_dense: bool, seed: int):
        self.begin, self.end, self._is_dense, self.seed = begin, end, is_dense, seed
        self._hint = ThresholdHint()

    def count(self, density: float) -> int:
        """Return the number of elements to select; all elements if the group is always sent dense."""
        size = self.end - self.begin
        return size if self._is_dense else top_k_count(size, density)

    def select(self, k: int, select_top_k: Callable[..., tuple]) -> np.ndarray:
        """Return the ascending indices of the k largest elements, int64[k].

        Args:
            k: The number of elements to select.
            select_top_k: A native selection, called with `k`, `seed` and `threshold_hint`.
        """
        if k == self.end - self.begin:
            return np.arange(self.begin, self.end)
        indices, _, (threshold, passed), *_ = select_top_k(k=k, seed=self.seed, threshold_hint=self._hint.value(k))
        self._hint.update(k, threshold, int(passed))
        return self.begin + indices


class KeptSelection:
    """Selects the elements of one of `count` tensors that reach a threshold, which is kept for a life-span (DCT)."""

    def __init__(self, method: DCTAsync, position: int, count: int):
        self.state = np.zeros(2)  # the threshold and its k, 0 for none
        self._threshold = KeptThreshold(method, position, count)

    def select(self, values: np.ndarray, k: int, step: int) -> np.ndarray:
        """Return the ascending indices of the elements that reach the threshold, about k.

        Args:
            values: float32[n].
            k: The number of elements of which a new threshold is the smallest magnitude, below n.
            step: The number of the push, from 0.
        """
        self._threshold.restore(self.state)
        plan = self._threshold.plan(step, k, values.size)
        threshold = plan.threshold
        if plan.k > 0:
            threshold = float(native.select_top_k(values, k, threshold_hint=threshold)[2][0])
        indices, _ = native.filter_threshold(values, max(threshold, SMALLEST))
        self._threshold.learn(k, threshold, indices.size)
        self.state[:] = self._threshold.numbers()
        return indices

    def miss(self, step: int) -> None:
        """Note that a push has not used the threshold: see `KeptThreshold.miss`."""
        self._threshold.restore(self.state)
        self._threshold.miss(step)
        self.state[:] = self._threshold.numbers()


def groups_of(pieces: list[Piece], begin: int, method: Method) -> list[Group]:
    """Return the groups of pieces, relative to `begin`.

    With scope "tensor", each piece is a group. With scope "model", the selected pieces are one group and the dense
    pieces another.
    """
    places = [(piece.begin - begin, piece.end - begin, piece.is_dense) for piece in pieces]
    if method.scope == "model":
        ends = {is_dense: end for _, end, is_dense in places}
        begins = {is_dense: begin for begin, _, is_dense in reversed(places)}
        places = [(begins[kind], ends[kind], kind) for kind in (False, True) if kind in ends]
    return [Group(*place, method.seed) for place in places]


def select(values: np.ndarray, groups: list[Group], density: float) -> np.ndarray | None:
    """Return the ascending indices of the largest values in each group, int64[k]; None stands for all elements.

    values: float32[n].
    """
    if density >= 1.0:
        return None
    return np.concatenate(
        [
            group.select(group.count(density), partial(native.select_top_k, values[group.begin : group.end]))
            for group in groups
        ]
    )


def rounded(update: Update, method: Method, values: str, segments: np.ndarray) -> Update:
    """Return the update that the receiver will decode: rounded values, and no zeros unless the update is dense.

    segments: the segments of the quantization levels, see `piece_segments`.
    """
    indices, numbers = update
    if values == "float32" and indices is None:
        return update
    if values != "float32":
        indices = np.arange(numbers.size) if indices is None else indices
        if values in LOW_BITS:  # they have no zero: it would become the level, with a sign
            indices, numbers = indices[numbers != 0.0], numbers[numbers != 0.0]
        numbers = native.quantize(numbers, values, method.level, indices, low_bit_segments(values, segments))
    sent = numbers != 0.0
    return Update(indices, numbers) if sent.all() else Update(indices[sent], numbers[sent])


def pack(update: Update, n: int, coding: str, values: str, segments: np.ndarray) -> tuple[int, np.ndarray]:
    """Return k and the payload, uint8[bytes], of an update of n elements. For an empty update, k is 0 with no bytes."""
    k = update.values.size
    if k == 0:
        return 0, np.empty(0, np.uint8)
    if k == n and values == "float32":
        return n, np.ascontiguousarray(update.values).view(np.uint8)
    form = (n, k, "dense" if k == n else coding, values, low_bit_segments(values, segments))
    return k, native.pack(update.indices, update.values, *form)


def unpack(message: Message, n: int, coding: str, values: str, segments: np.ndarray) -> Update:
    """Return the update in a message. Raise DamagedMessage unless its payload holds k of n elements."""
    k = message.k
    if k == 0 and message.body.size == 0:
        return Update(np.empty(0, np.int64), np.empty(0, np.float32))
    if k == n and values == "float32" and message.body.size == 4 * n:
        return finite(Update(None, message.body.copy().view(np.float32)))
    if not 1 <= k <= n:
        raise DamagedMessage(f"{k} entries of {n} elements, in {message.body.size} bytes")
    form = (n, k, "dense" if k == n else coding, values, low_bit_segments(values, segments))
    if message.body.size != payload_size(*form):
        raise DamagedMessage(f"{k} of {n} elements take {payload_size(*form)} bytes, got {message.body.size}")
    try:
        update = Update(*native.unpack(message.body, *form))
    except ValueError as error:
        raise DamagedMessage(str(error)) from None
    if update.values.size != k:
        raise DamagedMessage(f"{k} entries were announced, got {update.values.size}")
    return finite(update)


def finite(update: Update) -> Update:
    """Return the update. Raise NotFinite unless all its values are finite."""
    if not np.isfinite(update.values).all():
        raise NotFinite("not all values are finite: has training diverged? Try a lower learning rate")
    return update


def piece_segments(pieces: list[Piece], begin: int) -> np.ndarray:
    """Return the segments of the quantization levels, int64[pieces, 2], relative to `begin`. Each piece is a group."""
    return np.array([(piece.begin - begin, 1) for piece in pieces], np.int64)


def low_bit_segments(values: str, segments: np.ndarray) -> np.ndarray | None:
    """Return the segments if `values` is a low-bit type, which has levels; else None."""
    return segments if values in LOW_BITS else None
