"""Density over the steps of training: constant, or warming up from dense to sparse.

The warm-up follows Deep Gradient Compression, sections 3.3 and 4.1: the density starts at 25 % and falls by a constant
factor per stage (sparsity 75, 93.75, 98.4375, 99.6, 99.9 %), so that more of the early, fast-changing gradients is
sent.

Differences from the paper: the warm-up counts optimizer steps, not epochs, which the compressor does not know; any
final density, not only 0.1 %, follows the same geometric law.
"""

import abc
import itertools
from collections.abc import Sequence
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


class _Staged(Schedule):
    """A schedule that is dense for `begin` steps, then has all its densities but the last in `steps` steps."""

    steps: int
    begin: int

    @abc.abstractmethod
    def _densities(self) -> Sequence[float]:
        """Return the densities in order; the last one stays."""

    @property
    def highest(self) -> float:
        """The highest density of any step."""
        return 1.0 if self.begin else max(self._densities())

    @property
    def settled(self) -> float:
        """The last density."""
        return self._densities()[-1]

    def density(self, step: int) -> float:
        """Return the density of the stage that holds this step; ValueError for a negative step."""
        step = checked_integer("step", step, 0) - self.begin
        if step < 0:
            return 1.0
        *stages, final = self._densities()
        return final if step >= self.steps or not stages else stages[step * len(stages) // self.steps]

    def _check_steps(self) -> None:
        object.__setattr__(self, "steps", checked_integer("steps", self.steps, 1))
        object.__setattr__(self, "begin", checked_integer("begin", self.begin, 0))


def is_always_dense(schedule: Schedule) -> bool:
    """Return whether every step is dense."""
    return isinstance(schedule, Constant) and schedule.value >= 1.0


@dataclass(frozen=True)
class WarmUp(_Staged):
    """Density falling geometrically to `final` over `steps` optimizer steps.

    The densities of the stages are initial * factor**i while more than 5 % above `final`; stages divide `steps` evenly,
    and the density is `final` afterwards. If `final` is at least `initial`, there are no stages. With fewer steps than
    stages, stages are skipped. Source: Deep Gradient Compression, sections 3.3 and 4.1.

    Args:
        final: Density after the warm-up, in (0, 1].
        steps: Optimizer steps of the warm-up, at least 1; for no warm-up use `Constant`.
        initial: Density of the first stage, in (0, 1].
        factor: Ratio of each stage's density to the previous one's, in (0, 1).
        begin: Optimizer steps before the warm-up, which send everything. The paper has none.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value is no number, or `steps` or `begin` no integer.
    """

    final: float
    steps: int
    initial: float = 0.25
    factor: float = 0.25
    begin: int = 0

    def __post_init__(self):
        object.__setattr__(self, "final", checked_density("final", self.final))
        object.__setattr__(self, "initial", checked_density("initial", self.initial))
        check_number("factor", self.factor, "in (0, 1)", lambda factor: 0.0 < factor < 1.0)
        object.__setattr__(self, "factor", float(self.factor))
        self._check_steps()

    @property
    def stages(self) -> tuple[float, ...]:
        """Densities of the warm-up in order, without the final one; empty if `final` is not below `initial`."""
        floor = self.final * (1.0 + STAGE_TOLERANCE)
        densities = (self.initial * self.factor**i for i in itertools.count())
        return tuple(itertools.takewhile(lambda density: density > floor, densities))

    def _densities(self) -> Sequence[float]:
        return (*self.stages, self.final)

    def describe(self) -> str:
        """Return the settings as a plain string."""
        own = f"final={self.final!r}, steps={self.steps}, initial={self.initial!r}, factor={self.factor!r}"
        return f"warm_up({own}, begin={self.begin})"


@dataclass(frozen=True)
class Stages(_Staged):
    """Densities given one by one: all but the last divide `steps` evenly, and the last one stays.

    Args:
        densities: The densities in order, each in (0, 1], at least one.
        steps: Optimizer steps of all stages but the last, at least 1.
        begin: Optimizer steps before the first stage, which send everything.

    Raises:
        ValueError: A value is out of range, or there is no density.
        TypeError: A value is no number, or `steps` or `begin` no integer.
    """

    densities: Sequence[float]
    steps: int
    begin: int = 0

    def __post_init__(self):
        if isinstance(self.densities, str) or not isinstance(self.densities, Sequence) or not self.densities:
            raise ValueError(f"densities must be a list of numbers, such as [0.25, 0.05, 0.01]; got {self.densities!r}")
        checked = tuple(checked_density(f"densities[{place}]", one) for place, one in enumerate(self.densities))
        object.__setattr__(self, "densities", checked)
        self._check_steps()

    def _densities(self) -> Sequence[float]:
        return self.densities

    def describe(self) -> str:
        """Return the settings as a plain string."""
        return f"stages({self.densities!r}, steps={self.steps}, begin={self.begin})"


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
