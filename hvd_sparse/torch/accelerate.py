"""Compression for Hugging Face's Accelerate: one call after `Accelerator.prepare`.

    model, optimizer = accelerator.prepare(model, optimizer)
    compression = compress(accelerator, model, lambda named: Compression.dgc(named, density=0.01, momentum=0.9))

Nothing here imports Accelerate.
"""

from typing import TYPE_CHECKING

from hvd_sparse.frames import warn
from hvd_sparse.torch.attach import NOT_WRAPPED, Make, attach, distributed
from hvd_sparse.torch.ddp import DDPCompressor

if TYPE_CHECKING:
    from accelerate import Accelerator


class SummedState:
    """What Accelerate saves and loads of a compressor: the sum of all ranks' states, as it saves one rank's only.

    With one process nothing is compressed: what was loaded is saved again, for a later run with several.
    """

    def __init__(self, compression: DDPCompressor | None):
        self._compression = compression
        self._loaded: dict = {}

    def state_dict(self) -> dict:
        """Return the sum. Accelerate calls it on all ranks."""
        return self._loaded if self._compression is None else self._compression.state_dict(summed=True)

    def load_state_dict(self, state: dict) -> None:
        """Continue from the sum; with the empty state of one process, from empty residuals."""
        if self._compression is None:
            self._loaded = state
        elif state:
            self._compression.load_state_dict(state)
        else:
            self._compression.reset()


def compress(accelerator: "Accelerator", model: object, make: Make) -> DDPCompressor | None:
    """Compress the gradients of a model that `accelerator.prepare` has returned.

    Call it once for each model, on every rank, after `prepare` and before `load_state`. It registers the compressor in
    the model, sets its loss scale to the accelerator's scaler, and adds the sum of all ranks' states to what
    `save_state` saves and `load_state` restores, at any world size.

    Args:
        accelerator: The `accelerate.Accelerator`.
        model: The prepared model.
        make: Returns a new compressor of the (name, parameter) pairs that it is called with:
            `lambda named: Compression.dgc(named, density=0.01, momentum=0.9)`, of `hvd_sparse.torch.ddp.Compression`.

    Returns:
        The compressor; None with one process, after a warning, as Accelerate does not wrap the model then.

    Raises:
        TypeError: The model was not prepared, or not for DistributedDataParallel (FSDP, DeepSpeed); `make` returned
            something else.
        ValueError: `DDPCompressor.register` refuses the model.
    """
    wrapped = distributed(model)
    if wrapped is None and accelerator.num_processes > 1:
        raise TypeError(
            "hvd_sparse: compress needs a model that accelerator.prepare has wrapped in DistributedDataParallel, got "
            f"{type(model).__name__} with distributed_type {accelerator.distributed_type}. Pass what prepare returned; "
            "with FSDP or DeepSpeed gradients cannot be compressed: choose multi-GPU or multi-CPU in accelerate config"
        )
    compression = None if wrapped is None else attach(make, wrapped, accelerator.scaler)
    if compression is None:
        warn(NOT_WRAPPED.format("Accelerate"))
    accelerator.register_for_checkpointing(SummedState(compression))
    return compression
