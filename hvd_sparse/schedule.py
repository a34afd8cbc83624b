"""Density over the steps of training: constant, or warming up from dense to sparse.

The warm-up follows Deep Gradient Compression, sections 3.3 and 4.1: the density starts at 25 % and falls by a constant
factor per stage (sparsity 75, 93.75, 98.4375, 99.6, 99.9 %), so that more of the early, fast-changing gradients is
sent.

Differences from the paper: the warm-up counts optimizer steps, not epochs, which the compressor does not know; any
final density, not only 0.1 %, follows the same geometric law.
"""

import abc
import itertools
from dataclasses import dataclass

from hvd_sparse.checks import check_number, checked_density, checked_integer

STAGE_TOLERANCE = 0.05  # a stage this close to the final density is not worth having: 0.25**5 = 0.000977 is 0.001


class Schedule(abc.ABC):
    """A density for every optimizer step. For another schedule, derive a class and implement both methods.

    If the density of nearly all steps is known, define `settled`, too: what has to be decided once is decided by it.
    """

    @abc.abstractmethod
    def density(self, step: int) -> float:
        """Return the density, in (0, 1], of an optimizer step, counted from 0; it must be the same on every rank."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Return the settings as a plain string, equal on two ranks if and only if the schedules are equal."""

    @property
    def highest(self) -> float:
        """The highest density of any step. Below 1.0 TensorFlow's graph needs no branch for dense steps."""
        return 1.0

    @property
    def settled(self) -> float | None:
        """The density of nearly all steps; None if it is not known."""
        return None

    @property
    def planned(self) -> float:
        """The density for what is decided once, such as an exchange: `settled`, or that of the first step."""
        return self.density(0) if self.settled is None else self.settled


@dataclass(frozen=True)
class Constant(Schedule):
    """The same density at every step.

    Args:
        value: The density, in (0, 1].

    Raises:
        ValueError: The density is out of range.
        TypeError: The density is no number.
    """

    value: float

    def __post_init__(self):
        object.__setattr__(self, "value", checked_density("value", self.value))

    @property
    def highest(self) -> float:
        """The density."""
        return self.value

    @property
    def settled(self) -> float:
        """The density."""
        return self.value

    def density(self, step: int) -> float:
        """Return the density; ValueError for a negative step."""
        checked_integer("step", step, 0)
        return self.value

    def describe(self) -> str:
        """Return the settings as a plain string."""
        return f"constant({self.value!r})"


def is_always_dense(schedule: Schedule) -> bool:
    """Return whether every step is dense."""
    return isinstance(schedule, Constant) and schedule.value >= 1.0


@dataclass(frozen=True)
class WarmUp(Schedule):
    """Density falling geometrically to `final` over the first `steps` optimizer steps.

    The densities of the stages are initial * factor**i while more than 5 % above `final`; stages divide `steps` evenly,
    and the density is `final` from step `steps` on. If `final` is at least `initial`, the density is constant. With
    fewer steps than stages, stages are skipped. Source: Deep Gradient Compression, sections 3.3 and 4.1.

    Args:
        final: Density after the warm-up, in (0, 1].
        steps: Optimizer steps of the warm-up, at least 1; for no warm-up use `Constant`.
        initial: Density of the first stage, in (0, 1].
        factor: Ratio of each stage's density to the previous one's, in (0, 1).

    Raises:
        ValueError: A value is out of range.
        TypeError: A value is no number, or `steps` no integer.
    """

    final: float
    steps: int
    initial: float = 0.25
    factor: float = 0.25

    def __post_init__(self):
        object.__setattr__(self, "final", checked_density("final", self.final))
        object.__setattr__(self, "initial", checked_density("initial", self.initial))
        check_number("factor", self.factor, "in (0, 1)", lambda factor: 0.0 < factor < 1.0)
        object.__setattr__(self, "factor", float(self.factor))
        object.__setattr__(self, "steps", checked_integer("steps", self.steps, 1))

    @property
    def stages(self) -> tuple[float, ...]:
        """Densities of the warm-up in order, without the final one; empty if `final` is not below `initial`."""
        floor = self.final * (1.0 + STAGE_TOLERANCE)
        densities = (self.initial * self.factor**i for i in itertools.count())
        return tuple(itertools.takewhile(lambda density: density > floor, densities))

    @property
    def highest(self) -> float:
        """The density of the first stage."""
        return max((self.final, *self.stages))

    @property
    def settled(self) -> float:
        """The density after the warm-up."""
        return self.final

    def density(self, step: int) -> float:
        """Return the density of the stage that holds this step; ValueError for a negative step."""
        step = checked_integer("step", step, 0)
        stages = self.stages
        if step >= self.steps or not stages:
            return self.final
        return stages[step * len(stages) // self.steps]

    def describe(self) -> str:
        """Return the settings as a plain string."""
        return f"warm_up(final={self.final!r}, steps={self.steps}, initial={self.initial!r}, factor={self.factor!r})"


def check_one_density(density, warmup, default) -> None:
    """Raise ValueError if a `density` other than a method's default contradicts a Schedule given as `warmup`."""
    if isinstance(warmup, Schedule) and not isinstance(density, Schedule) and density not in (default, warmup.settled):
        raise ValueError(
            f"density (or sparsity) must be left out when warmup is a Schedule, which has a final density; got density="
            f"{density!r} and warmup={warmup.describe()}"
        )


def make_schedule(density, warmup=None) -> Schedule:
    """Return the schedule for a compressor's arguments `density` and `warmup`.

    Args:
        density: A number in (0, 1], or a Schedule (then warmup must be None).
        warmup: None or 0: no warm-up; an int above 0: the optimizer steps of a `WarmUp`; a Schedule: returned as it is.

    Returns:
        The schedule.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value has the wrong type.
    """
    if isinstance(density, Schedule):
        if warmup is not None:
            raise ValueError(f"warmup must be None when density is a Schedule, got {warmup!r}: put it in the Schedule")
        return density
    density = checked_density("density", density)
    if isinstance(warmup, Schedule):
        return warmup
    if warmup is None:
        return Constant(density)
    what = "warmup (optimizer steps: epochs times the steps of an epoch), unless None or a Schedule,"
    steps = checked_integer(what, warmup, 0)
    return WarmUp(density, steps) if steps else Constant(density)
