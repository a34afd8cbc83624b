"""One rank of a training job in PyTorch with Horovod."""

from time import perf_counter

import horovod.torch as hvd
import torch
from methods import Method
from models import batches, build, train_alone

from hvd_sparse.torch import Compression

tensors = torch  # worker.py measures the links with these tensors


class Job:
    """A model, its optimizer, and batches."""

    def __init__(self, model: str, method: Method, batch_size: int):
        hvd.init(process_sets="dynamic")
        torch.set_num_threads(1)
        self.rank, self.method = hvd.rank(), method
        self.model = build(model)
        self.numels = [parameter.numel() for parameter in self.model.parameters()]
        self.batches = batches(model, batch_size, self.rank, count=1 if model == "resnet50" else 4)
        named, momentum = list(self.model.named_parameters()), 0.9
        if method.package == "horovod":
            self.compression = getattr(hvd.Compression, method.name)
        else:
            self.compression = getattr(Compression, method.name)(named, **method.settings)
            momentum = 0.0 if "momentum" in method.settings else 0.9
        self.momentum = momentum
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001, momentum=momentum)
        self.optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=self.compression)

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
        return train_alone(self.model, self.momentum, self.batches, steps)

    def own_seconds(self) -> tuple[float, float]:
        """Return the total seconds of compressing and of decompressing."""
        if self.method.package != "hvd_sparse":
            return 0.0, 0.0
        seconds = self.compression.stats()["total"]["seconds"]
        return seconds["compress"], seconds["decompress"]

    def largest(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        return max(hvd.allgather_object(number))

    def bytes_per_step(self) -> int:
        """Return the bytes per step that this rank passes to the exchange."""
        if self.method.package == "hvd_sparse":
            return int(self.compression.stats()["step"]["payload_bytes"])
        return (2 if self.method.name == "fp16" else 4) * sum(self.numels)

    def close(self) -> None:
        """End the job."""
        hvd.shutdown()
