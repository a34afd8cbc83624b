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


def extra_references(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return such an object for each tensor."""
    return [extra_reference(tensor) for tensor in tensors]
