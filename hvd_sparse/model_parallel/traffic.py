"""What a stage has sent."""

from collections import Counter

import numpy as np

from hvd_sparse.model_parallel.message import Tensor


class PipelineTraffic:
    """Counts the messages of a stage, and the elements that its boundaries keep."""

    def __init__(self):
        self._count: Counter = Counter()

    def add(self, direction: str, tensors: list[Tensor], data: np.ndarray) -> None:
        """Count an encoded message and the dense bytes of its tensors."""
        self._count[f"{direction} messages"] += 1
        self._count[f"{direction} dense"] += sum(tensor.nbytes for tensor in tensors)
        self._count[f"{direction} sent"] += data.size

    def add_targets(self, data: np.ndarray) -> None:
        """Count an encoded message with targets."""
        self._count["targets"] += data.size

    def add_masks(self, tensors: list[Tensor]) -> None:
        """Count the kept elements of masked tensors."""
        for tensor in tensors:
            if tensor.mask is not None:
                self._count["kept"] += int(np.count_nonzero(tensor.mask))
                self._count["elements"] += tensor.mask.size

    def stats(self) -> dict:
        """Return the counts as `Pipeline.stats` does."""
        count = self._count
        occupancy = count["kept"] / count["elements"] if count["elements"] else 1.0
        directions = {name: self._direction(name) for name in ("forward", "backward", "evaluation")}
        return {**directions, "targets_bytes": count["targets"], "occupancy": occupancy}

    def _direction(self, name: str) -> dict:
        count = self._count
        dense, sent = count[f"{name} dense"], count[f"{name} sent"]
        ratio = dense / sent if sent else 1.0
        return {"messages": count[f"{name} messages"], "dense_bytes": dense, "sent_bytes": sent, "ratio": ratio}
