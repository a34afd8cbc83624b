"""The codec for exactly k elements of each variable, or of all jointly: all ranks' payloads have equal size."""

import tensorflow as tf

from hvd_sparse.tensorflow import ops
from hvd_sparse.tensorflow.codecs.base import Bucket, BucketCodec, Entry, Round
from hvd_sparse.tensorflow.error_feedback import decays, destinations
from hvd_sparse.tensorflow.threshold import ThresholdHints


class FixedCount(BucketCodec):
    """Selects exactly k elements in each variable; or with scope="model", in all of them, in the variables' order.

    One call into the core processes all members of a bucket, as an operation in a graph costs more than the selection
    in a small variable.
    """

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._hints = ThresholdHints(["model"] if self.is_joint else sorted(self.feedback))

    @property
    def is_joint(self) -> bool:
        """Whether all variables share one selection."""
        return self.algorithm.selection == "model"

    def encode(self, entries: list[Entry], now: Round) -> list[Bucket]:
        """Accumulate, select and pack, bucket by bucket."""
        names = self._selected(entries)
        if self.is_joint:
            counts = self._counts([sum(entry.feedback.size for entry in entries)], now)
            return [self._fill("model", entries, counts, self._hints.values(names, counts), now)]
        counts = self._counts([self.feedback[name].size for name in names], now)
        hints = self._hints.values(names, counts)
        return [
            self._fill(name, members, counts[part], hints[part], now) for name, members, part in self._buckets(entries)
        ]

    def _fill(self, name: str, entries: list[Entry], counts: tf.Tensor, hints: tf.Tensor, now: Round) -> Bucket:
        """Accumulate, select and pack in the members of a bucket, per variable or jointly."""
        feedback = [entry.feedback for entry in entries]
        payloads, finite, info = ops.accumulate_bucket(
            [entry.gradient for entry in entries],
            *destinations(feedback),
            factors=tf.stack([entry.factor for entry in entries]),
            weight_decay=decays(feedback, now.units),
            is_active=now.is_active,
            ks=counts,
            seed=now.seed,
            threshold_hints=hints,
            level=self.algorithm.level,
            **self._form(entries, joint=self.is_joint),
            **feedback[0].rule(),
        )
        now.finite.append(finite)
        sent = tf.reduce_sum(counts)
        now.counted.add(sent=sent if now.is_dense is None else tf.where(now.is_dense, tf.zeros_like(sent), sent))
        return Bucket(name, entries, payloads, self._most_bytes(entries), counts, info)

    def learn(self, buckets: list[Bucket], now: Round) -> list[tf.Operation]:
        """Store the thresholds as hints for the next step."""
        names = self._selected([entry for bucket in buckets for entry in bucket.entries])
        counts = tf.concat([bucket.ks for bucket in buckets], 0)
        return self._hints.update(names, counts, tf.concat([bucket.info for bucket in buckets], 0))

    def decode(self, bucket: Bucket, gathered: tf.Tensor | None, now: Round) -> list[tf.Operation]:
        """Sum the payloads, and clear the sent entries."""
        form = self._form(bucket.entries, joint=self.is_joint)
        sizes = [entry.feedback.size for entry in bucket.entries]
        ranks, scale = now.units.world_size, now.units.outgoing()
        sums = ops.reduce_bucket(gathered, sizes, ranks, bucket.ks, scale, **form)
        return self._delivered(bucket, sums, now, form)

    def _selected(self, entries: list[Entry]) -> list[str]:
        """Return the names of the selections in these entries, in the order of their buckets."""
        return ["model"] if self.is_joint else sorted(entry.name for entry in entries)

    def _most_bytes(self, entries: list[Entry]) -> int:
        selections = [entries] if self.is_joint else [[entry] for entry in entries]
        return sum(self._largest_payload(selection, self.algorithm.schedule.highest) for selection in selections)
