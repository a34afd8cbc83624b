"""Methods that send the elements that reach a threshold in each tensor: their number varies."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from hvd_sparse.algorithms.base import (
    Algorithm,
    AtDensity,
    Coding,
    Compressor,
    Fallback,
    Granularity,
    Level,
    Methods,
    Parameters,
    WireValues,
    documented,
)
from hvd_sparse.checks import check_choice, check_number, checked_integer
from hvd_sparse.dense_parameters import DenseParameters
from hvd_sparse.schedule import Constant, Schedule

Distribution = Literal["exponential", "gamma", "pareto"]
DISTRIBUTIONS = get_args(Distribution)


class ThresholdMethods(Methods[Parameters, Compressor]):
    """The methods of this module."""

    @classmethod
    @documented
    def dct(
        cls,
        parameters: Parameters,
        density: float | Schedule | None = None,
        *,
        sparsity: float | None = None,
        lifespan: int = 1000,
        drain: int | None = None,
        band: float | None = 4.0,
        warmup: int | Schedule | None = None,
        dense: DenseParameters = (),
        min_numel: int = 1024,
        coding: Coding = "run_length",
        values: WireValues = "float32",
        level: Level = "mean",
        granularity: Granularity = "tensor",
        bucket_bytes: int = 1 << 17,
        dense_fallback: Fallback | None = "bytes",
        seed: int = 0,
        process_set: Any = None,
    ) -> Compressor:
        """Dynamic Communication Thresholding, data-parallel (DCT-DP). Keep the momentum in the optimizer.

        A tensor's threshold is the exact one of its k largest elements, and is then used for a number of steps. In
        between, the number of elements sent drifts; see `stats()["step"]["density"]`. Differences from the paper:
        zeros are never sent; the band. Source: Gupta et al. (2021), Algorithm 1.

        Args:
            PARAMETERS
            DENSITY
            sparsity: 1 - density, as in the paper. Set one of the two, or neither: the density is 0.01.
            lifespan: Number of steps that use one threshold. The first thresholds are used for fewer (1, 2, 4, ...), as
                the residual grows fast at first. Tensors renew theirs in turn; one that has no gradient then, or is
                sent dense, in the next step that selects from it.
            drain: Number of steps in which a tensor sends its whole residual about once (section 3.3). None: never.
            band: A rank renews its threshold in the next step if it sent more than `band` times k elements, or fewer
                than k / `band`. None: only in its turn, as in the paper.
            SHARED
        """
        density = density_of(density, sparsity, DynamicCommunicationThresholding.DEFAULT_DENSITY)
        return cls._from(DynamicCommunicationThresholding, locals())

    @classmethod
    @documented
    def sidco(
        cls,
        parameters: Parameters,
        density: float | Schedule = 0.01,
        *,
        stages: int = 1,
        distribution: Distribution = "exponential",
        warmup: int | Schedule | None = None,
        dense: DenseParameters = (),
        min_numel: int = 1024,
        coding: Coding = "run_length",
        values: WireValues = "float32",
        level: Level = "mean",
        granularity: Granularity = "tensor",
        bucket_bytes: int = 1 << 17,
        dense_fallback: Fallback | None = "bytes",
        seed: int = 0,
        process_set: Any = None,
    ) -> Compressor:
        """SIDCo, a baseline: the threshold of a distribution fitted to the residual. Keep momentum in the optimizer.

        The threshold is found in stages: each fits a distribution to the elements above the last stage's threshold.
        The first of several stages keeps a quarter of the elements, the others reduce them in equal ratios to the
        density. The number of elements sent is as accurate as the fit, which uses a sample of a large tensor; see
        `stats()["step"]["density"]`. Source: Abdelmoniem et al. (2021), Algorithm 1.

        Args:
            PARAMETERS
            DENSITY
            stages: Initial number of stages. Every 5 steps, a tensor whose mean number of elements was off by more than
                20 % adds or removes one, in the direction that helped the last time.
            distribution: Distribution of the first stage: "exponential", "gamma" or "pareto" (generalized). The other
                stages have an exponential one after "exponential", else a generalized Pareto distribution.
            SHARED
        """
        return cls._from(SIDCo, locals())

    @classmethod
    @documented
    def hard_threshold(
        cls,
        parameters: Parameters,
        value: float,
        *,
        dense: DenseParameters = (),
        min_numel: int = 1024,
        coding: Coding = "run_length",
        values: WireValues = "float32",
        level: Level = "mean",
        granularity: Granularity = "tensor",
        bucket_bytes: int = 1 << 17,
        dense_fallback: Fallback | None = "bytes",
        seed: int = 0,
        process_set: Any = None,
    ) -> Compressor:
        """Send elements that reach a constant threshold, a baseline of MiCRO. Keep the momentum in the optimizer.

        Nothing bounds the density; see `stats()["step"]["density"]`.

        Args:
            PARAMETERS
            value: The threshold, above 0, in units of one rank's gradient without its loss scale.
            SHARED
        """
        return cls._from(HardThreshold, locals())


@dataclass(frozen=True, kw_only=True)
class DynamicCommunicationThresholding(AtDensity):
    """The settings of `Compression.dct`."""

    lifespan: int
    drain: int | None
    band: float | None

    name: ClassVar[str] = "dct"
    DEFAULT_DENSITY: ClassVar[float] = 0.01
    selection = "threshold"

    def __post_init__(self):
        super().__post_init__()
        check_lifespan(self)


@dataclass(frozen=True, kw_only=True)
class SIDCo(AtDensity):
    """The settings of `Compression.sidco`."""

    stages: int
    distribution: Distribution

    name: ClassVar[str] = "sidco"
    selection = "threshold"

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "stages", checked_integer("stages", self.stages, 1))
        check_choice("distribution", self.distribution, DISTRIBUTIONS)

    def fit(self, step) -> dict[str, Any]:
        """Return the first stage's distribution, and the seed of the sample."""
        return {"distribution": self.distribution, "seed": self.seed + step}


@dataclass(frozen=True, kw_only=True)
class HardThreshold(Algorithm):
    """The settings of `Compression.hard_threshold`."""

    value: float

    name: ClassVar[str] = "hard_threshold"
    schedule = Constant(0.01)  # messages are laid out by it; no density is aimed at
    selection = "threshold"

    def __post_init__(self):
        super().__post_init__()
        check_number("value", self.value, "above 0", lambda value: value > 0.0)


def check_lifespan(settings) -> None:
    """Check a method's `lifespan`, `drain` and `band`; store the first two as Python's int."""
    object.__setattr__(settings, "lifespan", checked_integer("lifespan", settings.lifespan, 1))
    if settings.drain is not None:
        object.__setattr__(settings, "drain", checked_integer("drain", settings.drain, 1))
    if settings.band is not None:
        check_number("band", settings.band, "above 1, or None for no band", lambda value: value > 1.0)


def density_of(density: float | Schedule | None, sparsity: float | None, default: float) -> float | Schedule:
    """Return the density from either argument; ValueError for both, or for a sparsity out of [0, 1)."""
    if sparsity is None:
        return default if density is None else density
    if density is not None:
        raise ValueError(f"give density or sparsity, not both; got density={density!r} and sparsity={sparsity!r}")
    check_number("sparsity", sparsity, "in [0, 1)", lambda value: 0.0 <= value < 1.0)
    return round(1.0 - sparsity, 12)  # 0.05, not 0.05 + 2**-54, for 0.95
