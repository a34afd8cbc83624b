"""The error feedback of one tensor: residual and velocity, when they change, and by which rule.

All buffers are flat float32, whatever the gradient's type, and made when first needed; they are in units of a rank's
gradient without its loss scale (`hvd_sparse.units`). Names follow Deep Gradient Compression: the velocity is its u, the
residual its v.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from hvd_sparse.algorithms import Algorithm, DeepGradientCompression, LocalMomentum, SparsificationAwareMomentum
from hvd_sparse.schedule import is_always_dense
from hvd_sparse.torch import ops
from hvd_sparse.units import Units

UNREAD = torch.empty(0)  # in place of a parameter that does not decay


class Dense(NamedTuple):
    """What a tensor sends that is sent dense. A step that is skipped is as if it had not been."""

    sent: torch.Tensor  # [n], in `dense_dtype` and the gradient's units, contiguous; it may be the gradient itself
    finite: torch.Tensor  # bool: were the gradient, and what is sent, finite everywhere?
    commit: Callable[[], None]  # changes the buffers


class Kept(NamedTuple):
    """What a rank keeps of a parameter, as a state sees it."""

    feedback: "ErrorFeedback | None"  # None where other ranks keep it
    buffers: tuple[str, ...]  # their names
    n: int  # elements of a buffer in the state
    begin: int  # where this rank's part of them begins
    place: int  # of this rank, among those that share a sum
    count: int  # of them


class ErrorFeedback:
    """Gradient Dropping's: r <- r + g; what is sent is subtracted (section 3)."""

    BUFFERS = ("residual",)
    retained = 0.0  # what part of a value stays in the residual when it is sent

    def __init__(self, algorithm: Algorithm, parameter: torch.Tensor, device: torch.device, weight_decay: float):
        self.algorithm = algorithm
        self.parameter = parameter
        self.weight_decay = weight_decay
        self.device = device  # where the buffers lie, and gradients are brought in
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

    def weights(self) -> torch.Tensor | None:
        """Return the parameter, if it decays: float32[n], contiguous, where the buffers lie."""
        if not self.weight_decay:
            return None
        return self.parameter.detach().reshape(-1).to(self.device, torch.float32).contiguous()

    def adopt(self, name: str, storage: torch.Tensor) -> None:
        """Move a buffer into `storage`, float32[n], such as a slice of a whole model's."""
        storage.copy_(self.buffer(name))
        self.buffers[name] = storage

    def factor(self, gradient: torch.Tensor, units: Units) -> float:
        """Return what this tensor's gradient is scaled with: to units of the residual, clipped."""
        algorithm = self.algorithm
        if not isinstance(algorithm, LocalMomentum) or algorithm.clip_norm is None or algorithm.clip_scope != "tensor":
            return units.incoming
        return clip_factor(algorithm.clip_norm, units, _norm(gradient))

    def accumulate(self, gradient: torch.Tensor, factor: float, units: Units) -> torch.Tensor:
        """Accumulate a gradient, scaled by `factor`; return, as bool, whether it was finite everywhere.

        What is not finite counts as zero.
        """
        decay = units.decay(self.weight_decay)
        return ops.accumulate(gradient, *self.destination(), factor=factor, weight_decay=decay, **self.rule())

    def destination(self) -> tuple[torch.Tensor | None, ...]:
        """Return residual, velocity, and the parameter that decays, as `ops.accumulate` takes them."""
        return self.residual, None, None

    def rule(self) -> dict:
        """Return how to accumulate, but for the weight decay, as `ops.accumulate` takes it."""
        return {}

    def keep_excess(self, total: torch.Tensor, dtype: torch.dtype, part: float) -> torch.Tensor:
        """Return what 16 bits hold of a sum, float32[n]; add the rest, times `part`, to the residual."""
        most = torch.finfo(dtype).max
        total = total.view(-1)
        held = total.clamp(-most, most).to(dtype)
        self.residual.add_((total - held).mul_(part))
        return held

    def dense_dtype(self, gradient: torch.Tensor) -> torch.dtype:
        """Return the type that a dense tensor is sent in: its own, but Horovod reduces no bfloat16.

        A float16 one that has a residual in other steps is sent as float32: float16 may not hold that.
        """
        may_wait = self.parameter.numel() >= self.algorithm.min_numel and not is_always_dense(self.algorithm.schedule)
        if gradient.dtype == torch.bfloat16 or (gradient.dtype == torch.float16 and may_wait):
            return torch.float32
        return gradient.dtype

    def take_all(self, gradient: torch.Tensor, factor: float, units: Units, most: float = math.inf) -> "Dense":
        """Return what a tensor that is sent dense sends: the gradient itself, and any residual it still had.

        What is larger than `most`, or than the type that it is sent in holds, is cut there; the rest waits.
        """
        if "residual" not in self.buffers:
            sent = gradient.to(self.dense_dtype(gradient)).contiguous().view(-1)
            return Dense(sent, ops.all_finite(gradient), self._clear_residual)
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).reshape(-1)
        whole = wide + self.residual * units.loss_scale
        finite = ops.all_finite(whole)
        if gradient.dtype != torch.float16:
            return Dense(whole, finite, self._clear_residual)
        sent = whole.clamp(-most, most).to(self.dense_dtype(gradient))
        left = (whole - sent).mul_(units.incoming)
        return Dense(sent, finite, lambda: self.residual.copy_(left))

    def _cut(self, sent: torch.Tensor, most: float) -> torch.Tensor | None:
        """Cut what is larger than `most`, in place; return what is left of it, None where nothing can be."""
        if most == math.inf:
            return None
        whole = sent.clone()
        return whole.sub_(sent.clamp_(-most, most))

    def _clear_residual(self) -> None:
        if "residual" in self.buffers:
            self.residual.zero_()

    def cleared(self) -> tuple[torch.Tensor, ...]:
        """Return the buffers that what was sent leaves: the residual first."""
        return (self.residual,)

    def clear(self, indices: torch.Tensor, left: torch.Tensor | None) -> None:
        """Take out what was sent; `left` is what rounding on the wire kept back, None for nothing."""
        if left is None:
            self.residual.index_fill_(0, indices, 0.0)
        else:
            self.residual.index_copy_(0, indices, left)


class MomentumCorrection(ErrorFeedback):
    """Deep Gradient Compression's: momentum correction and momentum factor masking (Algorithms 3 and 4).

    momentum SGD:  u <- m*u + g      v <- v + u
    Nesterov:      u <- m*(u + g)    v <- v + u + g
    where g is clipped, then has the weight decay's part of the parameter added. Both are cleared where they were sent.
    """

    BUFFERS = ("residual", "velocity")
    algorithm: DeepGradientCompression

    @property
    def velocity(self) -> torch.Tensor:
        """The local momentum, float32[n]."""
        return self.buffer("velocity")

    def destination(self) -> tuple[torch.Tensor | None, ...]:
        """Return residual, velocity, and the parameter that decays."""
        return self.buffer("residual"), self.buffer("velocity"), self.weights()

    def rule(self) -> dict:
        """Return momentum and nesterov."""
        return {"momentum": self.algorithm.momentum, "nesterov": self.algorithm.nesterov}

    def dense_dtype(self, gradient: torch.Tensor) -> torch.dtype:
        """Return the type that a dense tensor is sent in: that of the velocity."""
        return torch.float32

    def take_all(self, gradient: torch.Tensor, factor: float, units: Units, most: float = math.inf) -> "Dense":
        """Return what a tensor that is sent dense sends: its velocity, so that the momentum is that of dense training.

        Momentum is linear: the average of local velocities is the velocity of the average. Nothing is masked, as
        nothing is delayed.
        """
        sent, velocity = torch.zeros_like(self.velocity), self.velocity.clone()
        rule = {"factor": factor, "weight_decay": units.decay(self.weight_decay), **self.rule()}
        finite = ops.accumulate(gradient, sent, velocity, self.weights(), **rule)
        if "residual" in self.buffers:
            finite = finite & ops.all_finite(sent.add_(self.residual))
        left = self._cut(sent, most * units.incoming)
        finite = finite & _enlarge(sent, units)

        def commit() -> None:
            """Make the change, as the step counts."""
            self.velocity.copy_(velocity)
            self._clear_residual() if left is None else self.residual.copy_(left)

        return Dense(sent, finite, commit)

    def cleared(self) -> tuple[torch.Tensor, ...]:
        """Return residual, and the velocity if it is masked."""
        return (self.residual, self.velocity) if self.algorithm.factor_masking else (self.residual,)

    def clear(self, indices: torch.Tensor, left: torch.Tensor | None) -> None:
        """Take out what was sent, and its momentum with it (momentum factor masking, section 3.3)."""
        super().clear(indices, left)
        if self.algorithm.factor_masking:
            self.velocity.index_fill_(0, indices, 0.0)


class SparsificationAware(ErrorFeedback):
    """SAMomentum's: m * u of DGS, Algorithm 3, to which the next gradient is added.

    What is sent decays by m, the residual is not magnified: see `SparsificationAwareMomentum`.
    """

    algorithm: SparsificationAwareMomentum

    @property
    def retained(self) -> float:
        """The momentum."""
        return self.algorithm.momentum

    def destination(self) -> tuple[torch.Tensor | None, ...]:
        """Return the residual, no velocity, and the parameter that decays."""
        return self.residual, None, self.weights()

    def dense_dtype(self, gradient: torch.Tensor) -> torch.dtype:
        """Return the type that a dense tensor is sent in: that of the residual."""
        return torch.float32

    def take_all(self, gradient: torch.Tensor, factor: float, units: Units, most: float = math.inf) -> "Dense":
        """Return what a tensor that is sent dense sends: all of the residual, which is momentum SGD."""
        sent = self.residual.clone()
        rule = {"factor": factor, "weight_decay": units.decay(self.weight_decay)}
        finite = ops.accumulate(gradient, sent, None, self.weights(), **rule)
        left = self._cut(sent, most * units.incoming)
        decayed = sent * self.retained
        if left is not None:
            decayed.add_(left)
        finite = finite & _enlarge(sent, units)

        def commit() -> None:
            """Make the change, as the step counts; what is sent may have been reduced in place."""
            self.residual.copy_(decayed)

        return Dense(sent, finite, commit)


KINDS = {DeepGradientCompression: MomentumCorrection, SparsificationAwareMomentum: SparsificationAware}


def make_error_feedback(
    algorithm: Algorithm, parameter: torch.Tensor, device: torch.device, weight_decay: float = 0.0
) -> ErrorFeedback:
    """Return the error feedback of a tensor by a method, on a device."""
    return KINDS.get(type(algorithm), ErrorFeedback)(algorithm, parameter, device, weight_decay)


def destinations(feedback: Iterable[ErrorFeedback]) -> list[list[torch.Tensor]]:
    """Return residuals, velocities and parameters, as `ops.accumulate_bucket` takes them: one a tensor, or none."""
    columns = zip(*(one.destination() for one in feedback), strict=True)
    lists = [[UNREAD if one is None else one for one in column] for column in columns] or [[], [], []]
    return [[] if all(one is UNREAD for one in column) else column for column in lists]


def decays(feedback: Iterable[ErrorFeedback], units: Units) -> list[float]:
    """Return the weight decays, as `ops.accumulate_bucket` takes them."""
    return [units.decay(one.weight_decay) for one in feedback]


def whole_clip_factor(algorithm: Algorithm, units: Units, gradients: Iterable[torch.Tensor]) -> float:
    """Return the factor that clips by the L2 norm of all the gradients of this rank together."""
    squares = (_norm(gradient) ** 2 for gradient in gradients)
    return clip_factor(algorithm.clip_norm, units, sum(squares) ** 0.5)


def clip_factor(clip_norm: float, units: Units, norm: float) -> float:
    """Return what brings a gradient of this L2 norm to units of the residual, and down to the bound."""
    bound = units.clip_bound(clip_norm)
    return (bound / norm if norm > bound else 1.0) * units.incoming


def _enlarge(sent: torch.Tensor, units: Units) -> torch.Tensor | bool:
    """Bring what is sent to units of the gradient, in place; return whether it is finite there."""
    return True if units.loss_scale == 1.0 else ops.all_finite(sent.mul_(units.loss_scale))


def _norm(tensor: torch.Tensor) -> float:
    """Return the L2 norm; what is not finite counts as zero."""
    flat = _flat(tensor)
    norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64))  # squares may leave float32
    if math.isfinite(norm):
        return norm
    return float(torch.linalg.vector_norm(flat.nan_to_num(0.0, 0.0, 0.0), dtype=torch.float64))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).to(torch.float32)
