"""One rank's compression of one tensor in a step, in PyTorch: with the native operators, and with torch.topk."""

import numpy as np
import torch
from entries import draw_entries

from hvd_sparse.buckets import BucketLayout
from hvd_sparse.torch import bucket_ops, ops
from hvd_sparse.torch.codecs import CODECS
from hvd_sparse.torch.codecs.base import Arrival, Round
from hvd_sparse.torch.error_feedback import make_error_feedback
from hvd_sparse.torch.parameters import Parameters
from hvd_sparse.units import Units
from hvd_sparse.wire import payload_size, top_k_count

CAN_CHANGE_THREADS = True  # the number of threads can change at any time


def use_threads(count: int) -> None:
    """Compute with this number of threads."""
    torch.set_num_threads(count)


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Return a gradient as a tensor, without copying."""
    return torch.from_numpy(array)


def pack(indices: np.ndarray, values: np.ndarray, n: int, coding: str) -> torch.Tensor:
    """Return a payload of k of n elements."""
    out = torch.empty(payload_size(n, len(indices), coding), dtype=torch.uint8)
    ops.pack(torch.from_numpy(indices), torch.from_numpy(values), n, len(indices), out, coding)
    return out


def unpack(payload: torch.Tensor, n: int, k: int, coding: str) -> np.ndarray:
    """Return the indices of a payload."""
    return ops.unpack(payload, n, k, coding)[0].numpy()


class Worker:
    """Accumulates, selects, packs and clears; detects gradients that are not finite."""

    def __init__(self, algorithm, n: int):
        self.momentum = algorithm.local_momentum
        self.n, self.k = n, top_k_count(n, algorithm.schedule.density(0))
        self.memory = make_error_feedback(algorithm, torch.empty(1).expand(n), torch.device("cpu"))
        self.hints = bucket_ops.new_hints(1)
        self.bytes = torch.zeros(payload_size(n, self.k), dtype=torch.uint8)
        self.out = torch.empty(n)

    def compress(self, gradient: torch.Tensor) -> None:
        """Compress like `hvd_sparse.torch`."""
        buffers = [[buffer] for buffer in self.memory.destination() if buffer is not None]
        layout = BucketLayout([self.n], [self.k])
        options = {"layout": layout, "factors": [1.0], "hints": self.hints, **self.memory.rule()}
        _, finite = bucket_ops.accumulate_bucket([gradient], *buffers, out=self.bytes, **options)
        if not finite.item():
            raise ValueError("the benchmark's gradient must be finite")
        residual, *velocity = self.memory.cleared()
        bucket_ops.clear_bucket(self.bytes, [residual], velocity, layout=layout)

    def compress_with_topk(self, gradient: torch.Tensor) -> None:
        """Do the same work with PyTorch operators. The payload has 32-bit indices."""
        if not torch.isfinite(gradient).all():
            raise ValueError("the benchmark's gradient must be finite")
        self.sums(gradient)
        residual = self.memory.residual
        indices = torch.topk(residual.abs(), self.k, sorted=False).indices
        self.plain = (indices.to(torch.int32), residual[indices])
        self.memory.clear(indices, None)

    def sums(self, gradient: torch.Tensor) -> None:
        """Do only the additions of a compress, with PyTorch operators."""
        update = self.memory.velocity.mul_(self.momentum).add_(gradient) if self.momentum else gradient
        self.memory.residual.add_(update)

    def accumulate(self, gradient: torch.Tensor) -> None:
        """Only accumulate."""
        self.memory.accumulate(gradient, 1.0, Units(1))

    def reduce(self, ranks: int) -> None:
        """Decode and add the payloads of several ranks. Each rank has different places."""
        if not hasattr(self, "gathered"):
            draws = [draw_entries(self.n, self.k, rank) for rank in range(ranks)]
            self.gathered = torch.stack([pack(*drawn, self.n, "run_length") for drawn in draws])
        ops.reduce_payloads(self.gathered, 0, self.n, self.k, self.out)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the payload, the selection by torch.topk, and the residual, if they exist."""
        plain = getattr(self, "plain", (torch.empty(0), torch.empty(0)))
        return {
            "payload": self.bytes.numpy(),
            "indices": plain[0].numpy(),
            "values": plain[1].numpy(),
            "residual": self.memory.residual.numpy(),
        }


class Codec:
    """Compresses tensors of given shapes, bucket by bucket, like one rank."""

    def __init__(self, algorithm, shapes: list[tuple[int, ...]]):
        named = [(f"{i:03}", torch.nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(shapes)]
        parameters, device = Parameters(named), torch.device("cpu")
        feedback = {name: make_error_feedback(algorithm, one, device) for name, one in named}
        self.codec = CODECS[algorithm.selection](algorithm, parameters, feedback, None, self, device)
        self.names, self.density, self.step = [name for name, _ in named], algorithm.schedule.density(0), 0
        self.buckets = None
        self.sent = 0  # elements sent in the last step

    def count(self, sent: int) -> None:
        """Count like `hvd_sparse.torch.traffic.Traffic`."""
        self.sent += sent

    def compress(self, gradients: list[torch.Tensor]) -> None:
        """Accumulate, select, pack and clear."""
        self.sent = 0
        self.codec.begin(Round(self.step, self.density, self.step, Units(1), 0))
        self.buckets = self.buckets or self.codec.plan(self.names, "bucket")
        arrivals = {name: Arrival(name, one, False) for name, one in zip(self.names, gradients, strict=True)}
        for bucket in self.buckets:
            members = {name: arrivals[name] for name in bucket.members}
            self.codec.encode(bucket, members)
            self.codec.clear(bucket, members)
        self.codec.end()
        self.step += 1
