"""The order in which a stage runs forward and backward of its micro-batches."""

from collections.abc import Callable
from typing import Literal

Schedule = Literal["gpipe", "1f1b"]
FORWARD, BACKWARD = "forward", "backward"
Steps = list[tuple[str, int]]  # (forward or backward, micro-batch)


def gpipe(stage: int, stages: int, micro_batches: int) -> Steps:
    """Return all forwards, then all backwards (GPipe, Huang et al., 2019): every activation is held until then."""
    return [(what, m) for what in (FORWARD, BACKWARD) for m in range(micro_batches)]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Steps:
    """Return forwards until the last stage is reached, then one backward a forward (PipeDream, Narayanan et al., 2019).

    Stage s of S holds the activations of S - s micro-batches at most. Flushed at the end of each step: the weights are
    the same in a micro-batch's forward and backward, and the gradients those of `gpipe`, bit for bit.
    """
    ahead = min(stages - 1 - stage, micro_batches)
    steps = [(FORWARD, m) for m in range(ahead)]
    for m in range(micro_batches - ahead):
        steps += [(FORWARD, ahead + m), (BACKWARD, m)]
    return steps + [(BACKWARD, m) for m in range(micro_batches - ahead, micro_batches)]


SCHEDULES: dict[Schedule, Callable[[int, int, int], Steps]] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def split_rows(rows: int, micro_batches: int) -> list[int]:
    """Return the sizes of micro-batches: as equal as can be, larger ones first; fewer where there are fewer rows."""
    parts = min(rows, micro_batches)
    return [rows // parts + (part < rows % parts) for part in range(parts)]
