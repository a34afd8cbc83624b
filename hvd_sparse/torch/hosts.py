"""What the ranks of one host exchange, and their shards of parameters."""

from collections.abc import Sequence

import horovod.torch as hvd
import torch

from hvd_sparse.torch.exchange import Exchange, Pending
from hvd_sparse.traffic import Traffic

WORD_BYTES = 8
DENSE = -1  # in place of a number of entries


class Host:
    """The ranks of this host.

    Args:
        ranks: All ranks of the host, in order.
        process_set: Of these.
        shards: How many of them keep a shard: the first ones.
    """

    def __init__(self, ranks: Sequence[int], process_set: hvd.ProcessSet, shards: int, traffic: Traffic):
        self.exchange = Exchange(process_set, traffic)
        self.size, self.place, self.shards = len(ranks), list(ranks).index(hvd.rank()), shards

    def scatter(self, name: str, parts: Sequence[torch.Tensor]) -> Pending:
        """Start adding each part, float32[n_j], over the host's ranks; the result is the sum of this rank's part.

        parts: one for each shard. Sums are made in the order of the ranks. Ranks without a shard get nothing.
        """
        if self.size == 1:
            return Pending(finish=lambda: parts[0])
        sizes = [part.numel() for part in parts] + [0] * (self.size - self.shards)
        own = sizes[self.place]

        def add(received: torch.Tensor) -> torch.Tensor:
            """Add what all ranks of the host sent."""
            rows = received.view(self.size, own)
            total = rows[0].clone()
            for row in rows[1:]:
                total += row
            return total

        return self.exchange.alltoall_floats(name, torch.cat(list(parts)), sizes, add)

    def gather(self, name: str, part: torch.Tensor, sizes: Sequence[int]) -> Pending:
        """Start gathering the shards, float32[n_j] each; the result is a list of them, of `sizes`.

        What is zero for the most part is sent as indices and values.
        """
        if self.size == 1:
            return Pending(finish=lambda: [part])
        most = WORD_BYTES * (2 + max(sizes))
        gathered = self.exchange.allgather(name, _packed(part), most)
        return Pending(finish=lambda: list(_unpacked(gathered.wait(), sizes)))


class Shard:
    """A part of a parameter, as a step knows parameters."""

    def __init__(self, parameter: torch.Tensor, begin: int, end: int, row: int):
        self._parameter, self._part = parameter, slice(begin, end)
        size = end - begin
        self.shape = torch.Size([size // row, row] if row > 1 and begin % row == 0 and size % row == 0 else [size])

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter trains at present."""
        return self._parameter.requires_grad

    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()

    def element_size(self) -> int:
        """Return the bytes of an element, as the shard's gradient is: float32."""
        return 4

    def detach(self) -> torch.Tensor:
        """Return the elements."""
        return self._parameter.detach().reshape(-1)[self._part]


class Shards(dict[str, Shard]):
    """The shards of a column, by the names of their parameters."""

    device = torch.device("cpu")


def _packed(part: torch.Tensor) -> torch.Tensor:
    """Return the entries of a vector as bytes: their number, indices, values; or all, where that takes no more."""
    indices = part.nonzero().view(-1)
    count = indices.numel()
    values = part[indices]
    if 3 * count > part.numel():
        count, indices, values = DENSE, indices[:0], part
    padding = values.new_zeros(values.numel() % 2)
    words = [torch.tensor([count]), indices, torch.cat([values, padding]).view(torch.int64)]
    return torch.cat(words).view(torch.uint8)


def _unpacked(message: torch.Tensor, sizes: Sequence[int]):
    """Yield the vectors of these sizes from what `_packed` made of them, one after the other."""
    words, at = message.view(torch.int64), 0
    for size in sizes:
        count, at = int(words[at]), at + 1
        entries = size if count == DENSE else count
        indices = words[at : at + max(0, count)]
        at += max(0, count)
        values = words[at : at + (entries + 1) // 2].view(torch.float32)[:entries]
        at += (entries + 1) // 2
        yield values.clone() if count == DENSE else values.new_zeros(size).index_copy_(0, indices, values)
