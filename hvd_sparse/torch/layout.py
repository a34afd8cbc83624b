"""How the operators of buckets are told what lies where."""

from collections.abc import Sequence
from typing import NamedTuple

import torch


def of_each(weight_decay: float | Sequence[float], members: Sequence) -> Sequence[float]:
    """Return a weight decay for each member."""
    return [weight_decay] * len(members) if isinstance(weight_decay, int | float) else weight_decay


class Layout(NamedTuple):
    """What the payloads of a message hold: the selections, and which tensors take part in which.

    Lists of one entry a selection: n, k, the offset of its payload in the message in bytes, segments. Of one entry a
    member: the number of its selection, ascending, and how many elements of that precede its own.
    """

    ns: Sequence[int]
    ks: Sequence[int]
    offsets: Sequence[int]
    segments: Sequence[torch.Tensor | None]
    selections: Sequence[int]
    begins: Sequence[int]
