"""Hosts, columns and shards of the hierarchical exchange.

    dense gradients of a host ==all-to-all in the host==> shards of their sum
    shard -> error feedback, selection, exchange with the same shards of other hosts -> shard of the result
    shards of the result ==all-gather in the host==> result

Each tensor is cut into shards, one for each rank of a host. With L ranks on a host, a rank has 1/L of the error
feedback and of the selection, and a host sends 1/L of the bytes that its ranks would send in a flat exchange. The
selection is made from the sum of the host's gradients, not from those of one rank. Ranks with the same shard form a
column. If hosts differ in their number of ranks, the number of shards is that of the smallest host, and the remaining
ranks of larger hosts have no shard.
"""

import dataclasses
import socket
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hvd_sparse.algorithms import Algorithm


class Hierarchy(NamedTuple):
    """The ranks of each host, in order."""

    hosts: tuple[tuple[int, ...], ...]

    @property
    def shards(self) -> int:
        """The number of shards of a tensor."""
        return min(map(len, self.hosts))

    @property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """The ranks with the same shard, for each shard."""
        return tuple(tuple(host[shard] for host in self.hosts) for shard in range(self.shards))

    def host_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a rank's host."""
        return next(host for host in self.hosts if rank in host)

    def shard_of(self, rank: int) -> int | None:
        """Return the number of a rank's shard, None if it has none."""
        place = self.host_of(rank).index(rank)
        return place if place < self.shards else None

    def cut(self, n: int, row: int = 1) -> np.ndarray:
        """Return the shards' bounds in n elements, int64[shards + 1]: at whole rows if there is one for each shard."""
        rows, unit = (n // row, row) if n // row >= self.shards else (n, 1)
        return np.arange(self.shards + 1, dtype=np.int64) * rows // self.shards * unit


def shard_shape(begin: int, end: int, row: int) -> list[int]:
    """Return the shape of elements [begin, end) of a tensor: a matrix if they are whole rows of `row` elements."""
    size = end - begin
    return [size // row, row] if row > 1 and begin % row == 0 == size % row else [size]


def by_name(names: Sequence[Hashable]) -> Hierarchy:
    """Return the hosts, given the host name of each rank."""
    hosts: dict[Hashable, list[int]] = {}
    for rank, name in enumerate(names):
        hosts.setdefault(name, []).append(rank)
    return Hierarchy(tuple(map(tuple, hosts.values())))


def by_size(sizes: int | Sequence[int], world_size: int) -> Hierarchy:
    """Return hosts of consecutive ranks, all with one size (the last may have fewer ranks), or each with its own.

    Raises ValueError if the sizes do not add up to the world size.
    """
    if isinstance(sizes, int):
        rest = world_size % sizes
        sizes = [sizes] * (world_size // sizes) + [rest] * (rest > 0)
    if sum(sizes) != world_size:
        raise ValueError(f"ranks_per_host must add up to the {world_size} ranks that there are, got {list(sizes)}")
    ends = np.cumsum(sizes).tolist()
    return Hierarchy(tuple(tuple(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)))


def find_hierarchy(
    ranks_per_host: int | Sequence[int] | None, world_size: int, allgather_object: Callable[[str], Sequence[str]]
) -> Hierarchy:
    """Return the hosts of all ranks, from `ranks_per_host` or the host names. Call it on every rank.

    allgather_object: all-gathers a string of each rank, in the order of ranks.
    """
    if ranks_per_host is not None:
        return by_size(ranks_per_host, world_size)
    return by_name(allgather_object(socket.gethostname()))


def algorithm_between_hosts(algorithm: Algorithm, weight_decays: Mapping[str, float]) -> Algorithm:
    """Return the method of a column, which compresses all of its tensors.

    It does not clip, as gradients are clipped before the sum.

    weight_decays: of each sharded tensor.
    """
    names = {field.name for field in dataclasses.fields(algorithm)}
    settings: dict = {"dense": (), "min_numel": 0, "exchange": "gather", "ranks_per_host": None}
    if "between_hosts" in names:
        settings |= {"exchange": algorithm.between_hosts, "between_hosts": "auto"}
    if "clip_norm" in names:
        decays = {name: decay for name, decay in weight_decays.items() if decay}
        settings |= {"clip_norm": None, "clip_scope": "tensor", "weight_decay": decays or 0.0}
    return dataclasses.replace(algorithm, **settings)
