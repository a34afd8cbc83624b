"""A training job of one rank in PyTorch, with Horovod."""

from time import perf_counter

import horovod.torch as hvd
import torch
from methods import Method
from models import batches, build

from hvd_sparse.torch import Compression


class Job:
    """A model, its optimizer, and batches."""

    def __init__(self, model: str, method: Method, batch_size: int):
        hvd.init()
        torch.set_num_threads(1)
        self.rank, self.method = hvd.rank(), method
        self.model = build(model)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.batches = batches(model, batch_size, self.rank, count=1 if model == "resnet50" else 4)
        named, momentum = list(self.model.named_parameters()), 0.9
        if method.package == "horovod":
            self.compression = getattr(hvd.Compression, method.name)
        else:
            self.compression = getattr(Compression, method.name)(named, **method.settings)
            momentum = 0.0 if "momentum" in method.settings else 0.9
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001, momentum=momentum)
        self.optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=self.compression)

    def run(self, steps: int) -> float:
        """Take so many steps; return the seconds that they took."""
        start = perf_counter()
        for step in range(steps):
            self.optimizer.zero_grad()
            self.model(*self.batches[step % len(self.batches)]).backward()
            self.optimizer.step()
        return perf_counter() - start

    def compute(self, steps: int) -> float:
        """Return the seconds of forward and backward alone, in a copy of the model without hooks."""
        twin = build_twin(self.model)
        start = perf_counter()
        for step in range(steps):
            twin.zero_grad()
            twin(*self.batches[step % len(self.batches)]).backward()
        return (perf_counter() - start) / steps

    def largest(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        return max(hvd.allgather_object(number))

    def bytes_per_step(self) -> int:
        """Return the bytes that this rank gives to the exchange in a step."""
        if self.method.package == "hvd_sparse":
            return int(self.compression.stats()["step"]["payload_bytes"])
        return (2 if self.method.name == "fp16" else 4) * self.parameters

    def close(self) -> None:
        """End."""
        hvd.shutdown()


def build_twin(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy with the same weights and no hooks."""
    import copy

    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    twin = copy.deepcopy(model)
    for parameter, values in zip(twin.parameters(), parameters, strict=True):
        parameter.data = values
    return twin
