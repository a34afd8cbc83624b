"""The codec for shared indices: ranks first agree on elements of the model, then sum the values at these.

float32 values are summed by an all-reduce. Quantized values are gathered and summed in rank order: what the sum loses
then is in a residual. These sums depend on what was gathered, so this codec asks the exchange for them itself.
"""

import abc
from collections.abc import Mapping
from dataclasses import dataclass

import tensorflow as tf

from hvd_sparse.granularity import by_group
from hvd_sparse.sampling import stratified_sample
from hvd_sparse.tensorflow import ops
from hvd_sparse.tensorflow.codecs.base import Bucket, Codec, Entry, Round, gather, once
from hvd_sparse.tensorflow.threshold import PredictedThreshold, ScaledThreshold, ThresholdHints
from hvd_sparse.threshold import FEWEST_SAMPLED, SAMPLED, SKETCH_BINS
from hvd_sparse.wire import LOW_BITS, largest_payload


@dataclass
class Named(Bucket):
    """What this rank names."""

    indices: tf.Tensor | None = None
    sketch: tf.Tensor | None = None  # of its partition, float32[65]: all ranks' are summed with the values


class SharedIndices(Codec):
    """Each rank names elements, none of them twice; the values at all that were named are summed."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._selection = SELECTIONS[self.algorithm.layout](self)
        self.thresholds, self.threshold_rows = self._selection.thresholds, self._selection.threshold_rows

    def encode(self, entries: list[Entry], now: Round) -> list[Bucket]:
        """Accumulate; name elements, in a message without values, where the others cannot know them."""
        n, coding = sum(entry.feedback.size for entry in entries), self.algorithm.coding
        k = self._counts([n], now)
        named = Named("model", entries, None, largest_payload(n, n, coding, "none"), k)
        self._selection.name(named, now)
        if self._selection.is_named:
            count = tf.maximum(tf.size(named.indices, tf.int64), 1)
            named.message = ops.pack(named.indices, tf.zeros(tf.shape(named.indices)), n, count, coding, "none")
        return [named]

    def decode(self, named: Named, gathered: tf.Tensor | None, now: Round) -> list[tf.Operation]:
        """Sum the values of all ranks at what was named, and clear these."""
        entries, n = named.entries, sum(entry.feedback.size for entry in named.entries)
        indices = named.indices if gathered is None else self._union(gathered, n)
        values = tf.concat([entry.feedback.residual.sparse_read(own) for entry, own in self._cut(entries, indices)], 0)
        count = tf.size(indices, tf.int64)
        now.counted.add(sent=count if now.is_dense is None else tf.where(now.is_dense, tf.zeros_like(count), count))
        is_exact = self.algorithm.values == "float32"
        sum_values = self._sum_values if is_exact else self._sum_quantized
        total, sent, sketches = sum_values(entries, indices, values, self._rows(named.sketch, now), now)
        done = self._selection.learn(named, count, sketches, now)
        k = tf.maximum(count, 1)[None]
        packed = ops.pack(indices, total, n, k[0])
        if is_exact:
            done.append(
                ops.clear_bucket(packed, k, now.void, [entry.feedback.residual for entry in entries], joint=True)
            )
        else:
            done += self._clear_parts(entries, indices, values, values - sent, now)
        sizes = [entry.feedback.size for entry in entries]
        parts = ops.reduce_bucket(packed, sizes, 1, k, joint=True)
        return done + self._give_parts(entries, parts, now, list(done))

    def accumulated(self, entries: list[Entry], now: Round) -> list[tf.Tensor]:
        """Accumulate each gradient, and return the residuals."""
        return self._accumulate(entries, now)

    def _rows(self, sketch: tf.Tensor | None, now: Round) -> tf.Tensor:
        """Return what is summed with the values, flat: this rank's row of all ranks' sketches, zeros; or nothing."""
        if sketch is None:
            return tf.zeros([0])
        rank, size = self.exchange.rank(), 1 + SKETCH_BINS
        return tf.pad(sketch, [[rank * size, (now.units.world_size - 1 - rank) * size]])

    def _give_parts(
        self, entries: list[Entry], parts: list[tf.Tensor], now: Round, cleared: list
    ) -> list[tf.Operation]:
        """Give each entry its part of the sum; return what that changes in their error feedback."""
        return [
            change
            for entry, part in zip(entries, parts, strict=True)
            for change in self._held(entry, part, now, cleared)
        ]

    def _sum_values(self, entries: list[Entry], indices: tf.Tensor, values: tf.Tensor, rows: tf.Tensor, now: Round):
        """Return the sum of all ranks' values, these as they were sent, and the sum of rows."""
        scaled = values * tf.cast(now.units.outgoing(), tf.float32)  # the sum might overflow
        sent = once(now.present, tf.concat([scaled, rows], 0))
        now.counted.add(payload_bytes=4 * tf.size(sent))
        total, told = tf.split(self.exchange.allreduce(f"values{now.suffix}", sent), [tf.size(values), tf.size(rows)])
        return total, values, told

    def _sum_quantized(self, entries: list[Entry], indices: tf.Tensor, values: tf.Tensor, rows: tf.Tensor, now: Round):
        """Do the same in a payload of fewer bits, in which all that shares a level lies together."""
        dtype, layout, segments = self.algorithm.values, self._segments(entries), None
        n, count = sum(entry.feedback.size for entry in entries), tf.size(indices, tf.int64)
        places = order = tf.range(count)
        if dtype in LOW_BITS:
            grouped = tf.numpy_function(
                lambda indices: by_group(indices, layout), [indices], (tf.int64, tf.int64), stateful=False
            )
            order, segments = tf.ensure_shape(grouped[0], [None]), tf.ensure_shape(grouped[1], [None, 2])
        sent = ops.quantize(tf.gather(values, order), dtype, self.algorithm.level, places, segments)
        k = tf.maximum(count, 1)  # no elements at all: an empty contribution
        form, ranks = ("dense", dtype, segments), now.units.world_size
        payload = ops.pack(places, sent, k, k, *form)
        own = tf.reshape(rows, [ranks, -1])[self.exchange.rank()]
        own = tf.pad(own, [[0, own.shape[0] % 2]])  # messages are of 8 bytes each
        size, told = tf.size(payload), tf.reshape(tf.bitcast(own, tf.uint8), [-1])
        most_bytes = largest_payload(n, n, "dense", dtype, layout) + told.shape[0]
        gathered = gather(self.exchange, "values", tf.concat([payload, told], 0), most_bytes, now)
        gathered = tf.reshape(gathered, [ranks, -1])
        total = ops.reduce_payloads(gathered, 0, k, k, now.units.outgoing(), *form)[:count]
        told = tf.bitcast(tf.reshape(gathered[:, size:], [ranks, -1, 4]), tf.float32)[:, : rows.shape[0] // ranks]
        back = order[:, None]
        total, sent = (tf.scatter_nd(back, part, tf.shape(values, tf.int64)) for part in (total, sent))
        return total, sent, tf.reshape(told, [-1])

    def _union(self, gathered: tf.Tensor, n: int) -> tf.Tensor:
        """Return what all ranks named, ascending."""
        coding, ranks = self.algorithm.coding, self.exchange.size()
        offsets, counts = tf.unstack(ops.locate_payloads(gathered, [n], ranks, coding, "none")[:, :, 0])
        ends = tf.concat([offsets[1:], tf.size(gathered, tf.int64)[None]], 0)
        parts = [
            ops.unpack(gathered[offsets[rank] : ends[rank]], n, counts[rank], coding, "none")[0]
            for rank in range(ranks)
        ]
        return tf.sort(tf.concat(parts, 0))


class Selection(abc.ABC):
    """Which elements a rank names."""

    is_named = True  # whether the others have to be told

    def __init__(self, codec: SharedIndices):
        self._codec = codec
        self.thresholds: list[tf.Variable] = []  # as of a codec
        self.threshold_rows: Mapping[str, int] = {}

    @abc.abstractmethod
    def name(self, named: Named, now: Round) -> None:
        """Accumulate the entries; set ascending indices into them as one, and what the next step learns from."""

    def learn(self, named: Named, count: tf.Tensor, sketches: tf.Tensor, now: Round) -> list[tf.Operation]:
        """Keep what the next step starts from. count: how many elements all ranks named. sketches: of all, flat."""
        return []


class Leader(Selection):
    """CLT-k: the rank whose turn it is names its k largest, the others none."""

    def __init__(self, codec: SharedIndices):
        super().__init__(codec)
        self._hints = ThresholdHints(["model"])

    def name(self, named: Named, now: Round) -> None:
        """Set those, and what the next step's hint learns from."""
        residual, k = tf.concat(self._codec.accumulated(named.entries, now), 0), named.ks[0]
        hint = self._hints.values(["model"], named.ks)[0]
        world_size, rank = now.units.world_size, self._codec.exchange.rank()

        def lead() -> tuple[tf.Tensor, tf.Tensor]:
            """Select."""
            indices, _, info = ops.select_top_k(residual, k, now.seed, hint)
            return indices, info

        def follow() -> tuple[tf.Tensor, tf.Tensor]:
            """Name nothing, and forget the hint."""
            return tf.zeros([0], tf.int64), tf.zeros([2], tf.float64)

        named.indices, named.info = tf.cond(tf.equal(now.number % world_size, rank), lead, follow)

    def learn(self, named: Named, count: tf.Tensor, sketches: tf.Tensor, now: Round) -> list[tf.Operation]:
        """Keep the threshold as the next step's hint."""
        return self._hints.update(["model"], named.ks, named.info[None])


class Partition(Selection):
    """MiCRO: every rank names what reaches the threshold in the partition whose turn it is."""

    def __init__(self, codec: SharedIndices):
        super().__init__(codec)
        self._predicts = codec.algorithm.controller == "histogram"
        self._threshold = PredictedThreshold() if self._predicts else ScaledThreshold()
        self.thresholds, self.threshold_rows = self._threshold.variables, self._threshold.rows

    def name(self, named: Named, now: Round) -> None:
        """Set those, in one pass over the gradients."""
        entries, k, n = named.entries, named.ks[0], sum(entry.feedback.size for entry in named.entries)
        rank, ranks = self._codec.exchange.rank(), now.units.world_size
        number = (now.number + rank) % ranks  # as `hvd_sparse.threshold.partition` has it
        begin, end = number * n // ranks, (number + 1) * n // ranks
        threshold, share = self._threshold.plan(k, ranks)
        named.indices, sketch, finite = ops.accumulate_partition(
            [entry.gradient for entry in entries],
            [entry.feedback.residual for entry in entries],
            factors=tf.stack([entry.factor for entry in entries]),
            begin=begin,
            end=end,
            threshold=threshold,
            share=share,
            sample=tf.maximum(-(-(end - begin) * SAMPLED // k), FEWEST_SAMPLED),  # `hvd_sparse.threshold.sketch_sample`
            seed=now.seed,
            is_active=now.is_active,
        )
        named.sketch = sketch if self._predicts else None
        now.finite.append(finite)

    def learn(self, named: Named, count: tf.Tensor, sketches: tf.Tensor, now: Round) -> list[tf.Operation]:
        """Learn from the sketches, or scale the threshold."""
        return self._threshold.learn(named.ks[0], count, sketches, self._codec.exchange.rank(), now)


class Random(Selection):
    """Random-k: every rank draws the same elements from the seed and the step, so that none has to be named."""

    is_named = False

    def name(self, named: Named, now: Round) -> None:
        """Set those that all ranks draw."""
        residuals = self._codec.accumulated(named.entries, now)
        n = sum(entry.feedback.size for entry in named.entries)
        with tf.control_dependencies(residuals):
            indices = tf.numpy_function(
                lambda k, seed: stratified_sample(n, int(k), int(seed)),
                [named.ks[0], now.seed],
                tf.int64,
                stateful=False,
            )
        named.indices = tf.ensure_shape(indices, [None])


SELECTIONS: dict[str, type[Selection]] = {"leader": Leader, "partition": Partition, "random": Random}
