"""Model-parallel training for TensorFlow: `hvd_sparse.model_parallel.tensorflow`, as training scripts import it."""

from hvd_sparse.model_parallel.tensorflow import *  # noqa: F403 - its __all__, which is this module's
from hvd_sparse.model_parallel.tensorflow import __all__ as __all__
