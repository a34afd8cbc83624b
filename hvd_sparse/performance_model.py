"""A model of the time of a training step on a network: a rank's own work, and its collectives.

As Deep Gradient Compression (section 5) predicts scalability, after Wen et al. (2017): a light profile of one rank, and
analytic costs of the collectives. What is sent overlaps with the part of the work that is named for it; the rest of the
exchange is waited for.

    step = compute + compress + max(0, exchange - overlap) + decoded * decode + wait
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hvd_sparse.checks import check_number
from hvd_sparse.wire import HEADER_BYTES, payload_size, top_k_count

FLOAT32 = 4  # bytes
LOWEST_BANDWIDTH, HIGHEST_BANDWIDTH = 1e5, 1e13  # bit/s, between which a break-even is looked for
MOST_RANKS = 1 << 16
CYCLE = 1e-3  # seconds from one look of Horovod's background thread at what has been submitted to the next


@dataclass(frozen=True)
class Network:
    """The link of a rank.

    Args:
        bandwidth: Bits a second, in each direction, that a job really gets: for TCP about 95 % of the nominal rate.
        latency: Seconds until the first byte of a message arrives.

    Raises:
        ValueError: One of them is out of range.
    """

    bandwidth: float
    latency: float = 5e-5

    def __post_init__(self):
        check_number("bandwidth", self.bandwidth, "above 0", lambda value: value > 0.0)
        check_number("latency", self.latency, ">= 0", lambda value: value >= 0.0)

    def seconds(self, messages: float, size: float) -> float:
        """Return how long messages of so many bytes together take, one after the other."""
        return messages * self.latency + 8 * size / self.bandwidth

    def all_reduce(self, size: float, world_size: int) -> float:
        """Return the seconds of a ring all-reduce of so many bytes: 2 (N - 1) messages of a part each."""
        if world_size == 1:
            return 0.0
        return self.seconds(2 * (world_size - 1), 2 * size * (world_size - 1) / world_size)

    def all_gather(self, size: float, world_size: int) -> float:
        """Return the seconds of an all-gather of so many bytes from each rank."""
        return self.seconds(math.ceil(math.log2(world_size)), size * (world_size - 1))

    def all_to_all(self, size: float, world_size: int) -> float:
        """Return the seconds of an all-to-all in which each rank cuts so many bytes among all."""
        return self.seconds(world_size - 1, size * (world_size - 1) / world_size)

    def merging_all_reduce(self, size: float, dense: float, world_size: int, growth: float = 2.0) -> float:
        """Return the seconds of an all-reduce of log2 N steps, whose messages grow by a factor at each.

        As Deep Gradient Compression assumes of sparse gradients: in the worst case their density doubles, where no two
        ranks have chosen an element in common. No message exceeds the dense one.
        """
        steps = range(math.ceil(math.log2(world_size)))
        return sum(self.seconds(1, min(size * growth**step, dense)) for step in steps)


@dataclass(frozen=True)
class Profile:
    """One rank's own work in a step, in seconds.

    Args:
        numels: The elements of each tensor.
        compute: Forward, backward and optimizer.
        overlap: The part of it during which gradients can be sent already.
        compress: Accumulating, selecting and coding; 0 for dense.
        decode: Decoding and adding the payload of one rank; 0 for dense.
        wait: What every step waits for, whatever is sent: cycles of Horovod's background thread.
        decoded: How many payloads' entries it decodes; None: those of all ranks.
    """

    numels: Sequence[int]
    compute: float
    overlap: float = 0.0
    compress: float = 0.0
    decode: float = 0.0
    wait: float = 0.0
    decoded: float | None = None

    @property
    def parameters(self) -> int:
        """The number of elements."""
        return sum(self.numels)

    def step(self, exchange: float, world_size: int) -> float:
        """Return the seconds of a step whose exchange takes so many seconds."""
        if world_size == 1:
            return self.compute
        left = max(0.0, exchange - self.overlap)
        decoded = world_size if self.decoded is None else self.decoded
        return self.compute + self.compress + left + decoded * self.decode + self.wait


Exchange = Callable[[Network, Profile, int], float]
ORDINARY = Network(1e9)


def dense(itemsize: int = FLOAT32) -> Exchange:
    """Return the exchange of dense gradients, of so many bytes an element."""
    return lambda network, profile, world_size: network.all_reduce(itemsize * profile.parameters, world_size)


def gathered(density: float, coding: str = "run_length", values: str = "float32") -> Exchange:
    """Return the exchange of methods that gather every rank's payloads: top-k of each tensor."""

    def seconds(network: Network, profile: Profile, world_size: int) -> float:
        """Return the seconds of the exchange of one step."""
        return network.all_gather(payload_bytes(profile.numels, density, coding, values), world_size)

    return seconds


def scattered(density: float, coding: str = "run_length", values: str = "float32", complete: bool = False) -> Exchange:
    """Return the exchange of methods whose payloads are reduced by owners of regions (`hvd_sparse.reduce_scatter`).

    complete: All ranks then add their residuals where owners have kept a sum.
    """

    def seconds(network: Network, profile: Profile, world_size: int) -> float:
        """Return the seconds of the exchange of one step."""
        headers = HEADER_BYTES * world_size  # a payload of each region
        size = payload_bytes(profile.numels, density, coding, values) + headers
        spent = network.all_to_all(size, world_size) + network.all_gather(size / world_size, world_size)
        if complete:
            kept = sum(top_k_count(n, density) for n in profile.numels)
            spent += network.all_reduce(FLOAT32 * kept, world_size)
        return spent

    return seconds


def between_hosts(density: float, ranks_per_host: int, coding: str = "run_length", values: str = "float32") -> Exchange:
    """Return the exchange of shards between hosts (`hvd_sparse.hierarchy`), on the link that a host's ranks share.

    What the ranks of a host exchange among themselves is their own work, in the profile.
    """

    def seconds(network: Network, profile: Profile, world_size: int) -> float:
        """Return the seconds of the exchange of one step."""
        hosts = -(-world_size // ranks_per_host)
        if hosts == 1:
            return 0.0
        shards = [max(1, n // ranks_per_host) for n in profile.numels]
        return network.all_gather(ranks_per_host * payload_bytes(shards, density, coding, values), hosts)

    return seconds


@functools.lru_cache
def favours_scattered(
    numels: tuple[int, ...],
    density: float,
    world_size: int,
    coding: str = "run_length",
    values: str = "float32",
    complete: bool = False,
) -> bool:
    """Return whether a reduce-scatter takes at most half as long as a gather, on an ordinary network.

    Half, since it changes fewer elements in a step, and since its second collective waits for Horovod once more.
    """
    profile = Profile(numels, compute=0.0)
    form = (density, coding, values)
    one, other = (made(ORDINARY, profile, world_size) for made in (scattered(*form, complete), gathered(*form)))
    waits = 2 if complete else 1  # for one more collective, or two, that start when the one before has ended
    return world_size > 1 and bool(numels) and 2 * (one + waits * CYCLE) <= other


def merged(density: float, coding: str = "run_length", values: str = "float32", growth: float = 2.0) -> Exchange:
    """Return the exchange that Deep Gradient Compression assumes: density doubles at each step of an all-reduce.

    Or it grows by another factor, as measured: the ranks' choices overlap.
    """

    def seconds(network: Network, profile: Profile, world_size: int) -> float:
        """Return the seconds of the exchange of one step."""
        size = payload_bytes(profile.numels, density, coding, values)
        return network.merging_all_reduce(size, FLOAT32 * profile.parameters, world_size, growth)

    return seconds


def shared(density: float, coding: str = "run_length") -> Exchange:
    """Return the exchange of methods whose ranks share indices: these are gathered, values all-reduced (MiCRO)."""

    def seconds(network: Network, profile: Profile, world_size: int) -> float:
        """Return the seconds of the exchange of one step."""
        n = profile.parameters
        k = top_k_count(n, density)
        indices = payload_size(n, max(1, k // world_size), coding, "none")
        return network.all_gather(indices, world_size) + network.all_reduce(FLOAT32 * k, world_size)

    return seconds


def payload_bytes(numels: Sequence[int], density: float, coding: str = "run_length", values: str = "float32") -> int:
    """Return the bytes of one rank's payloads: round(density * n) entries of each tensor."""
    return sum(payload_size(n, top_k_count(n, density), coding, values) for n in numels)


@dataclass(frozen=True)
class Method:
    """A way to train: its exchange, and a rank's own work with it."""

    name: str
    exchange: Exchange
    profile: Profile

    def step(self, network: Network, world_size: int) -> float:
        """Return the seconds of a step."""
        return self.profile.step(self.exchange(network, self.profile, world_size), world_size)

    def speedup(self, network: Network, world_size: int) -> float:
        """Return how many times as much this trains in a second as one rank alone."""
        return world_size * self.profile.compute / self.step(network, world_size)


def break_even(method: Method, other: Method, network: Network, world_size: int) -> float | None:
    """Return the bandwidth, in bit/s, below which a method is faster than another; None if it is at none or at all."""

    def gain(bandwidth: float) -> float:
        """Return the seconds that a step saves with the method, at this bandwidth in bit/s."""
        at = replace(network, bandwidth=bandwidth)
        return other.step(at, world_size) - method.step(at, world_size)

    low, high = LOWEST_BANDWIDTH, HIGHEST_BANDWIDTH
    if gain(low) <= 0.0 or gain(high) >= 0.0:
        return None
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain(middle) > 0.0 else (low, middle)
    return math.sqrt(low * high)


def largest_world_size(method: Method, other: Method, network: Network) -> int | None:
    """Return the most ranks at which a method is faster than another; None if it is at no number of them.

    MOST_RANKS stands for no limit.
    """
    best = None
    world_size = 2
    while world_size <= MOST_RANKS:
        if method.step(network, world_size) < other.step(network, world_size):
            best = world_size
        elif best is not None:
            break
        world_size *= 2
    if best is None or best == MOST_RANKS:
        return best
    low, high = best, 2 * best
    while high - low > 1:
        middle = (low + high) // 2
        faster = method.step(network, middle) < other.step(network, middle)
        low, high = (middle, high) if faster else (low, middle)
    return low
