"""Two replicas of two stages, where one rank fails in step 3: python hybrid_failure_job.py FRAMEWORK WHERE RANK.

WHERE: "before" a step; "between" the pipeline's step and Horovod's exchange; or "leave": the rank ends without an
error. Each rank prints the error that it raises, and ends with it. Before this, one rank asks for a different number of
micro-batches, and all ranks print the resulting error.
"""

import contextlib
import sys

import numpy as np
from mpi4py import MPI

STAGES, SIZES, STEPS = 2, (12, 64, 5), 6


def built(make, rank, who):
    """Return a pipeline, after a failed one whose ranks differ in the number of micro-batches."""
    try:
        make(3 if rank == who else 2)
    except ValueError as error:
        sys.stderr.write(f"rank {rank} refuses {error}\n")
    return make(2)


def torch_steps(rank, who):
    """Return a context, a function for the pipeline's step, and one for Horovod's exchange."""
    import horovod.torch as hvd
    import torch
    from pipeline_oracle import make_stages

    from hvd_sparse.torch import Compression
    from hvd_sparse.torch.model_parallel import Pipeline, hybrid

    torch.set_num_threads(1)
    grid, process_set, communicator = hybrid(STAGES)
    stage = make_stages(SIZES)[grid.stage]
    loss = torch.nn.functional.cross_entropy
    options = {"loss": loss, "communicator": communicator, "timeout": 60}
    pipeline = built(lambda number: Pipeline(stage, micro_batches=number, **options), rank, who)
    compression = Compression.dct(stage.named_parameters(), density=0.2, min_numel=16, process_set=process_set)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(stage.parameters(), lr=0.1),
        named_parameters=stage.named_parameters(),
        compression=compression,
        backward_passes_per_step=2,
        process_set=process_set,
    )

    def step(inputs, targets):
        optimizer.zero_grad()
        pipeline.step(torch.from_numpy(inputs), torch.from_numpy(targets))

    return contextlib.nullcontext(), step, optimizer.step


def tensorflow_steps(rank, who):
    """Return the same for TensorFlow, with the pipeline as context."""
    import tensorflow as tf
    from pipeline_oracle_tensorflow import cross_entropy, make_stages

    from hvd_sparse.tensorflow import Compression
    from hvd_sparse.tensorflow.model_parallel import Pipeline, hybrid

    tf.config.threading.set_intra_op_parallelism_threads(1)
    grid, process_set, communicator = hybrid(STAGES)
    stage = make_stages(SIZES)[grid.stage]
    options = {"loss": cross_entropy, "communicator": communicator, "timeout": 60}
    pipeline = built(lambda number: Pipeline(stage, micro_batches=number, **options), rank, who)
    compression = Compression.dct(stage.trainable_variables, density=0.2, min_numel=16, process_set=process_set)
    options = {"compression": compression, "process_set": process_set}
    return pipeline, pipeline.step, lambda: pipeline.reduced_gradients(**options)


def main():
    """Train, and fail at the chosen place."""
    framework, where, who = sys.argv[1], sys.argv[2], int(sys.argv[3])
    rank = MPI.COMM_WORLD.Get_rank()
    try:
        make = {"torch": torch_steps, "tensorflow": tensorflow_steps}[framework]
        context, step, reduce = make(rank, who)
        with context:
            for number in range(STEPS):
                is_time = number == 3 and rank == who
                if is_time and where == "before":
                    raise ArithmeticError("out of luck")
                if is_time and where == "leave":
                    return
                random = np.random.default_rng(number)
                step(random.normal(size=(8, SIZES[0])).astype(np.float32), random.integers(0, SIZES[-1], 8))
                if is_time and where == "between":
                    raise ArithmeticError("out of luck")
                reduce()
    except Exception as error:
        sys.stderr.write(f"rank {rank} raises {type(error).__name__}: {error}\n")
        raise


if __name__ == "__main__":
    main()
