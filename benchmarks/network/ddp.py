"""One rank of a training job in PyTorch's DistributedDataParallel over gloo: its own hooks, or this package."""

import os
from time import perf_counter

import torch
import torch.distributed as dist
from methods import Method
from models import batches, build, train_alone
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hvd_sparse.torch.ddp import Compression

ONE_BUCKET = 1 << 14  # MiB
SPARSE = ("dgc",)  # methods of this package


class Job:
    """A model, its optimizer, and batches."""

    def __init__(self, model: str, method: Method, batch_size: int):
        self.rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        self.world_size = int(os.environ["OMPI_COMM_WORLD_SIZE"])
        if not dist.is_initialized():
            dist.init_process_group("gloo", rank=self.rank, world_size=self.world_size)  # at MASTER_ADDR
        torch.set_num_threads(1)
        self.method = method
        self.plain = build(model)
        self.numels = [parameter.numel() for parameter in self.plain.parameters()]
        self.batches = batches(model, batch_size, self.rank, count=1 if model == "resnet50" else 4)
        # PowerSGD's hook starts collectives in callbacks. With several buckets, their order may differ between ranks.
        options = {"bucket_cap_mb": ONE_BUCKET} if method.name == "powersgd" else {}
        self.model = DistributedDataParallel(self.plain, **options)
        self.compression = None
        self.compressed = 4 * sum(self.numels)
        if method.name in SPARSE:
            self.compression = getattr(Compression, method.name)(self.plain.named_parameters(), **method.settings)
            self.compression.register(self.model)
        elif method.name == "fp16":
            Compression.fp16.register(self.model)
            self.compressed //= 2
        elif method.name == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, **method.settings)
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            self.compressed = low_rank_bytes(self.plain, **method.settings)
        self.momentum = 0.0 if "momentum" in method.settings else 0.9
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001, momentum=self.momentum)

    def run(self, steps: int) -> float:
        """Take a number of steps; return their seconds."""
        start = perf_counter()
        for step in range(steps):
            self.optimizer.zero_grad()
            self.model(*self.batches[step % len(self.batches)]).backward()
            self.optimizer.step()
        return perf_counter() - start

    def compute(self, steps: int) -> float:
        """Return the seconds of a step without an exchange."""
        return train_alone(self.plain, self.momentum, self.batches, steps)

    def own_seconds(self) -> tuple[float, float]:
        """Return the total seconds of compressing and of decompressing. DDP's own hooks do not report them."""
        if self.compression is None:
            return 0.0, 0.0
        seconds = self.compression.stats()["total"]["seconds"]
        return seconds["compress"], seconds["decompress"]

    def largest(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        numbers = torch.tensor([number])
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return int(numbers)

    def bytes_per_step(self) -> int:
        """Return the bytes per step that this rank passes to the exchange."""
        if self.compression is None:
            return self.compressed
        return int(self.compression.stats()["step"]["payload_bytes"])

    def close(self) -> None:
        """End the job."""
        dist.destroy_process_group()


def low_rank_bytes(model: torch.nn.Module, matrix_approximation_rank: int) -> int:
    """Return PowerSGD's bytes: two factors for each matrix, and the other tensors."""
    total = 0
    for parameter in model.parameters():
        rows = parameter.shape[0]
        columns = parameter.numel() // max(1, rows)
        low = (rows + columns) * matrix_approximation_rank
        total += 4 * (low if 2 * low < parameter.numel() else parameter.numel())
    return total
