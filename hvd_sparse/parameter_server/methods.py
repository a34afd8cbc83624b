"""The asynchronous methods: error feedback of the workers, and the densities of pushes and answers.

All follow DGS (Yan et al., 2020, Algorithms 1 to 3): a worker pushes an update, a server applies it and answers
with the difference between its model and the worker's. Updates contain the learning rate; servers do not know it. An
answer has all changed elements unless `pull_density` is set (secondary compression, section 4.2.2).
"""

import functools
import inspect
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field, fields, replace
from typing import ClassVar, cast

from hvd_sparse.algorithms import CODINGS, SCOPES, WIRE_VALUES
from hvd_sparse.algorithms.base import Coding, Level, Scope, WireValues
from hvd_sparse.algorithms.threshold import check_lifespan, density_of
from hvd_sparse.checks import check_bool, check_choice, check_number, checked_density, checked_integer
from hvd_sparse.dense_parameters import DenseParameters, checked_dense, dense_names
from hvd_sparse.schedule import Schedule, check_one_density, is_always_dense, make_schedule
from hvd_sparse.wire import LEVELS


@dataclass(frozen=True, kw_only=True)
class Method:
    """The settings that all asynchronous methods share.

    Args:
        density: Part of an update's elements to push, in (0, 1], or a `Schedule` over the worker's steps.
        warmup: None, a number of the worker's steps, or a `Schedule`.
        pull_density: Part of the elements that servers send back, those with the largest differences; others are sent
            later (secondary compression, section 4.2.2). None: all changed elements.
        scope: "tensor" selects in each tensor, "model" jointly in all. In answers each server, or thread of one,
            selects among its own elements: from a tensor that is divided between servers, it selects in its part.
        dense: The parameters that are sent dense whatever their size: a collection of their names, or a function of
            name and parameter that returns a bool.
        min_numel: Tensors of fewer elements are sent dense.
        coding: Coding of positions: "run_length", "elias_fano", "bitmap", or "auto", the smallest.
        values: Type of the values pushed: "float32", "float16", "bfloat16", "int2" or "int1". The rounding error stays
            in the residual.
        pull_values: Type of the values that servers send back. The rounding error is sent later.
        level: The magnitude that "int1" and "int2" send: "mean" or "min".
        seed: Seed of the order among equal magnitudes.

    Raises:
        ValueError: A value is out of range; the message names the argument, the received value and the expected ones.
        TypeError: A value has the wrong type.
    """

    density: float | Schedule = field(default=0.01, kw_only=False)
    warmup: int | Schedule | None = None
    pull_density: float | None = None
    scope: Scope = "tensor"
    dense: DenseParameters = ()
    min_numel: int = 1024
    coding: Coding = "auto"
    values: WireValues = "float32"
    pull_values: WireValues = "float32"
    level: Level = "mean"
    seed: int = 0

    name: ClassVar[str]
    DEFAULT_DENSITY: ClassVar[float] = 0.01
    has_velocity: ClassVar[bool] = False  # beside the residual: momentum before the selection
    masks_velocity: ClassVar[bool] = False  # of what was sent
    most_workers: ClassVar[int | None] = None

    def __post_init__(self):
        check_one_density(self.density, self.warmup, self.DEFAULT_DENSITY)
        _ = self.schedule  # checks density and warmup
        if self.pull_density is not None:
            checked_density("pull_density", self.pull_density)
        check_choice("scope", self.scope, SCOPES)
        object.__setattr__(self, "dense", checked_dense(self.dense))  # names: stored as a sorted tuple
        for number in ("min_numel", "seed"):  # stored as Python's int
            object.__setattr__(self, number, checked_integer(number, getattr(self, number), 0))
        check_choice("coding", self.coding, CODINGS)
        check_choice("values", self.values, WIRE_VALUES)
        check_choice("pull_values", self.pull_values, WIRE_VALUES)
        check_choice("level", self.level, LEVELS)
        check_number("momentum", self.momentum, "in [0, 1)", lambda value: 0.0 <= value < 1.0)
        check_bool("nesterov", self.nesterov)
        if self.nesterov and self.momentum == 0.0:
            raise ValueError("nesterov=True needs a momentum above 0, got momentum=0.0")

    @property
    def momentum(self) -> float:
        """The momentum; 0 for methods without one."""
        return 0.0

    @property
    def nesterov(self) -> bool:
        """Whether the momentum is Nesterov's."""
        return False

    @property
    def retained(self) -> float:
        """Fraction of a sent value that stays in the residual: above 0 only with SAMomentum."""
        return 0.0

    @property
    def is_mirrored(self) -> bool:
        """Whether a server mirrors each worker's parameters: answers are then incomplete or rounded differences."""
        return self.pull_values != "float32" or (self.pull_density or 1.0) < 1.0

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The density of a worker's pushes, by its step."""
        return make_schedule(self.density, self.warmup)

    def with_names(self, parameters: Iterable[tuple[str, object]]) -> "Method":
        """Return these settings with the names of the (name, parameter) pairs that are sent dense as `dense`.

        TypeError or ValueError if it is wrong.
        """
        names = dense_names(self.dense, parameters)
        return self if names == self.dense else replace(self, dense=names)

    @classmethod
    def compress(cls, *_):
        """Raise TypeError: Horovod calls this if it is given an asynchronous method as its compression."""
        raise TypeError(
            f"hvd_sparse: {cls.__name__} is for asynchronous training, without Horovod: connect(model, "
            f"{cls.__name__}(...)) of hvd_sparse.torch.asynchronous or hvd_sparse.tensorflow.asynchronous. Horovod "
            "takes a compressor, such as Compression.dgc(...)"
        )

    def describe(self) -> list[str]:
        """Return one line per setting, for the configuration check across ranks."""
        settings = [field.name for field in fields(self) if field.name not in ("density", "warmup", "dense")]
        lines = [f"{name} = {getattr(self, name)!r}" for name in settings]
        dense = [] if callable(self.dense) else [f"sent dense: {name}" for name in self.dense]
        return [f"method = {self.name}", *lines, f"density = {self.schedule.describe()}", *dense]


def documented(method: type[Method]) -> type[Method]:
    """Replace `Others` in a method's docstring by the arguments of `Method`."""
    shared = inspect.cleandoc(Method.__doc__ or "").split("Args:\n")[1].split("\n\nRaises:")[0]
    method.__doc__ = inspect.cleandoc(method.__doc__ or "").replace("    Others: Those of `Method`.", shared)
    return method


@documented
@dataclass(frozen=True, kw_only=True)
class DGS(Method):
    """Dual-way gradient sparsification with SAMomentum (Algorithm 3, section 4.3.2).

    Args:
        momentum: m in [0, 1): u <- m*u + lr*g; sent elements stay in u, the others are multiplied by 1/m. The paper has
            0.7 for CIFAR-10, 0.45 for ImageNet on 16 workers, and gains with 0.3 on 32 (CIFAR-10).
        Others: Those of `Method`.

    Difference from the paper, with equal results: m*u is stored instead of u. A step adds lr*g, selects elements, and
    multiplies the sent ones by m; nothing is divided. So an element that waits T steps has exactly m*u_0 plus the sum
    of its T gradients (Equation 16), and m = 0 is Gradient Dropping.
    """

    momentum: float = 0.7

    name: ClassVar[str] = "dgs"

    @property
    def retained(self) -> float:
        """The momentum: sent elements decay by it."""
        return self.momentum


@documented
@dataclass(frozen=True, kw_only=True)
class DGCAsync(Method):
    """Deep Gradient Compression on asynchronous workers: momentum correction, momentum factor masking (section 5).

    Args:
        momentum: The momentum before the selection, in [0, 1).
        nesterov: Whether it is Nesterov's.
        Others: Those of `Method`.
    """

    momentum: float = 0.7
    nesterov: bool = False

    name: ClassVar[str] = "dgc_async"
    has_velocity: ClassVar[bool] = True
    masks_velocity: ClassVar[bool] = True


@documented
@dataclass(frozen=True, kw_only=True)
class GradientDroppingAsync(Method):
    """Gradient Dropping on asynchronous workers (Algorithm 1; Aji and Heafield, 2017): a residual, no momentum.

    Args:
        Others: Those of `Method`.
    """

    name: ClassVar[str] = "gd_async"


@documented
@dataclass(frozen=True, kw_only=True)
class DCTAsync(Method):
    """Dynamic Communication Thresholding on asynchronous workers (Gupta et al., 2021, Algorithm 1, section 3.3).

    A residual, no momentum. A tensor's threshold is that of its k largest elements, and is then used for a number of
    the worker's pushes. The scope is always "tensor". Difference from the paper: each worker has a residual; threads do
    not share one.

    Args:
        sparsity: 1 - density, as in the paper. Set one of the two, or neither: the density is 0.01.
        lifespan: Number of pushes that use one threshold; the first thresholds are used for fewer (1, 2, 4, ...).
        drain: Number of pushes in which a tensor sends its whole residual about once; None: never.
        band: A threshold is renewed in the next push if more than `band` times k elements reached it, or fewer than
            k / `band`; None: only in its turn, as in the paper.
        Others: Those of `Method`.
    """

    density: float | Schedule = field(default=cast(float, None), kw_only=False)  # None: by `sparsity`, else 0.01
    lifespan: int = 1000
    drain: int | None = None
    band: float | None = 4.0
    sparsity: InitVar[float | None] = None

    name: ClassVar[str] = "dct_async"

    def __post_init__(self, sparsity):
        object.__setattr__(self, "density", density_of(self.density, sparsity, self.DEFAULT_DENSITY))
        super().__post_init__()
        check_lifespan(self)
        check_choice("scope", self.scope, ("tensor",))


@documented
@dataclass(frozen=True, kw_only=True)
class ASGD(Method):
    """Asynchronous SGD, the baseline: dense, unless `values`, `pull_values` or `pull_density` is set.

    Args:
        Others: Those of `Method`. `density` is 1.0, and `warmup` None.
    """

    density: float = 1.0

    name: ClassVar[str] = "asgd"
    DEFAULT_DENSITY: ClassVar[float] = 1.0

    def __post_init__(self):
        super().__post_init__()
        if self.density != 1.0:
            dense = f"density must be 1.0 in {self.name}, which is dense"
            raise ValueError(f"{dense}, got {self.density!r}: use GradientDroppingAsync for less")
        if not is_always_dense(self.schedule):
            raise ValueError(
                f"warmup must be None in {self.name}, which is dense, got {self.warmup!r}: use GradientDroppingAsync"
            )


@documented
@dataclass(frozen=True, kw_only=True)
class MSGD(ASGD):
    """Momentum SGD on one worker, the baseline: dense, unless `values`, `pull_values` or `pull_density` is set.

    Args:
        momentum: The momentum, in [0, 1).
        nesterov: Whether it is Nesterov's.
        Others: Those of `Method`. `density` is 1.0, and `warmup` None.
    """

    momentum: float = 0.7
    nesterov: bool = False

    name: ClassVar[str] = "msgd"
    has_velocity: ClassVar[bool] = True
    most_workers: ClassVar[int | None] = 1


METHODS = {method.name: method for method in (DGS, DGCAsync, GradientDroppingAsync, DCTAsync, ASGD, MSGD)}


def checked_method(method: object, parameters: Iterable[tuple[str, object]]) -> Method:
    """Return the settings of a method for a model's (name, parameter) pairs, see `Method.with_names`.

    TypeError unless they are settings: not a method's class, nor its name.
    """
    if not isinstance(method, Method):
        names = ", ".join(sorted(one.__name__ for one in METHODS.values()))
        raise TypeError(f"method must be one of {names}, such as DGS(); got {method!r}")
    return method.with_names(parameters)
