"""Model-parallel training for PyTorch: `hvd_sparse.model_parallel.torch`, as training scripts import it."""

from hvd_sparse.model_parallel.torch import *  # noqa: F403 - its __all__, which is this module's
from hvd_sparse.model_parallel.torch import __all__ as __all__
