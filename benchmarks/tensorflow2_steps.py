"""A model with given variable shapes and its training step in TensorFlow with Horovod."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_sparse.tensorflow import Compression

hvd.init()
tf.config.threading.set_intra_op_parallelism_threads(1)
rank, size = hvd.rank, hvd.size


def as_tensor(array: np.ndarray) -> tf.Tensor:
    """Return a gradient as a tensor."""
    return tf.constant(array)


class Model:
    """Variables and a traced step with Horovod's gradient tape."""

    def __init__(self, title: str, shapes: list[tuple[int, ...]], method: tuple[str, dict] | None):
        self.variables = [tf.Variable(tf.zeros(shape), name=f"{title}_{i:03}") for i, shape in enumerate(shapes)]
        compression = hvd.Compression.none
        self.momenta = [tf.Variable(tf.zeros(shape), trainable=False) for shape in shapes]
        if method is not None:
            name, settings = method
            compression = getattr(Compression, name)(self.variables, **settings)
            self.momenta = [None] * len(shapes) if "momentum" in settings else self.momenta
        self.step = tf.function(lambda gradients: self._step(gradients, compression))

    def _step(self, gradients: list[tf.Tensor], compression) -> None:
        with tf.GradientTape() as tape:
            terms = [tf.reduce_sum(v * g) for v, g in zip(self.variables, gradients, strict=True)]
            loss = tf.add_n(terms)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        reduced = tape.gradient(loss, self.variables)
        for variable, velocity, gradient in zip(self.variables, self.momenta, reduced, strict=True):
            if velocity is not None:
                gradient = velocity.assign(0.9 * velocity + gradient)
            variable.assign_sub(0.01 * gradient)
