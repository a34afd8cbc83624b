"""Costs of exchanges for `hvd_sparse.performance_model`, beside those that `hvd_sparse plan` has."""

import math

from hvd_sparse.performance_model import FLOAT32, Exchange, Network, Profile, payload_bytes
from hvd_sparse.wire import HEADER_BYTES


def merging_all_reduce(network: Network, size: float, dense: float, world_size: int, growth: float = 2.0) -> float:
    """Return the seconds of an all-reduce of log2 N steps, whose messages grow by a factor at each step.

    Deep Gradient Compression assumes this for sparse gradients: in the worst case, no two ranks select the same
    element, so the density doubles at each step. No message is larger than the dense one.
    """
    steps = range(math.ceil(math.log2(world_size)))
    return sum(network.seconds(1, min(size * growth**step, dense)) for step in steps)


def merged(density: float, growth: float = 2.0) -> Exchange:
    """Return the exchange that Deep Gradient Compression assumes: the density doubles at each step of an all-reduce.

    Args:
        density: Part of the elements to send, in (0, 1].
        growth: Factor of the density at each step; below 2 where the ranks' selections overlap.
    """

    def seconds(network: Network, profile: Profile, world_size: int) -> float:
        """Return the seconds of the exchange of one step."""
        size = payload_bytes(profile.numels, density)
        return merging_all_reduce(network, size, FLOAT32 * profile.parameters, world_size, growth)

    return seconds


def hierarchical(density: float, ranks_per_host: int, scatters: bool = False) -> Exchange:
    """Return the exchange of shards between hosts (`hvd_sparse.hierarchy`). The ranks of a host share its link.

    The exchange within a host is part of a rank's own work, in the profile.

    Args:
        density: Part of the elements to send, in (0, 1].
        ranks_per_host: Ranks of each host.
        scatters: Whether it is a reduce-scatter.
    """

    def seconds(network: Network, profile: Profile, world_size: int) -> float:
        """Return the seconds of the exchange of one step."""
        hosts = -(-world_size // ranks_per_host)
        if hosts == 1:
            return 0.0
        size = payload_bytes([max(1, n // ranks_per_host) for n in profile.numels], density)
        if not scatters:
            return network.all_gather(ranks_per_host * size, hosts)
        size = ranks_per_host * (size + HEADER_BYTES * hosts)  # one payload for each region
        return network.all_to_all(size, hosts) + network.all_gather(size / hosts, hosts)

    return seconds
