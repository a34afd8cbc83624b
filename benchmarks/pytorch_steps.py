"""A model with given parameter shapes and its training step in PyTorch with Horovod."""

import horovod.torch as hvd
import numpy as np
import torch

from hvd_sparse.torch import Compression

hvd.init()
torch.set_num_threads(1)
rank, size = hvd.rank, hvd.size


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Return a gradient as a tensor, without copying."""
    return torch.from_numpy(array)


class Model:
    """Parameters and Horovod's optimizer."""

    def __init__(self, title: str, shapes: list[tuple[int, ...]], method: tuple[str, dict] | None):
        named = [(f"{title}.{i:03}", torch.nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(shapes)]
        self.parameters = [parameter for _, parameter in named]
        compression = hvd.Compression.none
        momentum = 0.9
        if method is not None:
            name, settings = method
            compression = getattr(Compression, name)(named, **settings)
            momentum = 0.0 if "momentum" in settings else 0.9
        optimizer = torch.optim.SGD(self.parameters, lr=0.01, momentum=momentum)
        self.optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)

    def step(self, gradients: list[torch.Tensor]) -> None:
        """Take a training step with these gradients."""
        self.optimizer.zero_grad()
        torch.autograd.backward([parameter.view_as(parameter) for parameter in self.parameters], gradients)
        self.optimizer.step()
