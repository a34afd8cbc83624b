"""The error feedback of one tensor: residual and velocity, and their update rules.

All buffers are flat float32, whatever the gradient's type, and are allocated when first needed. Their values are in
units of a rank's gradient without its loss scale (`hvd_sparse.units`). The names follow Deep Gradient Compression: the
velocity is u in the paper, and the residual is v.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from hvd_sparse.algorithms import Algorithm, DeepGradientCompression, SparsificationAwareMomentum
from hvd_sparse.half import rest_of
from hvd_sparse.schedule import is_always_dense
from hvd_sparse.torch import ops
from hvd_sparse.torch.norm import sum_of_squares
from hvd_sparse.units import Units

HALF = (torch.float16, torch.bfloat16)
UNREAD = torch.empty(0, dtype=torch.float32, device="cpu")  # in place of a parameter without weight decay
SMALLEST_NORMAL = 2.0**-126  # of float32


class Dense(NamedTuple):
    """The dense tensor to send, and the update of the error feedback, which a skipped step does not commit."""

    sent: torch.Tensor  # [n], in `dense_dtype` and the gradient's units, contiguous; may be the gradient itself
    finite: torch.Tensor  # bool: are the gradient and `sent` finite everywhere?
    commit: Callable[[], None]  # updates the buffers


class StatePart(NamedTuple):
    """This rank's part of a parameter's error feedback, for a checkpoint."""

    feedback: "ErrorFeedback | None"  # None where only other ranks have it
    buffers: tuple[str, ...]  # their names
    n: int  # elements of a buffer in the checkpoint
    begin: int  # start of this rank's part in these elements
    place: int  # this rank's position among the ranks that divide a summed state
    count: int  # the number of these ranks


class ErrorFeedback:
    """The error feedback of Gradient Dropping: r <- r + g; sent values are subtracted (section 4)."""

    BUFFERS = ("residual",)
    retained = 0.0  # fraction of a sent value that stays in the residual

    def __init__(self, algorithm: Algorithm, parameter: torch.Tensor, device: torch.device, weight_decay: float):
        self.algorithm = algorithm
        self.parameter = parameter
        self.weight_decay = weight_decay
        self.device = device  # of the buffers and the accumulation
        self.buffers: dict[str, torch.Tensor] = {}

    @property
    def residual(self) -> torch.Tensor:
        """The accumulated, unsent gradient, float32[n]."""
        return self.buffer("residual")

    def buffer(self, name: str) -> torch.Tensor:
        """Return a buffer, float32[n], zero at first."""
        found = self.buffers.get(name)
        if found is None:
            found = torch.zeros(self.parameter.numel(), dtype=torch.float32, device=self.device)
            self.buffers[name] = found
        return found

    def decayed_parameter(self) -> torch.Tensor | None:
        """Return the parameter as contiguous float32[n] on the buffers' device; None without weight decay."""
        if not self.weight_decay:
            return None
        return self.parameter.detach().reshape(-1).to(self.device, torch.float32).contiguous()

    def adopt(self, name: str, storage: torch.Tensor) -> None:
        """Move a buffer into `storage`, float32[n], such as a slice of the whole model's buffer."""
        storage.copy_(self.buffer(name))
        self.buffers[name] = storage

    def factor(self, gradient: torch.Tensor, units: Units) -> float:
        """Return the factor from this gradient to units of the residual, including clipping."""
        ratio = clip_ratio(self.algorithm, units, [gradient]) if self.algorithm.clips == "tensor" else 1.0
        return ratio * units.incoming

    def accumulate(self, gradient: torch.Tensor, factor: float, units: Units) -> torch.Tensor:
        """Accumulate a gradient, scaled by `factor`; return, as bool, whether it was finite everywhere.

        Elements that are not finite count as zero.
        """
        decay = units.decay(self.weight_decay)
        return ops.accumulate(gradient, *self.destination(), factor=factor, weight_decay=decay, **self.rule())

    def destination(self) -> tuple[torch.Tensor | None, ...]:
        """Return residual, velocity and, with weight decay, the parameter: arguments of `ops.accumulate`."""
        return self.residual, None, None

    def rule(self) -> dict:
        """Return the keyword arguments of `ops.accumulate` other than factor and weight decay."""
        return {}

    def keep_excess(
        self, total: torch.Tensor, dtype: torch.dtype, rank: int, units: Units, reduction: float
    ) -> torch.Tensor:
        """Clamp and round a sum, float32[n], to a 16-bit type, and add this rank's part of the rest to the residual.

        Other types are returned as they are. rank, units: of the ranks that share the rest; reduction: of the sum. Of
        the rest, residuals have kept `retained` times already.
        """
        if dtype not in HALF:
            return total
        most = torch.finfo(dtype).max
        part = (1.0 - self.retained) * rest_of(rank, units.world_size) / units.outgoing(reduction)
        total = total.view(-1)
        rounded = total.clamp(-most, most).to(dtype)
        excess = (total - rounded).mul_(part)
        self.residual.add_(excess.nan_to_num_(0.0, 0.0, 0.0))  # an infinite sum; on CUDA a damaged payload's is NaN
        return rounded

    def dense_dtype(self, gradient: torch.Tensor) -> torch.dtype:
        """Return the dtype in which a dense tensor is sent: the gradient's own or float32.

        Horovod cannot reduce bfloat16. A residual, or the sum of which a mean is taken, may exceed the range of
        float16. If all steps are dense, float16 is sent as in dense training.
        """
        dtype, always = gradient.dtype, is_always_dense(self.algorithm.schedule)
        return torch.float32 if dtype == torch.bfloat16 or (dtype == torch.float16 and not always) else dtype

    def take_all(self, gradient: torch.Tensor, factor: float, units: Units, most: float = math.inf) -> "Dense":
        """Return the dense tensor to send: the gradient plus the residual, if there is one.

        With a residual, the sum for a float16 gradient is clamped to `most`, and the excess stays in the residual.
        """
        if "residual" not in self.buffers:
            sent = gradient.to(self.dense_dtype(gradient)).contiguous().view(-1)
            return Dense(sent, ops.all_finite(gradient), self._clear_residual)
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).reshape(-1)
        whole = wide + (self.residual if units.loss_scale == 1.0 else self.residual * units.loss_scale)
        finite = ops.all_finite(whole)
        if gradient.dtype != torch.float16:
            return Dense(whole, finite, self._clear_residual)
        sent = whole.clamp(-most, most).to(self.dense_dtype(gradient))
        left = (whole - sent).mul_(units.incoming)
        return Dense(sent, finite, lambda: self.residual.copy_(left))

    def _addition(self, gradient: torch.Tensor, factor: float, units: Units) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that adds the gradient, with weight decay, to float32[n], as `accumulate` does."""
        decay = units.decay(self.weight_decay)
        return lambda out: ops.accumulate(
            gradient, out, None, self.decayed_parameter(), factor=factor, weight_decay=decay
        )

    def _cut(self, sent: torch.Tensor, most: float) -> torch.Tensor | None:
        """Clamp to magnitude `most`, in place; return the excess, or None without a bound."""
        if most == math.inf:
            return None
        whole = sent.clone()
        return whole.sub_(sent.clamp_(-most, most))

    def _clear_residual(self) -> None:
        if "residual" in self.buffers:
            self.residual.zero_()

    def cleared(self) -> tuple[torch.Tensor, ...]:
        """Return the buffers in which sent entries are cleared: the residual first."""
        return (self.residual,)

    def clear(self, indices: torch.Tensor, left: torch.Tensor | None) -> None:
        """Clear the sent entries; `left` is their rounding error in the payload, None if there is none."""
        if left is None:
            self.residual.index_fill_(0, indices, 0.0)
        else:
            self.residual.index_copy_(0, indices, left)


class MomentumCorrection(ErrorFeedback):
    """The error feedback of Deep Gradient Compression: momentum correction and factor masking (Algorithms 3 and 4).

    momentum SGD:  u <- m*u + g      v <- v + u
    Nesterov:      u <- m*(u + g)    v <- v + u + g
    where g is the clipped gradient plus weight_decay * parameter. Both buffers are cleared at the sent entries.
    """

    BUFFERS = ("residual", "velocity")
    algorithm: DeepGradientCompression

    @property
    def velocity(self) -> torch.Tensor:
        """The local momentum, float32[n]."""
        return self.buffer("velocity")

    def destination(self) -> tuple[torch.Tensor | None, ...]:
        """Return residual, velocity and, with weight decay, the parameter."""
        return self.buffer("residual"), self.buffer("velocity"), self.decayed_parameter()

    def rule(self) -> dict:
        """Return momentum and nesterov."""
        return {"momentum": self.algorithm.momentum, "nesterov": self.algorithm.nesterov}

    def dense_dtype(self, gradient: torch.Tensor) -> torch.dtype:
        """Return the dtype in which a dense tensor is sent: that of the velocity."""
        return torch.float32

    def take_all(self, gradient: torch.Tensor, factor: float, units: Units, most: float = math.inf) -> "Dense":
        """Return the dense tensor to send: the velocity, so that the update equals that of dense momentum SGD.

        Momentum is linear: the average of local velocities is the velocity of the average gradient. No momentum is
        masked, as no element is delayed.
        """
        add = self._addition(gradient, factor, units)
        sent = torch.empty_like(self.velocity)
        finite = self._advance(sent, add)
        if self.algorithm.nesterov:
            add(sent)
        if "residual" in self.buffers:
            sent.add_(self.residual)
        finite = finite & ops.all_finite(sent)
        left = self._cut(sent, most * units.incoming)
        finite = finite & _enlarge(sent, units)

        def commit() -> None:
            """Update the buffers: the step is not skipped. A second addition takes less memory than a copy."""
            self._advance(self.velocity, add)
            _drop_denormals(self.velocity)
            self._clear_residual() if left is None else self.residual.copy_(left)

        return Dense(sent, finite, commit)

    def _advance(self, velocity: torch.Tensor, add: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Write the next velocity, with denormals, to `velocity`; return, as bool, whether the gradient was finite."""
        momentum = self.algorithm.momentum
        if self.algorithm.nesterov:
            finite = add(velocity.copy_(self.velocity))
            velocity.mul_(momentum)
            return finite
        return add(torch.mul(self.velocity, momentum, out=velocity))

    def cleared(self) -> tuple[torch.Tensor, ...]:
        """Return the residual, and with factor masking the velocity."""
        return (self.residual, self.velocity) if self.algorithm.factor_masking else (self.residual,)

    def clear(self, indices: torch.Tensor, left: torch.Tensor | None) -> None:
        """Clear the sent entries, and their velocity too (momentum factor masking, section 3.3)."""
        super().clear(indices, left)
        if self.algorithm.factor_masking:
            self.velocity.index_fill_(0, indices, 0.0)


class SparsificationAware(ErrorFeedback):
    """The error feedback of SAMomentum (DGS, Algorithm 3): it stores m * u, to which the next gradient is added.

    A sent entry decays to m times its value; an unsent one stays as it is: see `SparsificationAwareMomentum`.
    """

    algorithm: SparsificationAwareMomentum

    @property
    def retained(self) -> float:
        """The momentum."""
        return self.algorithm.momentum

    def destination(self) -> tuple[torch.Tensor | None, ...]:
        """Return the residual, no velocity and, with weight decay, the parameter."""
        return self.residual, None, self.decayed_parameter()

    def dense_dtype(self, gradient: torch.Tensor) -> torch.dtype:
        """Return the dtype in which a dense tensor is sent: that of the residual."""
        return torch.float32

    def take_all(self, gradient: torch.Tensor, factor: float, units: Units, most: float = math.inf) -> "Dense":
        """Return the dense tensor to send: the whole residual, which makes the update momentum SGD."""
        add, most = self._addition(gradient, factor, units), most * units.incoming
        sent = self.residual.clone()
        finite = add(sent)
        left = self._cut(sent, most)
        finite = finite & _enlarge(sent, units)

        def commit() -> None:
            """Update the residual: the step is not skipped. `sent` may have been reduced in place by now."""
            add(self.residual)
            if left is not None:
                self.residual.clamp_(-most, most)
            _drop_denormals(self.residual.mul_(self.retained))
            if left is not None:
                self.residual.add_(left)

        return Dense(sent, finite, commit)


KINDS = {DeepGradientCompression: MomentumCorrection, SparsificationAwareMomentum: SparsificationAware}


def make_error_feedback(
    algorithm: Algorithm, parameter: torch.Tensor, device: torch.device, weight_decay: float = 0.0
) -> ErrorFeedback:
    """Return the error feedback of a method for one tensor, with buffers on `device`."""
    return KINDS.get(type(algorithm), ErrorFeedback)(algorithm, parameter, device, weight_decay)


def destinations(feedback: Iterable[ErrorFeedback]) -> list[list[torch.Tensor]]:
    """Return lists of residuals, velocities and parameters for `bucket_ops.accumulate_bucket`; empty where unused."""
    columns = zip(*(one.destination() for one in feedback), strict=True)
    lists = [[UNREAD if one is None else one for one in column] for column in columns] or [[], [], []]
    return [[] if all(one is UNREAD for one in column) else column for column in lists]


def decays(feedback: Iterable[ErrorFeedback], units: Units) -> list[float]:
    """Return the weight decays in the form of `bucket_ops.accumulate_bucket`."""
    return [units.decay(one.weight_decay) for one in feedback]


def clip_ratio(algorithm: Algorithm, units: Units, gradients: Iterable[torch.Tensor]) -> float:
    """Return the factor that clips gradients of this rank by their joint L2 norm; 1.0 if this is within the bound."""
    norm, bound = sum(map(sum_of_squares, gradients)) ** 0.5, units.clip_bound(algorithm.clip_norm)
    return bound / norm if norm > bound else 1.0


def _drop_denormals(buffer: torch.Tensor) -> None:
    """Replace denormals by zero: they would never decay to it, and processors multiply them slowly."""
    torch.ops.aten.hardshrink.out(buffer, SMALLEST_NORMAL, out=buffer)


def _enlarge(sent: torch.Tensor, units: Units) -> torch.Tensor | bool:
    """Convert to units of the gradient, in place; return whether the result is finite."""
    return True if units.loss_scale == 1.0 else ops.all_finite(sent.mul_(units.loss_scale))
