"""Model-parallel training with sparse activations (DCT-MP): boundaries, messages, pipelines, without any framework.

`hvd_sparse.torch.model_parallel` and `hvd_sparse.tensorflow.model_parallel` are what training scripts use.

A stage's activations are a matrix with one row per sample and f columns. Forward, each row keeps the density * f
elements of largest magnitude; their values and positions (the mask) are sent. Backward, the gradient at these positions
is sent: values alone, as both stages know the mask. There is no error feedback.
Source: Dynamic Communication Thresholding (Gupta et al., 2021), section 2.2, algorithm 2.
"""

from hvd_sparse.model_parallel.boundary import THRESHOLDS, BoundarySettings
from hvd_sparse.model_parallel.notices import PipelineError
from hvd_sparse.model_parallel.process_grid import ProcessGrid
from hvd_sparse.model_parallel.schedule import SCHEDULES

__all__ = ["SCHEDULES", "THRESHOLDS", "BoundarySettings", "PipelineError", "ProcessGrid"]
