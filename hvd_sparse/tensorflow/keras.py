"""Callbacks for Keras' `fit`."""

import tensorflow as tf

from hvd_sparse.log import numbers_of


class LogCompression(tf.keras.callbacks.Callback):
    """Adds a compressor's numbers to Keras' own logs, for History, CSVLogger, TensorBoard and other callbacks.

    Args:
        compression: A compressor of `hvd_sparse.tensorflow.Compression`.
        prefix: The names are `{prefix}/ratio`, `{prefix}/density` and so on.

    At the end of an epoch, numbers are those of its last step. Put it before the callbacks that are to see them. With
    Horovod's `MetricAverageCallback`, pass it on every rank, or after that one: on rank 0 alone, rank 0 would wait for
    the others to average its numbers.
    """

    def __init__(self, compression, prefix: str = "compression"):
        super().__init__()
        self._compression = compression
        self._prefix = prefix

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Add the numbers to the epoch's logs."""
        if logs is not None:
            logs.update(numbers_of(self._compression.stats(), self._prefix))
