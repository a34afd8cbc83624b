"""Thresholds in each variable: the sizes of the payloads differ between ranks and steps."""

import functools

import tensorflow as tf

from hvd_sparse.buckets import plan_buckets
from hvd_sparse.centres import columns_of
from hvd_sparse.tensorflow import ops
from hvd_sparse.tensorflow.memory import read_after
from hvd_sparse.tensorflow.scope import Entry, Selection, Step
from hvd_sparse.tensorflow.tensor_scope import TensorScope
from hvd_sparse.tensorflow.threshold import make_thresholds


class VaryingScope(TensorScope):
    """What reaches a threshold in each variable."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._thresholds = make_thresholds(self.algorithm, list(self.memories))
        self.kept = self._thresholds.variables

    def _choose(self, entries: list[Entry], step: Step) -> dict[str, Selection]:
        residuals = {}
        for entry in entries:
            finite = entry.memory.accumulate(entry.gradient, entry.factor, step.is_active)
            step.finite.append(finite)
            residuals[entry.name] = read_after(entry.memory.residual, finite)
        counts = self._counts([entry.memory.size for entry in entries], step)
        thresholds, self._changes = self._thresholds.at(step.number, residuals, counts, step.is_active)
        chosen, found_counts = {}, []
        for entry, threshold in zip(entries, thresholds, strict=True):
            indices, values = ops.filter_threshold(residuals[entry.name], threshold)
            found = tf.size(indices, tf.int64)
            k = tf.maximum(found, 1)
            chosen[entry.name] = self._packed(entry, indices, values, k, step)
            step.counted.add(
                sent=found if step.is_dense is None else tf.where(step.is_dense, tf.zeros_like(found), found)
            )
            found_counts.append(found)
        self._changes += self._thresholds.learn(list(residuals), counts, found_counts, step.is_active)
        return chosen

    def _packed(self, entry: Entry, indices: tf.Tensor, values: tf.Tensor, k: tf.Tensor, step: Step) -> Selection:
        """Return a selection with its payload."""
        travels, segments = values, self._segments([entry])
        if self.algorithm.values != "float32":
            travels = ops.quantize(values, self.algorithm.values, self.algorithm.centre, indices, segments)
        form = (self.algorithm.coding, self.algorithm.values, segments)
        payload = ops.pack(indices, travels, entry.memory.size, k, *form)
        step.counted.add(payload_bytes=tf.size(payload))
        return Selection(k, indices, values, travels, payload, None)

    def _send(self, entries: list[Entry], chosen: dict[str, Selection], step: Step) -> list[tf.Operation]:
        done = self._changes
        members = {entry.name: entry for entry in entries}
        for bucket in plan_buckets(self._settled_sizes(list(chosen)), self.algorithm.bucket_bytes, "bucket"):
            gathered = self._gather(bucket.name, [chosen[name].payload for name in bucket.offsets], step)
            self._give_decoders(gathered, [members[name] for name in bucket.offsets], step)
        for entry in entries:
            selection = chosen[entry.name]
            done += self._clear(entry.memory, selection.indices, selection.values, selection.left, step)
        return done

    def _give_decoders(self, gathered: tf.Tensor, members: list[Entry], step: Step) -> None:
        """Give each member of a bucket its `decode`."""
        form = (self.algorithm.coding, self.algorithm.values)
        sizes = [entry.memory.size for entry in members]
        columns = [columns_of(entry.memory.variable.shape, self.algorithm) for entry in members]
        places = ops.locate_payloads(gathered, sizes, self.exchange.size(), *form, columns)
        for position, entry in enumerate(members):
            place = (places[:, :, position], entry.memory.size, step.scale)
            entry.decode = functools.partial(ops.reduce_located, gathered, *place, *form, self._segments([entry]))
