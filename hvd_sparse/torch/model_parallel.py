"""Model-parallel training for PyTorch, where training scripts import it from; it is in `hvd_sparse.model_parallel.torch`."""

from hvd_sparse.model_parallel.torch import *  # noqa: F403
from hvd_sparse.model_parallel.torch import __all__ as __all__
