"""Compression for Lightning: a callback of the `Trainer`.

    callback = CompressionCallback(lambda named: Compression.dgc(named, density=0.01, momentum=0.9))
    trainer = lightning.Trainer(strategy="ddp", devices=2, callbacks=[callback])

`pytorch_lightning` has the same code as `lightning.pytorch`: its Trainer takes the same callback.
"""

import weakref
from typing import Any

from hvd_sparse.frames import warn
from hvd_sparse.torch.attach import NOT_WRAPPED, Make, attach, distributed, warn_of_clipping
from hvd_sparse.torch.ddp import DDPCompressor

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    try:
        from pytorch_lightning import Callback
    except ModuleNotFoundError as error:
        raise ImportError("hvd_sparse.torch.lightning needs Lightning: pip install lightning") from error


class CompressionCallback(Callback):
    """Compresses the gradients of a fit with the strategy "ddp": `Trainer(strategy="ddp", callbacks=[...])`.

    When a fit starts, and the model is on its device, it builds the compressor, registers it in the model, and sets its
    loss scale to the precision plugin's scaler. Checkpoints have the sum of all ranks' states: `fit(ckpt_path=...)`
    restores it, at any world size. A second fit of the same module continues with each rank's state of the first. With
    one device and without "ddp", Lightning wraps no model: a warning says once that nothing is compressed.

    Args:
        make: Returns a new compressor of the (name, parameter) pairs that it is called with:
            `lambda named: Compression.dgc(named, density=0.01, momentum=0.9)`, of `hvd_sparse.torch.ddp.Compression`.
        log_every: Report rank 0's numbers to the trainer's loggers every so many steps (`log_to`); None: never.

    Attributes:
        compression: The compressor of the last fit; None before the first, and if nothing is compressed.

    Raises:
        TypeError: When a fit starts: the strategy is not "ddp" (FSDP, DeepSpeed), or `make` returned something else.
        ValueError: When a fit starts: `DDPCompressor.register` refuses the model, or `load_state_dict` the state.
    """

    def __init__(self, make: Make, log_every: int | None = None):
        self._make, self._log_every = make, log_every
        self.compression: DDPCompressor | None = None
        self._module: weakref.ref | None = None  # of the last fit
        self._loaded: dict[str, Any] = {}  # from the checkpoint that this fit starts from
        self._has_told = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Build the compressor, or warn that nothing is compressed."""
        model = distributed(trainer.strategy.model)
        if model is None:
            self._refuse(trainer)
            return
        state = self._loaded or self._own_state(pl_module)
        self.compression = None  # free its memory before the next one needs some
        self.compression = attach(self._make, model, getattr(trainer.precision_plugin, "scaler", None))
        if state:
            self.compression.load_state_dict(state)
        self._loaded, self._module = {}, weakref.ref(pl_module)
        if trainer.is_global_zero:
            warn_of_clipping(self.compression, "gradient_clip_val", trainer.gradient_clip_val, off="it to None")
            if self._log_every is not None:
                self.compression.log_to(lambda numbers, step: _log(trainer.loggers, numbers, step), self._log_every)

    def state_dict(self) -> dict[str, Any]:
        """Return the sum of all ranks' states: Lightning calls it on all ranks, and one saves."""
        if self._loaded or self.compression is None:  # with one device, what was loaded waits for a run with several
            return self._loaded
        return self.compression.state_dict(summed=True)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Forget the last fit: this one continues from the checkpoint, also if that has no residuals."""
        self._module = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a checkpoint until the compressor exists."""
        self._loaded = state_dict

    def _own_state(self, module: object) -> dict[str, Any]:
        """Return this rank's state after the last fit; empty if there was none of this module."""
        if self.compression is None or self._module is None or self._module() is not module:
            return {}
        return self.compression.state_dict()

    def _refuse(self, trainer: Any) -> None:
        """Raise TypeError if several processes train a model without DistributedDataParallel; warn of a single one."""
        self.compression = None
        if trainer.world_size > 1:
            raise TypeError(
                "hvd_sparse: CompressionCallback needs a strategy that wraps the model in DistributedDataParallel, got "
                f"{type(trainer.strategy).__name__}. With FSDP or DeepSpeed gradients cannot be compressed: set "
                'Trainer(strategy="ddp"), or leave out the callback'
            )
        if not self._has_told:
            self._has_told = True
            warn(NOT_WRAPPED.format(f"Lightning's {type(trainer.strategy).__name__}"))


def _log(loggers: list[Any], numbers: dict[str, float], step: int) -> None:
    """Report a step to each of the trainer's loggers."""
    for logger in loggers:
        logger.log_metrics(numbers, step)
