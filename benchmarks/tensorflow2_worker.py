"""One rank's compression of a variable in a step, in TensorFlow: with native operators, and with tf.math.top_k."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from entries import draw_entries

from hvd_sparse.tensorflow import bucket_ops, ops
from hvd_sparse.tensorflow.codecs import CODECS
from hvd_sparse.tensorflow.codecs.base import Arrival, Round
from hvd_sparse.tensorflow.error_feedback import make_error_feedback
from hvd_sparse.tensorflow.threshold import ThresholdHints
from hvd_sparse.units import Units
from hvd_sparse.wire import top_k_count

CAN_CHANGE_THREADS = False  # not after the first operation


def use_threads(count: int) -> None:
    """Compute with this number of threads."""
    tf.config.threading.set_intra_op_parallelism_threads(count)
    tf.config.threading.set_inter_op_parallelism_threads(count)


def as_tensor(array: np.ndarray) -> tf.Tensor:
    """Return a gradient as a tensor."""
    return tf.constant(array)


def pack(indices: np.ndarray, values: np.ndarray, n: int, coding: str) -> tf.Tensor:
    """Return a payload of k of n elements."""
    return ops.pack(tf.constant(indices), tf.constant(values), n, len(indices), coding)


def unpack(payload: tf.Tensor, n: int, k: int, coding: str) -> np.ndarray:
    """Return the indices of a payload."""
    return ops.unpack(payload, n, k, coding)[0].numpy()


class Worker:
    """Accumulates, selects, packs and clears in one tf.function; detects gradients that are not finite."""

    def __init__(self, algorithm, n: int):
        self.momentum = algorithm.local_momentum
        self.n, self.k = n, top_k_count(n, algorithm.schedule.density(0))
        self.memory = make_error_feedback(algorithm, tf.Variable(tf.zeros([n])), "benchmark")
        self.hints = ThresholdHints(["benchmark"])
        self._compress = tf.function(self._compress_once)
        self._compress_with_topk = tf.function(self._compress_with_topk_once)
        self._accumulate = tf.function(lambda gradient: self.memory.accumulate(gradient, tf.ones([]), Units(1), True))
        self._reduce = tf.function(lambda gathered: ops.reduce_payloads(gathered, 0, n, self.k)[0])

    def _compress_once(self, gradient: tf.Tensor) -> tf.Tensor:
        names, counts = ["benchmark"], tf.constant([self.k], tf.int64)
        buffers = [[buffer] for buffer in self.memory.destination() if buffer is not None]
        options = {"factors": tf.ones([1]), "ks": counts, "threshold_hints": self.hints.values(names, counts)}
        payload, finite, info = bucket_ops.accumulate_bucket([gradient], *buffers, **options, **self.memory.rule())
        tf.debugging.Assert(finite[0], ["the benchmark's gradient must be finite"])
        self.hints.update(names, counts, info)
        residual, *velocity = self.memory.cleared()
        bucket_ops.clear_bucket(payload, counts, False, [residual], velocity)
        return payload

    def _compress_with_topk_once(self, gradient: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        tf.debugging.Assert(tf.reduce_all(tf.math.is_finite(gradient)), ["the benchmark's gradient must be finite"])
        update = gradient
        if self.momentum:
            update = self.memory.velocity.assign(self.memory.velocity * self.momentum + gradient)
        residual = self.memory.residual.assign_add(update)
        indices = tf.math.top_k(tf.abs(residual), self.k, sorted=False).indices
        values = tf.gather(residual, indices)
        self._clear(indices, values)
        return indices, values

    def _clear(self, indices: tf.Tensor, values: tf.Tensor) -> None:
        for kind, new in self.memory.after_sending(tf.zeros_like(values)).items():
            ops.scatter_update(self.memory.buffers[kind], tf.cast(indices, tf.int64), new)

    def compress(self, gradient: tf.Tensor) -> None:
        """Compress like `hvd_sparse.tensorflow`."""
        self.bytes = self._compress(gradient)

    def compress_with_topk(self, gradient: tf.Tensor) -> None:
        """Do the same work with TensorFlow operators. The payload has 32-bit indices."""
        self.plain = self._compress_with_topk(gradient)

    def accumulate(self, gradient: tf.Tensor) -> None:
        """Only accumulate."""
        self._accumulate(gradient).numpy()

    def reduce(self, ranks: int) -> None:
        """Decode and add the payloads of several ranks. Each rank has different places."""
        if not hasattr(self, "gathered"):
            draws = [draw_entries(self.n, self.k, rank) for rank in range(ranks)]
            self.gathered = tf.stack([pack(*drawn, self.n, "run_length") for drawn in draws])
        self._reduce(self.gathered).numpy()

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the payload, the selection by tf.math.top_k, and the residual, if they exist."""
        plain = getattr(self, "plain", (tf.zeros([0]), tf.zeros([0])))
        return {
            "payload": getattr(self, "bytes", tf.zeros([0])).numpy(),
            "indices": plain[0].numpy(),
            "values": plain[1].numpy(),
            "residual": self.memory.residual.numpy(),
        }


class Alone:
    """The exchange of a single rank, with the methods that a codec needs to compress."""

    def size(self) -> int:
        """Return the world size."""
        return 1


class Codec:
    """Compresses variables of given shapes, bucket by bucket in one tf.function, like one rank."""

    def __init__(self, algorithm, shapes: list[tuple[int, ...]]):
        variables = {f"{i:03}": tf.Variable(tf.zeros(shape)) for i, shape in enumerate(shapes)}
        self.feedback = {name: make_error_feedback(algorithm, one, name) for name, one in variables.items()}
        self.codec = CODECS[algorithm.selection](algorithm, self.feedback, Alone())
        self.density, self.step = algorithm.schedule.density(0), 0
        self.sent = 0  # elements sent in the last step
        self._traced = tf.function(self._compress)

    def _compress(self, gradients: list[tf.Tensor], step: tf.Tensor) -> tf.Tensor:
        units = Units(1, 1.0, tf.ones([], tf.float64))
        now = Round(step, step, self.density, None, units, "", ignores_payloads=tf.constant(False))
        arrivals = [
            Arrival(name, gradient, feedback, True, factor=tf.ones([]))
            for gradient, (name, feedback) in zip(gradients, self.feedback.items(), strict=True)
        ]
        buckets = self.codec.encode(arrivals, now)
        self.codec.learn(buckets, now)
        for bucket in buckets:
            self.codec.decode(bucket, bucket.message, now)  # ops whose results are unused do not run
        return tf.add_n([tf.reduce_sum(bucket.ks) for bucket in buckets])

    def compress(self, gradients: list[tf.Tensor]) -> None:
        """Accumulate, select, pack and clear."""
        self.sent = int(self._traced(gradients, tf.constant(self.step, tf.int64)))
        self.step += 1
