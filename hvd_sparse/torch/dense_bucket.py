"""What is sent dense: by Horovod, or several tensors in one all-reduce of our own."""

import math
from collections.abc import Sequence

import torch

from hvd_sparse.half import largest_sent
from hvd_sparse.torch.codecs.base import Entry, place_of
from hvd_sparse.torch.error_feedback import ErrorFeedback
from hvd_sparse.torch.exchange import Pending
from hvd_sparse.units import Units


class DenseBucket:
    """Dense tensors in one all-reduce: those that Horovod's own does not carry."""

    def __init__(self, names: Sequence[str], parts: Sequence[torch.Tensor], pending: Pending):
        self._sizes = dict(zip(names, map(torch.numel, parts), strict=True))
        self.pending = pending
        self._sums: dict[str, torch.Tensor] | None = None

    def sum_of(self, name: str, scale: float) -> torch.Tensor:
        """Return the sum of a member over all ranks, times a scale."""
        if self._sums is None:
            parts = self.pending.wait().mul_(scale).split(list(self._sizes.values()))
            self._sums = dict(zip(self._sizes, parts, strict=True))
        return self._sums[name]


def take_dense(entry: Entry, feedback: ErrorFeedback, units: Units) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return what a tensor sends dense, and whether that is finite; note what then becomes of its error feedback."""
    gradient = entry.gradient
    if entry.frozen:
        return gradient.new_zeros(gradient.numel(), dtype=feedback.dense_dtype(gradient)), []
    averages = units.reduction is not None and units.reduction * units.world_size <= 1.0
    most = largest_sent(units.world_size, averages) if gradient.dtype == torch.float16 else math.inf
    sent, finite, entry.commit = feedback.take_all(gradient, entry.factor, units, most)
    return sent, [finite]


def own_place(entry: Entry, feedback: ErrorFeedback, carried: torch.Tensor) -> torch.Tensor:
    """Return a reduced gradient in a place of its own: error feedback takes back its scratch buffer."""
    if not feedback.is_scratch(carried):
        return carried
    place = place_of(entry.gradient)
    place.view(-1).copy_(carried.view(-1))
    return place
