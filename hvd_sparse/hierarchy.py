"""Hosts, and each rank's part of every tensor, in a hierarchical exchange.

    dense gradients of a host ==all-to-all in it==> shards of their sum
    shard -> error feedback, selection, exchange with the same shards of other hosts -> shard of the result
    shards of the result ==all-gather in the host==> result

The ranks of a host cut each tensor into shards, one a rank. With L ranks on a host a rank has 1/L of the error
feedback and of the selection, and a host sends 1/L of what its ranks would send each for itself; a selection sees the
sum of the host's gradients, not those of one rank. Ranks that keep the same shard are a column. Where hosts have
different numbers of ranks, there are as many shards as the smallest host has ranks; the others keep none.
"""

import dataclasses
import socket
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hvd_sparse.algorithms import Algorithm, Scoped


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


def find_hierarchy(
    ranks_per_host: int | Sequence[int] | None, world_size: int, everywhere: Callable[[str, str], Sequence[str]]
) -> Hierarchy:
    """Return the hosts of all ranks: as given, or as their names tell. Call it on every rank.

    everywhere: gathers, under a name, a text of each rank.
    """
    if ranks_per_host is not None:
        return by_size(ranks_per_host, world_size)
    return by_name(everywhere("hosts", socket.gethostname()))


def between_hosts(algorithm: Algorithm, weight_decays: Mapping[str, float], exchange: str) -> Algorithm:
    """Return the method of a column: gradients are clipped before they are added, and all shards are compressed.

    weight_decays: of each tensor that is cut. exchange: between hosts, for methods that have a choice.
    """
    names = {field.name for field in dataclasses.fields(algorithm)}
    settings: dict = {"min_numel": 0, "exchange": exchange if isinstance(algorithm, Scoped) else "gather"}
    settings["ranks_per_host"] = None
    if "clip_norm" in names:
        decays = {name: decay for name, decay in weight_decays.items() if decay}
        settings |= {"clip_norm": None, "clip_scope": "tensor", "weight_decay": decays or 0.0}
    return dataclasses.replace(algorithm, **settings)


def row_of(shape: Sequence[int], granularity: str) -> int:
    """Return the elements of a row that shards do not cut: those that share no magnitude with one another."""
    return int(shape[-1]) if granularity == "channel" and len(shape) > 1 else 1
