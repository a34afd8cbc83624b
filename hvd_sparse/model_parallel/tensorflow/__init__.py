"""Model-parallel training for TensorFlow with sparse activations (DCT-MP), alone or hybrid: `docs/model-parallel.md`.

    stage = tf.keras.Sequential(first_half) if rank == 0 else tf.keras.Sequential(second_half)
    pipeline = Pipeline(stage, boundary=ThresholdBoundary(0.05), micro_batches=4, loss=cross_entropy)
    loss = pipeline.step(inputs, targets)
    optimizer.apply_gradients(zip(pipeline.gradients(), stage.trainable_variables))

Import this before loading a saved model that has a `ThresholdBoundary`: it registers layer and operators.
"""

from hvd_sparse.library import require_horovod
from hvd_sparse.mailbox import DamagedMessage
from hvd_sparse.model_parallel import PipelineError, ProcessGrid
from hvd_sparse.model_parallel import hybrid as _hybrid
from hvd_sparse.model_parallel.hybrid import Hybrid
from hvd_sparse.model_parallel.tensorflow.boundary import ThresholdBoundary
from hvd_sparse.model_parallel.tensorflow.pipeline import Pipeline

__all__ = ["DamagedMessage", "Hybrid", "Pipeline", "PipelineError", "ProcessGrid", "ThresholdBoundary", "hybrid"]


def hybrid(stages: int, order: str = "pipeline") -> Hybrid:
    """Start Horovod with one process set per stage; see `hvd_sparse.model_parallel.hybrid.hybrid`."""
    require_horovod("tensorflow")
    import horovod.tensorflow as hvd

    return _hybrid.hybrid(hvd, stages, order)
