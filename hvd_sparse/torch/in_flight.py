"""Tensors that Horovod has in flight, held so that its thread can let go of them without Python's lock.

When a rank dies, Horovod's thread drops all tensors in flight, with its own lock held. PyTorch takes
Python's lock where only Python's reference to a tensor is left then. A thread of Python that submits a tensor meanwhile
has that one, and waits for Horovod's: both wait for ever, and no error ends the job. Another reference prevents it.
"""

from collections.abc import Iterable

import torch


def held(tensor: torch.Tensor) -> torch.Tensor:
    """Return what holds a reference to a tensor that is none of Python's: as long as it lives."""
    holder = tensor.detach()
    holder.grad = tensor
    return holder


def held_all(found: object) -> list[torch.Tensor]:
    """Return what holds all tensors in a tuple, in tuples inside it, and so on."""
    if isinstance(found, torch.Tensor):
        return [held(found)]
    return [holder for one in found for holder in held_all(one)] if isinstance(found, Iterable) else []
