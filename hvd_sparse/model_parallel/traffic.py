"""What a stage has sent."""

from collections import Counter

import numpy as np

from hvd_sparse.model_parallel.message import Tensor
from hvd_sparse.traffic import DirectionStats, StageStats, StepStats, report


class PipelineTraffic:
    """Counts the messages of a stage, and the elements that its boundaries keep."""

    def __init__(self):
        self._count: Counter = Counter()
        self._begun: Counter = Counter()  # the counts when the last step of training began

    def begin_step(self) -> None:
        """Begin a step of training."""
        self._begun = self._count.copy()

    def add(self, direction: str, tensors: list[Tensor], data: np.ndarray) -> None:
        """Count an encoded message, and of its tensors the dense bytes and the elements."""
        count = self._count
        count[f"{direction} messages"] += 1
        count[f"{direction} dense"] += sum(tensor.nbytes for tensor in tensors)
        count[f"{direction} sent"] += data.size
        for tensor in tensors:
            elements = tensor.array.size
            kept = elements if tensor.mask is None else int(np.count_nonzero(tensor.mask))
            count[f"{direction} elements"] += elements
            count[f"{direction} kept"] += kept
            if direction == "forward" and tensor.mask is not None:
                count["elements"] += elements
                count["kept"] += kept

    def add_received(self, data: np.ndarray) -> None:
        """Count a message of another stage in training, forward or backward."""
        self._count["received"] += data.size

    def add_targets(self, data: np.ndarray) -> None:
        """Count an encoded message with targets."""
        self._count["targets"] += data.size

    def stats(self, steps: int) -> StageStats:
        """Return the counts as `Pipeline.stats` does. steps: number of those in training."""
        count, last = self._count, self._count.copy()
        last.subtract(self._begun)
        return {
            "steps": steps,
            "step": _report(last),
            "total": _report(count),
            "forward": self._direction("forward"),
            "backward": self._direction("backward"),
            "evaluation": self._direction("evaluation"),
            "targets_bytes": count["targets"],
            "occupancy": count["kept"] / count["elements"] if count["elements"] else 1.0,
        }

    def _direction(self, name: str) -> DirectionStats:
        count = self._count
        dense, sent, elements = count[f"{name} dense"], count[f"{name} sent"], count[f"{name} elements"]
        return {
            "messages": count[f"{name} messages"],
            "dense_bytes": dense,
            "payload_bytes": sent,
            "sent_bytes": sent,
            "ratio": dense / sent if sent else 1.0,
            "density": count[f"{name} kept"] / elements if elements else 1.0,
        }


def _report(count: Counter) -> StepStats:
    """Convert counts to an entry of `stats()`: what a stage has sent and received in training, without targets."""
    whats = ("dense", "sent", "kept", "elements")
    dense, sent, kept, elements = (count[f"forward {what}"] + count[f"backward {what}"] for what in whats)
    counters = {"dense_bytes": dense, "payload_bytes": sent, "surplus_bytes": count["received"] - sent}
    return report({**counters, "sent": kept, "elements": elements}, ())
