"""Model-parallel training for TensorFlow, where training scripts import it from; it is in `hvd_sparse.model_parallel.tensorflow`."""

from hvd_sparse.model_parallel.tensorflow import *  # noqa: F403
from hvd_sparse.model_parallel.tensorflow import __all__ as __all__
