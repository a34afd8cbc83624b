"""Methods in which each rank selects and sends exactly k elements of a tensor, or of the whole model."""

import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hvd_sparse.algorithms.base import (
    BETWEEN_HOSTS,
    SCOPES,
    BetweenHosts,
    Coding,
    Compressor,
    Exchange,
    Exchanged,
    Fallback,
    Granularity,
    Level,
    Methods,
    Parameters,
    Scope,
    WireValues,
    documented,
)
from hvd_sparse.checks import check_bool, check_choice, check_number
from hvd_sparse.dense_parameters import DenseParameters
from hvd_sparse.performance_model import favours_scattered
from hvd_sparse.schedule import Schedule
from hvd_sparse.weight_decay import WeightDecay, check_weight_decay, weight_decays


class TopKMethods(Methods[Parameters, Compressor]):
    """The methods of this module."""

    @classmethod
    @documented
    def gradient_dropping(
        cls,
        parameters: Parameters,
        density: float | Schedule = 0.01,
        *,
        scope: Scope = "tensor",
        warmup: int | Schedule | None = None,
        dense: DenseParameters = (),
        min_numel: int = 1024,
        coding: Coding = "run_length",
        values: WireValues = "float32",
        level: Level = "mean",
        granularity: Granularity = "tensor",
        bucket_bytes: int = 1 << 17,
        exchange: Exchange = "gather",
        complete: bool = False,
        ranks_per_host: int | Sequence[int] | None = None,
        between_hosts: BetweenHosts = "auto",
        dense_fallback: Fallback | None = "bytes",
        seed: int = 0,
        process_set: Any = None,
    ) -> Compressor:
        """Gradient Dropping: top-k with error feedback. Keep the momentum in the optimizer.

        Differences from the paper: exactly k = round(density * n) elements are sent, not those above a sampled
        threshold; training is synchronous. Source: Aji and Heafield (2017), sections 3 and 4.

        Args:
            PARAMETERS
            DENSITY
            scope: "tensor" selects in each tensor, during backward (the paper's local threshold); "model" jointly in
                all tensors, after backward (its global threshold).
            EXCHANGE
            SHARED
        """
        return cls._from(GradientDropping, locals())

    @classmethod
    @documented
    def topk(
        cls,
        parameters: Parameters,
        density: float | Schedule = 0.01,
        *,
        scope: Scope = "model",
        warmup: int | Schedule | None = None,
        dense: DenseParameters = (),
        min_numel: int = 1024,
        coding: Coding = "run_length",
        values: WireValues = "float32",
        level: Level = "mean",
        granularity: Granularity = "tensor",
        bucket_bytes: int = 1 << 17,
        exchange: Exchange = "gather",
        complete: bool = False,
        ranks_per_host: int | Sequence[int] | None = None,
        between_hosts: BetweenHosts = "auto",
        dense_fallback: Fallback | None = "bytes",
        seed: int = 0,
        process_set: Any = None,
    ) -> Compressor:
        """Top-k with error feedback, the baseline of MiCRO and SIDCo. Keep the momentum in the optimizer.

        Each rank sends its own k largest elements; with "gather" up to world_size * k elements change.

        Args:
            PARAMETERS
            DENSITY
            scope: "model" selects jointly in all tensors, after backward; "tensor" in each, during backward.
            EXCHANGE
            SHARED
        """
        return cls._from(TopK, locals())

    @classmethod
    @documented
    def dgc(
        cls,
        parameters: Parameters,
        density: float | Schedule = 0.001,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        factor_masking: bool = True,
        weight_decay: WeightDecay = 0.0,
        clip_norm: float | None = None,
        clip_scope: Scope = "tensor",
        scope: Scope = "tensor",
        warmup: int | Schedule | None = None,
        dense: DenseParameters = (),
        min_numel: int = 1024,
        coding: Coding = "run_length",
        values: WireValues = "float32",
        level: Level = "mean",
        granularity: Granularity = "tensor",
        bucket_bytes: int = 1 << 17,
        exchange: Exchange = "gather",
        complete: bool = False,
        ranks_per_host: int | Sequence[int] | None = None,
        between_hosts: BetweenHosts = "auto",
        dense_fallback: Fallback | None = "bytes",
        seed: int = 0,
        process_set: Any = None,
    ) -> Compressor:
        """Deep Gradient Compression: momentum correction, momentum factor masking, clipping, warm-up.

        Set the momentum here, and the optimizer's (Adam's `beta1`) to 0; likewise the weight decay of SGD, but not that
        of AdamW, which stays in the optimizer. Differences from the paper: exactly k elements are sent, with run
        lengths in blocks of 65,536; by default clipping is by the norm of each tensor, not of the whole gradient.
        Source: Lin et al. (2018), Algorithm 3, and Algorithm 4 with `nesterov`.

        Args:
            PARAMETERS
            DENSITY
            momentum: Momentum of each rank's velocity, in [0, 1) (momentum correction, section 3.2).
            nesterov: Use Nesterov momentum (Appendix B).
            factor_masking: Clear the velocity of the elements that are sent (section 3.3).
            MOMENTUM
            scope: "tensor" selects in each tensor, during backward; "model" jointly in all, after backward.
            EXCHANGE
            SHARED
        """
        return cls._from(DeepGradientCompression, locals())

    @classmethod
    @documented
    def samomentum(
        cls,
        parameters: Parameters,
        density: float | Schedule = 0.01,
        *,
        momentum: float = 0.7,
        weight_decay: WeightDecay = 0.0,
        clip_norm: float | None = None,
        clip_scope: Scope = "tensor",
        scope: Scope = "tensor",
        warmup: int | Schedule | None = None,
        dense: DenseParameters = (),
        min_numel: int = 1024,
        coding: Coding = "run_length",
        values: WireValues = "float32",
        level: Level = "mean",
        granularity: Granularity = "tensor",
        bucket_bytes: int = 1 << 17,
        exchange: Exchange = "gather",
        complete: bool = False,
        ranks_per_host: int | Sequence[int] | None = None,
        between_hosts: BetweenHosts = "auto",
        dense_fallback: Fallback | None = "bytes",
        seed: int = 0,
        process_set: Any = None,
    ) -> Compressor:
        """SAMomentum, the sparsification-aware momentum of DGS, in synchronous training.

        u <- m * u + g; the largest elements of u are sent and stay in u, the others are divided by m, so that an
        element sent after T steps is m * u_0 plus the sum of its T gradients (Equation 16). It needs one buffer, DGC
        two. Set the momentum here, and the optimizer's (Adam's `beta1`) to 0; likewise the weight decay of SGD, but not
        that of AdamW, which stays in the optimizer. Differences from the paper: training is synchronous (the paper's
        future work); u excludes the learning rate; m * u is stored instead of u, with the same results. Source: Yan et
        al. (2020), Algorithm 3 and section 4.3.2.

        Args:
            PARAMETERS
            DENSITY
            momentum: m, in [0, 1).
            MOMENTUM
            scope: "tensor" selects in each tensor, during backward; "model" jointly in all, after backward.
            EXCHANGE
            SHARED
        """
        return cls._from(SparsificationAwareMomentum, locals())


@dataclass(frozen=True, kw_only=True)
class Scoped(Exchanged):
    """The settings of methods in which each rank selects its own k elements."""

    scope: Scope
    complete: bool
    between_hosts: BetweenHosts

    def __post_init__(self):
        super().__post_init__()
        check_choice("scope", self.scope, SCOPES)
        check_choice("between_hosts", self.between_hosts, BETWEEN_HOSTS)
        if self.between_hosts != "auto" and not self.is_hierarchical:
            raise ValueError(f'between_hosts is for exchange="hierarchical", got exchange={self.exchange!r}')
        check_bool("complete", self.complete)
        exchange = self.between_hosts if self.is_hierarchical else self.exchange
        if self.complete and exchange == "gather":
            raise ValueError(
                'complete=True needs exchange="reduce_scatter" or "auto", where owners keep a part of the selections; '
                f"got exchange={self.exchange!r}, between_hosts={self.between_hosts!r}"
            )

    def scatters(self, world_size: int, numels: Iterable[int]) -> bool:
        """Return whether the exchange is a reduce-scatter at this world size; otherwise it is a gather.

        numels: the number of elements of each tensor; those below min_numel do not count. Leave out those in `dense`.
        """
        if self.exchange != "auto":
            return self.exchange == "reduce_scatter" and world_size > 1
        large = [n for n in numels if n >= max(1, self.min_numel)]
        selections = (sum(large),) if self.selection == "model" and large else tuple(large)
        form = (self.coding, self.values, self.complete)
        return favours_scattered(selections, self.schedule.planned, world_size, *form)

    @property
    def selection(self) -> str:
        """The scope."""
        return self.scope


@dataclass(frozen=True, kw_only=True)
class GradientDropping(Scoped):
    """The settings of `Compression.gradient_dropping`."""

    name: ClassVar[str] = "gradient_dropping"


@dataclass(frozen=True, kw_only=True)
class TopK(Scoped):
    """The settings of `Compression.topk`."""

    name: ClassVar[str] = "topk"


@dataclass(frozen=True, kw_only=True)
class LocalMomentum(Scoped):
    """The settings of the methods in which each rank applies momentum before the selection."""

    momentum: float
    weight_decay: WeightDecay
    clip_norm: float | None
    clip_scope: Scope

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
    def clips(self) -> str | None:
        """The scope of the clipping, if there is a bound."""
        return None if self.clip_norm is None else self.clip_scope

    @property
    def local_momentum(self) -> float:
        """The momentum."""
        return self.momentum

    @property
    def depends_on_reduction(self) -> bool:
        """Return whether a clip_norm or a weight_decay is set."""
        return self.clip_norm is not None or self.weight_decay != 0.0

    def _described(self) -> dict[str, str]:
        """Return the text of each setting, but of no weight_decay that is a function: it differs between ranks."""
        texts = super()._described()
        if not isinstance(self.weight_decay, numbers.Real):
            del texts["weight_decay"]
        return texts

    def weight_decays(self, parameters: Iterable[tuple[str, object]]) -> dict[str, float]:
        """Return {name: weight decay} of (name, parameter) pairs; TypeError or ValueError for wrong decays."""
        return weight_decays(self.weight_decay, parameters)


@dataclass(frozen=True, kw_only=True)
class DeepGradientCompression(LocalMomentum):
    """The settings of `Compression.dgc`."""

    nesterov: bool
    factor_masking: bool

    name: ClassVar[str] = "dgc"

    def __post_init__(self):
        super().__post_init__()
        check_bool("nesterov", self.nesterov)
        check_bool("factor_masking", self.factor_masking)
        if self.nesterov and self.momentum == 0.0:
            raise ValueError("nesterov=True needs a momentum above 0, got momentum=0.0")


@dataclass(frozen=True, kw_only=True)
class SparsificationAwareMomentum(LocalMomentum):
    """The settings of `Compression.samomentum`."""

    name: ClassVar[str] = "samomentum"
