"""The boundary of DCT-MP as a Keras layer: keeps the largest activations of each row, forward and backward.

Source: Dynamic Communication Thresholding (Gupta et al., 2021), section 2.2 and algorithm 2. Differences from the paper
are those of the PyTorch twin: "topk" keeps exactly round(density * f) elements of a row, and a seeded hash orders ties;
NaN is kept first, so that it stays visible; with "laplace", evaluation uses a running mean of thresholds.

A process that loads a SavedModel with boundaries must import `hvd_sparse.tensorflow.model_parallel` first: that
registers the operators. A file of Keras (.keras, .h5) needs the same import, for the class.
"""

import inspect
import math

import tensorflow as tf

from hvd_sparse.model_parallel.boundary import BoundarySettings, Threshold
from hvd_sparse.tensorflow import row_ops as ops
from hvd_sparse.traffic import BoundaryStats

UNCAST = (
    "autocast"
    if "autocast" in inspect.signature(tf.keras.layers.Layer.add_weight).parameters
    else "experimental_autocast"
)


@tf.keras.utils.register_keras_serializable(package="hvd_sparse")
class ThresholdBoundary(tf.keras.layers.Layer):
    """Keep the largest magnitudes of each row, and in backward the gradient of the same elements (DCT-MP).

    Put it at any split of a network, also in one process to study the effect; in a `Pipeline`, pass it as `boundary`.
    Evaluation uses the thresholded network, too: with "laplace" the running threshold, a non-trained weight; until that
    is estimated, all elements are kept. "laplace" never keeps zeros. Source: Dynamic Communication Thresholding (Gupta
    et al., 2021), section 2.2 and Algorithm 2.

    Input: float32, float64, float16 or bfloat16 of any shape with rows, of an unknown batch size too; nothing is cast
    to the layer's dtype. `tf.recompute_grad` recomputes the same mask: eagerly a batch then counts twice, in `batches`,
    `stats` and the running threshold; in a `tf.function` once. There are no XLA kernels, so no jit_compile.

    Args:
        density: Part of a row's elements to keep, in (0, 1]; 1 keeps everything.
        threshold: "topk": exactly max(1, round(density * f)) of the f elements of each row. "laplace": elements that
            reach -b * ln(density), with b the mean magnitude of the row: one pass, no sort, and a density that drifts
            (see `stats`).
        start_dim: Dimensions before it are rows; the others are a row's f elements. 1: a row is a sample; -1: a vector
            of the last dimension.
        momentum: Momentum of the running threshold, as in PyTorch's batch normalization: the weight of the new value.
        seed: Seed of the order among equal magnitudes.
        kwargs: Arguments of any Keras layer: name, dtype, trainable.

    Raises:
        ValueError: A value is out of range; the input has no dimension before `start_dim`, or none from it on; or it
            has no features.
        TypeError: A value has the wrong type.
        tf.errors.InvalidArgumentError: The same, in a graph.
    """

    def __init__(
        self,
        density: float,
        threshold: Threshold = "topk",
        *,
        start_dim: int = 1,
        momentum: float = 0.1,
        seed: int = 0,
        **kwargs,
    ):
        super().__init__(**{"autocast": False, **kwargs})
        self.settings = BoundarySettings(density, threshold, start_dim, momentum, seed).checked()
        self.supports_masking, self.supports_jit = True, False
        state = {"shape": (), "initializer": "zeros", "trainable": False, UNCAST: False}
        self.running_threshold = self.add_weight(name="running_threshold", dtype="float32", **state)
        self.batches = self.add_weight(name="batches", dtype="int64", **state)
        self._counters = Counters()

    def call(self, activations: tf.Tensor, training=None) -> tf.Tensor:
        """Return the kept activations, and zero for the others."""
        if self.settings.density == 1.0:
            self._counters.count(tf.size(activations, tf.int64), tf.size(activations, tf.int64))
            return activations
        if not activations.dtype.is_floating:
            raise ValueError(f"activations must be of real numbers, got {activations.dtype.name}")
        mask = tf.reshape(self.mask(activations, training), tf.shape(activations))
        mask.set_shape(activations.shape)
        return tf.where(mask, activations, tf.zeros([], activations.dtype))

    def mask(self, activations: tf.Tensor, training=None) -> tf.Tensor:
        """Return the mask, bool[B, f], and count the kept elements, like `call`."""
        rows, columns = self._rows(tf.stop_gradient(activations))
        settings, counters, numel = self.settings, self._counters, tf.size(rows, tf.int64)
        if settings.density == 1.0:
            counters.count(numel, numel)
            return tf.ones(tf.shape(rows), tf.bool)
        if settings.threshold == "topk":
            k = self._kept(columns)
            mask, thresholds = ops.select_top_k_rows(rows, k, settings.seed)
            counters.count(tf.shape(rows, tf.int64)[0] * k, numel)
        else:
            thresholds = _if(
                training, lambda: ops.laplace_threshold_rows(rows, settings.density), lambda: self._running(rows)
            )
            mask = ops.filter_threshold_rows(rows, thresholds)
            counters.count(tf.math.count_nonzero(mask), numel)
        _if(training, lambda: self._learn(thresholds), lambda: tf.constant(0, tf.int64))
        return mask

    def stats(self) -> BoundaryStats:
        """Return the occupancy, the part of elements kept: of the last batch, and as mean_occupancy of all batches.

        Both count training and evaluation (of a pipeline, training alone: `Pipeline.stats`). The threshold is the
        running mean over training batches of the rows' mean threshold, and `batches` their number. In a `Pipeline`,
        batches are micro-batches. The counts are of this process: they are not saved in Keras' files.
        """
        (kept, numel), (all_kept, all_numel) = self._counters.last.numpy(), self._counters.total.numpy()
        return {
            "occupancy": int(kept) / max(1, int(numel)),
            "mean_occupancy": int(all_kept) / max(1, int(all_numel)),
            "threshold": float(self.running_threshold.numpy()),
            "batches": int(self.batches.numpy()),
        }

    def get_config(self) -> dict:
        """Return the arguments of the constructor."""
        return {**super().get_config(), **{name: getattr(self.settings, name) for name in BoundarySettings._fields}}

    def _rows(self, activations: tf.Tensor) -> tuple[tf.Tensor, int | tf.Tensor]:
        """Return activations as a matrix, and its columns, a tensor where they are not known while tracing."""
        if activations.shape.rank is None:
            raise ValueError("activations must have a known number of dimensions, got an unknown shape")
        start, known = self.settings.start_dim, activations.shape.as_list()
        self.settings.row_shape(tuple(1 if size is None else size for size in known))
        if None not in known[start:]:
            columns = math.prod(known[start:])
            return tf.reshape(activations, [-1, columns]), columns
        sizes = tf.shape(activations, tf.int64)
        columns = tf.reduce_prod(sizes[start:])
        return tf.reshape(activations, tf.stack([tf.reduce_prod(sizes[:start]), columns])), columns

    def _kept(self, columns: int | tf.Tensor) -> int | tf.Tensor:
        if not tf.is_tensor(columns):
            return self.settings.kept(columns)
        kept = tf.floor(self.settings.density * tf.cast(columns, tf.float64) + 0.5)  # as `wire.top_k_count`
        return tf.maximum(tf.constant(1, tf.int64), tf.cast(kept, tf.int64))

    def _running(self, rows: tf.Tensor) -> tf.Tensor:
        """Return the running threshold for each row, float64[B]."""
        return tf.fill(tf.shape(rows)[:1], tf.cast(tf.convert_to_tensor(self.running_threshold), tf.float64))

    def _learn(self, thresholds: tf.Tensor) -> tf.Tensor:
        """Move the running threshold towards a batch's, the mean of its finite ones; the first is taken as it is.

        A batch without rows changes nothing. Returns the batches seen.
        """
        finite = tf.math.is_finite(thresholds)
        count = tf.cast(tf.math.count_nonzero(finite), tf.float64)
        mean = tf.reduce_sum(tf.where(finite, thresholds, tf.zeros([], tf.float64))) / tf.maximum(count, 1.0)
        seen, old = tf.convert_to_tensor(self.batches), tf.convert_to_tensor(self.running_threshold)
        has_rows = tf.size(thresholds) > 0
        part = tf.where(seen == 0, 1.0, self.settings.momentum) * tf.cast(has_rows, tf.float32)
        self.running_threshold.assign(old + part * (tf.cast(mean, tf.float32) - old))
        self.batches.assign(seen + tf.cast(has_rows, tf.int64))
        return seen


class Counters(tf.__internal__.tracking.AutoTrackable):
    """Kept and all elements, int64[2], of the last batch and in total. Keras does not save them, unlike weights."""

    def __init__(self):
        self.last = tf.Variable(tf.zeros([2], tf.int64), trainable=False, name="last")
        self.total = tf.Variable(tf.zeros([2], tf.int64), trainable=False, name="total")

    def count(self, kept: tf.Tensor, numel: tf.Tensor) -> None:
        """Record how many of `numel` elements are kept; both int64."""
        counted = tf.stack([kept, numel])
        self.last.assign(counted)
        self.total.assign_add(counted)


def _if(condition, then, otherwise) -> tf.Tensor:
    """Return the result of one of two functions. If the condition is a tensor, the graph decides when it runs."""
    value = tf.get_static_value(condition) if tf.is_tensor(condition) else condition
    if value is None and tf.is_tensor(condition):
        return tf.cond(tf.cast(condition, tf.bool), then, otherwise)
    return then() if value else otherwise()
