"""A model with given parameter shapes and its training step with DistributedDataParallel. torchrun starts the ranks."""

import atexit

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvd_sparse.torch.ddp import Compression

dist.init_process_group("gloo")
atexit.register(dist.destroy_process_group)
torch.set_num_threads(1)
rank, size = dist.get_rank, dist.get_world_size


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Return a gradient as a tensor, without copying."""
    return torch.from_numpy(array)


class Views(torch.nn.Module):
    """A module whose parameters receive given gradients: the gradient of the output is passed back unchanged."""

    def __init__(self, shapes: list[tuple[int, ...]]):
        super().__init__()
        self.all = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self) -> list[torch.Tensor]:
        """Return a view of each parameter."""
        return [parameter.view_as(parameter) for parameter in self.all]


class Model:
    """Parameters, DistributedDataParallel, and an optimizer."""

    def __init__(self, title: str, shapes: list[tuple[int, ...]], method: tuple[str, dict] | None):
        views = Views(shapes)
        self.model, momentum = DistributedDataParallel(views), 0.9
        if method is not None:
            name, settings = method
            getattr(Compression, name)(views.named_parameters(), **settings).register(self.model)
            momentum = 0.0 if "momentum" in settings else 0.9
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=momentum)

    def step(self, gradients: list[torch.Tensor]) -> None:
        """Take a training step with these gradients."""
        self.optimizer.zero_grad()
        torch.autograd.backward(self.model(), gradients)
        self.optimizer.step()
