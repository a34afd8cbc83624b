"""The Horovod part of the PyTorch examples: horovodrun -np 4 python EXAMPLE."""

import horovod.torch as hvd
import torch

init, finish, rank, size, local_rank = hvd.init, hvd.shutdown, hvd.rank, hvd.size, hvd.local_rank
Compression = hvd.Compression
PLUGIN = "hvd_sparse.torch"


def has_cuda():
    """Return whether gradients may be on a GPU."""
    return torch.cuda.is_available() and hvd.cuda_built()


def distribute(model, optimizer, compression, args, warmup_steps):
    """Return model, optimizer and compressor; rank 0's parameters are broadcast."""
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    return model, optimizer, compression


def step(model, optimizer, clip_norm):
    """Step the optimizer; clip the averaged gradient first unless clip_norm is 0."""
    if not clip_norm:
        optimizer.step()
        return
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    with optimizer.skip_synchronize():
        optimizer.step()


def sum_over_ranks(values, name):
    """Sum a list of numbers over all ranks; every rank gets the same floats."""
    return hvd.allreduce(torch.tensor(values, dtype=torch.float64), name=name, op=hvd.Sum).tolist()
