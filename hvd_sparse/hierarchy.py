"""Hosts, and the part of each tensor that a rank keeps, in a hierarchical exchange.

    dense gradients of a host ==all-to-all in it==> shards of their sum
    shard -> error feedback, selection, exchange with the same shards of other hosts -> shard of the result
    shards of the result ==all-gather in the host==> result

The ranks of a host cut each tensor into shards, one a rank. With L ranks on a host a rank has 1/L of the error
feedback and of the selection, and a host sends 1/L of what its ranks would send each for itself; a selection sees the
sum of the host's gradients, not those of one rank. Ranks that keep the same shard are a column. Where hosts have
different numbers of ranks, there are as many shards as the smallest host has ranks; the others keep none.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

DYNAMIC_SETS = (
    'hvd_sparse: exchange="hierarchical" makes process sets, which Horovod does not permit here: start Horovod with '
    'hvd.init(process_sets="dynamic"), or set HOROVOD_DYNAMIC_PROCESS_SETS=1'
)


class Hierarchy(NamedTuple):
    """The ranks of each host, in order."""

    hosts: tuple[tuple[int, ...], ...]

    @property
    def shards(self) -> int:
        """How many parts a tensor is cut into."""
        return min(map(len, self.hosts))

    @property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that keep the same shard, for each shard."""
        return tuple(tuple(host[shard] for host in self.hosts) for shard in range(self.shards))

    def host_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a rank's host."""
        return next(host for host in self.hosts if rank in host)

    def shard_of(self, rank: int) -> int | None:
        """Return the number of the shard that a rank keeps, None if it keeps none."""
        place = self.host_of(rank).index(rank)
        return place if place < self.shards else None

    def cut(self, n: int, row: int = 1) -> np.ndarray:
        """Return where the shards of n elements begin and end, int64[shards + 1]: at whole rows, if these suffice."""
        rows, unit = (n // row, row) if n // row >= self.shards else (n, 1)
        return np.arange(self.shards + 1, dtype=np.int64) * rows // self.shards * unit


def by_name(names: Sequence[Hashable]) -> Hierarchy:
    """Return the hosts of ranks whose hosts have these names."""
    hosts: dict[Hashable, list[int]] = {}
    for rank, name in enumerate(names):
        hosts.setdefault(name, []).append(rank)
    return Hierarchy(tuple(map(tuple, hosts.values())))


def by_size(sizes: int | Sequence[int], world_size: int) -> Hierarchy:
    """Return the hosts of ranks that follow one another, all with one size, or each with its own.

    Raises ValueError if they have more or fewer ranks together.
    """
    if isinstance(sizes, int):
        rest = world_size % sizes
        sizes = [sizes] * (world_size // sizes) + [rest] * (rest > 0)
    if sum(sizes) != world_size:
        raise ValueError(f"ranks_per_host must add up to the {world_size} ranks that there are, got {list(sizes)}")
    ends = np.cumsum(sizes).tolist()
    return Hierarchy(tuple(tuple(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)))
