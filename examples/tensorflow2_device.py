"""The threads and the GPU of one rank in TensorFlow."""

import os

import tensorflow as tf


def prepare(local_rank=None):
    """Use as many threads as asked for, and one GPU of the host, with memory as needed.

    local_rank: this rank's number on its host; None: as mpirun tells it.
    """
    tf.config.threading.set_intra_op_parallelism_threads(int(os.environ.get("OMP_NUM_THREADS", "0")))
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        number = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")) if local_rank is None else local_rank
        own = gpus[number % len(gpus)]
        tf.config.set_visible_devices(own, "GPU")
        tf.config.experimental.set_memory_growth(own, True)
