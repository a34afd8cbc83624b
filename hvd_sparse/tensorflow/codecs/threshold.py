"""What reaches a threshold in each variable: the sizes of the payloads differ between ranks and steps."""

from dataclasses import dataclass

import tensorflow as tf

from hvd_sparse.tensorflow import ops
from hvd_sparse.tensorflow.codecs.base import Entry, Round
from hvd_sparse.tensorflow.codecs.fixed_count import FixedCount
from hvd_sparse.tensorflow.error_feedback import decays, destinations
from hvd_sparse.tensorflow.threshold import make_thresholds


@dataclass
class Filtered:
    """What this rank sends of a bucket."""

    name: str
    entries: list[Entry]
    payloads: tf.Tensor  # uint8[bytes]
    ks: tf.Tensor  # of the payloads, int64[members]


class Threshold(FixedCount):
    """What reaches a threshold in each variable, in buckets that are cut as if exactly k were sent."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._thresholds = make_thresholds(self.algorithm, list(self.feedback))
        self.kept, self.kept_rows = self._thresholds.variables, self._thresholds.rows

    def encode(self, entries: list[Entry], now: Round) -> list[Filtered]:
        """Accumulate, select what reaches the thresholds, and pack, bucket by bucket."""
        entries = sorted(entries, key=lambda entry: entry.name)  # as buckets are cut
        names = [entry.name for entry in entries]
        counts = self._counts([entry.feedback.size for entry in entries], now)
        residuals = self._accumulate(entries, now) if self._thresholds.reads else []
        thresholds, ks = self._thresholds.plan(now.number, names, counts, now.is_active, residuals)
        with tf.control_dependencies(residuals):
            filtered = [
                self._filter(name, members, thresholds[part], ks[part], now)
                for name, members, part in self._buckets(entries)
            ]
        infos = tf.concat([info for _, info in filtered], 0)
        self._changes = self._thresholds.learn(names, counts, infos, now.is_active)
        return [message for message, _ in filtered]

    def _filter(
        self, name: str, entries: list[Entry], thresholds: tf.Tensor, ks: tf.Tensor, now: Round
    ) -> tuple[Filtered, tf.Tensor]:
        """Accumulate, unless that is done, select what reaches the thresholds in the members of a bucket, and pack."""
        feedback = [entry.feedback for entry in entries]
        payloads, finite, info = ops.filter_bucket(
            [entry.gradient for entry in entries],
            *destinations(feedback),
            factors=tf.stack([entry.factor for entry in entries]),
            weight_decay=decays(feedback, now.units),
            thresholds=thresholds,
            ks=ks,
            is_active=False if self._thresholds.reads else now.is_active,
            centre=self.algorithm.centre,
            **self._form(entries),
            **feedback[0].rule(),
        )
        now.finite.append(finite)
        found = tf.cast(info[:, 1], tf.int64)
        now.counted.add(payload_bytes=tf.size(payloads, tf.int64), sent=tf.reduce_sum(found))
        return Filtered(name, entries, payloads, tf.maximum(found, 1)), info

    def decode(self, entries: list[Entry], messages: list[Filtered], now: Round) -> list[tf.Operation]:
        """Gather, sum payloads whose sizes stand in them, and clear what was sent."""
        done = self._changes
        for message in messages:
            form = self._form(message.entries)
            most_bytes = sum(self._largest_payload([entry], density=1.0) for entry in message.entries)
            gathered = self._gather(message.name, message.payloads, most_bytes, now)
            sizes = [entry.feedback.size for entry in message.entries]
            ranks, scale = now.units.world_size, now.units.outgoing()
            sums = ops.reduce_located_bucket(gathered, sizes, ranks, scale, **form)
            cleared = self._cleared(message.payloads, message.ks, message.entries, now, form)
            done += self._delivered(message.entries, sums, now, cleared)
        return done
