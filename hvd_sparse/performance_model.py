"""A model of the time of a training step on a network: a rank's own work and its collectives.

As in Deep Gradient Compression (section 5), after Wen et al. (2017), the prediction combines a profile of one rank with
analytic costs of the collectives. The exchange overlaps with a part of the rank's work; the step waits for the rest of
the exchange.

    step = compute + compress + max(0, exchange - overlap) + decoded * decode + wait
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hvd_sparse.checks import check_number
from hvd_sparse.wire import HEADER_BYTES, payload_size, top_k_count

FLOAT32 = 4  # bytes
LOWEST_BANDWIDTH, HIGHEST_BANDWIDTH = 1e5, 1e13  # bit/s, the range of the search for a break-even
MOST_RANKS = 1 << 16
CYCLE = 1e-3  # seconds between two cycles of Horovod's background thread


@dataclass(frozen=True)
class Network:
    """The link of a rank.

    Args:
        bandwidth: Bits per second, in each direction, that a job achieves: for TCP about 95 % of the nominal rate.
        latency: Seconds until the first byte of a message arrives.
        gather_cost: The seconds of a byte in an all-gather or all-to-all, over those of a byte in a ring all-reduce:
            more than 1 where the ranks of a host share its link, which a ring crosses once.

    Raises:
        ValueError: One of them is out of range.
    """

    bandwidth: float
    latency: float = 5e-5
    gather_cost: float = 1.0

    def __post_init__(self):
        check_number("bandwidth", self.bandwidth, "above 0", lambda value: value > 0.0)
        check_number("latency", self.latency, ">= 0", lambda value: value >= 0.0)
        check_number("gather_cost", self.gather_cost, "above 0", lambda value: value > 0.0)

    def seconds(self, messages: float, size: float) -> float:
        """Return the seconds of `messages` consecutive messages with a total of `size` bytes."""
        return messages * self.latency + 8 * size / self.bandwidth

    def all_reduce(self, size: float, world_size: int) -> float:
        """Return the seconds of a ring all-reduce of `size` bytes: 2 (N - 1) messages of 1 / N of the bytes."""
        if world_size == 1:
            return 0.0
        return self.seconds(2 * (world_size - 1), 2 * size * (world_size - 1) / world_size)

    def all_gather(self, size: float, world_size: int) -> float:
        """Return the seconds of an all-gather of `size` bytes from each rank."""
        return self.seconds(math.ceil(math.log2(world_size)), self.gather_cost * size * (world_size - 1))

    def all_to_all(self, size: float, world_size: int) -> float:
        """Return the seconds of an all-to-all in which each rank divides `size` bytes among all ranks."""
        return self.seconds(world_size - 1, self.gather_cost * size * (world_size - 1) / world_size)


@dataclass(frozen=True)
class Profile:
    """One rank's own work in a step, in seconds.

    Args:
        numels: The number of elements of each tensor.
        compute: Forward, backward and optimizer.
        overlap: The part of `compute` during which gradients can be sent.
        compress: Accumulation, selection and coding; 0 for dense.
        decode: Decoding and adding one rank's payload; 0 for dense.
        wait: The time that every step waits, whatever it sends: cycles of Horovod's background thread.
        decoded: The number of payloads that a rank decodes; None: those of all ranks.
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
        """Return the seconds of a step whose exchange takes `exchange` seconds."""
        if world_size == 1:
            return self.compute
        left = max(0.0, exchange - self.overlap)
        decoded = world_size if self.decoded is None else self.decoded
        return self.compute + self.compress + left + decoded * self.decode + self.wait


Exchange = Callable[[Network, Profile, int], float]
ORDINARY = Network(1e9)


def dense(itemsize: int = FLOAT32) -> Exchange:
    """Return the exchange of dense gradients.

    Args:
        itemsize: Bytes of an element as sent.

    Returns:
        A function of network, profile and world size that returns the seconds of one step's exchange.
    """
    return lambda network, profile, world_size: network.all_reduce(itemsize * profile.parameters, world_size)


def gathered(density: float, coding: str = "run_length", values: str = "float32") -> Exchange:
    """Return the exchange of methods that gather all ranks' payloads: top-k in each tensor.

    Args:
        density: Part of the elements to send, in (0, 1].
        coding: Coding of positions, see `hvd_sparse.wire`.
        values: Type of the values sent.

    Returns:
        A function of network, profile and world size that returns the seconds of one step's exchange.
    """

    def seconds(network: Network, profile: Profile, world_size: int) -> float:
        """Return the seconds of the exchange of one step."""
        return network.all_gather(payload_bytes(profile.numels, density, coding, values), world_size)

    return seconds


def scattered(density: float, coding: str = "run_length", values: str = "float32", complete: bool = False) -> Exchange:
    """Return the exchange of methods with a reduce-scatter among owners of regions (`hvd_sparse.reduce_scatter`).

    Args:
        density, coding, values: As in `gathered`.
        complete: Whether all ranks then add their residuals where owners have kept a sum.

    Returns:
        A function of network, profile and world size that returns the seconds of one step's exchange.
    """

    def seconds(network: Network, profile: Profile, world_size: int) -> float:
        """Return the seconds of the exchange of one step."""
        headers = HEADER_BYTES * world_size  # one payload for each region
        size = payload_bytes(profile.numels, density, coding, values) + headers
        spent = network.all_to_all(size, world_size) + network.all_gather(size / world_size, world_size)
        if complete:
            kept = sum(top_k_count(n, density) for n in profile.numels)
            spent += network.all_reduce(FLOAT32 * kept, world_size)
        return spent

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
    """Return whether a reduce-scatter takes at most half as long as a gather, on a network of 1 Gbit/s.

    Half, because it changes fewer elements in a step, and its second collective waits for another cycle of Horovod.

    Args:
        numels: Elements of each selection.
        density, coding, values, complete: As in `scattered`.
        world_size: Number of ranks.

    Returns:
        Whether `exchange="auto"` uses a reduce-scatter.
    """
    profile = Profile(numels, compute=0.0)
    form = (density, coding, values)
    one, other = (made(ORDINARY, profile, world_size) for made in (scattered(*form, complete), gathered(*form)))
    waits = 2 if complete else 1  # for each collective that starts after the previous one has ended
    return world_size > 1 and bool(numels) and 2 * (one + waits * CYCLE) <= other


def shared(density: float, coding: str = "run_length") -> Exchange:
    """Return the exchange of methods with shared indices (MiCRO): indices are gathered, values all-reduced.

    Args:
        density, coding: As in `gathered`.

    Returns:
        A function of network, profile and world size that returns the seconds of one step's exchange.
    """

    def seconds(network: Network, profile: Profile, world_size: int) -> float:
        """Return the seconds of the exchange of one step."""
        n = profile.parameters
        k = top_k_count(n, density)
        indices = payload_size(n, max(1, k // world_size), coding, "none")
        return network.all_gather(indices, world_size) + network.all_reduce(FLOAT32 * k, world_size)

    return seconds


def payload_bytes(numels: Sequence[int], density: float, coding: str = "run_length", values: str = "float32") -> int:
    """Return the bytes of one rank's payloads, with round(density * n) entries for each tensor."""
    return sum(payload_size(n, top_k_count(n, density), coding, values) for n in numels)


@dataclass(frozen=True)
class Method:
    """A training method: its exchange, and a rank's own work with it."""

    name: str
    exchange: Exchange
    profile: Profile

    def step(self, network: Network, world_size: int) -> float:
        """Return the seconds of a step."""
        return self.profile.step(self.exchange(network, self.profile, world_size), world_size)

    def speedup(self, network: Network, world_size: int) -> float:
        """Return the samples per second of all ranks together, relative to a single rank."""
        return world_size * self.profile.compute / self.step(network, world_size)


def break_even(method: Method, other: Method, network: Network, world_size: int) -> float | None:
    """Return the bandwidth at which a method takes as long as another.

    A method that sends fewer bytes is faster below it; one that sends more, in fewer rounds, above it.

    Args:
        method: The method.
        other: What it is compared with, such as dense training.
        network: Its latency counts.
        world_size: Number of ranks.

    Returns:
        Bit/s; None if one of the two is faster at all bandwidths from 1e5 to 1e13 bit/s.
    """

    def gain(bandwidth: float) -> float:
        """Return the seconds per step that the method saves at this bandwidth, in bit/s."""
        at = replace(network, bandwidth=bandwidth)
        return other.step(at, world_size) - method.step(at, world_size)

    low, high = LOWEST_BANDWIDTH, HIGHEST_BANDWIDTH
    is_faster_at_low = gain(low) > 0.0
    if is_faster_at_low == (gain(high) > 0.0):
        return None
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if (gain(middle) > 0.0) == is_faster_at_low else (low, middle)
    return math.sqrt(low * high)


def largest_world_size(method: Method, other: Method, network: Network) -> int | None:
    """Return the largest world size at which a method is faster than another.

    Args:
        method: The method.
        other: What it is compared with, such as dense training.
        network: The link of each rank.

    Returns:
        Number of ranks; MOST_RANKS, 65,536, if there is no limit; None if it never is faster.
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
