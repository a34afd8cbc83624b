"""Exchanges among the ranks of one host, and their shards of parameters."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from hvd_sparse.hierarchy import shard_shape
from hvd_sparse.pieces import WORD_BYTES
from hvd_sparse.torch.exchange import Exchange, Pending

DENSE = -1  # in place of the number of entries: all elements follow


class ShardResult(NamedTuple):
    """A shard of results: its nonzero entries, or all of its elements."""

    indices: torch.Tensor | None  # int64[m], ascending; None: all
    values: torch.Tensor  # float32[m], or of all elements

    def put(self, out: torch.Tensor, begin: int) -> None:
        """Write n elements, from `begin` on, to `out`, float32[n]."""
        if self.indices is None:
            out.copy_(self.values[begin : begin + out.numel()])
            return
        first, last = np.searchsorted(self.indices.numpy(), [begin, begin + out.numel()])
        out.zero_().index_copy_(0, self.indices[first:last] - begin, self.values[first:last])


class Host:
    """The collectives among the ranks of this host.

    Args:
        ranks: All ranks of the host, in order.
        exchange: The exchange of these ranks.
        shards: The number of ranks with a shard: the first ones of the host.
    """

    def __init__(self, ranks: Sequence[int], exchange: Exchange, shards: int):
        self.exchange = exchange
        self.size, self.place, self.shards = len(ranks), exchange.rank(), shards

    def scatter(self, name: str, tensors: Sequence[torch.Tensor], cuts: Sequence[Sequence[int]]) -> Pending:
        """Start a reduce-scatter over the host's ranks; the result is the sum of this rank's shards, float32[n].

        tensors: float32[m] each; a single one is sent without a copy. cuts: the shards' bounds in each. Values are
        summed in rank order. The result of a rank without a shard is empty.
        """
        message = tensors[0]
        if len(tensors) > 1:
            pairs = list(zip(tensors, cuts, strict=True))
            message = torch.cat([one[cut[j] : cut[j + 1]] for j in range(self.shards) for one, cut in pairs])
        if self.size == 1:
            return Pending(finish=lambda: message)
        sizes = np.diff(cuts).sum(axis=0).tolist() + [0] * (self.size - self.shards)
        own = sizes[self.place]

        def add(received: torch.Tensor) -> torch.Tensor:
            """Sum the parts that all ranks of the host sent."""
            total, *others = received.view(self.size, own)
            for row in others:
                total += row
            return total

        return self.exchange.alltoall_floats(name, message, sizes, add)

    def total(self, name: str, own: torch.Tensor) -> Pending:
        """Start an all-reduce over the host's ranks: the sum of a tensor, in place."""
        if self.size == 1 or own.numel() == 0:
            return Pending(finish=lambda: own)
        return self.exchange.allreduce(name, own)

    def gather(self, name: str, pieces: Sequence[torch.Tensor], sizes: Sequence[int]) -> Pending:
        """Start gathering the shards; the result is a list with a `ShardResult` for each of `sizes`.

        pieces: this rank's shard, as float32[n_j] each; empty for a rank without one. A shard that is mostly zeros is
        sent as indices and values.
        """
        if self.size == 1:
            return Pending(finish=lambda: [ShardResult(None, torch.cat(list(pieces)))])
        gathered = self.exchange.allgather(name, _packed(pieces), WORD_BYTES * (2 + max(sizes)))
        return Pending(finish=lambda: list(_unpacked(gathered.wait(), sizes)))


class Shard:
    """A part of a parameter, with the interface of a parameter that a step uses."""

    def __init__(self, parameter: torch.Tensor, begin: int, end: int, row: int):
        self._parameter, self._part = parameter, slice(begin, end)
        self.shape = torch.Size(shard_shape(begin, end, row))

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter trains at present."""
        return self._parameter.requires_grad

    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()

    def element_size(self) -> int:
        """Return the bytes of an element: 4, as the shard's gradient is float32."""
        return 4

    def detach(self) -> torch.Tensor:
        """Return the elements."""
        return self._parameter.detach().reshape(-1)[self._part]


class Shards(dict[str, Shard]):
    """The shards of a column, by the names of their parameters."""

    device = torch.device("cpu")


def _packed(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a vector as bytes: number of entries, indices and values; or all elements, if these are no larger."""
    found = [torch.from_numpy(np.flatnonzero(piece.numpy() != 0.0)) for piece in pieces]
    *begins, size = np.cumsum([0, *(piece.numel() for piece in pieces)]).tolist()
    count = sum(indices.numel() for indices in found)
    if 3 * count > size:
        values, found, count = pieces, [], DENSE
    else:
        values = [piece[indices] for piece, indices in zip(pieces, found, strict=True)]
        found = [indices.add_(begin) for indices, begin in zip(found, begins, strict=True)]
    padding = torch.zeros(sum(one.numel() for one in values) % 2, dtype=torch.float32, device="cpu")
    words = [torch.tensor([count], device="cpu"), *found, torch.cat([*values, padding]).view(torch.int64)]
    return torch.cat(words).view(torch.uint8)


def _unpacked(message: torch.Tensor, sizes: Sequence[int]):
    """Yield a `ShardResult` for each of the concatenated results of `_packed`; `sizes` are those of the vectors."""
    words, at = message.view(torch.int64), 0
    for size in sizes:
        count, at = int(words[at]), at + 1
        entries = size if count == DENSE else count
        indices = None if count == DENSE else words[at : at + count]
        at += max(0, count)
        values = words[at : at + (entries + 1) // 2].view(torch.float32)[:entries]
        at += (entries + 1) // 2
        yield ShardResult(indices, values)
