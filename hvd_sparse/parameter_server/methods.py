"""The asynchronous methods: error feedback of the workers, and how much is sent in both directions.

All are one frame, that of DGS (Yan et al., 2020, Algorithms 1 to 3): a worker pushes an update, a server applies it and
answers with the model's difference from what the worker has. Updates contain the learning rate, so that servers know
none. A server's answer holds all that changed unless `pull_density` is given (secondary compression, section 4.2.2).
"""

import functools
from dataclasses import dataclass, fields
from typing import ClassVar

from hvd_sparse.algorithms import CODINGS, SCOPES, WIRE_VALUES
from hvd_sparse.checks import check_choice, check_number
from hvd_sparse.schedule import Schedule, make_schedule
from hvd_sparse.wire import LEVELS, checked_density, checked_integer


@dataclass(frozen=True, kw_only=True)
class Method:
    """The settings that all asynchronous methods share.

    Args:
        density: Part of an update's elements to push, in (0, 1], or a `Schedule` over the worker's steps.
        warmup: None, a number of the worker's steps, or a `Schedule`.
        pull_density: None: servers send back all that changed. Or the part of the elements that they send, the largest
            differences; the rest is sent later (secondary compression, section 4.2.2).
        scope: "tensor" selects in each tensor, "model" in all together, in both directions.
        min_numel: Tensors of fewer elements are sent whole.
        coding: Of positions: "run_length", "elias_fano", "bitmap", or "auto", the smallest.
        values: Type of the values pushed: "float32", "float16", "bfloat16", "int2" or "int1". What rounding loses stays
            in the residual.
        pull_values: Type of the values that servers send back. What rounding loses is sent later.
        level: The magnitude that "int1" and "int2" send: "mean" or "min".
        seed: Breaks ties.

    Raises:
        ValueError: A value is out of its range; the message names the argument, what was received, what is expected.
        TypeError: A value is of another type.
    """

    density: float | Schedule = 0.01
    warmup: int | Schedule | None = None
    pull_density: float | None = None
    scope: str = "tensor"
    min_numel: int = 1024
    coding: str = "auto"
    values: str = "float32"
    pull_values: str = "float32"
    level: str = "mean"
    seed: int = 0

    name: ClassVar[str]
    has_velocity: ClassVar[bool] = False  # beside the residual: momentum before the selection
    masks_velocity: ClassVar[bool] = False  # of what was sent
    most_workers: ClassVar[int | None] = None

    def __post_init__(self):
        _ = self.schedule  # checks density and warmup
        if self.pull_density is not None:
            checked_density("pull_density", self.pull_density)
        check_choice("scope", self.scope, SCOPES)
        checked_integer("min_numel", self.min_numel, 0)
        check_choice("coding", self.coding, CODINGS)
        check_choice("values", self.values, WIRE_VALUES)
        check_choice("pull_values", self.pull_values, WIRE_VALUES)
        check_choice("level", self.level, LEVELS)
        checked_integer("seed", self.seed, 0)
        check_number("momentum", self.momentum, "in [0, 1)", lambda value: 0.0 <= value < 1.0)

    @property
    def momentum(self) -> float:
        """The momentum; 0 where a method has none."""
        return 0.0

    @property
    def nesterov(self) -> bool:
        """Whether it is Nesterov's."""
        return False

    @property
    def retained(self) -> float:
        """What part of a value stays in the residual when it is sent: only SAMomentum keeps any."""
        return 0.0

    @property
    def is_mirrored(self) -> bool:
        """Whether a server has to keep what each worker has: answers then are differences, and not all of them."""
        return self.pull_values != "float32" or (self.pull_density or 1.0) < 1.0

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The density of a worker's pushes, by its step."""
        return make_schedule(self.density, self.warmup)

    def describe(self) -> list[str]:
        """Return one line a setting, for the configuration check across ranks."""
        settings = [field.name for field in fields(self) if field.name not in ("density", "warmup")]
        lines = [f"{name} = {getattr(self, name)!r}" for name in settings]
        return [f"method = {self.name}", *lines, f"density = {self.schedule.describe()}"]


@dataclass(frozen=True, kw_only=True)
class DGS(Method):
    """Dual-way gradient sparsification with SAMomentum (Algorithm 3, section 4.3.2).

    momentum: u <- m*u + lr*g; what is sent stays in u, and what is not is magnified by 1/m. The paper has 0.7 for up to
    8 workers, 0.45 for 16, 0.3 for 32.
    Difference from the paper, the numbers are equal: instead of u we keep m*u, what the next step starts from. That is
    lr*g added to it; it is selected from; what is sent is multiplied by m, and nothing is magnified. So an element that
    waits T steps has exactly m*u_0 plus the sum of its T gradients (Equation 16), and m = 0 is Gradient Dropping.
    """

    momentum: float = 0.7

    name: ClassVar[str] = "dgs"

    @property
    def retained(self) -> float:
        """What was sent decays by the momentum."""
        return self.momentum


@dataclass(frozen=True, kw_only=True)
class DGCAsync(Method):
    """Deep Gradient Compression on asynchronous workers: momentum correction, momentum factor masking (section 5)."""

    momentum: float = 0.7
    nesterov: bool = False

    name: ClassVar[str] = "dgc_async"
    has_velocity: ClassVar[bool] = True
    masks_velocity: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class GradientDroppingAsync(Method):
    """Gradient Dropping on asynchronous workers (Algorithm 1; Aji and Heafield, 2017): a residual, no momentum."""

    name: ClassVar[str] = "gd_async"


@dataclass(frozen=True, kw_only=True)
class ASGD(Method):
    """Asynchronous SGD, dense in both directions: the baseline."""

    density: float = 1.0

    name: ClassVar[str] = "asgd"

    def __post_init__(self):
        super().__post_init__()
        check_number("density", self.density, "1: use gd_async for less", lambda value: value == 1.0)


@dataclass(frozen=True, kw_only=True)
class MSGD(ASGD):
    """Momentum SGD on one worker, dense: what asynchronous methods are compared with."""

    momentum: float = 0.7
    nesterov: bool = False

    name: ClassVar[str] = "msgd"
    has_velocity: ClassVar[bool] = True
    most_workers: ClassVar[int | None] = 1


METHODS = {method.name: method for method in (DGS, DGCAsync, GradientDroppingAsync, ASGD, MSGD)}
