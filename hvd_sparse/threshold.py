"""Thresholds that keep state between steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hvd_sparse.algorithms import Algorithm, DynamicCommunicationThresholding, SIDCo
from hvd_sparse.sampling import hash_index

SMALLEST = 2.0**-149  # of float32: every nonzero number reaches it
LOWEST_MARGIN = 0.5
HIGHEST_MARGIN = 0.998
ADAPT_STEPS = 5  # between two changes of the number of stages in which a threshold is fitted
STAGE_TOLERANCE = 0.2  # of the mean of the counts over k: within it, the number of stages stays


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
    """What is selected from a tensor in a step, as the operators take it.

    k = 0: what reaches `threshold`. k > 0: the k largest, and what equals the least of them. stages > 0: what reaches a
    threshold that is fitted in this number of stages, about k elements. Unless k = 0, `threshold` is a guess, 0.0 for
    none, which affects the cost, but not the result.
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

    def miss(self, step: int) -> None:
        """Do nothing: a fixed threshold has no turn to miss."""


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
        self._value, self._k = float(numbers[0]), int(numbers[1])
        self._due = self._drains = False

    def plan(self, step: int, k: int, n: int) -> Plan:
        """Return the plan of a step: by k when a refresh is due; by SMALLEST to drain; else by the kept threshold."""
        self._drains = self._turns.drains(step, self._position)
        known = self._value > 0.0 and k == self._k
        self._due = not self._drains and (not known or self._turns.refreshes(step, self._position))
        if self._drains:
            self.miss(step)
            return Plan(SMALLEST)
        return Plan(self._value if known else 0.0, k) if self._due else Plan(self._value)

    def miss(self, step: int) -> None:
        """Note that a step has not used the threshold: after a missed turn, the next step that uses it renews it."""
        if self._value > 0.0 and self._turns.refreshes(step, self._position):
            self._value = 0.0

    def learn(self, k: int, threshold: float, count: int) -> None:
        """Store a refreshed threshold; if the count has left the band, make the next step refresh it."""
        if self._due:
            self._value, self._k = max(threshold, SMALLEST), k  # 0 means none; zeros are never sent
        elif self._band is not None and not self._drains:
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
        start = min(octave, 1 << (self._lifespan - 1).bit_length())  # the first step with this life-span
        return (step - start) % lifespan == position * lifespan // self._count

    def drains(self, step: int, position: int) -> bool:
        """Return whether a tensor sends its whole residual in this step; the same on every rank."""
        return self._drain is not None and int(hash_index(self._seed, step * self._count + position)) % self._drain == 0


@dataclass(frozen=True)
class StageSearch:
    """The search for the number of stages in which a threshold is fitted (SIDCo: Abdelmoniem et al., 2021, section 2).

    The fit itself is native: `csrc/core/fit.h`, and its twin `hvd_sparse.reference.fit`.
    """

    count: int  # of stages
    direction: int = 1  # -1: reversed
    error: float = math.inf  # of the mean of the counts over k, the last time

    def adapted(self, achieved: float, density: float) -> "StageSearch":
        """Return the search after one more change, from the mean of the counts over k (Algorithm 1, Adapt_Stages).

        Add a stage if too few elements were sent, remove one if too many; with the direction reversed, the other way
        round. Reverse it if the error has grown since the last time, or if the bounds 1 and log2(1 / density) forbid
        the change: whether more stages raise or lower the threshold depends on the tail.
        """
        error = abs(achieved - 1.0)
        direction = -self.direction if error > self.error else self.direction
        if error <= STAGE_TOLERANCE:
            return StageSearch(self.count, direction, error)
        wanted = self.count + (direction if achieved < 1.0 else -direction)
        count = min(max(wanted, 1), max(1, math.ceil(-math.log2(density))))
        return StageSearch(count, direction if count == wanted else -direction, error)


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
        self._stages = StageSearch(
            self._algorithm.stages + int(more), -1 if turned else 1, error if knows else math.inf
        )
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
            self.adapt(self._density)

    def adapt(self, density: float) -> None:
        """Adapt the stages to the mean of the ratios achieved in the last ADAPT_STEPS steps. density: k / n."""
        self._stages = self._stages.adapted(self._achieved / ADAPT_STEPS, density)
        self._achieved, self._steps = 0.0, 0

    def miss(self, step: int) -> None:
        """Do nothing: each selection has a new threshold."""


Threshold = ConstantThreshold | KeptThreshold | FittedThreshold


def make_threshold(algorithm: Algorithm, position: int, count: int) -> Threshold:
    """Return the threshold of one of `count` tensors, for a method that selects by threshold."""
    if isinstance(algorithm, SIDCo):
        return FittedThreshold(algorithm)
    if isinstance(algorithm, DynamicCommunicationThresholding):
        return KeptThreshold(algorithm, position, count)
    return ConstantThreshold(algorithm.value)
