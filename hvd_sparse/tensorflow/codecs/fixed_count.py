"""The codec for exactly k elements of each variable, or of all jointly: all ranks' payloads have equal size."""

import tensorflow as tf

from hvd_sparse.tensorflow import bucket_ops
from hvd_sparse.tensorflow.codecs.base import Arrival, Bucket, BucketCodec, Round
from hvd_sparse.tensorflow.devices import beside
from hvd_sparse.tensorflow.error_feedback import decays, destinations
from hvd_sparse.tensorflow.threshold import ThresholdHints


class FixedCount(BucketCodec):
    """Selects exactly k elements in each variable; or with scope="model", in all of them, in the order of names.

    One call into the core processes all members of a bucket, as an operation in a graph costs more than the selection
    in a small variable.
    """

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.is_joint = self.algorithm.selection == "model"  # whether all variables share one selection
        self._hints = ThresholdHints(["model"] if self.is_joint else sorted(self.feedback))

    def encode(self, arrivals: list[Arrival], now: Round) -> list[Bucket]:
        """Accumulate, select and pack, bucket by bucket."""
        names = self._selected(arrivals)
        if self.is_joint:
            counts = self._counts([sum(arrival.feedback.size for arrival in arrivals)], now)
            return [self._fill("model", arrivals, counts, self._hints.values(names, counts), now)]
        counts = self._counts([self.feedback[name].size for name in names], now)
        hints = self._hints.values(names, counts)
        return [
            self._fill(name, members, counts[part], hints[part], now) for name, members, part in self._buckets(arrivals)
        ]

    def _fill(self, name: str, arrivals: list[Arrival], counts: tf.Tensor, hints: tf.Tensor, now: Round) -> Bucket:
        """Accumulate, select and pack in the members of a bucket, per variable or jointly."""
        feedback = [arrival.feedback for arrival in arrivals]
        factors, is_active = tf.stack([arrival.factor for arrival in arrivals]), tf.convert_to_tensor(now.is_active)
        with beside(feedback[0].device):
            payloads, finite, info = bucket_ops.accumulate_bucket(
                [arrival.gradient for arrival in arrivals],
                *destinations(feedback),
                factors=factors,
                weight_decay=decays(feedback, now.units),
                is_active=is_active,
                ks=counts,
                seed=now.seed,
                threshold_hints=hints,
                level=self.algorithm.level,
                **self._form(arrivals, joint=self.is_joint),
                **feedback[0].rule(),
            )
        now.finite.append(finite)
        sent = tf.reduce_sum(counts)
        now.counted.add(sent=sent if now.is_dense is None else tf.where(now.is_dense, tf.zeros_like(sent), sent))
        return Bucket(name, arrivals, payloads, self._most_bytes(arrivals), counts, info)

    def learn(self, buckets: list[Bucket], now: Round) -> list[tf.Operation]:
        """Store the thresholds as hints for the next step."""
        names = self._selected([arrival for bucket in buckets for arrival in bucket.arrivals])
        counts = tf.concat([bucket.ks for bucket in buckets], 0)
        return self._hints.update(names, counts, tf.concat([bucket.info for bucket in buckets], 0))

    def decode(self, bucket: Bucket, gathered: tf.Tensor | None, now: Round) -> list[tf.Operation]:
        """Sum the payloads, and clear the sent entries."""
        form = self._form(bucket.arrivals, joint=self.is_joint)
        sizes = [arrival.feedback.size for arrival in bucket.arrivals]
        ranks = tf.constant(now.units.world_size, tf.int64)
        scale = tf.cast(now.units.outgoing(), tf.float32)
        with beside(bucket.arrivals[0].feedback.device):
            sums = bucket_ops.reduce_bucket(gathered, sizes, ranks, bucket.ks, scale, **form)
        return self._delivered(bucket, sums, now, form)

    def _selected(self, arrivals: list[Arrival]) -> list[str]:
        """Return the names of the selections in these arrivals, in the order of their buckets."""
        return ["model"] if self.is_joint else [arrival.name for arrival in arrivals]

    def _most_bytes(self, arrivals: list[Arrival]) -> int:
        selections = [arrivals] if self.is_joint else [[arrival] for arrival in arrivals]
        return sum(self._largest_payload(selection, self.algorithm.schedule.highest) for selection in selections)
