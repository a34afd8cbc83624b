"""hvd_sparse for PyTorch: `hvd.DistributedOptimizer(..., compression=Compression.dgc(model.named_parameters()))`.

`Compression` needs Horovod, and loads it when first named. `ddp` (for DistributedDataParallel), `ops` and `*_ops` (the
native operators) do not.
"""

import importlib
from typing import TYPE_CHECKING

from hvd_sparse.library import require_horovod

if TYPE_CHECKING:
    from hvd_sparse.torch.compression import Compression, SparseCompressor

__all__ = ["Compression", "SparseCompressor"]


def __getattr__(name: str):
    if name in __all__:
        require_horovod("torch")
        return getattr(importlib.import_module("hvd_sparse.torch.compression"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return all names, with those that are not loaded yet."""
    return sorted({*globals(), *__all__})
