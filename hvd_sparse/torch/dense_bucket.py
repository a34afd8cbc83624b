"""Dense tensors in one all-reduce of our own."""

from collections.abc import Sequence

import torch

from hvd_sparse.torch.exchange import Pending


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
