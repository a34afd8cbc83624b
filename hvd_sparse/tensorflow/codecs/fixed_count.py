"""The codec for exactly k elements of each variable, or of all jointly: all ranks' payloads have equal size."""

from collections.abc import Iterator

import tensorflow as tf

from hvd_sparse.buckets import plan_buckets
from hvd_sparse.granularity import channels_of
from hvd_sparse.tensorflow import ops
from hvd_sparse.tensorflow.codecs.base import Bucket, Codec, Entry, Round
from hvd_sparse.tensorflow.error_feedback import decays, destinations
from hvd_sparse.tensorflow.threshold import ThresholdHints
from hvd_sparse.wire import LOW_BITS, payload_size, top_k_count


class FixedCount(Codec):
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
        return self.algorithm.layout == "model"

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

    @property
    def bucket_bytes(self) -> int:
        """The maximum bytes of a message. A single payload that is larger gets a separate message."""
        return self.algorithm.bucket_bytes

    def _buckets(self, entries: list[Entry]) -> Iterator[tuple[str, list[Entry], slice]]:
        """Cut the entries, sorted by name, into buckets; yield each bucket's name, entries and their slice."""
        entries, begin = sorted(entries, key=lambda entry: entry.name), 0
        planned = plan_buckets(self._settled_sizes(entries), self.bucket_bytes, "bucket")
        for name, members in planned.items():
            part = slice(begin, begin + len(members))
            yield name, entries[part], part
            begin = part.stop

    def _settled_sizes(self, entries: list[Entry]) -> dict[str, int]:
        """Return the payloads' sizes at the final density, as a graph's buckets always have the same members."""
        density = self.algorithm.schedule.planned
        form, sizes = (self.algorithm.coding, self.algorithm.values), {}
        for entry in entries:
            n = entry.feedback.size
            sizes[entry.name] = payload_size(n, top_k_count(n, density), *form, self._segments([entry]))
        return sizes

    def _selected(self, entries: list[Entry]) -> list[str]:
        """Return the names of the selections in these entries, in the order of their buckets."""
        return ["model"] if self.is_joint else sorted(entry.name for entry in entries)

    def _form(self, entries: list[Entry], **options) -> dict:
        """Return the coding of payloads, as arguments of the bucket operators."""
        algorithm = self.algorithm
        has_levels = self.values in LOW_BITS
        channels = [channels_of(entry.feedback.variable.shape, algorithm) for entry in entries] if has_levels else []
        return {"coding": algorithm.coding, "value_dtype": self.values, "channels": channels, **options}

    def _delivered(self, bucket: Bucket, sums: list[tf.Tensor], now: Round, form: dict) -> list[tf.Operation]:
        """Clear the sent entries, unless the step is skipped; set the entries' sums; return the operations to run."""
        buffers = [entry.feedback.cleared() for entry in bucket.entries]
        memory = ([own[0] for own in buffers], [velocity for own in buffers for velocity in own[1:]])
        retained = bucket.entries[0].feedback.retained
        cleared = ops.clear_bucket(bucket.message, bucket.ks, now.void, *memory, **form, retained=retained)
        done = [cleared]
        for entry, total in zip(bucket.entries, sums, strict=True):
            done += self._held(entry, total, now, [cleared])
        return done

    def _most_bytes(self, entries: list[Entry]) -> int:
        selections = [entries] if self.is_joint else [[entry] for entry in entries]
        return sum(self._largest_payload(selection, self.algorithm.schedule.highest) for selection in selections)
