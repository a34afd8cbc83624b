"""One of the ranks that share a GPU under Horovod: horovodrun -np RANKS python horovod_job.py WHAT FOLDER.

WHAT is parity, events or train, as in ddp_job.py. test_gpu_horovod.py starts it. Each rank writes FOLDER/RANK.json.
A single rank takes part in collectives, as if other ranks might join it.
"""

import json
import os
import sys
from pathlib import Path

import horovod.torch as hvd
import parity_job
import torch
from gpu_jobs import compare_cases, compare_events, train_digits

from hvd_sparse.torch import Compression


def wrap_terms(model, compression):
    """Return a function that reduces gradients into those of the model."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = hvd.DistributedOptimizer(sgd, model.named(), compression=compression)

    def reduce(gradients):
        optimizer.zero_grad()
        model(gradients).backward()
        optimizer.synchronize()

    return reduce


def wrap_model(model, optimizer, compression):
    """Return the model, the same on all ranks, and Horovod's optimizer."""
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)


def gather(tensor):
    """Return the tensors of all ranks."""
    return hvd.allgather(tensor[None])


def main():
    """Run as one rank."""
    what, folder = sys.argv[1], Path(sys.argv[2])
    hvd.init()
    if hvd.size() == 1:
        os.environ["HOROVOD_ELASTIC"] = "1"  # Horovod's optimizer leaves a single rank's gradients alone otherwise
    kinds = {
        "parity": lambda: compare_cases(parity_job.train_torch),
        "events": lambda: compare_events(Compression, hvd.rank(), wrap_terms),
        "train": lambda: train_digits(Compression, hvd.rank(), wrap_model, gather),
    }
    (folder / f"{hvd.rank()}.json").write_text(json.dumps(kinds[what]()))


if __name__ == "__main__":
    main()
