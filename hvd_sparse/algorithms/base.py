"""What all methods share: the settings and their checks, and the arguments as `Compression` documents them."""

import abc
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, TypeVar

from hvd_sparse._version import __version__
from hvd_sparse.checks import check_choice
from hvd_sparse.schedule import Schedule, make_schedule
from hvd_sparse.wire import LEVELS, checked_integer

SCOPES = ("tensor", "model")
CODINGS = ("run_length", "elias_fano", "bitmap", "auto")  # of positions
WIRE_VALUES = ("float32", "float16", "bfloat16", "int2", "int1")  # residuals are float32
GRANULARITIES = ("tensor", "channel")
DENSE_FALLBACKS = ("bytes", "measured")
EXCHANGES = ("gather", "reduce_scatter", "hierarchical", "auto")

Parameters = TypeVar("Parameters")
Compressor = TypeVar("Compressor")
Signature = TypeVar("Signature", bound=Callable[..., Any])

SHARED_ARGUMENTS = {
    "DENSITY": """\
    density: Part of the elements to send, a number in (0, 1], or a `hvd_sparse.schedule.Schedule`.
    warmup: Steps of the warm-up: the density starts at 25 % and falls by a factor of 4 in each of its stages
        (Deep Gradient Compression, section 3.3). None: no warm-up. Or a `Schedule`.""",
    "MOMENTUM": """\
    weight_decay: Times the parameter, added to its gradient before the momentum, once whatever `op` and loss scale
        are. One number; or {name: number}, where parameters without a number do not decay; or a function of name and
        parameter that returns a number.
    clip_norm: Largest L2 norm of the reduced gradient, whatever `op` and loss scale are. Each of N ranks clips its own
        gradient before the momentum, so that N independent gradients of the largest norm sum up to it (Deep Gradient
        Compression, section 3.2 and Appendix C). None: no clipping.
    clip_scope: "tensor" clips each tensor by its own norm, "model" all by the norm of the whole gradient of the rank,
        which is known with `scope="model"` only.""",
    "EXCHANGE": """\
    exchange: How the selections of all ranks become one sum. "gather": every rank receives all of them, world_size * k
        entries, and up to as many elements change. "reduce_scatter": each rank adds the entries of its region of the
        elements and keeps the largest, k of all ranks together, which every rank receives: 2 k entries, whatever the
        world size is. What is not kept stays in the residuals. "hierarchical": gradients are added in each
        host, each of its ranks keeps and compresses a part of the sum, and the parts are exchanged between hosts;
        Horovod must permit process sets. "auto": "reduce_scatter" where that takes at most half as long as "gather" on
        a network of 1 Gbit/s, by `hvd_sparse.performance_model`: on five ranks and more, in large models.
    complete: In a reduce-scatter, once it is known which elements the owners keep, all ranks add their whole residuals
        there, in one more all-reduce of at most k float32: residuals stay smaller, about twice as much is received.
    ranks_per_host: With `exchange="hierarchical"`, how many ranks follow one another on a host, or a list of how many
        on each. None: as the hosts' names tell.""",
    "HOSTS": """\
    exchange: "gather": all ranks name elements and send their values. "hierarchical": gradients are added in each host,
        each of its ranks keeps and compresses a part of the sum, and hosts name and send; Horovod must permit process
        sets.
    ranks_per_host: With `exchange="hierarchical"`, how many ranks follow one another on a host, or a list of how many
        on each. None: as the hosts' names tell.""",
    "SHARED": """\
    min_numel: Tensors of fewer elements are sent dense.
    coding: How positions are coded: "run_length" (16-bit run lengths), "elias_fano", "bitmap", or "auto", the
        smallest of them.
    values: Type of the values sent: "float32", "float16", "bfloat16", "int2" (a sign and one of two magnitudes) or
        "int1" (a sign and one magnitude). What rounding loses stays in the residual.
    level: The magnitude that "int1" and "int2" send: the "mean" of the values that share it, or their "min"
        (Gradient Dropping, section 5.4).
    granularity: Which values share a magnitude: all of a "tensor", or those of a "channel" (last dimension) of a
        tensor with two dimensions or more.
    bucket_bytes: Payloads are sent in messages of about so many bytes (`scope="tensor"` and the thresholds); in a
        reduce-scatter so many to each owner of a region.
    dense_fallback: "bytes" sends a step dense if its payloads cost more bytes than an all-reduce of the gradients, as
        in a warm-up on many ranks; likewise single tensors whose payloads always cost more. Error feedback goes on:
        what was not sent before is sent with it. "measured" times steps of both kinds besides, at first and again
        every so often, and sends what is faster. None sends payloads whatever they cost.
    seed: Seed of all random choices. The same on every rank.
    process_set: The optimizer's `hvd.ProcessSet`, or under DistributedDataParallel the model's
        `torch.distributed.ProcessGroup`; None: all ranks.

Returns:
    The compressor of one optimizer. Build a new one for each, in the same order on every rank.

Raises:
    ValueError: A value is out of its range; the message names the argument, what was received, what is expected.
    TypeError: A value is of another type.""",
}


def documented(method: Signature) -> Signature:
    """Put SHARED_ARGUMENTS where the docstring of a method names them."""
    text = inspect.cleandoc(method.__doc__ or "")
    for name, arguments in SHARED_ARGUMENTS.items():
        text = text.replace(f"    {name}", arguments)
    method.__doc__ = text
    return method


def check_hosts(exchange: str, ranks_per_host: int | Sequence[int] | None) -> None:
    """Raise ValueError unless the number of ranks a host, or of each host, fits the exchange."""
    if ranks_per_host is None:
        return
    if exchange != "hierarchical":
        raise ValueError(f'ranks_per_host is for exchange="hierarchical", got exchange={exchange!r}')
    for number in [ranks_per_host] if isinstance(ranks_per_host, int) else ranks_per_host:
        checked_integer("ranks_per_host", number, 1)


class Methods(Generic[Parameters, Compressor]):
    """Base of the classes of methods: each method is a class method, whose arguments are the settings."""

    @classmethod
    def _build(cls, algorithm: "Algorithm", parameters: Parameters, process_set: Any) -> Compressor:
        """Return a framework's compressor."""
        raise NotImplementedError

    @classmethod
    def _from(cls, algorithm: "type[Algorithm]", arguments: dict[str, Any]) -> Compressor:
        """Return the compressor of a method that was called with these arguments, its `locals()`."""
        settings = {field.name: arguments[field.name] for field in fields(algorithm)}
        return cls._build(algorithm(**settings), arguments["parameters"], arguments["process_set"])


@dataclass(frozen=True, kw_only=True)
class Algorithm(abc.ABC):
    """The settings that every method has. Defaults stand in the signatures of `Compression`, and nowhere else."""

    min_numel: int
    coding: str
    values: str
    level: str
    granularity: str
    bucket_bytes: int
    dense_fallback: str | None
    seed: int

    name: ClassVar[str]

    def __post_init__(self):
        check_choice("coding", self.coding, CODINGS)
        check_choice("values", self.values, WIRE_VALUES)
        check_choice("level", self.level, LEVELS)
        check_choice("granularity", self.granularity, GRANULARITIES)
        checked_integer("min_numel", self.min_numel, 0)
        checked_integer("bucket_bytes", self.bucket_bytes, 1)
        if self.dense_fallback is not None:
            check_choice("dense_fallback", self.dense_fallback, DENSE_FALLBACKS)
        checked_integer("seed", self.seed, 0)

    @property
    def depends_on_reduction(self) -> bool:
        """Return whether error feedback depends on `op`: there is a clip_norm or a weight_decay."""
        return False

    @property
    @abc.abstractmethod
    def layout(self) -> str:
        """How a step is laid out: "tensor" or "model", the scope of a selection of exactly k; or a name of its own."""

    @property
    @abc.abstractmethod
    def schedule(self) -> Schedule:
        """The density of each optimizer step."""

    @property
    def local_momentum(self) -> float:
        """The momentum that is applied on each rank, before the selection."""
        return 0.0

    def weight_decays(self, parameters: Iterable[tuple[str, object]]) -> dict[str, float]:
        """Return {name: weight decay} of (name, parameter) pairs; 0.0 where the optimizer applies it."""
        return {name: 0.0 for name, _ in parameters}

    def describe(self) -> list[str]:
        """Return one line a setting, and the version, for the configuration check across ranks."""
        settings = [field.name for field in fields(self)]
        start = [f"hvd_sparse = {__version__}", f"method = {self.name}"]
        return start + [f"{name} = {getattr(self, name)!r}" for name in settings]


@dataclass(frozen=True, kw_only=True)
class AtDensity(Algorithm):
    """The settings of the methods that aim at a density."""

    density: float | Schedule
    warmup: int | Schedule | None

    def __post_init__(self):
        super().__post_init__()
        _ = self.schedule  # checks both

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The density of each optimizer step."""
        return make_schedule(self.density, self.warmup)

    def describe(self) -> list[str]:
        """Return one line a setting, for the configuration check across ranks."""
        own = [line for line in super().describe() if not line.startswith(("density = ", "warmup = "))]
        return [*own, f"density = {self.schedule.describe()}"]
