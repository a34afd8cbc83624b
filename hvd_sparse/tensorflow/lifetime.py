"""Tells when compressors are built in the training step, where each would live for one step only."""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

BUILT_INSIDE = (
    "hvd_sparse: build the compressor once, outside the tf.function: in it, each trace would build another, without "
    "the residuals"
)


@contextlib.contextmanager
def built_outside() -> Iterator[None]:
    """Raise RuntimeError where TensorFlow refuses a compressor's first variable: in a function that is traced again."""
    try:
        yield
    except ValueError as error:
        if tf.inside_function():
            raise RuntimeError(BUILT_INSIDE) from error
        raise
