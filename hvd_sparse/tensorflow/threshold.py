"""The thresholds of all selections of a step, as vectors in variables.

The rule is that of `hvd_sparse.threshold.ThresholdHint`, on tensors: a graph cannot call it, and a few operations on
vectors cost less than a few on each of many scalars.
"""

import tensorflow as tf

from hvd_sparse.tensorflow.memory import make_variable
from hvd_sparse.threshold import HIGHEST_MARGIN, LOWEST_MARGIN, ThresholdHint


class ThresholdHints:
    """Last step's thresholds, taken slightly low, as the guesses at this step's; no state that a checkpoint needs."""

    def __init__(self, names: list[str]):
        self._row = {name: row for row, name in enumerate(names)}
        first = ThresholdHint()
        self._threshold, self._margin, self._k = (
            make_variable([len(names)], f"hvd_sparse/hint/{kind}", tf.float64, value)
            for kind, value in (("threshold", first.threshold), ("margin", first.margin), ("k", float(first.k)))
        )

    def values(self, names: list[str], counts: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return a hint, float64, for each of the selections named; 0 where there is none."""
        threshold, margin, known = self._read(names)
        return tf.unstack(_hints(threshold, margin, known, tf.cast(tf.stack(counts), tf.float64)))

    def update(self, names: list[str], counts: list[tf.Tensor], infos: list[tf.Tensor]) -> list[tf.Operation]:
        """Learn from the selections: infos are (threshold, how many elements reached the hint)."""
        threshold, margin, known = self._read(names)
        k = tf.cast(tf.stack(counts), tf.float64)
        found, passed = tf.unstack(tf.stack(infos), axis=1)
        used = _hints(threshold, margin, known, k) > 0.0
        lower = tf.maximum(1.0 - 2.0 * (1.0 - margin), LOWEST_MARGIN)
        higher = tf.minimum(1.0 - 0.9 * (1.0 - margin), HIGHEST_MARGIN)
        crowded = passed > k + tf.floor(k / 4.0) + 16.0
        learnt = tf.where(passed < k, lower, tf.where(crowded, higher, margin))
        rows = self._rows(names)
        changes = ((self._threshold, found), (self._margin, tf.where(used, learnt, margin)), (self._k, k))
        return [variable.scatter_update(tf.IndexedSlices(new, rows)) for variable, new in changes]

    def _read(self, names: list[str]) -> list[tf.Tensor]:
        rows = self._rows(names)
        return [tf.gather(variable.read_value(), rows) for variable in (self._threshold, self._margin, self._k)]

    def _rows(self, names: list[str]) -> tf.Tensor:
        return tf.constant([self._row[name] for name in names], tf.int64)


def _hints(threshold, margin, known, k) -> tf.Tensor:
    return tf.where(tf.equal(known, k), threshold * margin, tf.zeros_like(threshold))
