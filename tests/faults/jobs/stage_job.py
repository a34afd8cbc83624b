"""A pipeline of three stages, with a fault in the messages of a stage.

    mpirun -np 3 python stage_job.py FOLDER FRAMEWORK

`injector` reads the fault from the environment. Each rank records its losses, and how it ended.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "shared"))
if sys.argv[2] == "tensorflow":
    import tensorflow as tf  # before MPI: after it, MPI_Finalize may take TensorFlow's hwloc for its own, and crash

import numpy as np
from injector import Injector
from mpi4py import MPI

SIZES, ROWS, STEPS, TIMEOUT = (9, 31, 40, 4), 6, 8, 60.0
folder, framework, rank = Path(sys.argv[1]), sys.argv[2], MPI.COMM_WORLD.Get_rank()
losses: list[float] = []


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets."""
    draw = np.random.default_rng(step)
    return draw.normal(size=(ROWS, SIZES[0])).astype(np.float32), draw.integers(0, SIZES[-1], ROWS)


def torch_step():
    """Return a context, and what trains on a batch and returns the loss."""
    import torch
    from pipeline_oracle import make_stages

    from hvd_sparse.torch.model_parallel import Pipeline

    torch.set_num_threads(1)
    stage = make_stages(SIZES)[rank]
    loss = torch.nn.functional.cross_entropy
    pipeline = Pipeline(stage, boundary=0.3, micro_batches=2, schedule="1f1b", loss=loss, timeout=TIMEOUT)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)

    def step(inputs, targets) -> float:
        optimizer.zero_grad()
        found = pipeline.step(torch.from_numpy(inputs), torch.from_numpy(targets))
        optimizer.step()
        return found

    return contextlib.nullcontext(), step


def tensorflow_step():
    """The same in TensorFlow."""
    from pipeline_oracle_tensorflow import cross_entropy, make_stages

    from hvd_sparse.tensorflow.model_parallel import Pipeline

    tf.config.threading.set_intra_op_parallelism_threads(1)
    stage = make_stages(SIZES)[rank]
    pipeline = Pipeline(stage, boundary=0.3, micro_batches=2, schedule="1f1b", loss=cross_entropy, timeout=TIMEOUT)

    def step(inputs, targets) -> float:
        found = float(pipeline.step(inputs, targets))
        for variable, gradient in zip(stage.trainable_variables, pipeline.gradients(), strict=True):
            variable.assign_sub(0.1 * gradient)
        return found

    return pipeline, step


def main() -> None:
    """Train."""
    injector = Injector.from_environment(rank)
    context, step = {"torch": torch_step, "tensorflow": tensorflow_step}[framework]()
    with context:
        for number in range(STEPS):
            injector.begin(number)
            losses.append(float(step(*batch(number))))


status: dict = {}
try:
    main()
except BaseException as error:
    status = {"error": f"{type(error).__name__}: {error}"}
    raise
finally:
    (folder / f"{rank}.json").write_text(json.dumps({**status, "losses": losses, "time": time.time()}))
