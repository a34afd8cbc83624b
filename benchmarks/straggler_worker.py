"""One rank of benchmarks/stragglers.py: mpirun -np RANKS python benchmarks/straggler_worker.py MODE SECONDS."""

import json
import sys
import time

import numpy as np
import torch
from mpi4py import MPI

STEP, SLOWER = 0.04, 5.0  # seconds per gradient, and the slow worker's factor
WARM_UP = 2  # steps before the clock starts: workers join, and Horovod negotiates
SHAPES = {"body": (300, 300), "head": (300, 30)}


def compute(parameters, random, is_slow):
    """Give each parameter a gradient. Sleep for the time of a forward and backward pass, so that it needs no core."""
    end = time.perf_counter() + STEP * (SLOWER if is_slow else 1.0)
    for parameter in parameters:
        parameter.grad = torch.from_numpy(random.random(parameter.shape, np.float32) - np.float32(0.5))
    time.sleep(max(0.0, end - time.perf_counter()))


def asynchronous(name, parameters, random, seconds):
    """Train with a server on the last rank; return on worker 0 the updates per second of all workers."""
    from hvd_sparse.torch.asynchronous import METHODS, connect

    settings = {"pull_density": 0.01} if name != "asgd" else {}
    session = connect(parameters.items(), METHODS[name](**settings))
    if not session.is_worker:
        session.serve()
        return None
    optimizer = session.optimizer(lr=1e-3)
    is_slow = session.rank == session.workers - 1

    def step():
        compute(parameters.values(), random, is_slow)
        optimizer.step()

    for _ in range(WARM_UP):
        step()
    before, start = session.stats()["all"]["pushes"], time.perf_counter()
    while time.perf_counter() < start + seconds:
        step()
    pushes = session.stats()["all"]["pushes"] - before
    elapsed = time.perf_counter() - start
    session.close()
    return pushes / elapsed if session.rank == 0 else None


def synchronous(name, parameters, random, seconds):
    """Train with Horovod on all ranks but the last; return on rank 0 the batches per second of all ranks."""
    import horovod.torch as hvd

    from hvd_sparse.torch import Compression

    workers = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.Get_rank() == MPI.COMM_WORLD.Get_size() - 1)
    if MPI.COMM_WORLD.Get_rank() == MPI.COMM_WORLD.Get_size() - 1:
        return None
    hvd.init(comm=workers)
    compression = Compression.none if name == "dense" else getattr(Compression, name)(parameters.items())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters.values(), lr=1e-3), parameters.items(), compression=compression
    )
    steps = max(1, round(seconds / (STEP * SLOWER)))  # the same number on every rank
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            start = time.perf_counter()
        compute(parameters.values(), random, hvd.rank() == hvd.size() - 1)
        loss = sum((parameter * parameter.grad).sum() for parameter in parameters.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return steps * hvd.size() / (time.perf_counter() - start) if hvd.rank() == 0 else None


def main() -> None:
    """Run one mode. The rank that knows the result prints the batches per second."""
    kind, name = sys.argv[1].split(":")
    seconds = float(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random = np.random.default_rng(MPI.COMM_WORLD.Get_rank())
    parameters = {key: torch.nn.Parameter(torch.randn(shape)) for key, shape in SHAPES.items()}
    run = asynchronous if kind == "asynchronous" else synchronous
    done = run(name, parameters, random, seconds)
    if done is not None:
        print(json.dumps({"mode": sys.argv[1], "batches_per_second": done}), flush=True)


if __name__ == "__main__":
    main()
