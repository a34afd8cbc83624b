"""Asynchronous training for TensorFlow, where training scripts import it from; it is in `hvd_sparse.parameter_server.tensorflow`."""

from hvd_sparse.parameter_server.tensorflow import *  # noqa: F403
from hvd_sparse.parameter_server.tensorflow import __all__ as __all__
