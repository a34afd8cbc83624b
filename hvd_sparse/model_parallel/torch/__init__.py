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
from hvd_sparse.model_parallel.process_grid import Order
from hvd_sparse.model_parallel.torch.boundary import ThresholdBoundary
from hvd_sparse.model_parallel.torch.pipeline import Pipeline

__all__ = ["DamagedMessage", "Hybrid", "Pipeline", "PipelineError", "ProcessGrid", "ThresholdBoundary", "hybrid"]


def hybrid(stages: int, order: Order = "pipeline") -> Hybrid:
    """Start Horovod with one process set per stage; call it in place of `hvd.init()`, on every rank.

    If an error ends one rank, the others raise PipelineError in their current or next step, or show the reason below
    the error that Horovod raises. At exit, ranks wait for each other.

    Args:
        stages: Number of stages of a pipeline; it must divide the world size. Each pipeline is a replica of the model.
        order: "pipeline", the stages of a replica are on consecutive ranks; or "replica", the replicas of a stage are.

    Returns:
        grid: this rank's stage and replica. process_set: the ranks with the same stage, for `Compression` and Horovod's
        optimizer. communicator: the ranks of this replica, for `Pipeline`.

    Raises:
        TypeError: `stages` is no integer.
        ValueError: `stages` is below 1 or does not divide the world size, or `order` is unknown.
        RuntimeError: Horovod has been started already, or has other ranks than MPI.
        ImportError: Horovod or mpi4py is not installed.
    """
    require_horovod("torch")
    import horovod.torch as hvd

    return _hybrid.hybrid(hvd, stages, order)
