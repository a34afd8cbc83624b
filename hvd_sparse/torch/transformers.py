"""Compression for the `Trainer` of Hugging Face's Transformers: a callback.

    trainer.add_callback(CompressionCallback(trainer, lambda named: Compression.dgc(named, density=0.01, momentum=0.9)))

A Trainer tells its callbacks nothing of the model that DistributedDataParallel has wrapped: this one asks the Trainer.
"""

import os
import weakref
from typing import Any

import torch

from hvd_sparse.checkpoint import atomic_file
from hvd_sparse.checks import some
from hvd_sparse.frames import warn
from hvd_sparse.torch.attach import NOT_WRAPPED, Make, attach, distributed, warn_of_clipping
from hvd_sparse.torch.ddp import DDPCompressor

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    raise ImportError("hvd_sparse.torch.transformers needs Transformers: pip install transformers[torch]") from error

FILE = "compression.pt"  # in each checkpoint's folder


class CompressionCallback(TrainerCallback):
    """Compresses the gradients of a `Trainer` with several processes: `trainer.add_callback(...)`.

    When training starts, and the model is on its device, it builds the compressor, registers it in the model, and sets
    its loss scale to the Trainer's scaler. Each checkpoint has the sum of all ranks' states in `compression.pt`;
    `train(resume_from_checkpoint=...)` restores it from a checkpoint in `output_dir`, at any world size. Another
    `train()` of the same model continues with each rank's state. With one process, the Trainer wraps no model: a
    warning says that nothing is compressed.

    Args:
        trainer: The `Trainer` that the callback is added to.
        make: Returns a new compressor of the (name, parameter) pairs that it is called with:
            `lambda named: Compression.dgc(named, density=0.01, momentum=0.9)`, of `hvd_sparse.torch.ddp.Compression`.
        log_every: Report rank 0's numbers by `trainer.log` every so many steps (`log_to`); None: never.

    Attributes:
        compression: The compressor of the last training; None before the first, and if nothing is compressed.

    Raises:
        TypeError: When training starts: the model is not in DistributedDataParallel (FSDP, DeepSpeed), or `make`
            returned something else.
        ValueError: When training starts: `DDPCompressor.register` refuses the model, or `load_state_dict` the state.
    """

    def __init__(self, trainer: Any, make: Make, log_every: int | None = None):
        self._trainer = weakref.ref(trainer)  # which has the callback
        self._make, self._log_every = make, log_every
        self._numbers: dict[str, float] = {}  # of this step, to be reported at its end
        self.compression: DDPCompressor | None = None
        self._model: weakref.ref | None = None  # the DistributedDataParallel of the last training

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Build the compressor, or warn that nothing is compressed."""
        trainer = self._trainer()
        model = None if trainer is None else distributed(trainer.model_wrapped)
        if trainer is None or model is None:
            self._refuse(args, trainer)
            return
        if self.compression is None or self._model is None or self._model() is not model:
            self.compression = attach(self._make, model, trainer.accelerator.scaler)
            self._model = weakref.ref(model)
        if state.global_step > 0:
            self._resume(self.compression, args, state)
        if state.is_world_process_zero:
            warn_of_clipping(self.compression, "max_grad_norm", args.max_grad_norm, off="it to 0.0")
            if self._log_every is not None:
                self.compression.log_to(lambda numbers, step: self._numbers.update(numbers), self._log_every)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the numbers of this step: during its backward pass, the Trainer still counts the one before."""
        trainer = self._trainer()
        if self._numbers and trainer is not None:
            numbers, self._numbers = self._numbers, {}
            own = control.should_log
            trainer.log(numbers)
            control.should_log = own  # `log` clears it, and the Trainer would not report its loss in this step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the sum of all ranks' states to the checkpoint: all ranks call it, and one saves."""
        if self.compression is None:
            return
        saved = self.compression.state_dict(summed=True)
        if args.should_save:  # on each node with save_on_each_node, as what the Trainer saves
            with atomic_file(_path(args, state)) as file:
                torch.save(saved, file)

    def _resume(self, compression: DDPCompressor, args: Any, state: Any) -> None:
        """Load the state in the checkpoint that training resumes from; warn if it has none."""
        path = _path(args, state)
        exist = [False] * args.world_size  # on each rank: to load a state is a collective call
        torch.distributed.all_gather_object(exist, os.path.exists(path))
        if all(exist):
            compression.load_state_dict(torch.load(path, map_location="cpu"))
            return
        if any(exist):
            lacking = some([str(rank) for rank, exists in enumerate(exist) if not exists])
            raise ValueError(f"hvd_sparse: {path} is missing on ranks {lacking}: copy it to all, or delete it")
        compression.reset()
        if state.is_world_process_zero:
            warn(f"hvd_sparse: training resumes without {path}: residuals start empty")

    def _refuse(self, args: Any, trainer: Any) -> None:
        """Raise TypeError if several processes train a model without DistributedDataParallel; warn of a single one."""
        self.compression = None
        if args.world_size > 1:
            raise TypeError(
                "hvd_sparse: CompressionCallback needs the Trainer that it is added to, and its model in "
                f"DistributedDataParallel, got {type(getattr(trainer, 'model_wrapped', None)).__name__}. With FSDP or "
                "DeepSpeed gradients cannot be compressed"
            )
        warn(NOT_WRAPPED.format("Transformers"))


def _path(args: Any, state: Any) -> str:
    """Return the path of a compressor's state in the checkpoint of this step."""
    return os.path.join(args.output_dir, f"checkpoint-{state.global_step}", FILE)
