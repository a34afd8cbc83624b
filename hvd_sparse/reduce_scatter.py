"""Reduce-scatter of sparse gradients: the bytes that a rank receives do not grow with the world size.

The elements of a message are divided into one region per rank, and each rank owns one region:

    selected entries -> split ==all-to-all==> reduce: add, keep the largest ==all-gather==> join -> sums

Each rank sends its k selected entries to the owners of their regions. An owner sums the received entries in rank order,
keeps the k / N sums of largest magnitude, and sends these to all ranks. A rank receives fewer than 2 k entries at any
world size N; with an all-gather, it receives (N - 1) k.

No gradient is lost. A rank clears its error feedback at those of its own entries that an owner has kept; the other
entries stay in its residual. The rounding error of a sum is added to the owner's residual.

The bounds of the regions are chosen so that all owners receive about the same number of entries. They follow from a
histogram of all ranks' selected indices, which the ranks sum in the first step and in every 64th step.

Source: Ok-Topk (Li and Hoefler, 2022), section 3; SparCML (Renggli et al., 2019). Differences: each owner keeps k / N
sums, so that messages have similar sizes, where Ok-Topk keeps the sums that reach a threshold; entries are summed in
rank order.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hvd_sparse import native, native_changes
from hvd_sparse.wire import Segments, entries_of, largest_payload, payload_size

BALANCE_STEPS = 64  # steps between two agreements on the regions
BINS = 4096  # of the histogram of selected indices
HEADROOM = 1.25  # capacity of a padded message, relative to its average number of entries

Bounds = dict[tuple[str, ...], np.ndarray]  # the bounds of the regions, int64[N + 1], by the tensors of their message


class SparseVector(NamedTuple):
    """The selected entries of a vector: indices and values."""

    indices: np.ndarray  # int64[m], ascending
    values: np.ndarray  # float32[m]


NOTHING = SparseVector(np.empty(0, np.int64), np.empty(0, np.float32))


@dataclass(frozen=True)
class MessageFormat:
    """The format of a message, equal on all ranks: elements n, selected entries k of each rank, and the coding."""

    n: int
    k: int
    coding: str
    values: str
    level: str
    segments: Segments = None

    def size(self, begin: int, end: int, k: int) -> int:
        """Return the bytes of a payload of k entries of a region."""
        return payload_size(end - begin, max(1, k), self.coding, self.values, self.part(begin, end))

    def part(self, begin: int, end: int) -> Segments:
        """Return the groups of a region's elements that share the quantization levels of low-bit values."""
        if self.segments is None:
            return None
        begins, channels = np.asarray(self.segments, np.int64).reshape(-1, 2).T
        first = np.searchsorted(begins, begin, side="right") - 1
        last = np.searchsorted(begins, end, side="left")
        starts = np.maximum(begins[first:last] - begin, 0)
        room = np.append(starts[1:], end - begin) - starts
        return np.stack([starts, np.minimum(channels[first:last], room)], axis=1)


class Sent(NamedTuple):
    """The message of a rank to the owners of regions."""

    message: np.ndarray  # uint8[bytes]: a payload for each region; padding follows this rank's own
    splits: np.ndarray  # int64[N]: the bytes for each rank
    padding: int  # bytes
    entries: SparseVector  # with the values that the owners decode


class Regions:
    """The regions of one message, and the operations of its reduce-scatter. The bounds are equal on all ranks.

    Args:
        form: The format of the message.
        world_size: The number of ranks N.
        rank: This rank, the owner of region `rank`.
    """

    def __init__(self, form: MessageFormat, world_size: int, rank: int):
        self.form = form
        self.world_size = world_size
        self.rank = rank
        self.bounds: np.ndarray | None = None  # int64[N + 1], the regions' bounds; None: not agreed on yet
        self._padded: tuple[np.ndarray | None, int] = None, 0  # bounds, and the padded message size for them

    @property
    def kept_count(self) -> int:
        """The maximum number of sums that the owner of a region keeps."""
        return -(-self.form.k // self.world_size)

    @property
    def most_kept_bytes(self) -> int:
        """The maximum bytes of the payload of a region's kept sums."""
        k, form = min(self.kept_count, self.form.n), self.form
        return largest_payload(form.n, k, form.coding, form.values, form.segments)

    def count(self, entries: SparseVector) -> np.ndarray:
        """Return the histogram of the entries' indices, float64[bins]."""
        bins = min(self.form.n, BINS)
        return np.bincount(entries.indices * bins // self.form.n, minlength=bins).astype(np.float64)

    def balance(self, counts: np.ndarray) -> None:
        """Set the bounds so that regions have about equal numbers of entries. counts: `count`, summed over ranks."""
        edges = np.arange(counts.size + 1) * (self.form.n / counts.size)
        passed = np.concatenate([[0.0], np.cumsum(counts + 1e-6)])  # strictly ascending, even across empty bins
        cuts = np.interp(np.arange(1, self.world_size) * (passed[-1] / self.world_size), passed, edges)
        inner = np.clip(np.rint(cuts).astype(np.int64), 0, self.form.n)
        self.bounds = np.concatenate([[0], inner, [self.form.n]]).astype(np.int64)

    def split(self, entries: SparseVector) -> Sent:
        """Return the message to the owners of regions: a payload for each, without entries where none were selected.

        This rank's own part is padded, so that messages have the same size in most steps: Horovod has to negotiate a
        message of a new size. The padding is not sent to other ranks.
        """
        cuts = np.searchsorted(entries.indices, self.bounds)
        payloads, survived = [], []
        for (begin, end), first, last in zip(self._spans(), cuts[:-1], cuts[1:], strict=True):
            payload, values = self._pack(begin, end, entries.indices[first:last], entries.values[first:last])
            payloads.append(payload)
            survived.append(values)
        sizes = np.array([payload.size for payload in payloads], np.int64)
        padding = -int(sizes.sum()) % self._room()
        sizes[self.rank] += padding
        payloads.insert(self.rank + 1, np.zeros(padding, np.uint8))
        return Sent(np.concatenate(payloads), sizes, padding, SparseVector(entries.indices, np.concatenate(survived)))

    def reduce(self, received: np.ndarray, padding: int, seed: int) -> tuple[np.ndarray, SparseVector]:
        """Sum the entries of this rank's region from all ranks, in rank order, and keep the sums of largest magnitude.

        Args:
            received: uint8[bytes], the payloads of all ranks, in rank order.
            padding: The padding of this rank's own part, in bytes.
            seed: Breaks ties of equal magnitudes; the same on all ranks.

        Returns:
            The payload of the kept sums; and their rounding errors, which belong in this rank's residual.

        Raises:
            ValueError: A payload is damaged; the message names its rank.
        """
        begin, end = self._span(self.rank)
        parts = self._unpack(received, [(begin, end)] * self.world_size, padding)
        total = add_in_order(parts)
        if total.indices.size > self.kept_count:
            chosen = native.select_top_k(total.values, self.kept_count, seed % 2**64)[0]
            total = SparseVector(total.indices[chosen], total.values[chosen])
        payload, values = self._pack(begin, end, total.indices, total.values)
        with np.errstate(invalid="ignore"):  # an infinite sum has no rounding error
            left = total.values - values
        lossy = (left != 0.0) & np.isfinite(left)
        return payload, SparseVector(total.indices[lossy], left[lossy])

    def join(self, gathered: np.ndarray) -> SparseVector:
        """Return the sums that the owners of all regions have kept, from their payloads, uint8[bytes], in rank order.

        Raises ValueError, naming the rank, if a payload is damaged.
        """
        parts = self._unpack(gathered, list(self._spans()), 0)
        return SparseVector(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def _pack(self, begin: int, end: int, indices: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the payload of a region's entries, and their values as decoded from it."""
        form, segments = self.form, self.form.part(begin, end)
        inner = indices - begin
        if form.values != "float32" and inner.size:
            values = native.quantize(np.ascontiguousarray(values), form.values, form.level, inner, segments)
        k = max(1, inner.size)
        values = np.ascontiguousarray(values)
        return native.pack(inner, values, end - begin, k, form.coding, form.values, segments), values

    def _unpack(self, message: np.ndarray, spans: Sequence[tuple[int, int]], padding: int) -> list[SparseVector]:
        """Return the entries of a message's payloads, one from each rank; spans: the region of each."""
        found, at, form = [], 0, self.form
        for rank, (begin, end) in enumerate(spans):
            try:
                k = max(1, entries_of(message[at:], end - begin))
                size = form.size(begin, end, k)
                segments = form.part(begin, end)
                piece = message[at : at + size]
                indices, values = native.unpack(piece, end - begin, k, form.coding, form.values, segments)
            except ValueError as error:
                raise ValueError(f"hvd_sparse: from rank {rank}: {error}") from error
            found.append(SparseVector(indices + begin, values))
            at += size + (padding if rank == self.rank else 0)
        if at != message.size:
            raise ValueError(f"hvd_sparse: the payloads have {at} bytes, received {message.size}")
        return found

    def _spans(self) -> Iterator[tuple[int, int]]:
        return (self._span(rank) for rank in range(self.world_size))

    def _span(self, rank: int) -> tuple[int, int]:
        """Return the bounds of a region. An empty one gets an adjacent element, as a payload has at least one."""
        begin, end = int(self.bounds[rank]), int(self.bounds[rank + 1])
        if begin < end:
            return begin, end
        begin = min(begin, self.form.n - 1)
        return begin, begin + 1

    def _room(self) -> int:
        """Return the unit of message sizes, in bytes; in most steps, a message has one unit."""
        if self._padded[0] is not self.bounds:
            most = int(HEADROOM * self.kept_count) + 16
            sizes = (self.form.size(begin, end, min(most, end - begin)) for begin, end in self._spans())
            self._padded = self.bounds, sum(sizes)
        return self._padded[1]


def selected_entries(message: np.ndarray, ns: Sequence[int], ks: Sequence[int], coding: str) -> SparseVector:
    """Return the nonzero entries of concatenated payloads, with indices into the concatenated elements."""
    indices, values = native.unpack_payloads(message, ns, ks, coding)
    kept = values != 0.0
    return SparseVector(indices, values) if kept.all() else SparseVector(indices[kept], values[kept])


def entries_to_clear(
    selected: SparseVector, sent: SparseVector, kept: SparseVector, retained: float
) -> tuple[np.ndarray, ...]:
    """Return which of a rank's entries the owners kept: indices, int64[m]; residuals, and next residuals, float32[m].

    selected: with this rank's residuals. sent: with the values that the owners decode. The next residual is what the
    payload rounded away, plus `retained` times the sent value.
    """
    own = native_changes.find_common(sent.indices, kept.indices)
    old, survived = selected.values[own], sent.values[own]
    return sent.indices[own], old, old - survived + np.float32(retained) * survived


def add_in_order(parts: Sequence[SparseVector]) -> SparseVector:
    """Return the sums of the ranks' entries, float32, added in rank order."""
    indices, values = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return SparseVector(*native_changes.add_entries(indices, values, np.array([part.indices.size for part in parts])))


def known_bounds(regions: Bounds, names: Sequence[str], n: int, world_size: int) -> np.ndarray | None:
    """Return the bounds of a message that the ranks agreed on before; None if these are for another message.

    Those of another world size are from before an elastic job lost or gained ranks.
    """
    bounds = regions.get(tuple(names))
    return None if bounds is None or (bounds[-1], bounds.size - 1) != (n, world_size) else bounds


def region_numbers(regions: Bounds, step: int) -> list[float]:
    """Return a rank's numbers for the presence sum, from which all ranks know whether to agree on regions.

    They are whether an agreement is due in this step, and a digest of all regions that this rank knows, by the tensors
    of their message, with its square. A new rank of an elastic job, or a rank that loaded another checkpoint, knows
    other regions.
    """
    digest = 0
    for names, bounds in sorted(regions.items()):
        digest = zlib.crc32(bounds.tobytes(), zlib.crc32("\n".join(names).encode(), digest))
    digest %= 1 << 16
    return [float(step % BALANCE_STEPS == 0), float(digest), float(digest**2)]


def must_balance(sums: Sequence[float], world_size: int) -> bool:
    """Return whether to agree on all regions in this step. sums: of `region_numbers`, over ranks."""
    due, digests, squares = sums
    # By Cauchy-Schwarz, equal only if all digests are equal.
    return due > 0.0 or digests * digests != squares * world_size


def state_of(regions: Bounds) -> list[tuple[list[str], list[int]]]:
    """Return the regions in the layout of a checkpoint: the tensors of a message, and its bounds."""
    return [(list(names), bounds.tolist()) for names, bounds in sorted(regions.items())]


def restored(state: Sequence[tuple[list[str], list[int]]], sizes: Mapping[str, int]) -> Bounds:
    """Return the regions from the result of `state_of`; those that do not fit these tensors are left out."""
    found = {}
    for names, bounds in state:
        n = sum(sizes.get(name, 0) for name in names)
        if len(bounds) > 1 and bounds[0] == 0 and bounds[-1] == n > 0 and list(bounds) == sorted(bounds):
            found[tuple(names)] = np.array(bounds, np.int64)
    return found
