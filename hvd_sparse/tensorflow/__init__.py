"""hvd_sparse for TensorFlow: `hvd.DistributedGradientTape(tape, compression=Compression.dgc(model))`.

`ops` and `*_ops`, the native operators, need no Horovod; the compressors do, and load it when first named.
"""

import importlib
from typing import TYPE_CHECKING

from hvd_sparse.library import require_horovod

if TYPE_CHECKING:
    from hvd_sparse.tensorflow.compression import Compression, SparseCompressor
    from hvd_sparse.tensorflow.reduction import reduce_gradients

__all__ = ["Compression", "SparseCompressor", "reduce_gradients"]


def __getattr__(name: str):
    if name in __all__:
        require_horovod("tensorflow")
        module = "reduction" if name == "reduce_gradients" else "compression"
        return getattr(importlib.import_module(f"hvd_sparse.tensorflow.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return all names, with those that are not loaded yet."""
    return sorted({*globals(), *__all__})
