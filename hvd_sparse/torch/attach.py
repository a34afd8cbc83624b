"""Gives a model that Lightning, Accelerate or another trainer has wrapped in DistributedDataParallel its compressor."""

from collections.abc import Callable, Iterable

import torch
from torch.nn.parallel import DistributedDataParallel

from hvd_sparse.frames import warn
from hvd_sparse.messages import clips_late
from hvd_sparse.torch.compressor import Scale
from hvd_sparse.torch.ddp import DDPCompressor

Make = Callable[[Iterable[tuple[str, torch.nn.Parameter]]], DDPCompressor]

NOT_WRAPPED = (
    "hvd_sparse: {} does not wrap a single process's model in DistributedDataParallel: nothing is compressed, and "
    "momentum, weight_decay and clip_norm of the compressor are not applied. Give them to the optimizer for such a run"
)


def distributed(model: object) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel that a trainer has made of a model, inside what torch.compile returned, too.

    None: it has made none.
    """
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def attach(make: Make, model: DistributedDataParallel, scaler: Scale | None) -> DDPCompressor:
    """Build a compressor of the model's parameters, register it, and set its loss scale.

    Args:
        make: Returns a new compressor of the (name, parameter) pairs that it is called with.
        model: The wrapped model, on its device.
        scaler: The loss scaler; None: the loss is not scaled.

    Raises:
        TypeError: `make` returned something else.
        ValueError: `DDPCompressor.register` refuses the model.
    """
    compression = make(model.module.named_parameters())
    if not isinstance(compression, DDPCompressor):
        raise TypeError(
            "hvd_sparse: the function must return a new compressor of hvd_sparse.torch.ddp.Compression, such as lambda "
            f"named: Compression.dgc(named, density=0.01); it returned {type(compression).__name__}"
        )
    compression.register(model)
    if scaler is not None:
        compression.loss_scale = scaler
    return compression


def warn_of_clipping(compression: DDPCompressor, option: str, bound: float | None, off: str) -> None:
    """Warn if a trainer clips the reduced gradient. option: the name of its bound. off: how to turn it off."""
    if bound:
        warn(clips_late(option, compression.algorithm, off))
