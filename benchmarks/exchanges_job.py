"""Measure the bytes that a rank receives in a step of a real job, with each exchange.

    mpirun -np N python benchmarks/exchanges_job.py

Rank 0 prints one JSON object. For each exchange it has the bytes per step of the rank that receives most, and the same
divided by the bytes of k entries.
"""

import json

import horovod.torch as hvd
import numpy as np
import torch
from entries import ENTRY_BYTES
from mpi4py import MPI

from hvd_sparse.torch import Compression
from hvd_sparse.wire import top_k_count

SIZES, DENSITY, STEPS = (200_000, 50_000, 50_000), 0.01, 8  # some steps have messages as large as the first step's


def received(exchange: str) -> float:
    """Return the bytes that this rank receives in the median step of a small model with this exchange."""
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
    named = [(str(place), parameter) for place, parameter in enumerate(parameters)]
    compression = Compression.dgc(named, density=DENSITY, dense_fallback=None, exchange=exchange)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), named, compression=compression)
    random = np.random.default_rng(hvd.rank())
    steps = []
    for _ in range(STEPS):
        gradients = [torch.from_numpy(random.standard_normal(size, np.float32)) for size in SIZES]
        optimizer.zero_grad()
        sum((parameter * one).sum() for parameter, one in zip(parameters, gradients, strict=True)).backward()
        optimizer.step()
        steps.append(compression.stats()["step"]["received_bytes"])
    return float(np.median(steps))


def main() -> None:
    """Train a few steps with each exchange; report the rank that receives most."""
    hvd.init()
    entries = sum(top_k_count(size, DENSITY) for size in SIZES)
    found = {"ranks": hvd.size()}
    for exchange in ("gather", "reduce_scatter"):
        most = max(MPI.COMM_WORLD.allgather(received(exchange)))
        found |= {f"{exchange}_bytes": most, f"{exchange}_entries": most / ENTRY_BYTES / entries}
    if hvd.rank() == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
