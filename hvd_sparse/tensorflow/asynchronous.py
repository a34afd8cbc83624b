"""Asynchronous training for TensorFlow: `hvd_sparse.parameter_server.tensorflow`, as training scripts import it."""

from hvd_sparse.parameter_server.tensorflow import *  # noqa: F403 - its __all__, which is this module's
from hvd_sparse.parameter_server.tensorflow import __all__ as __all__
