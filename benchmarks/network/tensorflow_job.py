"""One rank of a training job in TensorFlow with Horovod's gradient tape. It has only multi-layer perceptrons."""

import os
import statistics
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
        self.velocities = zeros_like(self.variables)
        self._step = tf.function(self._train, autograph=False)

    def _loss(self, variables, features, labels) -> tf.Tensor:
        values = features
        for kernel, bias in zip(variables[::2], variables[1::2], strict=True):
            values = values @ kernel + bias
            if bias is not variables[-1]:
                values = tf.nn.relu(values)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, values))

    def _update(self, variables, velocities, gradients) -> None:
        for variable, velocity, gradient in zip(variables, velocities, gradients, strict=True):
            if self.momentum:
                gradient = velocity.assign(self.momentum * velocity + gradient)
            variable.assign_sub(0.001 * gradient)

    def _train(self, features, labels) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = self._loss(self.variables, features, labels)
        gradients = hvd.DistributedGradientTape(tape, compression=self.compression).gradient(loss, self.variables)
        self._update(self.variables, self.velocities, gradients)
        return loss

    def run(self, steps: int) -> float:
        """Take a number of steps; return their seconds."""
        start = perf_counter()
        for step in range(steps):
            self._step(*self.batches[step % len(self.batches)]).numpy()
        return perf_counter() - start

    def compute(self, steps: int) -> float:
        """Return the median seconds of a training step of a copy of the model without an exchange."""
        twins = [tf.Variable(variable) for variable in self.variables]
        velocities = zeros_like(twins)

        @tf.function(autograph=False)
        def train_alone(features, labels):
            with tf.GradientTape() as tape:
                loss = self._loss(twins, features, labels)
            self._update(twins, velocities, tape.gradient(loss, twins))
            return loss

        times = []
        for step in range(steps + 1):
            start = perf_counter()
            train_alone(*self.batches[step % len(self.batches)]).numpy()
            times.append(perf_counter() - start)
        return statistics.median(times[1:])  # the first step traces the graph

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


def zeros_like(variables: list[tf.Variable]) -> list[tf.Variable]:
    """Return a velocity for each variable."""
    return [tf.Variable(tf.zeros_like(variable), trainable=False) for variable in variables]


def layers(spec: Layers) -> list[tf.Variable]:
    """Return kernel and bias of each layer. They are the same on every rank."""
    random, made = np.random.default_rng(0), []
    for number, (inputs, outputs) in enumerate(zip(spec.widths, spec.widths[1:], strict=False)):
        kernel = random.standard_normal((inputs, outputs), np.float32) * np.float32((2 / inputs) ** 0.5)
        made.append(tf.Variable(kernel, name=f"kernel{number}"))
        made.append(tf.Variable(tf.zeros([outputs]), name=f"bias{number}"))
    return made
