"""The settings, checks and argument documentation that all methods of `Compression` share."""

import abc
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args

from hvd_sparse._version import __version__
from hvd_sparse.checks import check_choice, checked_integer
from hvd_sparse.dense_parameters import DenseParameters, checked_dense, dense_names
from hvd_sparse.schedule import Schedule, check_one_density, make_schedule
from hvd_sparse.wire import LEVELS

Scope = Literal["tensor", "model"]
Coding = Literal["run_length", "elias_fano", "bitmap", "auto"]  # of positions
WireValues = Literal["float32", "float16", "bfloat16", "int2", "int1"]  # residuals are float32
Level = Literal["mean", "min"]
Granularity = Literal["tensor", "channel"]
Fallback = Literal["bytes", "measured"]
Exchange = Literal["gather", "reduce_scatter", "hierarchical", "auto"]
BetweenHosts = Literal["gather", "reduce_scatter", "auto"]
SCOPES, CODINGS, WIRE_VALUES, GRANULARITIES = map(get_args, (Scope, Coding, WireValues, Granularity))
DENSE_FALLBACKS, EXCHANGES, BETWEEN_HOSTS = map(get_args, (Fallback, Exchange, BetweenHosts))

Parameters = TypeVar("Parameters")
Compressor = TypeVar("Compressor")
Signature = TypeVar("Signature", bound=Callable[..., Any])

SHARED_ARGUMENTS = {
    "PARAMETERS": """\
    parameters: What the optimizer trains. In PyTorch the model, `model.named_parameters()`, or other (name, parameter)
        pairs. In TensorFlow the trainable variables: a list, the model, or a function that returns them.""",
    "DENSITY": """\
    density: Part of the elements to send, a number in (0, 1], or a `hvd_sparse.schedule.Schedule`.
    warmup: Number of warm-up steps, in stages: the density starts at 25 % and falls by a factor of 4 per stage (Deep
        Gradient Compression, sections 3.3 and 4.1). None: no warm-up. Or a `Schedule`.""",
    "MOMENTUM": """\
    weight_decay: Coefficient of weight decay, which is added to the gradient before the momentum, independent of `op`
        and loss scale. A number; {name: number}, 0 for other parameters; or a function of name and parameter that
        returns a number.
    clip_norm: Bound on the L2 norm of each tensor's reduced gradient (`clip_scope="model"`: of the whole gradient),
        without the loss scale. The mean of N independent gradients is about sqrt(N) shorter than each of them, so each
        rank clips its own, before the momentum, at clip_norm * sqrt(N) with `op=Average` and clip_norm / sqrt(N) with
        `op=Sum` (Deep Gradient Compression, section 3.2 and Appendix C). None: no clipping.
    clip_scope: "tensor" clips each tensor by its norm, "model" all tensors by the norm of the rank's whole gradient,
        and needs `scope="model"`.""",
    "EXCHANGE": """\
    exchange: How the selections of all ranks become one sum. "gather": every rank receives the k entries of every other
        rank, and up to world_size * k elements change. "reduce_scatter": each rank owns a region of the elements, adds
        the entries that all ranks send for it, and keeps the largest sums, k over all regions; every rank receives less
        than 2 k entries, for every world size. Other elements stay in the residuals. "hierarchical": the ranks of a
        host add their gradients, each compresses a part of the sum, and hosts exchange the parts; Horovod must permit
        process sets. "auto": "reduce_scatter" if it takes at most half as long as "gather" on a network of 1 Gbit/s, by
        `hvd_sparse.performance_model`: with 25.6 M elements from 5 ranks on at density 0.01, from 7 on at 0.001 (with
        `complete`, 8 and 14); with smaller models later or never.
    complete: In a reduce-scatter, all ranks add their whole residuals at the elements that owners keep, in one more
        all-reduce of at most k float32. Residuals stay smaller; a rank receives about two thirds more bytes.
    ranks_per_host: With `exchange="hierarchical"`, the number of consecutive ranks on each host, or a list with one
        number per host. None: from the host names.
    between_hosts: With `exchange="hierarchical"`, the exchange of the parts between hosts: "gather", "reduce_scatter",
        or "auto", by the number of hosts.""",
    "HOSTS": """\
    exchange: "gather": all ranks send values at the shared indices. "hierarchical": the ranks of a host add their
        gradients, each compresses a part of the sum, and hosts exchange the parts; Horovod must permit process sets.
    ranks_per_host: With `exchange="hierarchical"`, the number of consecutive ranks on each host, or a list with one
        number per host. None: from the host names.""",
    "SHARED": """\
    dense: The parameters that are sent dense whatever their size, as those below min_numel: such as an embedding, the
        output layer or all normalisation. A collection of their names, or a function of name and parameter that returns
        a bool.
    min_numel: Tensors of fewer elements are sent dense.
    coding: Coding of positions: "run_length" (16-bit run lengths), "elias_fano", "bitmap", or "auto", the smallest. No
        effect in `random_k`, which sends no positions.
    values: Type of the values sent: "float32", "float16", "bfloat16", "int2" (a sign and one of two magnitudes) or
        "int1" (a sign and one magnitude). The rounding error stays in the residual.
    level: The magnitude that "int1" and "int2" send: the "mean" of the values that share it, or their "min"
        (Gradient Dropping, section 5.4).
    granularity: Values that share a magnitude: all of a "tensor", or those of a "channel" (last dimension) of a
        tensor with two dimensions or more.
    bucket_bytes: Approximate size of a message in bytes; in a reduce-scatter, per owner of a region. No effect with
        `scope="model"` and in `micro`, `cltk` and `random_k`, which send one message.
    dense_fallback: "bytes" sends dense gradients in a step whose payloads cost more bytes than an all-reduce, as in a
        warm-up on many ranks; likewise for single tensors whose payloads always cost more. A dense step includes the
        residuals. "measured" also times steps of both kinds, at first and at intervals, and uses the faster. None
        always sends payloads. No effect in `hard_threshold`, which has no density.
    seed: Seed of all random choices, the same on every rank.
    process_set: The optimizer's `hvd.ProcessSet`, or under DistributedDataParallel the model's
        `torch.distributed.ProcessGroup`; None: all ranks.

Returns:
    The compressor of one optimizer. Build a new one for each, in the same order on every rank.

Raises:
    ValueError: A value is out of range; the message names the argument, the received value and the expected ones.
    TypeError: A value has the wrong type.""",
}


def documented(method: Signature) -> Signature:
    """Complete a public method of `CompressionMethods`, and return it.

    Insert the shared arguments into its docstring, set its name in Python's errors, and make it raise a helpful
    TypeError if it is passed without being called.
    """
    text = inspect.cleandoc(method.__doc__ or "")
    for name, arguments in SHARED_ARGUMENTS.items():
        text = text.replace(f"    {name}", arguments)
    method.__doc__ = text
    method.__qualname__ = f"Compression.{method.__name__}"  # as Python's messages on wrong arguments call it
    name = method.__name__
    given = f"compression=Compression.{name} must be a call, with the model's parameters"
    vars(method)["compress"] = _not_called(  # Horovod calls it if it is given the method itself
        f"{given}: for example compression=Compression.{name}(model.named_parameters()) in PyTorch, "
        f"Compression.{name}(lambda: model.trainable_variables) in TensorFlow"
    )
    vars(method)["register"] = _not_called(  # of compressors for DistributedDataParallel
        f"{given}: compression=Compression.{name}(model.named_parameters()), then compression.register(model)"
    )
    return method


def _not_called(reason: str) -> Callable:
    """Return a function that says what is wrong if a method is used without its parameters."""

    def refuse(*_):
        """Raise TypeError: the method must be called."""
        raise TypeError(f"hvd_sparse: {reason}")

    return refuse


class Methods(Generic[Parameters, Compressor]):
    """Base of the classes of methods: each method is a class method whose arguments are its settings."""

    @classmethod
    def _build(cls, algorithm: "Algorithm", parameters: Parameters, process_set: Any) -> Compressor:
        """Return a framework's compressor: the frameworks' classes define it; this base is never built from."""
        raise NotImplementedError

    @classmethod
    def _from(cls, algorithm: "type[Algorithm]", arguments: dict[str, Any]) -> Compressor:
        """Return the compressor of a method, from its arguments (`locals()`)."""
        settings = {field.name: arguments[field.name] for field in fields(algorithm)}
        if "warmup" in settings:
            default = inspect.signature(getattr(cls, algorithm.name)).parameters["density"].default
            default = algorithm.DEFAULT_DENSITY if default is None else default
            check_one_density(settings["density"], settings["warmup"], default)
        return cls._build(algorithm(**settings), arguments["parameters"], arguments["process_set"])


@dataclass(frozen=True, kw_only=True)
class Algorithm(abc.ABC):
    """The settings that every method has. Only the signatures of `Compression` have defaults."""

    dense: DenseParameters
    min_numel: int
    coding: Coding
    values: WireValues
    level: Level
    granularity: Granularity
    bucket_bytes: int
    dense_fallback: Fallback | None
    seed: int

    name: ClassVar[str]
    DEFAULT_DENSITY: ClassVar[float | None] = None  # where the signature has none

    def __post_init__(self):
        object.__setattr__(self, "dense", checked_dense(self.dense))  # names: stored as a sorted tuple
        check_choice("coding", self.coding, CODINGS)
        check_choice("values", self.values, WIRE_VALUES)
        check_choice("level", self.level, LEVELS)
        check_choice("granularity", self.granularity, GRANULARITIES)
        for number, least in (("min_numel", 0), ("bucket_bytes", 1), ("seed", 0)):  # stored as Python's int
            object.__setattr__(self, number, checked_integer(number, getattr(self, number), least))
        if self.dense_fallback is not None:
            check_choice("dense_fallback", self.dense_fallback, DENSE_FALLBACKS)

    def with_names(self, parameters: Iterable[tuple[str, object]]) -> "Algorithm":
        """Return these settings with the names of the (name, parameter) pairs that are sent dense as `dense`.

        TypeError or ValueError if it is wrong.
        """
        names = dense_names(self.dense, parameters)
        return self if names == self.dense else replace(self, dense=names)

    def compresses(self, name: str, numel: int) -> bool:
        """Return whether a tensor of this many elements is sent as a payload; of settings `with_names`."""
        return numel >= max(self.min_numel, 1) and name not in self._dense_names

    @property
    def _dense_names(self) -> tuple[str, ...]:
        return () if callable(self.dense) else tuple(self.dense)

    @property
    def depends_on_reduction(self) -> bool:
        """Whether error feedback depends on `op`: with a clip_norm or a weight_decay."""
        return False

    @property
    @abc.abstractmethod
    def selection(self) -> str:
        """The kind of selection, which has a codec: "tensor" or "model", the scope of exactly k; or another name."""

    @property
    @abc.abstractmethod
    def schedule(self) -> Schedule:
        """The density of each optimizer step."""

    @property
    def local_momentum(self) -> float:
        """The momentum that each rank applies before the selection."""
        return 0.0

    @property
    def clips(self) -> str | None:
        """What is clipped by its norm: each "tensor", or the "model"'s whole gradient; None: nothing."""
        return None

    @property
    def is_hierarchical(self) -> bool:
        """Whether hosts add their ranks' gradients before they compress."""
        return False

    def scatters(self, world_size: int, numels: Iterable[int]) -> bool:
        """Return whether the exchange is a reduce-scatter at this world size; otherwise it is a gather."""
        return False

    def index_bytes(self, n: int, k: int, world_size: int) -> int:
        """Return the bytes of all ranks' messages with the k indices of n elements that the ranks share.

        The dense fallback adds them to the bytes of the values. 0: each rank computes the indices itself.
        """
        return 0

    @property
    def replaces_optimizer(self) -> bool:
        """Whether ranks apply a momentum, weight decay or clip_norm, which the optimizer then must not."""
        return self.local_momentum > 0.0 or self.depends_on_reduction

    def weight_decays(self, parameters: Iterable[tuple[str, object]]) -> dict[str, float]:
        """Return {name: weight decay} of (name, parameter) pairs; 0.0 if the optimizer applies it."""
        return {name: 0.0 for name, _ in parameters}

    def fit(self, step) -> dict[str, Any]:
        """Return the arguments of the native functions that fit thresholds, in a step; empty without a fit."""
        return {}

    def describe(self) -> list[str]:
        """Return one line per setting, and the version, for the configuration check across ranks."""
        start = [f"hvd_sparse = {__version__}", f"method = {self.name}"]
        dense = [f"sent dense: {name}" for name in self._dense_names]
        return start + [f"{name} = {text}" for name, text in self._described().items()] + dense

    def _described(self) -> dict[str, str]:
        """Return the text of each setting that ranks compare, but of `dense`, which has a line for each name."""
        return {field.name: repr(getattr(self, field.name)) for field in fields(self) if field.name != "dense"}


@dataclass(frozen=True, kw_only=True)
class AtDensity(Algorithm):
    """The settings of the methods with a density."""

    density: float | Schedule
    warmup: int | Schedule | None

    def __post_init__(self):
        super().__post_init__()
        _ = self.schedule  # checks both

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The density of each optimizer step."""
        return make_schedule(self.density, self.warmup)

    def _described(self) -> dict[str, str]:
        """Return the text of each setting; `density` and `warmup` are one schedule."""
        texts = super()._described() | {"density": self.schedule.describe()}
        del texts["warmup"]
        return texts


@dataclass(frozen=True, kw_only=True)
class Exchanged(AtDensity):
    """The settings of methods that can add the gradients of each host before they compress."""

    exchange: Exchange
    ranks_per_host: int | Sequence[int] | None

    CHOICES: ClassVar[tuple[str, ...]] = EXCHANGES  # of `exchange`

    def __post_init__(self):
        super().__post_init__()
        check_choice("exchange", self.exchange, self.CHOICES)
        object.__setattr__(self, "ranks_per_host", self._checked_hosts())

    @property
    def is_hierarchical(self) -> bool:
        """Whether the exchange is hierarchical."""
        return self.exchange == "hierarchical"

    def _checked_hosts(self) -> int | tuple[int, ...] | None:
        """Return `ranks_per_host` with Python's integers; TypeError for others, ValueError unless it is of use."""
        ranks = self.ranks_per_host
        if ranks is None:
            return None
        if not self.is_hierarchical:
            raise ValueError(f'ranks_per_host is for exchange="hierarchical", got exchange={self.exchange!r}')
        if isinstance(ranks, Iterable) and not isinstance(ranks, str):
            return tuple(checked_integer("ranks_per_host", number, 1) for number in ranks)
        return checked_integer("ranks_per_host", ranks, 1)
