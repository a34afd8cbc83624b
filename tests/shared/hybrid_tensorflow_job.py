"""A small hybrid run: replicas of a pipeline, and Horovod between them. Each rank prints one JSON line."""

import argparse
import hashlib
import json

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from mpi4py import MPI
from pipeline_oracle_tensorflow import Mask, Oracle, cross_entropy, make_stages

from hvd_sparse.tensorflow import Compression
from hvd_sparse.tensorflow.model_parallel import Pipeline, hybrid

SIZES = (12, 64, 48, 5)
ROWS, STEPS, LR = 8, 30, 0.1


def batch(step, replicas):
    """Return inputs and targets of all replicas, concatenated."""
    random = np.random.default_rng([7, step])
    inputs = random.normal(size=(replicas * ROWS, SIZES[0])).astype(np.float32)
    return inputs, (inputs[:, :5] * 2).argmax(axis=1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--order", default="pipeline")
    parser.add_argument("--density", type=float, default=1.0)
    parser.add_argument("--compression", default="none")
    parser.add_argument("--micro-batches", type=int, default=2)
    args = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    grid, process_set, communicator = hybrid(args.stages, args.order)
    sizes = [*SIZES[: args.stages], SIZES[-1]]
    stage = make_stages(sizes)[grid.stage]
    pipeline = Pipeline(
        stage,
        boundary=args.density,
        micro_batches=args.micro_batches,
        loss=cross_entropy,
        communicator=communicator,
        timeout=60,
    )
    compression = hvd.Compression.none
    if args.compression != "none":
        compression = getattr(Compression, args.compression)(
            stage.trainable_variables, density=0.2, min_numel=16, process_set=process_set
        )
    whole = Oracle(make_stages(sizes), [Mask(1.0)] * (args.stages - 1), cross_entropy, 1)
    optimizer, reference = (tf.keras.optimizers.SGD(LR) for _ in range(2))
    losses, expected = [], []
    for step in range(STEPS):
        inputs, targets = batch(step, grid.replicas)
        mine = slice(grid.replica * ROWS, (grid.replica + 1) * ROWS)
        losses.append(pipeline.step(inputs[mine], targets[mine]))
        gradients = pipeline.reduced_gradients(compression=compression)  # among the replicas of this stage
        optimizer.apply_gradients(zip(gradients, stage.trainable_variables, strict=True))
        theirs, gradients = whole.gradients(inputs, targets)
        reference.apply_gradients(zip(gradients, whole.variables, strict=True))
        expected.append(theirs)
    pipeline.close()
    flat, theirs = (
        np.concatenate([variable.numpy().ravel() for variable in one.trainable_variables])
        for one in (stage, whole.stages[grid.stage])
    )
    result = {
        "rank": grid.rank,
        "stage": grid.stage,
        "replica": grid.replica,
        "losses": losses,
        "expected": expected,
        "difference": float(np.abs(flat - theirs).max()),
        "parameters": hashlib.sha256(flat.tobytes()).hexdigest(),
        "dp_ratio": compression.stats()["total"]["ratio"] if args.compression != "none" else 1.0,
    }
    for line in MPI.COMM_WORLD.gather(json.dumps(result), 0) or []:
        print(line, flush=True)


if __name__ == "__main__":
    main()
