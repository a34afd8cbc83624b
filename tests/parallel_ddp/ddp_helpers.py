"""Models with gradients that a test chooses, and functions that inspect them."""

import pytest
import torch
import torch.distributed as dist
from gradients import SHAPES, draw, whole_numbers
from terms import Terms
from torch.nn.parallel import DistributedDataParallel

from hvd_sparse.torch.ddp import Compression

ALONE = pytest.mark.skipif(
    "int(__import__('os').environ.get('WORLD_SIZE', '1')) < 2", reason="needs two ranks that differ"
)


class Trainer:
    """A model, its compressor under DistributedDataParallel, and plain SGD.

    layout: the model's memory format. ddp: options; by default, DDP has three buckets for SHAPES from its second step.
    freezes: a parameter that is frozen after DDP was built, and before its compressor is registered.
    """

    KINDS = ("residual", "velocity")

    def __init__(
        self,
        method="gradient_dropping",
        shapes=SHAPES,
        lr=0.1,
        dtype=torch.float32,
        layout=torch.contiguous_format,
        ddp=None,
        freezes=None,
        **settings,
    ):
        self.model, self.lr = Terms(draw(shapes, step=0, rank=0, seed=1), dtype).to(memory_format=layout), lr
        self.compression = getattr(Compression, method)(self.model.named(), **settings)
        self.ddp = DistributedDataParallel(self.model, **{"bucket_cap_mb": 0.00005, **(ddp or {})})
        if freezes is not None:
            self.model[freezes].requires_grad_(False)
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

    def buckets(self):
        """Return the number of DDP's buckets, those of its second step and later."""
        return len(self.ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(","))

    def buffers(self, name):
        """Return {kind: buffer} of a parameter, copies."""
        return {kind: self.buffer(name, kind) for kind in self.KINDS}


class Balance:
    """A ledger: what the ranks of a trainer's group give equals ranks * delivered means + residuals of all ranks."""

    def __init__(self, trainer):
        self.trainer, self.group = trainer, trainer.ddp.process_group
        self.ranks = dist.get_world_size(self.group)
        self.shapes = {name: parameter.shape for name, parameter in trainer.model.named()}
        self.given, self.delivered = (
            {name: torch.zeros(shape, dtype=torch.float64) for name, shape in self.shapes.items()} for _ in range(2)
        )

    def give(self, gradients):
        """Add gradients to what this rank has given; return them."""
        for name, value in gradients.items():
            self.given[name] += torch.as_tensor(value, dtype=torch.float64)
        return gradients

    def gradients(self, step, names=None):
        """Draw and give gradients: whole numbers times world size, so that means of all ranks are exact."""
        drawn = whole_numbers({name: self.shapes[name] for name in names or self.shapes}, step, dist.get_rank())
        return self.give({name: self.ranks * value for name, value in drawn.items()})

    def deliver(self, reduced):
        """Add reduced gradients to what has been delivered; None counts as zero."""
        for name, gradient in reduced.items():
            if gradient is not None:
                self.delivered[name] += gradient.double()

    def check(self, slack=None):
        """Assert that the ledger is exact. Call it on every rank of the group. slack: {name: a difference allowed}."""
        summed = self.trainer.compression.state_dict(summed=True)["memory"]
        for name in self.shapes:
            given = torch.stack(everywhere(self.given[name].reshape(-1), self.group)).sum(0)
            found = self.ranks * self.delivered[name].reshape(-1) + summed[name]["residual"].double()
            atol = (slack or {}).get(name, 0.0)
            torch.testing.assert_close(found, given, rtol=0.0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def everywhere(tensor, group=None):
    """Return what each rank has of a tensor, of the same shape on all."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, tensor.contiguous(), group=group)
    return found


def assert_ranks_agree(model, group=None):
    """Assert that all ranks have the same bits in all parameters."""
    for name, parameter in model.named_parameters():
        first, *others = everywhere(parameter.detach().view(-1).view(torch.uint8), group)
        assert all(torch.equal(first, other) for other in others), name


def assert_alive():
    """Assert that collectives still work on all ranks."""
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert ones.tolist() == [dist.get_world_size()] * 3


def shared_folder(tmp_path):
    """Return the path of the first rank's temporary folder, on all ranks."""
    paths = [str(tmp_path)]
    dist.broadcast_object_list(paths)
    return paths[0]
