"""Extra references to tensors in flight, so that Horovod's thread can release them without Python's lock (the GIL).

When a rank dies, Horovod's thread releases all tensors in flight while it holds Horovod's lock. If only Python's
reference to a tensor is left then, PyTorch acquires the GIL. A Python thread that submits a tensor at that moment holds
the GIL and waits for Horovod's lock: a deadlock, and no error ends the job. One more C++ reference prevents it.
"""

from collections.abc import Iterable

import torch


def extra_reference(tensor: torch.Tensor) -> torch.Tensor:
    """Return an object that, while it lives, has a C++ reference to the tensor."""
    holder = tensor.detach()
    holder.grad = tensor
    return holder


def extra_references(found: object) -> list[torch.Tensor]:
    """Return such objects for all tensors in a nested tuple."""
    if isinstance(found, torch.Tensor):
        return [extra_reference(found)]
    return [holder for one in found for holder in extra_references(one)] if isinstance(found, Iterable) else []
