"""A rank of a small pipeline that trains or misbehaves: python pipeline_job.py WHAT RANK. It prints how it ended."""

import os
import signal
import sys
import time

import torch
from mpi4py import MPI
from pipeline_oracle import make_stages

from hvd_sparse.torch.model_parallel import Pipeline

SIZES, ROWS, STEPS = (9, 31, 40, 17, 4), 6, 50


def batch(step):
    """Return inputs and targets."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, SIZES[0], generator=generator), torch.randint(0, 4, (ROWS,), generator=generator)


def misbehave(what, stage):
    """Do something that must not make other ranks wait."""
    if what == "raise":
        raise ArithmeticError("this rank has had enough")
    if what == "exit":
        sys.exit(0)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "sleep":
        time.sleep(5)
    if what == "cast":
        stage.double()


def main():
    """Train; misbehave in step 3."""
    what, who = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    stage = make_stages([*SIZES[:size], SIZES[-1]])[rank]
    if what == "never" and rank == who:
        time.sleep(6)
        return
    if what != "never":
        world.Barrier()  # so that the imports of a slow rank do not count as its absence
    pipeline = Pipeline(
        stage,
        micro_batches=2,
        schedule="1f1b",
        loss=torch.nn.functional.cross_entropy,
        timeout=3.0 if what in ("sleep", "never") else 120.0,
    )
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        if step == 3 and rank == who:
            misbehave(what, stage)
        optimizer.zero_grad()
        losses.append(pipeline.step(*batch(step)))
        optimizer.step()
    print(f"losses of rank {rank}: {' '.join(map(repr, losses))}", flush=True)


if __name__ == "__main__":
    main()
