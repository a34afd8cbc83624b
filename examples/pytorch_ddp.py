"""The DistributedDataParallel part of the PyTorch examples: torchrun --nproc-per-node 4 EXAMPLE --host ddp.

Horovod is not needed. The baselines `none` and `fp16`, and PowerSGD, send gradients by PyTorch's own hooks.
"""

import gc
import os

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hvd_sparse.torch import ddp

PLUGIN, Compression = ddp.__name__, ddp.Compression  # which has the baselines, as that of horovod.torch
ONE_BUCKET = 1 << 14  # MiB: PowerSGD starts collectives in callbacks, those of two buckets in any order
VARIABLES = {"RANK": "OMPI_COMM_WORLD_RANK", "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE"}
VARIABLES |= {"LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK"}


def init(**options):
    """Start torch.distributed, as torchrun says, or mpirun with MASTER_ADDR and MASTER_PORT; alone without both."""
    for name, theirs in VARIABLES.items():
        os.environ.setdefault(name, os.environ.get(theirs, "1" if name == "WORLD_SIZE" else "0"))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_cuda() else "gloo")


def finish():
    """End torch.distributed and its threads: Python aborts if one of them frees a tensor while it exits."""
    gc.collect()  # the model and its compressor, which hold the process group
    dist.destroy_process_group()


rank, size = dist.get_rank, dist.get_world_size


def local_rank():
    """Return this rank's number on its machine."""
    return int(os.environ["LOCAL_RANK"])


def has_cuda():
    """Return whether gradients may be on a GPU."""
    return torch.cuda.is_available() and dist.is_nccl_available()


class PowerSGDStats:
    """Traffic counters for PyTorch's PowerSGD, with the interface of a compressor's `stats()`."""

    def __init__(self, state, parameters):
        self._state, self._dense_bytes = state, 4 * parameters

    def stats(self):
        """Return {"step": ..., "total": ...}; bytes are those of the factors, and of what is no matrix.

        The first steps are dense, and PyTorch does not count them.
        """
        state = self._state
        ratio, before, after = state.compression_stats()
        first = min(state.iter, state.start_powerSGD_iter) * self._dense_bytes
        step = bytes_of(self._dense_bytes, int(self._dense_bytes / max(ratio, 1.0)))
        return {"step": step, "total": bytes_of(first + 4 * before, first + 4 * after), "residual_norm": 0.0}


def bytes_of(dense_bytes, sent):
    """Return the entry of `stats()` for some bytes, which all-reduces send."""
    ratio = dense_bytes / sent if sent else 1.0
    sizes = {"dense_bytes": dense_bytes, "payload_bytes": sent, "received_bytes": sent}
    return {**sizes, "ratio": ratio, "density": 1.0, "seconds": {}}


def distribute(model, optimizer, compression, args, warmup_steps):
    """Return model, optimizer, and compressor or counters of PowerSGD; rank 0's parameters are broadcast."""
    devices = [torch.cuda.current_device()] if args.device == "cuda" else None
    buckets = {"bucket_cap_mb": ONE_BUCKET} if args.powersgd else {}
    wrapped = DistributedDataParallel(model, device_ids=devices, **buckets)
    if args.powersgd:
        begin = max(2, warmup_steps)  # the steps before send dense gradients
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=args.powersgd, start_powerSGD_iter=begin)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        compression = PowerSGDStats(state, sum(parameter.numel() for parameter in model.parameters()))
    else:
        compression.register(wrapped)
    return wrapped, optimizer, compression


def step(model, optimizer, clip_norm):
    """Step the optimizer; clip the averaged gradient first unless clip_norm is 0."""
    if clip_norm:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()


def sum_over_ranks(values, name):
    """Sum a list of numbers over all ranks; every rank gets the same floats."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()
