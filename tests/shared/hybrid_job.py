"""A small hybrid run: replicas of a pipeline, and Horovod between them. Each rank prints one JSON line."""

import argparse
import copy
import hashlib
import json
import time

import horovod.torch as hvd
import numpy as np
import torch
from mpi4py import MPI
from pipeline_oracle import make_stages

from hvd_sparse.torch import Compression
from hvd_sparse.torch.model_parallel import Pipeline, hybrid

SIZES = (12, 64, 48, 5)
ROWS, STEPS, LR = 8, 30, 0.1


def batch(step, replicas):
    """Return inputs and targets of all replicas, concatenated."""
    random = np.random.default_rng([7, step])
    inputs = random.normal(size=(replicas * ROWS, SIZES[0])).astype(np.float32)
    return torch.from_numpy(inputs), torch.from_numpy((inputs[:, :5] * 2).argmax(axis=1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--order", default="pipeline")
    parser.add_argument("--density", type=float, default=1.0)
    parser.add_argument("--compression", default="none")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--late", action="store_true", help="the first stage reduces its last gradients late")
    args = parser.parse_args()
    torch.set_num_threads(1)
    refused = ""
    try:
        hybrid(MPI.COMM_WORLD.size + 1)
    except ValueError as error:
        refused = str(error)
    grid, process_set, communicator = hybrid(args.stages, args.order)
    sizes = [*SIZES[: args.stages], SIZES[-1]]
    stages = make_stages(sizes)
    loss = torch.nn.functional.cross_entropy
    try:
        Pipeline(stages[grid.stage], loss=loss, timeout=60)
        in_the_world = ""
    except ValueError as error:
        in_the_world = str(error)
    whole = copy.deepcopy(torch.nn.Sequential(*stages))
    stage = stages[grid.stage]
    pipeline = Pipeline(
        stage, boundary=args.density, micro_batches=args.micro_batches, loss=loss, communicator=communicator, timeout=60
    )
    compression = hvd.Compression.none
    if args.compression != "none":
        compression = getattr(Compression, args.compression)(
            stage.named_parameters(), density=0.2, min_numel=16, process_set=process_set
        )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(stage.parameters(), lr=LR),
        named_parameters=stage.named_parameters(),
        compression=compression,
        backward_passes_per_step=len(range(0, ROWS, -(-ROWS // args.micro_batches))),
        process_set=process_set,
    )
    reference = torch.optim.SGD(whole.parameters(), lr=LR)
    losses, expected = [], []
    for step in range(STEPS):
        inputs, targets = batch(step, grid.replicas)
        mine = slice(grid.replica * ROWS, (grid.replica + 1) * ROWS)
        optimizer.zero_grad()
        if args.late and step == STEPS - 1 and grid.stage == 0:
            stage[0].weight.register_hook(lambda _: time.sleep(3.0))
        losses.append(pipeline.step(inputs[mine], targets[mine]))
        optimizer.step()
        reference.zero_grad()
        theirs = loss(whole(inputs), targets)
        theirs.backward()
        reference.step()
        expected.append(theirs.item())
    pipeline.close()
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in stage.parameters()])
    theirs = torch.cat([parameter.detach().reshape(-1) for parameter in whole[grid.stage].parameters()])
    result = {
        "rank": grid.rank,
        "refused": refused,
        "in_the_world": in_the_world,
        "stage": grid.stage,
        "replica": grid.replica,
        "describe": grid.describe(),
        "losses": losses,
        "expected": expected,
        "difference": float((flat - theirs).abs().max()),
        "parameters": hashlib.sha256(flat.numpy().tobytes()).hexdigest(),
        "dp_ratio": compression.stats()["total"]["ratio"] if args.compression != "none" else 1.0,
    }
    for line in MPI.COMM_WORLD.gather(json.dumps(result), 0) or []:
        print(line, flush=True)


if __name__ == "__main__":
    main()
