"""What a worker remembers of a tensor: residual and momentum, accumulated here, in PyTorch.

All buffers are flat float32, whatever the gradient's type, and made when first needed. Names follow Deep Gradient
Compression: the velocity is its u, the residual its v.
"""

from collections.abc import Callable, Iterable

import torch

from hvd_sparse.algorithms import Algorithm, DeepGradientCompression

# What torch.optim.SGD(fused=True) calls; not a documented function, so there is a way without it.
FUSED_SGD = getattr(torch, "_fused_sgd_", None)
REGISTER = 16  # float32 in the longest vector register


class ResidualMemory:
    """Gradient Dropping's memory of one tensor: r <- r + g; what is sent leaves it (section 3)."""

    BUFFERS = ("residual",)

    def __init__(self, algorithm: Algorithm, parameter: torch.Tensor):
        self.algorithm = algorithm
        self.parameter = parameter
        self.buffers: dict[str, torch.Tensor] = {}

    @property
    def residual(self) -> torch.Tensor:
        """The accumulated, unsent gradient, float32[n]."""
        return self.buffer("residual")

    def buffer(self, name: str) -> torch.Tensor:
        """Return a buffer, float32[n], zero at first."""
        if name not in self.buffers:
            self.buffers[name] = torch.zeros(self.parameter.numel(), dtype=torch.float32)
        return self.buffers[name]

    def adopt(self, name: str, storage: torch.Tensor) -> None:
        """Move a buffer into `storage`, float32[n], such as a slice of a whole model's."""
        storage.copy_(self.buffer(name))
        self.buffers[name] = storage

    def clip_factor(self, gradient: torch.Tensor, ranks: int) -> float:
        """Return what to scale this tensor's gradient with before it is accumulated."""
        return 1.0

    def accumulate(self, gradient: torch.Tensor, factor: float = 1.0) -> None:
        """Add a finite gradient, scaled by `factor`, to the memory."""
        self.residual.add_(_flat(gradient), alpha=factor)

    def dense_dtype(self, gradient: torch.Tensor) -> torch.dtype:
        """Return the type that a dense tensor travels in: its own, but Horovod reduces no bfloat16."""
        return torch.float32 if gradient.dtype == torch.bfloat16 else gradient.dtype

    def take_all(self, gradient: torch.Tensor, factor: float = 1.0) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return what a tensor that travels dense sends: the gradient itself, and any residual it still had.

        Of the gradient's shape, contiguous, in `dense_dtype`; it may be the gradient itself. The memory changes only
        when the function returned with it is called: a step that does not count is then as if it had not been.
        """
        sent = gradient.to(self.dense_dtype(gradient)).contiguous()
        if "residual" in self.buffers:
            sent = sent + self.residual.view_as(sent).to(sent.dtype)
        return sent, self._clear_residual

    def _clear_residual(self) -> None:
        if "residual" in self.buffers:
            self.residual.zero_()

    def clear(self, indices: torch.Tensor, left: torch.Tensor | None) -> None:
        """Take out what was sent; `left` is what rounding on the wire kept back, None for nothing."""
        if left is None:
            self.residual.index_fill_(0, indices, 0.0)
        else:
            self.residual.index_copy_(0, indices, left)


class MomentumMemory(ResidualMemory):
    """Deep Gradient Compression's memory of one tensor (Algorithms 3 and 4).

    momentum SGD:  u <- m*u + g      v <- v + u
    Nesterov:      u <- m*(u + g)    v <- v + u + g
    where g is clipped, then has weight_decay * parameter added. Both are cleared where they were sent.
    """

    BUFFERS = ("residual", "velocity")
    algorithm: DeepGradientCompression

    @property
    def velocity(self) -> torch.Tensor:
        """The local momentum, float32[n]."""
        return self.buffer("velocity")

    def clip_factor(self, gradient: torch.Tensor, ranks: int) -> float:
        """Return clip_norm / sqrt(ranks) over the tensor's own L2 norm, at most 1 (section 3.2, Appendix C)."""
        if self.algorithm.clip_norm is None or self.algorithm.clip_scope != "tensor":
            return 1.0
        return clip_factor(self.algorithm.clip_norm, ranks, _norm(gradient))

    def accumulate(self, gradient: torch.Tensor, factor: float = 1.0) -> None:
        """Add a finite gradient, scaled by `factor`, to velocity and residual."""
        if FUSED_SGD is not None and self.algorithm.momentum > 0.0 and not self.algorithm.nesterov:
            self._momentum_in_one_pass(self._local(gradient, factor))
            return
        for term in self._advance(gradient, factor, self.velocity):
            self.residual.add_(term)

    def dense_dtype(self, gradient: torch.Tensor) -> torch.dtype:
        """Return the type that a dense tensor travels in: that of the velocity."""
        return torch.float32

    def take_all(self, gradient: torch.Tensor, factor: float = 1.0) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return what a tensor that travels dense sends: its velocity, so that the momentum is that of dense training.

        Momentum is linear: the average of local velocities is the velocity of the average. Nothing is masked, as
        nothing is delayed.
        """
        velocity = torch.empty_like(self.velocity)
        first, *rest = self._advance(gradient, factor, velocity)
        sent = first.clone()
        for term in rest:
            sent.add_(term)
        if "residual" in self.buffers:
            sent.add_(self.residual)

        def commit() -> None:
            """Make the change, as the step counts."""
            self.velocity.copy_(velocity)
            self._clear_residual()

        return sent.view(gradient.shape), commit

    def clear(self, indices: torch.Tensor, left: torch.Tensor | None) -> None:
        """Take out what was sent, and its momentum with it (momentum factor masking, section 3.3)."""
        super().clear(indices, left)
        if self.algorithm.factor_masking:
            self.velocity.index_fill_(0, indices, 0.0)

    def _local(self, gradient: torch.Tensor, factor: float) -> torch.Tensor:
        """Return the gradient, float32[n], clipped and with weight decay; it may be the gradient itself."""
        local = _flat(gradient)
        if factor != 1.0:
            local = local * factor
        if self.algorithm.weight_decay != 0.0:
            local = local + _flat(self.parameter) * self.algorithm.weight_decay
        return local

    def _momentum_in_one_pass(self, local: torch.Tensor) -> None:
        """Do u <- m*u + g; v <- v + u: what PyTorch's fused SGD does to a parameter, with a rate of -1.

        What does not fill a vector register it would round once where all else is rounded twice: not left to it.
        """
        whole = local.numel() - local.numel() % REGISTER
        (u, u_rest), (v, v_rest), (g, g_rest) = ((t[:whole], t[whole:]) for t in (self.velocity, self.residual, local))
        FUSED_SGD(
            [v],
            [g],
            [u],
            weight_decay=0.0,
            momentum=self.algorithm.momentum,
            lr=-1.0,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )
        v_rest.add_(u_rest.mul_(self.algorithm.momentum).add_(g_rest))

    def _advance(self, gradient: torch.Tensor, factor: float, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Write the next velocity to `out`, which may be the velocity; return the terms that the residual grows by."""
        local = self._local(gradient, factor)
        if self.algorithm.nesterov:
            torch.add(self.velocity, local, out=out).mul_(self.algorithm.momentum)
            return out, local
        torch.mul(self.velocity, self.algorithm.momentum, out=out).add_(local)  # two roundings, as everywhere else
        return (out,)


def make_memory(algorithm: Algorithm, parameter: torch.Tensor) -> ResidualMemory:
    """Return the memory that an algorithm keeps of a tensor."""
    kind = MomentumMemory if isinstance(algorithm, DeepGradientCompression) else ResidualMemory
    return kind(algorithm, parameter)


def whole_clip_factor(algorithm: Algorithm, ranks: int, gradients: Iterable[torch.Tensor]) -> float:
    """Return the factor that clips by the L2 norm of all the gradients of this rank together."""
    squares = (_norm(gradient) ** 2 for gradient in gradients)
    return clip_factor(algorithm.clip_norm, ranks, sum(squares) ** 0.5)


def clip_factor(clip_norm: float, ranks: int, norm: float) -> float:
    """Return what scales a local gradient of this L2 norm down to clip_norm / sqrt(ranks), 1.0 if it is below."""
    bound = clip_norm * ranks**-0.5
    return bound / norm if norm > bound else 1.0


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(_flat(tensor), dtype=torch.float64))  # squares may leave float32


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).to(torch.float32)
