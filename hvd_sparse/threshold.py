"""Thresholds that keep state between steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvd_sparse.algorithms import Algorithm, DynamicCommunicationThresholding, SIDCo
from hvd_sparse.fit import ADAPT_STEPS, Stages
from hvd_sparse.sampling import hash_index

SMALLEST = 2.0**-149  # of float32: every number that is not zero reaches it
HISTOGRAM_SHIFT = 19  # from the bits of a magnitude to its bin: the exponent and four bits more
HISTOGRAM_BINS = 1 << (31 - HISTOGRAM_SHIFT)
HISTOGRAM_INFINITY = 0x7F800000 >> HISTOGRAM_SHIFT
SKETCH_BINS = 64  # of a histogram, around a threshold
SAMPLED = 512  # of the k largest: how many samples of all ranks together have
FEWEST_SAMPLED = 1 << 16  # elements of a partition, if it has so many: they cost next to nothing
LARGEST_FLOAT = float(np.finfo(np.float32).max)
LARGEST_GROWTH = 0.22  # of a threshold's logarithm in a step
LOWEST_MARGIN = 0.5
HIGHEST_MARGIN = 0.998


@dataclass
class ThresholdHint:
    """Last step's threshold, taken slightly low, as the guess at this step's: it makes one pass over the data enough.

    Error feedback piles the residual up just under the threshold, so the margin has to be small, and it adapts: a
    miss (fewer than k elements reached the hint, the data were read again) lowers it, a crowd raises it. The selection
    itself is exact whatever the hint, so this is no state that a checkpoint needs.
    """

    threshold: float = 0.0
    margin: float = 0.98
    k: int = 0

    def value(self, k: int) -> float:
        """Return the hint for a selection of k elements, 0.0 where there is none."""
        if k != self.k:  # another density: last step's threshold says little
            return 0.0
        return self.threshold * self.margin

    def update(self, k: int, threshold: float, passed: int) -> None:
        """Learn from a selection: its threshold, and how many elements reached the hint."""
        if self.value(k) > 0.0:
            if passed < k:
                self.margin = max(LOWEST_MARGIN, 1.0 - 2.0 * (1.0 - self.margin))
            elif passed > k + k // 4 + 16:
                self.margin = min(HIGHEST_MARGIN, 1.0 - 0.9 * (1.0 - self.margin))
        self.threshold = threshold
        self.k = k


@dataclass(frozen=True)
class Plan:
    """What a tensor's selection in a step goes by: a threshold, or where k is above 0, that of the k largest.

    The threshold then is a guess, 0.0 for none, which changes nothing but how fast the k largest are found. Where k is
    below 0, the -k largest and no others, whatever is equal to them. Where there are stages, a threshold that about k
    elements reach is fitted in them; the threshold here is a guess at it, which changes nothing but the cost.
    """

    threshold: float
    k: int = 0
    stages: int = 0


class ConstantThreshold:
    """A threshold chosen beforehand."""

    def __init__(self, value: float):
        self._plan = Plan(value)

    def forget(self) -> None:
        """There is nothing to forget."""

    def numbers(self) -> list[float]:
        """Return what a checkpoint keeps: nothing."""
        return []

    def restore(self, numbers: Sequence[float]) -> None:
        """There is nothing to restore."""

    def plan(self, step: int, k: int, n: int) -> Plan:
        """Return what to select by in a step."""
        return self._plan

    def learn(self, k: int, threshold: float, count: int, ratio: float) -> None:
        """There is nothing to learn from how many were sent."""


class KeptThreshold:
    """The threshold of one of `count` tensors, taken at its turn and kept for a life-span (DCT, Algorithm 1)."""

    def __init__(self, algorithm: DynamicCommunicationThresholding, position: int, count: int):
        self._turns = Turns(algorithm, count)
        self._position = position
        self._band = algorithm.band
        self.forget()

    def forget(self) -> None:
        """Take the threshold anew in the next step."""
        self.restore([0.0, 0.0])

    def numbers(self) -> list[float]:
        """Return what a checkpoint keeps: the threshold, 0 for none, and its k."""
        return [self._value, float(self._k)]

    def restore(self, numbers: Sequence[float]) -> None:
        """Continue from `numbers()`."""
        self._value, self._k, self._due, self._drains = float(numbers[0]), int(numbers[1]), False, False

    def plan(self, step: int, k: int, n: int) -> Plan:
        """Return what to select by in a step: k when due, with the last threshold as a guess; SMALLEST to send all."""
        self._drains = self._turns.drains(step, self._position)
        known = self._value > 0.0 and k == self._k
        self._due = not self._drains and (not known or self._turns.refreshes(step, self._position))
        if self._due:
            return Plan(self._value if known else 0.0, k)
        return Plan(SMALLEST if self._drains else self._value)

    def learn(self, k: int, threshold: float, count: int, ratio: float) -> None:
        """Keep the threshold, if it was taken anew; take it anew in the next step if the count has left the band."""
        if self._due:
            self._value, self._k = threshold, k
        elif not self._drains and self._band is not None and not k <= count * self._band <= k * self._band**2:
            self._value = 0.0


class Turns:
    """When the thresholds of `count` tensors are taken, spread over the life-span, and when a tensor is drained.

    The life-span starts at one step and doubles until it is what was asked for: the first thresholds know no residual,
    which grows fast at first.
    """

    def __init__(self, algorithm: DynamicCommunicationThresholding, count: int):
        self._lifespan, self._drain, self._seed, self._count = (
            algorithm.lifespan,
            algorithm.drain,
            algorithm.seed,
            count,
        )

    def refreshes(self, step: int, position: int) -> bool:
        """Return whether a tensor's threshold is taken in this step."""
        octave = 1 << max(0, step.bit_length() - 1)  # the largest power of two up to the step
        lifespan = min(octave, self._lifespan)
        return step % lifespan == position * lifespan // self._count

    def drains(self, step: int, position: int) -> bool:
        """Return whether a tensor sends its whole residual in this step; the same on every rank."""
        return self._drain is not None and int(hash_index(self._seed, step * self._count + position)) % self._drain == 0


class FittedThreshold:
    """The threshold of one tensor from a distribution fitted in stages, whose number adapts (SIDCo, Algorithm 1).

    Difference from the paper: of a large tensor it is fitted to a sample, so that it costs a small part of a pass.
    """

    def __init__(self, algorithm: SIDCo):
        self._algorithm = algorithm
        self.forget()

    def forget(self) -> None:
        """Start with the stages that were asked for."""
        self.restore([0.0] * 6)

    def numbers(self) -> list[float]:
        """Return what a checkpoint keeps: zeros at first.

        Stages beyond those that were asked for, whether the search for their number has turned, its last error, and
        whether there is one; the sum of counts over k since then, and of how many steps.
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
        """Return what to select by in a step."""
        self._density = k / n
        return Plan(self._guess, k, self._stages.count)

    def learn(self, k: int, threshold: float, count: int, ratio: float) -> None:
        """Adapt the stages to how many of the sample reached the fitted threshold, over how many should."""
        self._guess = threshold
        self._achieved += ratio
        self._steps += 1
        if self._steps == ADAPT_STEPS:
            self._stages = self._stages.adapted(self._achieved / ADAPT_STEPS, self._density)
            self._achieved, self._steps = 0.0, 0


class PredictedThreshold:
    """MiCRO's threshold from the histograms of the step before, of all ranks: known before a step's gradients are.

    It is the one that k elements reached in that step, times how much it grew of late. With it goes how many of this
    rank's next partition should reach it: a rank that finds far fewer or more names that many, so that a jump of the
    gradients' scale does not change how much is sent.
    """

    NUMBERS = 6

    def __init__(self):
        self.forget()

    def forget(self) -> None:
        """Start anew."""
        self.restore([0.0] * self.NUMBERS)

    def numbers(self) -> list[float]:
        """Return what a checkpoint keeps: zeros at first.

        The threshold that k elements reached, k, the logarithm of its growth a step, its elasticity with respect to k,
        the next share of this rank, and of how many ranks.
        """
        return [self._value, float(self._k), self._growth, self._elasticity, self._share, float(self._ranks)]

    def restore(self, numbers: Sequence[float]) -> None:
        """Continue from `numbers()`."""
        self._value, k, self._growth, self._elasticity, self._share, ranks = map(float, numbers)
        self._k, self._ranks = int(k), int(ranks)

    def plan(self, k: int, ranks: int) -> tuple[float, float]:
        """Return a step's threshold, infinite where none is known, and this rank's share of k."""
        if self._k == 0 or self._ranks != ranks:
            return math.inf, k / ranks
        scale = math.exp(self._growth + self._elasticity * math.log(k / self._k))
        return min(max(self._value * scale, SMALLEST), LARGEST_FLOAT), self._share * k / self._k

    def learn(self, k: int, rank: int, sketches: np.ndarray) -> None:
        """Learn from what the ranks counted in their partitions: float32[ranks, 65], a bin and the counts from there.

        Partition p of a step is that of the rank before in the next one: `partition`.
        """
        histograms = np.stack([widen(sketch) for sketch in sketches])
        total = histograms.sum(0)
        cut, more = histogram_cut(total, k), histogram_cut(total, 2 * k)
        value = min(cut.threshold, LARGEST_FLOAT)
        is_tail = SMALLEST < more.threshold < value
        self._elasticity = math.log(more.threshold / value) / math.log(2.0) if is_tail else 0.0
        grows = SMALLEST < self._value and SMALLEST < value and self._k == k and self._ranks == len(sketches)
        growth = min(max(math.log(value / self._value), -LARGEST_GROWTH), LARGEST_GROWTH) if grows else 0.0
        self._growth = 0.5 * (self._growth + growth) if grows else 0.0
        wanted = [cut.wanted(histogram) for histogram in histograms]
        found, ranks = sum(wanted), len(sketches)
        self._share = k * wanted[(rank + 1) % ranks] / found if found > 0.0 else k / ranks
        self._value, self._k, self._ranks = value, k, ranks


def widen(sketch: np.ndarray) -> np.ndarray:
    """Return the histogram, float64[HISTOGRAM_BINS], that a sketch is the known part of."""
    histogram = np.zeros(HISTOGRAM_BINS)
    begin = int(sketch[0])
    histogram[begin : begin + SKETCH_BINS] = sketch[1:]
    return histogram


def sketch_sample(n: int, k: int) -> int:
    """Return how many of n elements of a partition to count, so that about 512 of the k largest of all are."""
    return min(n, max(FEWEST_SAMPLED, -(-n * SAMPLED // k)))


class ScaledThreshold:
    """MiCRO's own: started at 1 / (2 sqrt(k)), and scaled by how many were sent (section IV-C)."""

    def __init__(self):
        self.forget()

    def forget(self) -> None:
        """Start anew."""
        self.restore([0.0, 0.0])

    def numbers(self) -> list[float]:
        """Return what a checkpoint keeps: the threshold, 0 for none, and its k."""
        return [self._value, float(self._k)]

    def restore(self, numbers: Sequence[float]) -> None:
        """Continue from `numbers()`."""
        self._value, self._k = float(numbers[0]), int(numbers[1])

    def plan(self, k: int, ranks: int) -> tuple[float, float]:
        """Return a step's threshold, started anew if k is another one, and -1: as many are sent as reach it."""
        if k != self._k:
            self._value, self._k = 0.5 / math.sqrt(k), k
        return self._value, -1.0

    def learn(self, k: int, count: int) -> None:
        """Scale by how many were sent, of all ranks together."""
        self._value *= threshold_scale(count / k)


def threshold_scale(excess: float) -> float:
    """Return what MiCRO's published code scales the threshold with after `excess` times as many were sent as wanted."""
    if excess > 1.1:
        return 1.005
    return 1.00125 if excess > 0.909 else 0.995


Threshold = ConstantThreshold | KeptThreshold | FittedThreshold


def make_threshold(algorithm: Algorithm, position: int, count: int) -> Threshold:
    """Return the threshold of one of `count` tensors, for a method whose count varies."""
    if isinstance(algorithm, SIDCo):
        return FittedThreshold(algorithm)
    if isinstance(algorithm, DynamicCommunicationThresholding):
        return KeptThreshold(algorithm, position, count)
    return ConstantThreshold(algorithm.value)


def partition(step: int, rank: int, ranks: int, n: int) -> tuple[int, int]:
    """Return where the partition of a rank begins and ends: another one in each step (MiCRO, Algorithm 1, line 7)."""
    number = (step + rank) % ranks
    return number * n // ranks, (number + 1) * n // ranks


@dataclass(frozen=True)
class Cut:
    """Where a histogram of magnitudes is cut, so that about k are above."""

    threshold: float
    bin: int = 0  # the one that the threshold lies in
    part: float = 0.0  # how much of that bin is to be above

    def wanted(self, histogram: np.ndarray) -> float:
        """Return how many of those that a histogram, [HISTOGRAM_BINS], counts are to be above."""
        return float(histogram[self.bin + 1 :].sum() + self.part * histogram[self.bin])


def histogram_cut(histogram: np.ndarray, k: int) -> Cut:
    """Return the threshold that about k of the counted values reach; SMALLEST if there are not that many.

    Within a bin the logarithm of the count is taken to be linear in that of the threshold, as tails are.
    """
    counts = histogram.astype(np.float64)
    counts[0] = 0.0  # zeros
    reaching = np.cumsum(counts[::-1])[::-1]  # how many are in a bin or above it
    if reaching[0] < k:
        return Cut(SMALLEST)
    bin_ = int(np.flatnonzero(reaching >= k)[-1])
    above = float(reaching[bin_] - counts[bin_])
    within = (k - above) / counts[bin_]
    if bin_ >= HISTOGRAM_INFINITY - 1:  # the last bin of numbers has no finite end
        infinite = bin_ >= HISTOGRAM_INFINITY
        return Cut(math.inf if infinite else float(np.float32(2.0**127 * (2 - 2.0**-4))), bin_, within)
    low, high = (np.array([bin_, bin_ + 1], np.uint32) << HISTOGRAM_SHIFT).view(np.float32).astype(np.float64).tolist()
    part = math.log(k / above) / math.log(reaching[bin_] / above) if above > 0 else k / counts[bin_]
    return Cut(max(SMALLEST, high * (low / high) ** part), bin_, within)
