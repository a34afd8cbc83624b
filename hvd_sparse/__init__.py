"""Sparse gradient compression for Horovod.

A gradient goes one way through it:

    gradient -> memory -> threshold -> select -> payload ==exchange==> payloads of all ranks -> sum -> gradient

`hvd_sparse.torch.Compression` holds the compressors for PyTorch. This package itself imports no framework.
"""

from hvd_sparse._version import __version__

__all__ = ["__version__"]
