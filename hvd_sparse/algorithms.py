"""Every method as one frozen dataclass: its memory, its defaults and the section of the paper that it follows.

The arguments that all methods share are those of `Algorithm`; both frontends build their compressors from these.
"""

import math
import numbers
from dataclasses import dataclass, fields
from typing import ClassVar

from hvd_sparse.schedule import Schedule, make_schedule
from hvd_sparse.wire import CODINGS, VALUE_DTYPES, checked_integer

SCOPES = ("tensor", "model")
WIRE_VALUES = tuple(dtype for dtype in VALUE_DTYPES if dtype != "float64")  # residuals are float32


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """The arguments that every method shares.

    density: part of the elements to send, in (0, 1]. warmup: None, a number of optimizer steps, or a `Schedule`.
    scope: "tensor" selects in each tensor, "model" in all of them together. min_numel: smaller tensors travel dense.
    coding, values: of the payload, see `hvd_sparse.wire`. bucket_bytes: payload bytes that one allgather aims at
    (scope "tensor"). seed: of the sampled thresholds and the breaking of ties.
    Raises ValueError or TypeError that names the argument, what was received and what is expected.
    """

    density: float | Schedule
    warmup: int | Schedule | None = None
    scope: str = "tensor"
    min_numel: int = 1024
    coding: str = "run_length"
    values: str = "float32"
    bucket_bytes: int = 1 << 17
    seed: int = 0

    name: ClassVar[str]
    momentum: ClassVar[float] = 0.0

    def __post_init__(self):
        object.__setattr__(self, "warmup", make_schedule(self.density, self.warmup))
        check_choice("scope", self.scope, SCOPES)
        check_choice("coding", self.coding, tuple(CODINGS))
        check_choice("values", self.values, WIRE_VALUES)
        checked_integer("min_numel", self.min_numel, 0)
        checked_integer("bucket_bytes", self.bucket_bytes, 1)
        checked_integer("seed", self.seed, 0)

    def density_at(self, step: int) -> float:
        """Return the density of an optimizer step, counted from 0."""
        return self.warmup.density(step)

    def describe(self) -> list[str]:
        """Return one line a setting, for the comparison between ranks."""
        settings = [field.name for field in fields(self) if field.name not in ("density", "warmup")]
        lines = [f"method = {self.name}", f"density = {self.warmup.describe()}"]
        return lines + [f"{name} = {getattr(self, name)!r}" for name in settings]


@dataclass(frozen=True, kw_only=True)
class GradientDropping(Algorithm):
    """Gradient Dropping (Aji and Heafield, 2017, sections 3 and 4): a residual, and the largest of it are sent.

    scope "tensor" is the paper's local threshold, "model" its global one. Differences from the paper: exactly
    k = round(density * n) entries are sent, not whatever exceeds a sampled threshold; synchronous.
    """

    density: float | Schedule = 0.01

    name: ClassVar[str] = "gradient_dropping"


@dataclass(frozen=True, kw_only=True)
class DeepGradientCompression(Algorithm):
    """Deep Gradient Compression (Lin et al., 2018): Algorithm 3, and Algorithm 4 with nesterov.

    momentum: of the local velocity (momentum correction, section 3.2). nesterov: Appendix B. weight_decay: added to
    the gradient before the accumulation. clip_norm: the L2 threshold of the aggregated gradient; each of N ranks clips
    its own at clip_norm / sqrt(N) before the accumulation (section 3.2, Appendix C). clip_scope: "tensor" clips each
    tensor by its own norm, "model" all by the norm of the whole local gradient, which only scope="model" knows.
    factor_masking: clear the velocity of what was sent (section 3.3).
    Differences from the paper: the threshold is exact (exactly k entries); run lengths are per block of 65,536.
    """

    density: float | Schedule = 0.001
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    clip_norm: float | None = None
    clip_scope: str = "tensor"
    factor_masking: bool = True

    name: ClassVar[str] = "dgc"

    def __post_init__(self):
        super().__post_init__()
        check_number("momentum", self.momentum, "in [0, 1)", lambda value: 0.0 <= value < 1.0)
        check_number("weight_decay", self.weight_decay, "at least 0", lambda value: value >= 0.0)
        if self.clip_norm is not None:
            check_number("clip_norm", self.clip_norm, "above 0, or None for no clipping", lambda value: value > 0.0)
        check_choice("clip_scope", self.clip_scope, SCOPES)
        for name in ("nesterov", "factor_masking"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.nesterov and self.momentum == 0.0:
            raise ValueError("nesterov=True needs a momentum above 0, got momentum=0.0")
        if self.clip_scope == "model" and self.scope != "model":
            raise ValueError(
                'clip_scope="model" needs scope="model", got scope="tensor": the norm of the whole gradient is not '
                "known while single tensors are sent"
            )


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")


def check_number(name: str, value: float, expected: str, holds) -> None:
    """Raise TypeError unless value is a number, ValueError unless it is finite and `holds`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number {expected}, got {value!r} of type {type(value).__name__}")
    if not math.isfinite(value) or not holds(value):
        raise ValueError(f"{name} must be {expected}, got {value!r}")
