"""The units of gradients: this module alone turns the loss scale and the reduction `op` into factors.

A rank passes S * g_k, the gradient of its scaled loss; the optimizer receives S * result, where result = s * sum of
g_k over N ranks (s is 1 / N for op=Average, 1 for op=Sum). The settings `clip_norm`, `weight_decay` and a constant
threshold are in units of result and g_k, so they hold for every op and every loss scale.

All state that persists across steps (residuals, velocities, thresholds and their hints) is in units of g_k. A gradient
is divided by S before it is accumulated, and a sum is multiplied by S afterwards, so a change of S leaves the state
valid.
"""

from dataclasses import dataclass
from typing import Any

from hvd_sparse.checks import check_number

REDUCTIONS = "op must be hvd.Average or hvd.Sum"
REDUCTION_UNKNOWN = (
    "hvd_sparse: clip_norm and weight_decay depend on op, but no Horovod optimizer called this compressor: pass "
    "compression= to hvd.DistributedOptimizer"
)


@dataclass(frozen=True)
class Units:
    """The units of one step.

    world_size: N. reduction: s, the factor of sums over ranks; None if it is unknown and nothing depends on it.
    loss_scale: S, a number, or in a graph a float64 scalar tensor; the methods return the same type.
    """

    world_size: int
    reduction: float | None = 1.0
    loss_scale: Any = 1.0

    @property
    def averages(self) -> bool:
        """Whether s is known and at most 1 / N: a result then exceeds no rank's gradient."""
        return self.reduction is not None and self.reduction * self.world_size <= 1.0

    @property
    def incoming(self):
        """The factor of a gradient when it is accumulated."""
        return 1.0 / self.loss_scale

    def outgoing(self, reduction: float | None = None):
        """Return the factor of a sum over ranks, in units of g_k: s, or `reduction`, times S."""
        return (self.reduction if reduction is None else reduction) * self.loss_scale

    def clip_bound(self, clip_norm: float):
        """Return the bound on the L2 norm of a rank's gradient as Horovod passes it, S * g_k.

        N independent gradients of norm clip_norm / (s * sqrt(N)) sum up to a result of norm clip_norm (Deep Gradient
        Compression, section 3.2; Appendix C divides g_k by N beforehand, which leaves the factor N^(-1/2)).
        """
        return clip_norm / (self.reduction * self.world_size**0.5) * self.loss_scale

    def decay(self, weight_decay: float) -> float:
        """Return each rank's factor of the parameter, in units of g_k, so that the decay counts once in result."""
        return weight_decay / (self.reduction * self.world_size) if weight_decay else 0.0


def checked_loss_scale(value) -> float:
    """Return a loss scale as a float; TypeError or ValueError unless it is a finite number above 0."""
    check_number("loss_scale", value, "above 0 (docs/mixed-precision.md)", lambda number: number > 0.0)
    return float(value)


def loss_scales_differ(own: float, mean: float) -> str:
    """Return the error message for ranks whose loss scales differ."""
    return (
        f"hvd_sparse: loss_scale is {own:g} on this rank, the mean over the ranks is {mean:g}. Set "
        "compression.loss_scale to the same number on every rank"
    )


def reduction_differs(found: float, own: float) -> str:
    """Return the error message for a reduction that differs from the optimizer's op."""
    return (
        f"hvd_sparse: Horovod multiplied the sum over ranks with {found:g}, where the optimizer's op says {own:g}: "
        "reduce gradients through the optimizer alone, without factors of your own"
    )
