"""Callbacks for Keras' `fit`."""

import tensorflow as tf

from hvd_sparse.frames import warn
from hvd_sparse.log import numbers_of

IDLE = (
    "hvd_sparse: no step of this epoch has reduced gradients with this compressor: each rank trains alone. Keras 3: a "
    "train_step with hvd.DistributedGradientTape; Keras 2: hvd.DistributedOptimizer(..., compression=compression) in "
    "compile"
)


class LogCompression(tf.keras.callbacks.Callback):
    """Adds a compressor's numbers to Keras' own logs, for History, CSVLogger, TensorBoard and other callbacks.

    Args:
        compression: A compressor of `hvd_sparse.tensorflow.Compression`.
        prefix: The names are `{prefix}/ratio`, `{prefix}/density` and so on.

    At the end of an epoch, numbers are those of its last step. Put it before the callbacks that are to see them. With
    Horovod's `MetricAverageCallback`, pass it on every rank, or after that one: on rank 0 alone, rank 0 would wait for
    the others to average its numbers. If no step has reduced gradients with the compressor, it warns at the end of the
    first epoch.
    """

    def __init__(self, compression, prefix: str = "compression"):
        super().__init__()
        self._compression = compression
        self._prefix = prefix
        self._has_warned = False

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Add the numbers to the epoch's logs."""
        parts = self._compression._parts
        is_told = self._has_warned or parts.has_optimizer  # of that, `stats` warns
        if not is_told and parts.is_idle() and parts.exchange.rank() == 0:
            self._has_warned = True
            warn(IDLE)
        if logs is not None:
            logs.update(numbers_of(self._compression.stats(), self._prefix))
