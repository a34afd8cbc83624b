"""Finds wrong uses in a step of Horovod's optimizer: gradients that changed after compression, or are not reduced."""

from collections.abc import Mapping

import torch

from hvd_sparse.frames import warn
from hvd_sparse.torch.caller import runs_closure, stepping_scaler
from hvd_sparse.torch.codecs.base import Arrival
from hvd_sparse.torch.collectives import Collectives
from hvd_sparse.torch.device import is_cuda
from hvd_sparse.torch.optimizer_checks import first_uncompressed
from hvd_sparse.torch.parameters import Parameters

REDUCE_FIRST = (
    "Reduce first, then change gradients: optimizer.synchronize(); scaler.unscale_(optimizer), or clip; with "
    "optimizer.skip_synchronize(): scaler.step(optimizer), or optimizer.step(). With a scaler, also set "
    "compression.loss_scale = scaler, once"
)
ALONE = (
    "hvd_sparse: the optimizer also trains {}, which neither Horovod nor a compressor reduces: each rank trains it "
    "alone. It was added by add_param_group, or unfrozen, after hvd.DistributedOptimizer was built. Build that and the "
    "compressor from all parameters that will ever train, and freeze some afterwards. If something else reduces it, "
    "all is well"
)


class GradientChecks:
    """Checks the gradients of a compressor for Horovod, and the optimizer that reduces them.

    Args:
        parameters: The compressor's parameters.
        collectives: Those of the compressor.
    """

    def __init__(self, parameters: Parameters, collectives: Collectives):
        self._parameters, self._collectives = parameters, collectives
        self._has_warned_of_alone = False

    def check(self, optimizer: torch.optim.Optimizer | None, arrivals: Mapping[str, Arrival]) -> None:
        """Raise RuntimeError if a gradient has changed since it was compressed, or if a parameter is not reduced.

        optimizer: Horovod's that reduces the gradients; None if it is unknown. arrivals: the gradients of the step.
        PyTorch counts most changes of a tensor, but not those by a loss scaler.
        """
        if stepping_scaler() is not None:
            raise RuntimeError(
                f"hvd_sparse: scaler.step() unscales gradients before the optimizer reduces them. {REDUCE_FIRST}"
            )
        if optimizer is not None and runs_closure(optimizer):
            raise RuntimeError(
                "hvd_sparse: Horovod does not reduce gradients that a closure computes in optimizer.step(closure): "
                "each rank would train alone. Call the closure before: loss = closure(); optimizer.step()"
            )
        if optimizer is not None:
            self._refuse_unreduced(optimizer, arrivals)
        for arrival in arrivals.values():
            if self._is_replaced(arrival) or (
                arrival.passed._version != arrival.version and _has_changed(arrival, arrivals)
            ):
                raise RuntimeError(
                    f"hvd_sparse: the gradient of {arrival.name} was changed between backward() and optimizer.step(), "
                    f"after it had been taken: the change would be lost. {REDUCE_FIRST}"
                )

    def _refuse_unreduced(self, optimizer: torch.optim.Optimizer, arrivals: Mapping[str, Arrival]) -> None:
        """Raise RuntimeError if an optimizer trains a parameter of the compressor that no optimizer reduces.

        What the compressor lacks may be reduced by the user, or by the compressor of another optimizer.
        """
        reduced = getattr(optimizer, "_requires_update", ())
        own = [one for group in optimizer.param_groups for one in group["params"]] if reduced else []
        alone = [one for one in own if one not in reduced and one.requires_grad and one.grad is not None]
        if not alone:
            return
        names = {id(one): name for name, one in self._parameters.items()}
        unreduced = [name for one in alone if (name := names.get(id(one))) and name not in arrivals]
        if unreduced:
            raise RuntimeError(
                f"hvd_sparse: Horovod does not reduce the gradient of {unreduced[0]}, and each rank would train it "
                "alone: it was added by add_param_group, or unfrozen, after hvd.DistributedOptimizer was built. Build "
                "it with all parameters, while all of them train, and freeze some afterwards"
            )
        if not self._has_warned_of_alone:
            self._warn_of_alone(alone, getattr(optimizer, "_parameter_names", {}))

    def _warn_of_alone(self, parameters: list[torch.Tensor], names: dict[torch.Tensor, str]) -> None:
        """Warn once if one of these parameters, which Horovod does not reduce, belongs to no compressor.

        names: those that the optimizer knows.
        """
        alone = first_uncompressed(parameters)
        if alone is None:
            return
        self._has_warned_of_alone = True
        if self._collectives.is_first():
            warn(ALONE.format(names.get(alone, f"a parameter of shape {tuple(alone.shape)}")))

    def _is_replaced(self, arrival: Arrival) -> bool:
        """Return whether the parameter has another gradient now. A sparse one was copied before it was passed here."""
        now = self._parameters[arrival.name].grad
        return now is not arrival.passed and not (now is not None and now.is_sparse)


def _has_changed(arrival: Arrival, arrivals: Mapping[str, Arrival]) -> bool:
    """Return whether a gradient whose count of changes differs has changed since the last one was compressed.

    Gradients that are parts of one tensor, as after `torch.cat`, share a count, which then rises until the last of them
    has arrived. One more change shows which gradients share it.
    """
    counts = {name: other.passed._version for name, other in arrivals.items()}
    torch.autograd.graph.increment_version(arrival.passed)
    sharing = [one for name, one in arrivals.items() if one.passed._version != counts[name]]
    if any(is_cuda(one.passed.device) and one.is_lent for one in sharing):
        return False  # Horovod's own copy of the sum back to the GPU counts, if it was built without NCCL
    if counts[arrival.name] > max(one.version for one in sharing):
        return True
    for one in sharing:
        one.version = one.passed._version
    return False
