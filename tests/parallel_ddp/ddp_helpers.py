"""Models with gradients that a test chooses, and functions that inspect them."""

import torch
import torch.distributed as dist
from gradients import SHAPES, draw
from terms import Terms
from torch.nn.parallel import DistributedDataParallel

from hvd_sparse.torch.ddp import Compression


class Trainer:
    """A model, its compression under DistributedDataParallel, and plain SGD. layout: the model's memory format."""

    def __init__(
        self,
        method="gradient_dropping",
        shapes=SHAPES,
        lr=0.1,
        dtype=torch.float32,
        layout=torch.contiguous_format,
        ddp=None,
        **settings,
    ):
        self.model, self.lr = Terms(draw(shapes, step=0, rank=0, seed=1), dtype).to(memory_format=layout), lr
        self.compression = getattr(Compression, method)(self.model.named(), **settings)
        self.ddp = DistributedDataParallel(self.model, **{"bucket_cap_mb": 0.002, **(ddp or {})})
        self.compression.register(self.ddp)

    def backward(self, gradients):
        self.ddp(gradients).backward()

    def reduced(self, gradients):
        """Return {name: the gradient that the optimizer would get}, None for what has none."""
        self.ddp.zero_grad(set_to_none=True)
        self.backward(gradients)
        return {name: parameter.grad for name, parameter in self.model.named()}

    def step(self, gradients):
        reduced = self.reduced(gradients)
        with torch.no_grad():
            for name, parameter in self.model.named():
                if reduced[name] is not None:
                    parameter -= self.lr * reduced[name]
        return reduced

    def buffer(self, name, kind="residual"):
        """Return a buffer of the error feedback as the state has it, zeros before there is one."""
        memory = self.compression.state_dict()["memory"][name]
        return memory.get(kind, torch.zeros(self.model[name].numel()))


def everywhere(tensor):
    """Return what each rank has of a tensor, of the same shape on all."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return found


def assert_ranks_agree(model):
    """Assert that all ranks have the same bits in all parameters."""
    for name, parameter in model.named_parameters():
        first, *others = everywhere(parameter.detach().view(-1).view(torch.uint8))
        assert all(torch.equal(first, other) for other in others), name


def assert_alive():
    """Assert that collectives still work on all ranks."""
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert ones.tolist() == [dist.get_world_size()] * 3
