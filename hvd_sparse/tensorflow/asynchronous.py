"""Asynchronous training for TensorFlow: `hvd_sparse.parameter_server.tensorflow`, as training scripts import it."""

from hvd_sparse.parameter_server.tensorflow import *  # noqa: F403
from hvd_sparse.parameter_server.tensorflow import __all__ as __all__
