"""Sparse gradient compression for Horovod.

The path of a gradient:

    gradient -> error feedback -> threshold -> select -> payload ==exchange==> payloads of all ranks -> sum -> gradient

`hvd_sparse.torch.Compression` and `hvd_sparse.tensorflow.Compression` have the compressors for Horovod,
`hvd_sparse.torch.ddp.Compression` those for DistributedDataParallel. This package itself imports no framework.
"""

from hvd_sparse._version import __version__

__all__ = ["__version__"]
