"""Finds wrong uses that gradients do not show, when an optimizer steps: a loss scale not set, a second momentum."""

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvd_sparse.algorithms import Algorithm
from hvd_sparse.members import two_momenta
from hvd_sparse.schedule import is_always_dense
from hvd_sparse.torch.caller import scaler_steps

NOT_SCALED = (
    "hvd_sparse: a loss scaler multiplies the gradients, and compression.loss_scale was never set: residuals, "
    "clip_norm and weight_decay are in wrong units. Before each backward: compression.loss_scale = scaler.get_scale()"
)
_checks: "weakref.WeakSet[OptimizerChecks]" = weakref.WeakSet()


class OptimizerChecks:
    """Checks the optimizers of one compressor's parameters at their steps, until a later compressor has them.

    Args:
        algorithm: The settings of the method.
        parameters: The compressor's parameters.
        warns: Returns whether this rank warns for all.
    """

    def __init__(self, algorithm: Algorithm, parameters: Iterable[torch.Tensor], warns: Callable[[], bool]):
        self._algorithm, self._ids, self._warns = algorithm, {id(parameter) for parameter in parameters}, warns
        self._known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # optimizer: has it these parameters?
        self.is_used = False  # whether it has compressed
        # Whether a loss scale was set, or has no effect.
        self.is_scaled = is_always_dense(algorithm.schedule) and not algorithm.replaces_optimizer
        for other in [other for other in _checks if other._ids & self._ids]:
            _checks.discard(other)
        _checks.add(self)
        _watch_optimizers()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RuntimeError if a loss scaler steps and no loss scale was set; warn once of a second momentum."""
        if not self.is_used:
            return
        is_new = optimizer not in self._known
        if is_new:
            groups = optimizer.param_groups
            self._known[optimizer] = any(id(one) in self._ids for group in groups for one in group["params"])
        if not self._known[optimizer]:
            return
        if is_new:
            self._warn_of_momentum(optimizer)
        reduces = getattr(optimizer, "_should_synchronize", False)  # Horovod's: the compressor then raises an error
        if not self.is_scaled and not reduces and scaler_steps():
            raise RuntimeError(NOT_SCALED)

    def _warn_of_momentum(self, optimizer: torch.optim.Optimizer) -> None:
        inner = self._algorithm.local_momentum
        if inner > 0.0 and self._warns():
            outer = max(map(_momentum_of, optimizer.param_groups), default=0.0)
            if outer > 0.0:
                warnings.warn(two_momenta(outer, self._algorithm.name, inner), stacklevel=5)


def _momentum_of(group: dict) -> float:
    """Return the momentum of a parameter group, or the beta1 of Adam and its like."""
    return float(group.get("momentum") or (group.get("betas") or (0.0,))[0])


def _before_step(optimizer: torch.optim.Optimizer, args, kwargs) -> None:
    if torch.compiler.is_compiling():
        return
    for checks in tuple(_checks):
        checks.before_step(optimizer)


@functools.cache
def _watch_optimizers() -> None:
    """Have `_before_step` called before each step of any optimizer; once for all compressors."""
    register_optimizer_step_pre_hook(_before_step)
