"""Finds loops that call reduce_gradients() for some steps only, or on a new compressor in each step."""

import weakref
from collections.abc import Iterable

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hvd_sparse.frames import warn
from hvd_sparse.messages import NEW_EACH_STEP
from hvd_sparse.torch.collectives import Collectives
from hvd_sparse.torch.optimizer_checks import first_uncompressed, have_gradients

NOT_REDUCED = (
    "hvd_sparse: an optimizer steps with gradients that reduce_gradients() has not reduced, as it had before earlier "
    "steps: each rank applies its own, and their weights drift apart. Call it before every step of the optimizer"
)
ALONE = (
    "hvd_sparse: the optimizer also trains a parameter of shape {}, which no compressor reduces: each rank trains it "
    "alone. Build the compressor from all parameters of the optimizer; those in its argument dense are not compressed. "
    "If something else reduces it, all is well"
)
_lives = WeakIdKeyDictionary()  # the first parameter of compressors: lists with the steps of the last three


class OwnLoopChecks:
    """Checks a compressor whose reduce_gradients() is called, and the optimizers that have its parameters.

    Args:
        parameters: The compressor's parameters.
        collectives: Those of the compressor.
        number: The number of the compressor's next step.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], collectives: Collectives, number: int):
        self._by_id, self._collectives = {id(one): one for one in parameters}, collectives
        self._steps = [0]  # a list, which outlives this compressor
        self._warn_of_short_lives(number)
        self._reduced: set[int] = set()  # parameters with a reduced gradient that no optimizer has stepped with yet
        self._applied: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # optimizer: a gradient, its version
        self._has_told_of_steps = self._has_told_of_others = False

    def after_reduction(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that these have reduced gradients, at the end of a step."""
        self._reduced |= set(map(id, parameters))
        self._steps[0] += 1

    def before_step(self, optimizer: torch.optim.Optimizer, own: set[int]) -> None:
        """Warn once of gradients that were not reduced, where earlier ones were; own: parameters of the compressor.

        An optimizer around another one makes two steps with the same gradients. One that has never stepped with reduced
        gradients may be the inner one of local SGD.
        """
        if self._reduced & own:
            self._reduced -= own
            if applied := self._first_gradient(own):
                self._applied[optimizer] = applied
            self._warn_of_others(optimizer, own)
        elif optimizer in self._applied and not self._has_told_of_steps:
            now = self._first_gradient(own)
            is_new = now is not None and not any(_is_same(now, one) for one in self._applied.values())
            if is_new and have_gradients(self._by_id[one] for one in own):
                self._has_told_of_steps = True
                self._warn(NOT_REDUCED)

    def _warn_of_short_lives(self, number: int) -> None:
        """Warn at the third compressor of which each takes a step, unless it has loaded the state of the second."""
        lives = _lives.setdefault(next(iter(self._by_id.values())), [])
        was_told = lives[:-2] == [[1]]
        if number == 0 and lives[-2:] == [[1], [1]] and not was_told:
            self._warn(NEW_EACH_STEP)
        lives[:] = [*lives[-2:], self._steps]

    def _first_gradient(self, own: set[int]) -> tuple[weakref.ref, int] | None:
        """Return the gradient of the first of these parameters that has one, and the number of its changes."""
        gradient = next((one.grad for key, one in self._by_id.items() if key in own and one.grad is not None), None)
        if gradient is None:
            return None
        return weakref.ref(gradient), 0 if gradient.is_inference() else gradient._version

    def _warn_of_others(self, optimizer: torch.optim.Optimizer, own: set[int]) -> None:
        """Warn once if an optimizer trains a parameter that belongs to no compressor."""
        if self._has_told_of_others or sum(len(group["params"]) for group in optimizer.param_groups) == len(own):
            return
        every = (one for group in optimizer.param_groups for one in group["params"])
        alone = first_uncompressed(one for one in every if one.grad is not None)
        if alone is not None:
            self._has_told_of_others = True
            self._warn(ALONE.format(tuple(alone.shape)))

    def _warn(self, message: str) -> None:
        """Warn on the first of several ranks."""
        if self._collectives.size() > 1 and self._collectives.is_first():
            warn(message)


def _is_same(one: tuple[weakref.ref, int], other: tuple[weakref.ref, int]) -> bool:
    """Return whether two are the same gradient, unchanged. Comparing the references would compare their elements."""
    return one[0]() is other[0]() and one[1] == other[1]
