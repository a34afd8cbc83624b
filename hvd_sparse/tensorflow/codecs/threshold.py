"""The codec for elements that reach a threshold: payload sizes differ between ranks and steps."""

import tensorflow as tf

from hvd_sparse.tensorflow import varying_ops
from hvd_sparse.tensorflow.codecs.base import Arrival, Bucket, BucketCodec, Round
from hvd_sparse.tensorflow.error_feedback import decays, destinations
from hvd_sparse.tensorflow.threshold import make_thresholds


class Threshold(BucketCodec):
    """Selects the elements that reach a threshold in each variable; buckets are planned as if exactly k were sent."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._thresholds = make_thresholds(self.algorithm, {name: one.size for name, one in self.feedback.items()})
        self.thresholds, self.threshold_rows = self._thresholds.variables, self._thresholds.rows

    def encode(self, arrivals: list[Arrival], now: Round) -> list[Bucket]:
        """Accumulate, select the elements that reach the thresholds, and pack, bucket by bucket."""
        names = [arrival.name for arrival in arrivals]
        counts = self._counts([arrival.feedback.size for arrival in arrivals], now)
        plan = self._thresholds.plan(now.number, names, counts, now.is_active)
        return [
            self._filter(name, members, {kind: numbers[part] for kind, numbers in plan.items()}, now)
            for name, members, part in self._buckets(arrivals)
        ]

    def learn(self, buckets: list[Bucket], now: Round) -> list[tf.Operation]:
        """Update the thresholds, after `encode` in the same trace."""
        arrivals = [arrival for bucket in buckets for arrival in bucket.arrivals]
        counts = self._counts([arrival.feedback.size for arrival in arrivals], now)
        infos = tf.concat([bucket.info for bucket in buckets], 0)
        return self._thresholds.learn([arrival.name for arrival in arrivals], counts, infos, now.is_active)

    def miss(self, now: Round) -> list[tf.Operation]:
        """Update the thresholds in a step without gradients that are sent as payloads."""
        return self._thresholds.miss(now.number)

    def _filter(self, name: str, arrivals: list[Arrival], plan: dict[str, tf.Tensor], now: Round) -> Bucket:
        """Accumulate, select the elements that reach the thresholds in the members of a bucket, and pack."""
        feedback = [arrival.feedback for arrival in arrivals]
        payloads, finite, info = varying_ops.filter_bucket(
            [arrival.gradient for arrival in arrivals],
            *destinations(feedback),
            factors=tf.stack([arrival.factor for arrival in arrivals]),
            weight_decay=decays(feedback, now.units),
            is_active=now.is_active,
            level=self.algorithm.level,
            **plan,
            **self.algorithm.fit(now.number),
            **self._form(arrivals),
            **feedback[0].rule(),
        )
        now.finite.append(finite)
        found = tf.cast(info[:, 1], tf.int64)
        now.counted.add(sent=tf.reduce_sum(found))
        most_bytes = sum(self._largest_payload([arrival], density=1.0) for arrival in arrivals)
        return Bucket(name, arrivals, payloads, most_bytes, tf.maximum(found, 1), info)

    def decode(self, bucket: Bucket, gathered: tf.Tensor | None, now: Round) -> list[tf.Operation]:
        """Sum the payloads, whose headers have their sizes, and clear the sent entries."""
        form = self._form(bucket.arrivals)
        sizes = [arrival.feedback.size for arrival in bucket.arrivals]
        ranks, scale = now.units.world_size, now.units.outgoing()
        sums = varying_ops.reduce_located_bucket(gathered, sizes, ranks, scale, **form)
        return self._delivered(bucket, sums, now, form)
