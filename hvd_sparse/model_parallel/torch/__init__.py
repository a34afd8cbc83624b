"""Model-parallel training for PyTorch with sparse activations (DCT-MP), alone or hybrid; see `docs/model-parallel.md`.

stage = Sequential(first_half) if rank == 0 else Sequential(second_half)
pipeline = Pipeline(stage, boundary=ThresholdBoundary(0.05), micro_batches=4, loss=cross_entropy)
loss = pipeline.step(inputs, targets)
optimizer.step()
"""

from hvd_sparse.library import require_horovod
from hvd_sparse.mailbox import DamagedMessage
from hvd_sparse.model_parallel import PipelineError, ProcessGrid
from hvd_sparse.model_parallel import hybrid as _hybrid
from hvd_sparse.model_parallel.hybrid import Hybrid
from hvd_sparse.model_parallel.torch.boundary import ThresholdBoundary
from hvd_sparse.model_parallel.torch.pipeline import Pipeline

__all__ = ["DamagedMessage", "Hybrid", "Pipeline", "PipelineError", "ProcessGrid", "ThresholdBoundary", "hybrid"]


def hybrid(stages: int, order: str = "pipeline") -> Hybrid:
    """Start Horovod with one process set per stage; see `hvd_sparse.model_parallel.hybrid.hybrid`."""
    require_horovod("torch")
    import horovod.torch as hvd

    return _hybrid.hybrid(hvd, stages, order)
