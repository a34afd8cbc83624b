"""One of two ranks that share a GPU, or the only one: python ddp_job.py parity|events|nccl|train RANK RANKS PORT.

    parity   trains every case of parity_job on the CPU and on the GPU, and compares payload bytes and parameters
    events   does so in steps with NaN, unused parameters, reloaded states and a reset, of every method
    nccl     does what `parity` does for one rank, whose GPU communicates by NCCL and nothing else
    train    trains a convolutional network on the GPU for 1,000 steps

test_gpu_ddp.py starts it. The last line of the output of each rank is one JSON object.
"""

import json
import sys
from datetime import timedelta

import parity_job
import torch
import torch.distributed as dist
from gpu_jobs import compare_cases, compare_events, train_digits
from torch.nn.parallel import DistributedDataParallel

from hvd_sparse.torch.ddp import Compression


def use_nccl():
    """Replace the process group by one of this rank alone, over NCCL, which accepts one rank for each GPU."""
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.HashStore(), world_size=1, rank=0)


def wrap_terms(model, compression):
    """Return a function that reduces gradients into those of the model."""
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.002, find_unused_parameters=True)
    compression.register(wrapped)

    def reduce(gradients):
        wrapped.zero_grad()
        wrapped(gradients).backward()

    return reduce


def wrap_model(model, optimizer, compression):
    """Return the model under DistributedDataParallel, and the optimizer."""
    wrapped = DistributedDataParallel(model)
    compression.register(wrapped)
    return wrapped, optimizer


def gather(tensor):
    """Return the tensors of all ranks."""
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(others, tensor)
    return others


def main():
    """Run as one rank."""
    what, (rank, ranks, port) = sys.argv[1], map(int, sys.argv[2:])
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", address, timedelta(seconds=60), world_size=ranks, rank=rank)
    kinds = {
        "parity": lambda: compare_cases(parity_job.train_ddp),
        "nccl": lambda: compare_cases(parity_job.train_ddp, use_nccl),
        "events": lambda: compare_events(Compression, rank, wrap_terms),
        "train": lambda: train_digits(Compression, rank, wrap_model, gather),
    }
    result = kinds[what]()
    dist.destroy_process_group()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
