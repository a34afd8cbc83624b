"""Finds wrong uses that gradients do not show: no loss scale, two momenta, the optimizer's weight decay, two passes."""

import functools
import weakref
from collections.abc import Callable, Iterable

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvd_sparse.algorithms import Algorithm
from hvd_sparse.frames import warn
from hvd_sparse.messages import two_momenta
from hvd_sparse.schedule import is_always_dense
from hvd_sparse.torch.caller import stepping_scaler
from hvd_sparse.torch.collectives import Collectives

NOT_SCALED = (
    "hvd_sparse: a loss scaler multiplies the gradients, and compression.loss_scale was never set: residuals, "
    "clip_norm and weight_decay are in wrong units. Once, before training: compression.loss_scale = scaler"
)
OLD_SCALE = (
    "hvd_sparse: the loss scaler multiplied the gradients by {}, but compression.loss_scale was {} in this step: "
    "residuals, clip_norm and weight_decay are in wrong units. Once, before training: compression.loss_scale = scaler"
)
UNUSED = (
    "hvd_sparse: an optimizer steps with gradients that its compressor has not seen: nothing is compressed, and a "
    "momentum of the compressor is not applied. Use hvd.DistributedOptimizer(..., compression=compression), with "
    "DistributedDataParallel compression.register(model), or in a loop of your own compression.reduce_gradients()"
)
TWO_PASSES = (
    "hvd_sparse: two backward passes without an optimizer step between them: the second compresses gradients that were "
    "reduced already, and momentum grows without bound. To accumulate, run all but the last pass in model.no_sync(). "
    "If the first pass was not to train these parameters, freeze them in it"
)
DISCARDED = (
    "hvd_sparse: gradients were reduced, and no optimizer has stepped with them: their unsent part stays in the "
    "residual and is sent in later steps. This is right if you skipped the step on purpose. Freeze parameters in a "
    "pass that is not to train them, as the discriminator's in a GAN's generator step: requires_grad_(False)"
)
WEAK_DECAY = (
    "hvd_sparse: weight_decay={:g} of SGD does not pass through the momentum of {}, which Compression.{} has: it is "
    "{:.3g} times as weak as in dense training. Give the weight decay to the compressor, and set SGD's to 0"
)
_all: "weakref.WeakSet[OptimizerChecks]" = weakref.WeakSet()
_checks: "weakref.WeakSet[OptimizerChecks]" = weakref.WeakSet()  # of these, the last one for each parameter


class OptimizerChecks:
    """Checks the optimizers of one compressor's parameters at their steps, until a later compressor has them.

    Args:
        algorithm: The settings of the method.
        parameters: The compressor's parameters.
        collectives: Those of the compressor.
    """

    def __init__(self, algorithm: Algorithm, parameters: Iterable[torch.Tensor], collectives: Collectives):
        self._algorithm, self._ids = algorithm, {id(parameter) for parameter in parameters}
        self._collectives, self._warns = collectives, collectives.is_first
        self._known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # optimizer: number of its groups, own ids
        self._told: weakref.WeakSet = weakref.WeakSet()  # optimizers whose settings have been warned of
        self._is_used = False  # whether it has compressed
        self.is_scaled = False  # whether a loss scale was set
        self._scale = 1.0  # the loss scale of the last step
        self._due: set[int] = set()  # parameters with a reduced gradient that no optimizer has stepped with yet
        self._stepped: set[int] = set()  # parameters that an optimizer has stepped with
        self._has_told = self._has_told_of_unused = False
        self._needs_scale = algorithm.replaces_optimizer or not is_always_dense(algorithm.schedule)
        # One more check, a method of the compressor: a weak reference, as the compressor refers to this object.
        self.further: Callable[[], Callable[[], None] | None] = lambda: None
        # One for reduce_gradients(), a method of OwnLoopChecks, which does not refer to the compressor or to this.
        self.own_loop: Callable[[torch.optim.Optimizer, set[int]], None] | None = None
        _all.add(self)
        self._replace_others()
        _watch_optimizers()

    def _replace_others(self) -> None:
        """Check the optimizers of these parameters instead of all other compressors."""
        for other in [other for other in _checks if other._ids & self._ids]:
            _checks.discard(other)
        _checks.add(self)

    def begin_step(self, scale: float) -> None:
        """Note that the compressor begins a step with a loss scale. Of several for a model, the one in use checks."""
        self._is_used, self._scale = True, scale
        if self not in _checks:
            self._replace_others()

    def before_step(self, optimizer: torch.optim.Optimizer, runs_closure: bool = False) -> None:
        """Raise RuntimeError if a loss scaler steps whose scale was not set; warn once of the compressor's settings.

        Warn once, too, if an optimizer steps with gradients that have not come through the compressor. With a closure,
        they may be those of passes in `no_sync()`: the closure will run the last pass.
        """
        if not self._is_used:
            if not runs_closure:
                self._warn_of_unused(optimizer)
            return
        own = self._own_ids(optimizer)
        if not own:
            return
        if further := self.further():
            further()
        if self.own_loop is not None and not runs_closure:
            self.own_loop(optimizer, own)
        has_reduced = bool(self._due & own)  # else the scale of its last step says nothing of this one
        self._due -= own
        self._stepped |= own
        self._warn_of_settings(optimizer, own)
        reduces = getattr(optimizer, "_should_synchronize", False)  # Horovod's: the compressor then raises an error
        scaler = stepping_scaler() if self._needs_scale and has_reduced and not reduces else None
        if scaler is not None and not self.is_scaled:
            raise RuntimeError(NOT_SCALED)
        if scaler is not None and scaler.get_scale() != self._scale:
            raise RuntimeError(OLD_SCALE.format(scaler.get_scale(), self._scale))

    def _warn_of_unused(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn once, unless the optimizer has a compressor: Horovod may call it later in this step, or not at all."""
        collectives = self._collectives
        if self._has_told_of_unused or not collectives.can_start() or collectives.size() == 1:
            return
        if not isinstance(getattr(optimizer, "_compression", type), type):  # Horovod's own are classes
            return
        own = [one for group in optimizer.param_groups for one in group["params"] if id(one) in self._ids]
        if have_gradients(own):  # hvd.broadcast_optimizer_state steps with zeros, to create the optimizer's state
            self._has_told_of_unused = True
            if self._warns():
                warn(UNUSED)

    def check_reduction(self, parameters: Iterable[torch.Tensor], message: str) -> None:
        """Warn once if no optimizer has stepped with one of these since its last reduction, though one did before."""
        if not self._has_told and set(map(id, parameters)) & self._due & self._stepped:
            self._has_told = True
            if self._warns():
                warn(message)

    def after_reduction(self, parameters: Iterable[torch.Tensor]) -> None:
        """Expect an optimizer to step with these before their next reduction."""
        self._due |= set(map(id, parameters))

    def forget_reductions(self) -> None:
        """Expect no step of an optimizer: what was reduced has been given up."""
        self._due.clear()

    def _own_ids(self, optimizer: torch.optim.Optimizer) -> set[int]:
        """Return which parameters of this compressor an optimizer has, also in groups that were added later."""
        count, own = self._known.get(optimizer, (0, set()))
        groups = optimizer.param_groups
        if len(groups) > count:
            own = own | {id(one) for group in groups[count:] for one in group["params"]} & self._ids
            self._known[optimizer] = len(groups), own
        return own

    def _warn_of_settings(self, optimizer: torch.optim.Optimizer, own: set[int]) -> None:
        """Warn once of an optimizer with what belongs to the compressor: a momentum, or weight decay before it.

        In any step, as a scheduler or load_state_dict may set it later. own: the parameters of this compressor that the
        optimizer has.
        """
        inner, name = self._algorithm.local_momentum, self._algorithm.name
        if inner == 0.0 or optimizer in self._told or not self._warns():
            return
        groups = [group for group in optimizer.param_groups if own & set(map(id, group["params"]))]
        outer = max(map(_momentum_of, groups), default=0.0)
        decay = max((group["weight_decay"] for group in groups if isinstance(optimizer, torch.optim.SGD)), default=0.0)
        if outer > 0.0:
            warn(two_momenta(outer, name, inner))
        elif decay > 0.0:
            warn(WEAK_DECAY.format(decay, inner, name, 1.0 / (1.0 - inner)))
        if outer > 0.0 or decay > 0.0:
            self._told.add(optimizer)


def first_uncompressed(parameters: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Return the first of these parameters that belongs to no compressor; None if each belongs to one."""
    compressed = set().union(*(checks._ids for checks in _all))
    return next((one for one in parameters if id(one) not in compressed), None)


def have_gradients(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether any gradient of these parameters is not zero."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return any(bool((one.coalesce().values() if one.is_sparse else one).any()) for one in gradients)


def _momentum_of(group: dict) -> float:
    """Return the momentum of a parameter group, or the beta1 of Adam and its like."""
    return float(group.get("momentum") or (group.get("betas") or (0.0,))[0])


def _before_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    """args, kwargs: those of `step`, the optimizer itself first."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    for checks in tuple(_checks):
        checks.before_step(optimizer, closure is not None)


@functools.cache
def _watch_optimizers() -> None:
    """Have `_before_step` called before each step of any optimizer; once for all compressors."""
    register_optimizer_step_pre_hook(torch.compiler.disable(_before_step))  # also of compiled steps
