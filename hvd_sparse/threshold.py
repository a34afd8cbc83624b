"""Thresholds that keep state between steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hvd_sparse.algorithms import Algorithm, DynamicCommunicationThresholding, SIDCo
from hvd_sparse.sampling import hash_index
from hvd_sparse.stages import ADAPT_STEPS, Stages

SMALLEST = 2.0**-149  # of float32: every nonzero number reaches it
HISTOGRAM_SHIFT = 19  # from the bits of a magnitude to its bin: exponent and four mantissa bits
HISTOGRAM_BINS = 1 << (31 - HISTOGRAM_SHIFT)
HISTOGRAM_INFINITY = 0x7F800000 >> HISTOGRAM_SHIFT
SKETCH_BINS = 64  # bins of a sketch: the part of a histogram around a threshold
SAMPLED = 512  # number of the k largest elements in the samples of all ranks together
FEWEST_SAMPLED = 1 << 16  # elements of a partition, or all of a smaller one: the cost is negligible
LARGEST_FLOAT = float(np.finfo(np.float32).max)
LARGEST_GROWTH = 0.22  # of a threshold's logarithm per step
LOWEST_MARGIN = 0.5
HIGHEST_MARGIN = 0.998


def lowered(margin):
    """Return a hint's margin, a number or a tensor, after fewer than k elements reached the hint."""
    return 1.0 - 2.0 * (1.0 - margin)


def raised(margin):
    """Return a hint's margin, a number or a tensor, after more than `most_passed(k)` elements reached the hint."""
    return 1.0 - 0.9 * (1.0 - margin)


def most_passed(k):
    """Return how many elements may reach the hint of k elements before it is raised; of a number or a tensor."""
    return k + k // 4 + 16


@dataclass
class ThresholdHint:
    """The last step's threshold, slightly lowered, as a guess for this step, so that one pass over the data suffices.

    With error feedback, many residuals lie just below the threshold, so the hint has to be close to it, and its margin
    adapts: a miss (fewer than k elements reached the hint, and the data was read again) lowers it, and too many
    elements raise it. The selection is exact with any hint, so a checkpoint does not need it.
    """

    threshold: float = 0.0
    margin: float = 0.98
    k: int = 0

    def value(self, k: int) -> float:
        """Return the hint for a selection of k elements, 0.0 if there is none."""
        if k != self.k:  # the density has changed: the last threshold is no guess
            return 0.0
        return self.threshold * self.margin

    def update(self, k: int, threshold: float, passed: int) -> None:
        """Update the hint from a selection: its threshold, and the number of elements that reached the hint."""
        if self.value(k) > 0.0:
            if passed < k:
                self.margin = max(LOWEST_MARGIN, lowered(self.margin))
            elif passed > most_passed(k):
                self.margin = min(HIGHEST_MARGIN, raised(self.margin))
        self.threshold = threshold
        self.k = k


@dataclass(frozen=True)
class Plan:
    """The rule of a tensor's selection in a step: by `threshold`, or if k > 0, by the threshold of the k largest.

    If k > 0, `threshold` is only a guess, 0.0 for none, which affects speed but not the result. If k < 0, exactly the
    -k largest elements are selected, even if others equal them. If stages > 0, a threshold that about k elements reach
    is fitted in this number of stages, and `threshold` is a guess at it, which affects only the cost.
    """

    threshold: float
    k: int = 0
    stages: int = 0


class ConstantThreshold:
    """A fixed threshold."""

    def __init__(self, value: float):
        self._plan = Plan(value)

    def reset(self) -> None:
        """Do nothing: there is no state."""

    def numbers(self) -> list[float]:
        """Return the state for a checkpoint: none."""
        return []

    def restore(self, numbers: Sequence[float]) -> None:
        """Do nothing: there is no state."""

    def plan(self, step: int, k: int, n: int) -> Plan:
        """Return the plan of a step."""
        return self._plan

    def learn(self, k: int, threshold: float, count: int) -> None:
        """Do nothing: a fixed threshold does not adapt."""


class KeepsThresholds(Protocol):
    """The settings of a method that keeps thresholds; see `Compression.dct`."""

    @property
    def lifespan(self) -> int:
        """The number of steps that use one threshold."""

    @property
    def drain(self) -> int | None:
        """The number of steps in which a tensor sends its whole residual about once; None: never."""

    @property
    def band(self) -> float | None:
        """The factor by which the number of elements may miss k; None: any."""

    @property
    def seed(self) -> int:
        """The seed of the steps in which tensors are drained."""


class KeptThreshold:
    """The threshold of one of `count` tensors, computed at its turn and kept for a life-span (DCT, Algorithm 1)."""

    def __init__(self, algorithm: KeepsThresholds, position: int, count: int):
        self._turns = Turns(algorithm, count)
        self._position = position
        self._band = algorithm.band
        self.reset()

    def reset(self) -> None:
        """Reset the state, so that the next step computes a new threshold."""
        self.restore([0.0, 0.0])

    def numbers(self) -> list[float]:
        """Return the state for a checkpoint: the threshold, 0 for none, and its k."""
        return [self._value, float(self._k)]

    def restore(self, numbers: Sequence[float]) -> None:
        """Continue from `numbers()`."""
        self._value, self._k, self._due, self._drains = float(numbers[0]), int(numbers[1]), False, False

    def plan(self, step: int, k: int, n: int) -> Plan:
        """Return the plan of a step: by k when a refresh is due; by SMALLEST to drain; else by the kept threshold."""
        self._drains = self._turns.drains(step, self._position)
        known = self._value > 0.0 and k == self._k
        self._due = not self._drains and (not known or self._turns.refreshes(step, self._position))
        if self._due:
            return Plan(self._value if known else 0.0, k)
        return Plan(SMALLEST if self._drains else self._value)

    def learn(self, k: int, threshold: float, count: int) -> None:
        """Store a refreshed threshold; if the count has left the band, make the next step refresh it."""
        if self._due:
            self._value, self._k = max(threshold, SMALLEST), k  # 0 means none; zeros are never sent
        elif not self._drains and self._band is not None:
            too_few = count * self._band < k and self._value > SMALLEST  # SMALLEST cannot be lowered
            if too_few or count > k * self._band:
                self._value = 0.0


class Turns:
    """The steps in which each of `count` tensors refreshes its threshold, spread over the life-span, or is drained.

    The life-span starts at one step and doubles until it reaches the setting, as the first thresholds are computed
    without residuals, which grow fast at first.
    """

    def __init__(self, algorithm: KeepsThresholds, count: int):
        self._lifespan, self._drain, self._seed, self._count = (
            algorithm.lifespan,
            algorithm.drain,
            algorithm.seed,
            count,
        )

    def refreshes(self, step: int, position: int) -> bool:
        """Return whether a tensor refreshes its threshold in this step."""
        octave = 1 << max(0, step.bit_length() - 1)  # the largest power of two up to the step
        lifespan = min(octave, self._lifespan)
        return step % lifespan == position * lifespan // self._count

    def drains(self, step: int, position: int) -> bool:
        """Return whether a tensor sends its whole residual in this step; the same on every rank."""
        return self._drain is not None and int(hash_index(self._seed, step * self._count + position)) % self._drain == 0


class FittedThreshold:
    """The threshold of one tensor from a distribution fitted in stages, whose number adapts (SIDCo, Algorithm 1).

    Difference from the paper: for a large tensor, the fit uses a sample, so that it costs a fraction of a pass.
    """

    def __init__(self, algorithm: SIDCo):
        self._algorithm = algorithm
        self.reset()

    def reset(self) -> None:
        """Reset the state: start with the number of stages in the settings."""
        self.restore([0.0] * 6)

    def numbers(self) -> list[float]:
        """Return the state for a checkpoint, initially zeros.

        The numbers are: stages beyond the setting; whether the search for their number has turned; its last error;
        whether there is one; and since the last adaptation, the sum of achieved ratios and the number of steps.
        """
        stages, knows = self._stages, math.isfinite(self._stages.error)
        search = [stages.count - self._algorithm.stages, stages.direction < 0, stages.error if knows else 0.0, knows]
        return [float(number) for number in (*search, self._achieved, self._steps)]

    def restore(self, numbers: Sequence[float]) -> None:
        """Continue from `numbers()`."""
        more, turned, error, knows, self._achieved, steps = map(float, numbers)
        self._stages = Stages(self._algorithm.stages + int(more), -1 if turned else 1, error if knows else math.inf)
        self._steps, self._density, self._guess = int(steps), 1.0, 0.0

    def plan(self, step: int, k: int, n: int) -> Plan:
        """Return the plan of a step."""
        self._density = k / n
        return Plan(self._guess, k, self._stages.count)

    def learn(self, k: int, threshold: float, count: int) -> None:
        """Adapt the stages to how many elements were selected instead of k."""
        self._guess = threshold
        self._achieved += count / k
        self._steps += 1
        if self._steps == ADAPT_STEPS:
            self._stages = self._stages.adapted(self._achieved / ADAPT_STEPS, self._density)
            self._achieved, self._steps = 0.0, 0


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


def widen(sketch: np.ndarray) -> np.ndarray:
    """Return the histogram, float64[HISTOGRAM_BINS], of a sketch, with zeros in all other bins."""
    histogram = np.zeros(HISTOGRAM_BINS)
    begin = int(sketch[0])
    histogram[begin : begin + SKETCH_BINS] = sketch[1:]
    return histogram


def sketch_sample(n: int, k: int) -> int:
    """Return the number of a partition's n elements to sample, for about 512 of the k largest on all ranks."""
    return min(n, max(FEWEST_SAMPLED, -(-n * SAMPLED // k)))


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


Threshold = ConstantThreshold | KeptThreshold | FittedThreshold


def make_threshold(algorithm: Algorithm, position: int, count: int) -> Threshold:
    """Return the threshold of one of `count` tensors, for a method that selects by threshold."""
    if isinstance(algorithm, SIDCo):
        return FittedThreshold(algorithm)
    if isinstance(algorithm, DynamicCommunicationThresholding):
        return KeptThreshold(algorithm, position, count)
    return ConstantThreshold(algorithm.value)


def partition(step: int, rank: int, world_size: int, n: int) -> tuple[int, int]:
    """Return the bounds of a rank's partition, which rotates each step (MiCRO, Algorithm 1, line 7)."""
    number = (step + rank) % world_size
    return number * n // world_size, (number + 1) * n // world_size


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
