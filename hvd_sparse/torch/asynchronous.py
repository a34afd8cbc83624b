"""Asynchronous training for PyTorch: `hvd_sparse.parameter_server.torch`, as training scripts import it."""

from hvd_sparse.parameter_server.torch import *  # noqa: F403 - its __all__, which is this module's
from hvd_sparse.parameter_server.torch import __all__ as __all__
