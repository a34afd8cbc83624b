"""Compression on a CUDA device: which builds support it, and how damaged payloads are reported.

With methods that select exactly k elements and all-gather them, no call waits for the device during backward, but for
the norms of `clip_norm` and the scale of a loss scaler that was given as `loss_scale`. Buffers, messages, hints and
votes are on the device, and the collectives use them there: Horovod must have been built for CUDA. The token does not
depend on the gradient and stays on the CPU. Raising an error for a damaged payload at once would mean waiting for the
decoder, so the vote of the next step reports it. Other methods wait for numbers that the host needs; docs/cuda.md lists
them.

In a hierarchical exchange, or if the build does not support CUDA, gradients are copied to the CPU and back.
"""

import torch

from hvd_sparse.algorithms import Algorithm
from hvd_sparse.library import why_no_cuda
from hvd_sparse.torch import ops
from hvd_sparse.torch.collectives import Collectives
from hvd_sparse.torch.exchange import Exchange

LEAST_CAPABILITY = (8, 0)


def is_cuda(device: torch.device) -> bool:
    """Return whether this is a CUDA device, whose operators return before they are done."""
    return device.type == "cuda"


def why_not(device: torch.device, collectives: Collectives) -> str:
    """Return why compressors do not work on a CUDA device here; an empty string if they do."""
    if why := why_no_cuda("torch"):
        return why
    if torch.cuda.is_available():
        if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
            return "the kernels need a GPU of compute capability 8.0 or newer, such as A100"
        try:
            ops.all_finite(torch.zeros(1, device=device))
        except RuntimeError as error:  # compiled for other GPUs, or with a CUDA that is newer than the driver
            return f"the kernels do not run on this GPU: {error}"
    return collectives.why_not_cuda()


def device_of(parameters: torch.device, collectives: Collectives) -> torch.device:
    """Return the device on which gradients are compressed, given the parameters' device."""
    return torch.device("cpu") if is_cuda(parameters) and why_not(parameters, collectives) else parameters


def crossing(algorithm: Algorithm, parameters: torch.device, collectives: Collectives) -> str:
    """Return the warning for parameters on a CUDA device whose gradients are compressed on the CPU."""
    why = 'exchange="hierarchical" works on the CPU' if algorithm.is_hierarchical else why_not(parameters, collectives)
    return f"hvd_sparse: the parameters are on a CUDA device, but their gradients cross to the CPU and back: {why}"


def refuse_damage(exchange: Exchange, damage: torch.Tensor) -> None:
    """Raise RuntimeError with all ranks' records of damaged payloads. On the CPU, the decoder itself raises."""
    gathered = exchange.allgather("damage", damage.view(torch.uint8)).wait().view(torch.int64).view(-1, 2).tolist()
    met = [
        f"rank {rank} received {count} of them, the first from rank {first // 256} with the wrong "
        f"{ops.FAILED_CHECKS[first % 256 - 1]}"
        for rank, (count, first) in enumerate(gathered)
        if count > 0
    ]
    raise RuntimeError(
        f"hvd_sparse: payloads were damaged on their way in the step before this one: {'; '.join(met)}. Their sums "
        "became NaN. Load a checkpoint, and check the memory and the network of these machines"
    )
