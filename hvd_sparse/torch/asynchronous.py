"""Asynchronous training for PyTorch, where training scripts import it from; it is in `hvd_sparse.parameter_server.torch`."""

from hvd_sparse.parameter_server.torch import *  # noqa: F403
from hvd_sparse.parameter_server.torch import __all__ as __all__
