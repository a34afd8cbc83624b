"""One rank of a training job in TensorFlow with Horovod's gradient tape. It has only multi-layer perceptrons."""

import os
from time import perf_counter

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from methods import MODELS, Layers, Method

from hvd_sparse.tensorflow import Compression

tensors = tf  # worker.py measures the links with these tensors


class Job:
    """A model, its optimizer, and batches."""

    def __init__(self, model: str, method: Method, batch_size: int):
        hvd.init()
        if tf.config.threading.get_intra_op_parallelism_threads() != 1:  # must be set before the first operation
            tf.config.threading.set_intra_op_parallelism_threads(1)
            tf.config.threading.set_inter_op_parallelism_threads(1)
        spec = MODELS[model]
        if not isinstance(spec, Layers):
            raise SystemExit(f"{model} is timed with --framework pytorch")
        self.rank, self.method = hvd.rank(), method
        self.variables = layers(spec)
        self.numels = [int(np.prod(variable.shape)) for variable in self.variables]
        random = np.random.default_rng(self.rank)
        self.batches = [
            (
                tf.constant(random.standard_normal((batch_size, spec.widths[0]), np.float32)),
                tf.constant(random.integers(spec.widths[-1], size=batch_size)),
            )
            for _ in range(4)
        ]
        momentum = 0.9
        if method.package == "horovod":
            self.compression = getattr(hvd.Compression, method.name)
        else:
            self.compression = getattr(Compression, method.name)(self.variables, **method.settings)
            momentum = 0.0 if "momentum" in method.settings else 0.9
        self.momentum = momentum
        self.velocities = [tf.Variable(tf.zeros_like(variable), trainable=False) for variable in self.variables]
        self._step, self._alone = (tf.function(one, autograph=False) for one in (self._train, self._backward))

    def _gradients(self, tape, features, labels):
        with tape:
            values = features
            for kernel, bias in zip(self.variables[::2], self.variables[1::2], strict=True):
                values = (
                    tf.nn.relu(values @ kernel + bias) if bias is not self.variables[-1] else values @ kernel + bias
                )
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, values)
            loss = tf.reduce_mean(loss)
        return loss

    def _train(self, features, labels) -> tf.Tensor:
        tape = tf.GradientTape()
        loss = self._gradients(tape, features, labels)
        gradients = hvd.DistributedGradientTape(tape, compression=self.compression).gradient(loss, self.variables)
        for variable, velocity, gradient in zip(self.variables, self.velocities, gradients, strict=True):
            if self.momentum:
                gradient = velocity.assign(self.momentum * velocity + gradient)
            variable.assign_sub(0.001 * gradient)
        return loss

    def _backward(self, features, labels) -> list[tf.Tensor]:
        tape = tf.GradientTape()
        loss = self._gradients(tape, features, labels)
        return tape.gradient(loss, self.variables)

    def run(self, steps: int) -> float:
        """Take a number of steps; return their seconds."""
        start = perf_counter()
        for step in range(steps):
            self._step(*self.batches[step % len(self.batches)]).numpy()
        return perf_counter() - start

    def compute(self, steps: int) -> float:
        """Return the seconds of forward and backward without an exchange."""
        self._alone(*self.batches[0])
        start = perf_counter()
        for step in range(steps):
            self._alone(*self.batches[step % len(self.batches)])[0].numpy()
        return (perf_counter() - start) / steps

    def own_seconds(self) -> tuple[float, float]:
        """Return zeros, because a graph does not measure time."""
        return 0.0, 0.0

    def largest(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        return int(tf.reduce_max(hvd.allgather(tf.constant([number]), name="largest")))

    def bytes_per_step(self) -> int:
        """Return the bytes per step that this rank passes to the exchange."""
        if self.method.package == "hvd_sparse":
            return int(self.compression.stats()["step"]["payload_bytes"])
        return (2 if self.method.name == "fp16" else 4) * sum(self.numels)

    def close(self) -> None:
        """End the job."""
        hvd.shutdown()


def layers(spec: Layers) -> list[tf.Variable]:
    """Return kernel and bias of each layer. They are the same on every rank."""
    random, made = np.random.default_rng(0), []
    for number, (inputs, outputs) in enumerate(zip(spec.widths, spec.widths[1:], strict=False)):
        kernel = random.standard_normal((inputs, outputs), np.float32) * np.float32((2 / inputs) ** 0.5)
        made.append(tf.Variable(kernel, name=f"kernel{number}"))
        made.append(tf.Variable(tf.zeros([outputs]), name=f"bias{number}"))
    return made
