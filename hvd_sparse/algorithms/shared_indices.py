"""Methods in which all ranks send the same elements of the whole model, so that there is no gradient build-up.

An all-reduce sums float32 values. Quantized values are gathered and summed in rank order: an all-reduce would round
partial sums, and no residual would contain the error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from hvd_sparse.algorithms.base import (
    Coding,
    Compressor,
    Exchanged,
    Fallback,
    Granularity,
    Level,
    Methods,
    Parameters,
    WireValues,
    documented,
)
from hvd_sparse.checks import check_choice
from hvd_sparse.dense_parameters import DenseParameters
from hvd_sparse.schedule import Schedule
from hvd_sparse.wire import payload_size

Controller = Literal["histogram", "scaling"]
SharedExchange = Literal["gather", "hierarchical"]  # indices are shared: a reduce-scatter would save nothing
CONTROLLERS, SHARED_EXCHANGES = map(get_args, (Controller, SharedExchange))


class SharedIndicesMethods(Methods[Parameters, Compressor]):
    """The methods of this module."""

    @classmethod
    @documented
    def micro(
        cls,
        parameters: Parameters,
        density: float | Schedule = 0.01,
        *,
        controller: Controller = "histogram",
        warmup: int | Schedule | None = None,
        dense: DenseParameters = (),
        min_numel: int = 1024,
        coding: Coding = "run_length",
        values: WireValues = "float32",
        level: Level = "mean",
        granularity: Granularity = "tensor",
        bucket_bytes: int = 1 << 17,
        exchange: SharedExchange = "gather",
        ranks_per_host: int | Sequence[int] | None = None,
        dense_fallback: Fallback | None = "bytes",
        seed: int = 0,
        process_set: Any = None,
    ) -> Compressor:
        """MiCRO: each rank selects in its own partition of the model. Keep the momentum in the optimizer.

        In each step, rank i selects the elements above the threshold in partition (step + i) % world_size; all ranks
        send their values at all selected elements, and clear these residuals. The number of elements is within a few
        per cent of k, not exactly k. Source: Yoon and Oh (2023), Algorithm 1.

        Args:
            PARAMETERS
            DENSITY
            controller: Rule for the threshold. "histogram": from histograms of magnitudes that ranks sent with
                the previous step's values (260 bytes each). A rank that finds far fewer or more elements than expected
                in its partition selects the expected number of largest ones: the density is right from the first step,
                and when gradients jump. "scaling": the authors' rule, for comparison. It starts at 1 / (2 sqrt(k)),
                scales the threshold after each step by the number of elements sent (section IV-C; factors from their
                published code), takes hundreds of steps to settle, and lags behind a growing residual.
            HOSTS
            SHARED
        """
        return cls._from(MiCRO, locals())

    @classmethod
    @documented
    def cltk(
        cls,
        parameters: Parameters,
        density: float | Schedule = 0.01,
        *,
        warmup: int | Schedule | None = None,
        dense: DenseParameters = (),
        min_numel: int = 1024,
        coding: Coding = "run_length",
        values: WireValues = "float32",
        level: Level = "mean",
        granularity: Granularity = "tensor",
        bucket_bytes: int = 1 << 17,
        exchange: SharedExchange = "gather",
        ranks_per_host: int | Sequence[int] | None = None,
        dense_fallback: Fallback | None = "bytes",
        seed: int = 0,
        process_set: Any = None,
    ) -> Compressor:
        """CLT-k, the cyclic local top-k of ScaleCom, a baseline of MiCRO. Keep the momentum in the optimizer.

        Rank step % world_size selects the k largest elements of its residual; all ranks send values at these elements.
        Source: Chen et al. (2020), without their low-pass filter of the residual (beta = 1).

        Args:
            PARAMETERS
            DENSITY
            HOSTS
            SHARED
        """
        return cls._from(CyclicLocalTopK, locals())

    @classmethod
    @documented
    def random_k(
        cls,
        parameters: Parameters,
        density: float | Schedule = 0.01,
        *,
        warmup: int | Schedule | None = None,
        dense: DenseParameters = (),
        min_numel: int = 1024,
        coding: Coding = "run_length",
        values: WireValues = "float32",
        level: Level = "mean",
        granularity: Granularity = "tensor",
        bucket_bytes: int = 1 << 17,
        exchange: SharedExchange = "gather",
        ranks_per_host: int | Sequence[int] | None = None,
        dense_fallback: Fallback | None = "bytes",
        seed: int = 0,
        process_set: Any = None,
    ) -> Compressor:
        """Random-k with error feedback, a baseline: no indices are sent. Keep the momentum in the optimizer.

        All ranks draw the same k elements from the seed. Difference from the paper: one element from each of k equal
        parts of the model, so that no element waits long. Source: Stich et al. (2018), definition 2.2.

        Args:
            PARAMETERS
            DENSITY
            HOSTS
            SHARED
        """
        return cls._from(RandomK, locals())


@dataclass(frozen=True, kw_only=True)
class SharedIndices(Exchanged):
    """The settings of methods in which all ranks send the same elements."""

    CHOICES: ClassVar[tuple[str, ...]] = SHARED_EXCHANGES


@dataclass(frozen=True, kw_only=True)
class CyclicLocalTopK(SharedIndices):
    """The settings of `Compression.cltk`."""

    name: ClassVar[str] = "cltk"
    selection = "leader"

    def index_bytes(self, n: int, k: int, world_size: int) -> int:
        """Return the bytes of the leader's indices, and of the others' empty messages."""
        leader, other = (payload_size(n, count, self.coding, "none") for count in (k, 1))
        return leader + (world_size - 1) * other


@dataclass(frozen=True, kw_only=True)
class MiCRO(SharedIndices):
    """The settings of `Compression.micro`."""

    controller: Controller

    name: ClassVar[str] = "micro"
    selection = "partition"

    def __post_init__(self):
        super().__post_init__()
        check_choice("controller", self.controller, CONTROLLERS)

    def index_bytes(self, n: int, k: int, world_size: int) -> int:
        """Return the bytes of the indices: each rank sends those in its partition."""
        return world_size * payload_size(n, max(1, k // world_size), self.coding, "none")


@dataclass(frozen=True, kw_only=True)
class RandomK(SharedIndices):
    """The settings of `Compression.random_k`."""

    name: ClassVar[str] = "random_k"
    selection = "random"
