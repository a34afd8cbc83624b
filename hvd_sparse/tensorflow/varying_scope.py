"""Thresholds in each variable: the sizes of the payloads differ between ranks and steps."""

from dataclasses import dataclass

import tensorflow as tf

from hvd_sparse.plan import plan_buckets
from hvd_sparse.tensorflow import ops
from hvd_sparse.tensorflow.bucket_scope import columns_of_all, decays, destinations
from hvd_sparse.tensorflow.memory import read_after
from hvd_sparse.tensorflow.scope import Entry, Step
from hvd_sparse.tensorflow.tensor_scope import TensorScope
from hvd_sparse.tensorflow.threshold import make_thresholds


@dataclass
class Message:
    """What this rank sends of a bucket."""

    name: str
    entries: list[Entry]
    payloads: tf.Tensor  # uint8[bytes]
    ks: tf.Tensor  # of the payloads, int64[members]


class VaryingScope(TensorScope):
    """What reaches a threshold in each variable."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._thresholds = make_thresholds(self.algorithm, list(self.memories))
        self.kept, self.kept_rows = self._thresholds.variables, self._thresholds.rows

    def _choose(self, entries: list[Entry], step: Step) -> list[Message]:
        entries = sorted(entries, key=lambda entry: entry.name)  # as buckets are cut
        names = [entry.name for entry in entries]
        counts = self._counts([entry.memory.size for entry in entries], step)
        residuals = self._accumulated(entries, step) if self._thresholds.reads else []
        thresholds, ks = self._thresholds.plan(step.number, names, counts, step.is_active, residuals)
        messages, infos, begin = [], [], 0
        with tf.control_dependencies(residuals):
            for bucket in plan_buckets(self._settled_sizes(names), self.algorithm.bucket_bytes, "bucket"):
                members = slice(begin, begin + len(bucket.offsets))
                message, info = self._filter(bucket.name, entries[members], thresholds[members], ks[members], step)
                messages.append(message)
                infos.append(info)
                begin = members.stop
        self._changes = self._thresholds.learn(names, counts, tf.concat(infos, 0), step.is_active)
        return messages

    def _accumulated(self, entries: list[Entry], step: Step) -> list[tf.Tensor]:
        """Accumulate each gradient, and return the residuals."""
        residuals = []
        for entry in entries:
            finite = entry.memory.accumulate(entry.gradient, entry.factor, step.units, step.is_active)
            step.finite.append(finite)
            residuals.append(read_after(entry.memory.residual, finite))
        return residuals

    def _filter(
        self, name: str, entries: list[Entry], thresholds: tf.Tensor, ks: tf.Tensor, step: Step
    ) -> tuple[Message, tf.Tensor]:
        """Accumulate, unless that is done, select what reaches the thresholds in the members of a bucket, and pack."""
        memories = [entry.memory for entry in entries]
        payloads, finite, info = ops.filter_bucket(
            [entry.gradient for entry in entries],
            *destinations(memories),
            factors=tf.stack([entry.factor for entry in entries]),
            weight_decay=decays(memories, step.units),
            thresholds=thresholds,
            ks=ks,
            is_active=False if self._thresholds.reads else step.is_active,
            centre=self.algorithm.centre,
            **self._varying_form(entries),
            **memories[0].rule(),
        )
        step.finite.append(finite)
        found = tf.cast(info[:, 1], tf.int64)
        step.counted.add(
            payload_bytes=tf.size(payloads, tf.int64), sent=tf.reduce_sum(found)
        )  # 0 where all travels dense
        return Message(name, entries, payloads, tf.maximum(found, 1)), info

    def _send(self, entries: list[Entry], messages: list[Message], step: Step) -> list[tf.Operation]:
        done = self._changes
        for message in messages:
            form = self._varying_form(message.entries)
            most_bytes = sum(self._largest_payload([entry], density=1.0) for entry in message.entries)
            gathered = self._gather(message.name, message.payloads, most_bytes, step)
            sizes = [entry.memory.size for entry in message.entries]
            ranks, scale = step.units.world_size, step.units.outgoing()
            sums = ops.reduce_located_bucket(gathered, sizes, ranks, scale, **form)
            cleared = self._cleared(message.payloads, message.ks, message.entries, step, form)
            done += self._delivered(message.entries, sums, step, cleared)
        return done

    def _varying_form(self, entries: list[Entry]) -> dict:
        algorithm = self.algorithm
        columns = columns_of_all([entry.memory for entry in entries], algorithm)
        return {"coding": algorithm.coding, "value_dtype": algorithm.values, "columns": columns}
