"""Every method as one frozen dataclass: its memory, its defaults and the section of the paper that it follows.

The arguments that all methods share are those of `Algorithm`; both frontends build their compressors from these.
"""

import numbers
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import ClassVar

from hvd_sparse.checks import check_choice, check_number
from hvd_sparse.schedule import Constant, Schedule, make_schedule
from hvd_sparse.weight_decay import WeightDecay, check_weight_decay, weight_decays
from hvd_sparse.wire import CENTRES, checked_integer

SCOPES = ("tensor", "model")
DISTRIBUTIONS = ("exponential", "gamma", "pareto")
CODINGS = ("run_length", "elias_fano", "bitmap", "auto")  # of positions
WIRE_VALUES = ("float32", "float16", "bfloat16", "int2", "int1")  # residuals are float32
CENTRE_SCOPES = ("tensor", "column")
CONTROLLERS = ("histogram", "scaling")


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """The arguments that every method shares.

    min_numel: smaller tensors travel dense. coding, values: of the payload, see `hvd_sparse.wire`; what values of fewer
    bits lose stays in the residual. centre, centre_scope: "int1" sends signs and one magnitude, "int2" signs and two:
    the "mean" of what is sent or its "min", of each "tensor", or of each "column" (last dimension) of those that have
    two dimensions or more (Gradient Dropping, section 5.4). bucket_bytes: payload bytes that one allgather aims at
    (scope "tensor"). seed: of all that is drawn.
    Raises ValueError or TypeError that names the argument, what was received and what is expected.
    """

    min_numel: int = 1024
    coding: str = "run_length"
    values: str = "float32"
    centre: str = "mean"
    centre_scope: str = "tensor"
    bucket_bytes: int = 1 << 17
    seed: int = 0

    name: ClassVar[str]
    warmup: ClassVar[Schedule]
    momentum: ClassVar[float] = 0.0
    scope: ClassVar[str] = "tensor"

    def __post_init__(self):
        check_choice("scope", self.scope, SCOPES)
        check_choice("coding", self.coding, CODINGS)
        check_choice("values", self.values, WIRE_VALUES)
        check_choice("centre", self.centre, CENTRES)
        check_choice("centre_scope", self.centre_scope, CENTRE_SCOPES)
        checked_integer("min_numel", self.min_numel, 0)
        checked_integer("bucket_bytes", self.bucket_bytes, 1)
        checked_integer("seed", self.seed, 0)

    @property
    def depends_on_reduction(self) -> bool:
        """Return whether what is remembered depends on what a sum over ranks will be multiplied with."""
        return False

    @property
    def layout(self) -> str:
        """How a step is laid out: "tensor" or "model", the scope of a selection of exactly k; or a name of its own."""
        return self.scope

    def density_at(self, step: int) -> float:
        """Return the density that is aimed at in an optimizer step, counted from 0."""
        return self.warmup.density(step)

    def weight_decays(self, parameters: Iterable[tuple[str, object]]) -> dict[str, float]:
        """Return {name: weight decay} of (name, parameter) pairs: 0.0 where it is the optimizer's, not the method's."""
        return {name: 0.0 for name, _ in parameters}

    def describe(self) -> list[str]:
        """Return one line a setting, for the comparison between ranks."""
        settings = [field.name for field in fields(self)]
        return [f"method = {self.name}"] + [f"{name} = {getattr(self, name)!r}" for name in settings]


@dataclass(frozen=True, kw_only=True)
class AtDensity(Algorithm):
    """What the methods that aim at a density share.

    density: part of the elements to send, in (0, 1]. warmup: None, a number of optimizer steps, or a `Schedule`.
    """

    density: float | Schedule
    warmup: int | Schedule | None = None

    def __post_init__(self):
        object.__setattr__(self, "warmup", make_schedule(self.density, self.warmup))
        super().__post_init__()

    def describe(self) -> list[str]:
        """Return one line a setting, for the comparison between ranks."""
        own = [line for line in super().describe() if not line.startswith(("density = ", "warmup = "))]
        return [*own, f"density = {self.warmup.describe()}"]


@dataclass(frozen=True, kw_only=True)
class GradientDropping(AtDensity):
    """Gradient Dropping (Aji and Heafield, 2017, sections 3 and 4): a residual, and the largest of it are sent.

    scope "tensor" is the paper's local threshold, "model" its global one. Differences from the paper: exactly
    k = round(density * n) entries are sent, not whatever exceeds a sampled threshold; synchronous.
    """

    density: float | Schedule = 0.01
    scope: str = "tensor"

    name: ClassVar[str] = "gradient_dropping"


@dataclass(frozen=True, kw_only=True)
class TopK(AtDensity):
    """Exact top-k with error feedback, the baseline: every rank sends its k largest, up to ranks * k together.

    scope: "tensor" selects in each tensor, "model" in all of them together.
    """

    density: float | Schedule = 0.001
    scope: str = "model"

    name: ClassVar[str] = "topk"


@dataclass(frozen=True, kw_only=True)
class DynamicCommunicationThresholding(AtDensity):
    """DCT-DP (Gupta et al., 2021, Algorithm 1): a tensor's threshold is taken exactly, then kept for a life-span.

    lifespan: steps that a threshold is kept, fewer at first (1, 2, 4, ...), as the first thresholds know no residual;
    refreshes are staggered over the tensors. drain: None, or about once in so many steps, drawn from the seed, a tensor
    sends all that it remembers (section 3.3).
    What reaches the threshold is sent: the count drifts between refreshes, and `stats()["density"]` tells it. band: how
    many times more or fewer than k may be sent before the threshold is taken anew in the next step, before its turn;
    None: any number, as in the paper. Each rank goes by its own counts, as it has thresholds of its own.
    Differences from the paper: zeros are never sent; the band.
    """

    density: float | Schedule = 0.01
    lifespan: int = 1000
    drain: int | None = None
    band: float | None = 4.0

    name: ClassVar[str] = "dct"
    layout: ClassVar[str] = "threshold"

    def __post_init__(self):
        super().__post_init__()
        checked_integer("lifespan", self.lifespan, 1)
        if self.drain is not None:
            checked_integer("drain", self.drain, 1)
        if self.band is not None:
            check_number("band", self.band, "above 1, or None for no band", lambda value: value > 1.0)


@dataclass(frozen=True, kw_only=True)
class Union(AtDensity):
    """What the methods share in which all ranks send the same elements of the whole model: there is no build-up.

    float32 values are summed by Horovod's own allreduce. What has fewer bits cannot be summed without another loss that
    no residual would know of: it is gathered, and summed in rank order.
    """

    density: float | Schedule = 0.001

    scope: ClassVar[str] = "model"


@dataclass(frozen=True, kw_only=True)
class CyclicLocalTopK(Union):
    """CLT-k (ScaleCom: Chen et al., 2020, section 3), a baseline: rank step % ranks says which elements are sent.

    Its own k largest of the whole model; their indices go to all ranks, which all add their values there.
    """

    name: ClassVar[str] = "cltk"
    layout: ClassVar[str] = "leader"


@dataclass(frozen=True, kw_only=True)
class MiCRO(Union):
    """MiCRO (Yoon and Oh, 2023, Algorithm 1): each rank selects in a partition of its own, in another one each step.

    Rank i names what reaches the threshold in partition (step + i) % ranks of the whole model; the values at all that
    were named are averaged, and leave every rank's residual. The count is within a few per cent of k, not exactly k.
    controller: "histogram" reads the threshold off a histogram of sampled magnitudes, 16 KiB, that the ranks sum before
    they select: it is right from the first step, at any number of ranks, and has no state. "scaling" is the authors':
    it starts at 1 / (2 sqrt(k)) and scales after each step by how many were sent (section IV-C; the factors are those
    of their published code). It is for comparison: it takes hundreds of steps, and lags behind a residual that grows.
    """

    controller: str = "histogram"

    name: ClassVar[str] = "micro"
    layout: ClassVar[str] = "partition"

    def __post_init__(self):
        super().__post_init__()
        check_choice("controller", self.controller, CONTROLLERS)


@dataclass(frozen=True, kw_only=True)
class RandomK(Union):
    """Random-k (Stich et al., 2018, definition 2.1), a baseline: the same random elements on every rank, no indices.

    Difference from the paper: one element of each of k equal parts of the model, so that none is left out for long.
    """

    name: ClassVar[str] = "random_k"
    layout: ClassVar[str] = "random"


@dataclass(frozen=True, kw_only=True)
class SIDCo(AtDensity):
    """SIDCo (Abdelmoniem et al., 2021), a baseline: a tensor's threshold from a distribution fitted to its magnitudes.

    distribution: "exponential", "gamma" or "pareto" (generalised) of the first stage. Each further stage fits what
    exceeds the threshold so far: exponential again, or generalised Pareto. The first of several stages keeps a quarter,
    the others share what is left to the density. stages: how many at first; each tensor adapts its own every 5 steps,
    where the mean count was off by over 20 %: by one, in the direction that made it better the last time.
    What reaches the threshold is sent: the count is off where the fit is, and `stats()["density"]` tells it.
    """

    density: float | Schedule = 0.001
    stages: int = 1
    distribution: str = "exponential"

    name: ClassVar[str] = "sidco"
    layout: ClassVar[str] = "threshold"

    def __post_init__(self):
        super().__post_init__()
        checked_integer("stages", self.stages, 1)
        check_choice("distribution", self.distribution, DISTRIBUTIONS)


@dataclass(frozen=True, kw_only=True)
class HardThreshold(Algorithm):
    """A constant threshold, the baseline: whatever reaches `value` is sent.

    value: in units of a rank's own gradient without its loss scale.
    The density follows from it, and nothing bounds it: `stats()["density"]` tells it.
    """

    value: float

    name: ClassVar[str] = "hard_threshold"
    warmup: ClassVar[Schedule] = Constant(0.01)  # messages are laid out by it; no density is aimed at
    layout: ClassVar[str] = "threshold"

    def __post_init__(self):
        super().__post_init__()
        check_number("value", self.value, "above 0", lambda value: value > 0.0)


@dataclass(frozen=True, kw_only=True)
class LocalMomentum(AtDensity):
    """What the methods share whose momentum lives at the ranks, before the selection: outside there is plain SGD.

    momentum: in [0, 1). weight_decay: times the parameter, added to the gradient before the accumulation, and counted
    once whatever op is. One number for all; or a mapping of names to numbers, where the others do not decay; or a
    function of name and parameter that returns a number. clip_norm: the bound on the L2 norm of the reduced gradient,
    whatever op and loss scale are: each of N ranks clips its own before the accumulation, so that N independent
    gradients of that norm sum up to it (Deep Gradient Compression, section 3.2, Appendix C; `hvd_sparse.units`).
    clip_scope: "tensor" clips each tensor by its own norm, "model" all by the norm of the whole local gradient, which
    only scope="model" knows.
    """

    scope: str = "tensor"
    momentum: float
    weight_decay: WeightDecay = 0.0
    clip_norm: float | None = None
    clip_scope: str = "tensor"

    def __post_init__(self):
        super().__post_init__()
        check_number("momentum", self.momentum, "in [0, 1)", lambda value: 0.0 <= value < 1.0)
        check_weight_decay(self.weight_decay)
        if self.clip_norm is not None:
            check_number("clip_norm", self.clip_norm, "above 0, or None for no clipping", lambda value: value > 0.0)
        check_choice("clip_scope", self.clip_scope, SCOPES)
        if self.clip_scope == "model" and self.scope != "model":
            raise ValueError(
                'clip_scope="model" needs scope="model", got scope="tensor": the norm of the whole gradient is not '
                "known while single tensors are sent"
            )

    @property
    def depends_on_reduction(self) -> bool:
        """Return whether there is a clip_norm or a weight_decay."""
        return self.clip_norm is not None or self.weight_decay != 0.0

    def describe(self) -> list[str]:
        """Return one line a setting, for the comparison between ranks; a function has no text that ranks share."""
        lines = super().describe()
        if isinstance(self.weight_decay, numbers.Real):
            return lines
        return [line for line in lines if not line.startswith("weight_decay = ")]

    def weight_decays(self, parameters: Iterable[tuple[str, object]]) -> dict[str, float]:
        """Return {name: weight decay} of (name, parameter) pairs; TypeError or ValueError, naming what is wrong."""
        return weight_decays(self.weight_decay, parameters)


@dataclass(frozen=True, kw_only=True)
class DeepGradientCompression(LocalMomentum):
    """Deep Gradient Compression (Lin et al., 2018): Algorithm 3, and Algorithm 4 with nesterov.

    momentum: of the local velocity (momentum correction, section 3.2). nesterov: Appendix B. factor_masking: clear the
    velocity of what was sent (section 3.3).
    Differences from the paper: the threshold is exact (exactly k entries); run lengths are per block of 65,536.
    """

    density: float | Schedule = 0.001
    momentum: float = 0.9
    nesterov: bool = False
    factor_masking: bool = True

    name: ClassVar[str] = "dgc"

    def __post_init__(self):
        super().__post_init__()
        for name in ("nesterov", "factor_masking"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.nesterov and self.momentum == 0.0:
            raise ValueError("nesterov=True needs a momentum above 0, got momentum=0.0")


@dataclass(frozen=True, kw_only=True)
class SparsificationAwareMomentum(LocalMomentum):
    """SAMomentum (DGS: Yan et al., 2020, Algorithm 3 and section 4.3.2) for synchronous training, its future work.

    u <- m*u + g; the largest of u are sent and stay in u; the others are magnified by 1/m, so that an element that
    waits T steps has m*u_0 plus the sum of its T gradients (Equation 16). One buffer, where DGC has two.
    Differences from the paper: synchronous, without the learning rate in u; what is kept is m*u, the numbers are equal.
    """

    density: float | Schedule = 0.01
    momentum: float = 0.7

    name: ClassVar[str] = "samomentum"


def density_of(density: float | Schedule | None, sparsity: float | None, default: float) -> float | Schedule:
    """Return the density that either argument says; ValueError for both, or for a sparsity out of [0, 1)."""
    if sparsity is None:
        return default if density is None else density
    if density is not None:
        raise ValueError(f"give density or sparsity, not both; got density={density!r} and sparsity={sparsity!r}")
    check_number("sparsity", sparsity, "in [0, 1)", lambda value: 0.0 <= value < 1.0)
    return 1.0 - sparsity
