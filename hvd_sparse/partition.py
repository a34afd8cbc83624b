"""MiCRO's exclusive partitions, and the thresholds that select in them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvd_sparse.threshold import SMALLEST

HISTOGRAM_SHIFT = 19  # from the bits of a magnitude to its bin: exponent and four mantissa bits
HISTOGRAM_BINS = 1 << (31 - HISTOGRAM_SHIFT)
HISTOGRAM_INFINITY = 0x7F800000 >> HISTOGRAM_SHIFT
SKETCH_BINS = 64  # bins of a sketch: the part of a histogram around a threshold
SAMPLED = 512  # number of the k largest elements in the samples of all ranks together
FEWEST_SAMPLED = 1 << 16  # elements of a partition, or all of a smaller one: the cost is negligible
LARGEST_FLOAT = float(np.finfo(np.float32).max)
LARGEST_GROWTH = 0.22  # of a threshold's logarithm per step


def partition(step: int, rank: int, world_size: int, n: int) -> tuple[int, int]:
    """Return the bounds of a rank's partition, which rotates each step (MiCRO, Algorithm 1, line 7)."""
    number = (step + rank) % world_size
    return number * n // world_size, (number + 1) * n // world_size


class PredictedThreshold:
    """MiCRO's threshold, predicted from all ranks' histograms of the previous step, before the gradients are known.

    It is the threshold that k elements reached in that step, times its recent growth. `share` is the number of elements
    of this rank's next partition that should reach it. A rank that finds far fewer or more selects `share` elements
    instead, so that a jump of the gradients' scale does not change the amount sent.
    """

    NUMBERS = 6

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        """Reset the state."""
        self.restore([0.0] * self.NUMBERS)

    def numbers(self) -> list[float]:
        """Return the state for a checkpoint, initially zeros.

        The numbers are: the threshold that k elements reached; k; the logarithm of its growth per step; its elasticity
        with respect to k; this rank's next share; and the world size.
        """
        return [self._value, float(self._k), self._growth, self._elasticity, self._share, float(self._world_size)]

    def restore(self, numbers: Sequence[float]) -> None:
        """Continue from `numbers()`."""
        self._value, k, self._growth, self._elasticity, self._share, world_size = map(float, numbers)
        self._k, self._world_size = int(k), int(world_size)

    def plan(self, k: int, world_size: int) -> tuple[float, float]:
        """Return a step's threshold, infinite if unknown, and this rank's share of k."""
        if self._k == 0 or self._world_size != world_size:
            return math.inf, k / world_size
        scale = math.exp(self._growth + self._elasticity * math.log(k / self._k))
        return min(max(self._value * scale, SMALLEST), LARGEST_FLOAT), self._share * k / self._k

    def learn(self, k: int, rank: int, sketches: np.ndarray) -> None:
        """Update the threshold from the sketches of the ranks' partitions: float32[ranks, 65], first bin and counts.

        The previous rank has this rank's partition in the next step (`partition`).
        """
        histograms = np.stack([widen(sketch) for sketch in sketches])
        total = histograms.sum(0)
        cut, more = histogram_cut(total, k), histogram_cut(total, 2 * k)
        value = min(cut.threshold, LARGEST_FLOAT)
        is_tail = SMALLEST < more.threshold < value
        self._elasticity = math.log(more.threshold / value) / math.log(2.0) if is_tail else 0.0
        grows = SMALLEST < self._value and SMALLEST < value and self._k == k and self._world_size == len(sketches)
        growth = min(max(math.log(value / self._value), -LARGEST_GROWTH), LARGEST_GROWTH) if grows else 0.0
        self._growth = 0.5 * (self._growth + growth) if grows else 0.0
        wanted = [cut.wanted(histogram) for histogram in histograms]
        found, world_size = sum(wanted), len(sketches)
        self._share = k * wanted[(rank + 1) % world_size] / found if found > 0.0 else k / world_size
        self._value, self._k, self._world_size = value, k, world_size


class ScaledThreshold:
    """MiCRO's published rule: starts at 1 / (2 sqrt(k)), and scales with the number sent (section IV-C)."""

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        """Reset the state."""
        self.restore([0.0, 0.0])

    def numbers(self) -> list[float]:
        """Return the state for a checkpoint: the threshold, 0 for none, and its k."""
        return [self._value, float(self._k)]

    def restore(self, numbers: Sequence[float]) -> None:
        """Continue from `numbers()`."""
        self._value, self._k = float(numbers[0]), int(numbers[1])

    def plan(self, k: int, world_size: int) -> tuple[float, float]:
        """Return a step's threshold, reset if k has changed, and the share -1: no correction of the selection."""
        if k != self._k:
            self._value, self._k = 0.5 / math.sqrt(k), k
        return self._value, -1.0

    def learn(self, k: int, count: int) -> None:
        """Scale the threshold by the number of elements that all ranks sent."""
        self._value = max(self._value * threshold_scale(count / k), SMALLEST)


def threshold_scale(excess: float) -> float:
    """Return the factor of the threshold in MiCRO's published code. excess: elements sent over elements wanted."""
    if excess > 1.1:
        return 1.005
    return 1.00125 if excess > 0.909 else 0.995


@dataclass(frozen=True)
class HistogramCut:
    """The cut of a histogram of magnitudes that leaves about k elements above it."""

    threshold: float
    bin: int = 0  # the bin with the threshold
    part: float = 0.0  # fraction of this bin's elements above the cut

    def wanted(self, histogram: np.ndarray) -> float:
        """Return the number of elements of a histogram, [HISTOGRAM_BINS], above the cut."""
        return float(histogram[self.bin + 1 :].sum() + self.part * histogram[self.bin])


def histogram_cut(histogram: np.ndarray, k: int) -> HistogramCut:
    """Return the threshold that about k of the counted values reach; SMALLEST if there are not that many.

    Within a bin, log(count) is interpolated linearly in log(threshold), as for a power-law tail.
    """
    counts = histogram.astype(np.float64)
    counts[0] = 0.0  # zeros
    reaching = np.cumsum(counts[::-1])[::-1]  # elements in a bin or above it
    if reaching[0] < k:
        return HistogramCut(SMALLEST)
    bin_ = int(np.flatnonzero(reaching >= k)[-1])
    above = float(reaching[bin_] - counts[bin_])
    within = (k - above) / counts[bin_]
    if bin_ >= HISTOGRAM_INFINITY - 1:  # the last bin of numbers has no finite end
        infinite = bin_ >= HISTOGRAM_INFINITY
        return HistogramCut(math.inf if infinite else float(np.float32(2.0**127 * (2 - 2.0**-4))), bin_, within)
    low, high = (np.array([bin_, bin_ + 1], np.uint32) << HISTOGRAM_SHIFT).view(np.float32).astype(np.float64).tolist()
    part = math.log(k / above) / math.log(reaching[bin_] / above) if above > 0 else k / counts[bin_]
    return HistogramCut(max(SMALLEST, high * (low / high) ** part), bin_, within)


def widen(sketch: np.ndarray) -> np.ndarray:
    """Return the histogram, float64[HISTOGRAM_BINS], of a sketch, with zeros in all other bins."""
    histogram = np.zeros(HISTOGRAM_BINS)
    begin = int(sketch[0])
    histogram[begin : begin + SKETCH_BINS] = sketch[1:]
    return histogram


def sketch_sample(n: int, k: int) -> int:
    """Return the number of a partition's n elements to sample, for about 512 of the k largest on all ranks."""
    return min(n, max(FEWEST_SAMPLED, -(-n * SAMPLED // k)))
