"""The codec for shared indices: ranks first agree on indices into the model, then sum their values there.

An all-reduce sums float32 values. Quantized values are all-gathered and summed in rank order, so that every rounding
error is in a residual. The size of this second exchange depends on the gathered indices, so the codec starts it itself.
"""

import abc
from collections.abc import Mapping
from dataclasses import dataclass

import tensorflow as tf

from hvd_sparse.granularity import by_group
from hvd_sparse.members import is_elastic
from hvd_sparse.partition import FEWEST_SAMPLED, SAMPLED, SKETCH_BINS, partition
from hvd_sparse.sampling import stratified_sample
from hvd_sparse.tensorflow import bucket_ops, ops, varying_ops
from hvd_sparse.tensorflow.codecs.base import Arrival, Bucket, Codec, Round, gather, once
from hvd_sparse.tensorflow.threshold import PredictedThreshold, ScaledThreshold
from hvd_sparse.wire import LOW_BITS, largest_payload


@dataclass
class IndexBucket(Bucket):
    """The indices that this rank selects, as a message."""

    indices: tf.Tensor | None = None
    sketch: tf.Tensor | None = None  # of the partition, float32[65]: exchanged with the values
    threshold: tf.Tensor | None = None  # of the selection, a float64 scalar


class SharedIndices(Codec):
    """All ranks send their values at the same indices.

    They are those that the ranks have selected, no two the same (CLT-k, MiCRO), or that each rank computes (random-k).
    """

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._selection = SELECTIONS[self.algorithm.selection](self)
        self.thresholds, self.threshold_rows = self._selection.thresholds, self._selection.threshold_rows

    def encode(self, arrivals: list[Arrival], now: Round) -> list[Bucket]:
        """Accumulate and select; pack the indices, without values, unless all ranks can compute them."""
        n, coding = sum(arrival.feedback.size for arrival in arrivals), self.algorithm.coding
        k = self._counts([n], now)
        bucket = IndexBucket("model", arrivals, None, largest_payload(n, n, coding, "none"), k)
        self._selection.select_indices(bucket, now)
        if self._selection.sends_indices:
            count = tf.maximum(tf.size(bucket.indices, tf.int64), 1)
            bucket.message = ops.pack(bucket.indices, tf.zeros(tf.shape(bucket.indices)), n, count, coding, "none")
        return [bucket]

    def decode(self, bucket: IndexBucket, gathered: tf.Tensor | None, now: Round) -> list[tf.Operation]:
        """Sum the values of all ranks at the shared indices, and clear them in the residual."""
        arrivals, n = bucket.arrivals, sum(arrival.feedback.size for arrival in bucket.arrivals)
        indices = bucket.indices if gathered is None else self._shared_indices(gathered, n)
        values = tf.concat(
            [arrival.feedback.residual.sparse_read(own) for arrival, own in self._cut(arrivals, indices)], 0
        )
        count = tf.size(indices, tf.int64)
        now.counted.add(sent=count if now.is_dense is None else tf.where(now.is_dense, tf.zeros_like(count), count))
        is_exact = self.algorithm.values == "float32"
        sum_values = self._sum_values if is_exact else self._sum_quantized
        total, sent, sketches = sum_values(arrivals, indices, values, self._rows(bucket.sketch, now), now)
        done = self._selection.learn(bucket, count, sketches, now)
        k = tf.maximum(count, 1)[None]
        packed = ops.pack(indices, total, n, k[0])
        if is_exact:
            done.append(
                bucket_ops.clear_bucket(
                    packed, k, now.ignores_payloads, [arrival.feedback.residual for arrival in arrivals], joint=True
                )
            )
        else:
            done += self._clear_parts(arrivals, indices, values, values - sent, now)
        sizes = [arrival.feedback.size for arrival in arrivals]
        parts = bucket_ops.reduce_bucket(packed, sizes, 1, k, joint=True)
        return done + self._give_parts(arrivals, parts, now, list(done))

    def _rows(self, sketch: tf.Tensor | None, now: Round) -> tf.Tensor:
        """Return the flat sketches to exchange with the values: zeros but for this rank's row; or an empty tensor."""
        if sketch is None:
            return tf.zeros([0])
        rank, size = self.exchange.rank(), 1 + SKETCH_BINS
        return tf.pad(sketch, [[rank * size, (now.units.world_size - 1 - rank) * size]])

    def _give_parts(
        self, arrivals: list[Arrival], parts: list[tf.Tensor], now: Round, cleared: list
    ) -> list[tf.Operation]:
        """Set each gradient's part of the sum; return the operations that update the error feedback."""
        return [
            change
            for arrival, part in zip(arrivals, parts, strict=True)
            for change in self._set_sum(arrival, part, now, cleared)
        ]

    def _sum_values(self, arrivals: list[Arrival], indices: tf.Tensor, values: tf.Tensor, rows: tf.Tensor, now: Round):
        """Return the sums of all ranks' values, this rank's values as sent, and the sum of `rows`."""
        scaled = values * tf.cast(now.units.outgoing(), tf.float32)  # before the sum, which might overflow otherwise
        sent = once(now.present, tf.concat([scaled, rows], 0))
        now.counted.add(payload_bytes=4 * tf.size(sent, tf.int64))
        total = self.exchange.allreduce(f"values{now.suffix}", sent)
        total, sketches = tf.split(total, [tf.size(values), tf.size(rows)])
        return total, values, sketches

    def _sum_quantized(
        self, arrivals: list[Arrival], indices: tf.Tensor, values: tf.Tensor, rows: tf.Tensor, now: Round
    ):
        """Do `_sum_values` with a quantized payload, in which the elements of a group are adjacent."""
        dtype, layout, segments = self.algorithm.values, self._segments(arrivals), None
        n, count = sum(arrival.feedback.size for arrival in arrivals), tf.size(indices, tf.int64)
        places = order = tf.range(count)
        if dtype in LOW_BITS:
            grouped = tf.numpy_function(
                lambda indices: by_group(indices, layout), [indices], (tf.int64, tf.int64), stateful=False
            )
            order, segments = tf.ensure_shape(grouped[0], [None]), tf.ensure_shape(grouped[1], [None, 2])
        sent = ops.quantize(tf.gather(values, order), dtype, self.algorithm.level, places, segments)
        k = tf.maximum(count, 1)  # without elements, an empty payload
        form, ranks = ("dense", dtype, segments), now.units.world_size
        payload = ops.pack(places, sent, k, k, *form)
        own = tf.reshape(rows, [ranks, -1])[self.exchange.rank()]
        own = tf.pad(own, [[0, own.shape[0] % 2]])  # a multiple of 8 bytes
        size, sketches = tf.size(payload), tf.reshape(tf.bitcast(own, tf.uint8), [-1])
        most_bytes = largest_payload(n, n, "dense", dtype, layout) + int(sketches.shape[0])
        gathered = gather(self.exchange, "values", tf.concat([payload, sketches], 0), most_bytes, now)
        gathered = tf.reshape(gathered, [ranks, -1])
        total = ops.reduce_payloads(gathered, 0, k, k, now.units.outgoing(), *form)[:count]
        sketches = tf.bitcast(tf.reshape(gathered[:, size:], [ranks, -1, 4]), tf.float32)[:, : rows.shape[0] // ranks]
        back = order[:, None]
        total, sent = (tf.scatter_nd(back, part, tf.shape(values, tf.int64)) for part in (total, sent))
        return total, sent, tf.reshape(sketches, [-1])

    def _shared_indices(self, gathered: tf.Tensor, n: int) -> tf.Tensor:
        """Return the indices that all ranks selected, ascending."""
        coding, ranks = self.algorithm.coding, self.exchange.size()
        offsets, counts = tf.unstack(varying_ops.locate_payloads(gathered, [n], ranks, coding, "none")[:, :, 0])
        ends = tf.concat([offsets[1:], tf.size(gathered, tf.int64)[None]], 0)
        parts = []
        for rank in range(ranks):
            with tf.name_scope(f"from_rank_{rank}"):  # part of the error for a damaged payload
                parts.append(ops.unpack(gathered[offsets[rank] : ends[rank]], n, counts[rank], coding, "none")[0])
        return tf.sort(tf.concat(parts, 0))


class Selection(abc.ABC):
    """The rule by which a rank selects indices."""

    sends_indices = True  # whether indices must be sent to the other ranks

    def __init__(self, codec: SharedIndices):
        self._codec = codec
        self.thresholds: list[tf.Variable] = []  # as in `Codec`
        self.threshold_rows: Mapping[str, int] = {}

    @abc.abstractmethod
    def select_indices(self, bucket: IndexBucket, now: Round) -> None:
        """Accumulate the gradients; set ascending indices into their concatenation, and the data for `learn`."""

    def learn(self, bucket: IndexBucket, count: tf.Tensor, sketches: tf.Tensor, now: Round) -> list[tf.Operation]:
        """Update the state for the next step. count: indices of all ranks. sketches: those of all ranks, flat."""
        return []


class Leader(Selection):
    """CLT-k: one rank, in turn, selects its k largest elements; the others select none."""

    def select_indices(self, bucket: IndexBucket, now: Round) -> None:
        """Set the indices."""
        residuals, k = self._codec.accumulate(bucket.arrivals, now), bucket.ks[0]
        residual = tf.concat(residuals, 0)
        world_size, rank = now.units.world_size, self._codec.exchange.rank()
        leads = tf.equal(now.number % world_size, rank)
        none = tf.zeros([0], tf.int64)
        indices = tf.cond(leads, lambda: ops.select_top_k(residual, k, now.seed)[0], lambda: none)
        with tf.control_dependencies(residuals):  # a follower's indices do not depend on its gradients, its values do
            bucket.indices = tf.identity(indices)


class Partition(Selection):
    """MiCRO: each rank selects the elements of its current partition that reach the threshold."""

    def __init__(self, codec: SharedIndices):
        super().__init__(codec)
        self._predicts = codec.algorithm.controller == "histogram"
        self._threshold = PredictedThreshold() if self._predicts else ScaledThreshold()
        self.thresholds, self.threshold_rows = self._threshold.variables, self._threshold.rows

    def select_indices(self, bucket: IndexBucket, now: Round) -> None:
        """Set the indices, in one pass over the gradients."""
        arrivals, k, n = bucket.arrivals, bucket.ks[0], sum(arrival.feedback.size for arrival in bucket.arrivals)
        rank, ranks = self._codec.exchange.rank(), now.units.world_size
        begin, end = partition(now.number, rank, ranks, n)
        threshold, share = self._threshold.plan(k, ranks)
        if is_elastic() and not self._predicts:  # a new rank has another one, which equal scaling would leave different
            bits = once(now.present, tf.bitcast(threshold, tf.int64))  # of numbers above 0: in their order
            threshold = tf.bitcast(self._codec.exchange.furthest(f"threshold{now.suffix}", bits), tf.float64)
        bucket.threshold = threshold
        bucket.indices, sketch, finite = varying_ops.accumulate_partition(
            [arrival.gradient for arrival in arrivals],
            [arrival.feedback.residual for arrival in arrivals],
            factors=tf.stack([arrival.factor for arrival in arrivals]),
            begin=begin,
            end=end,
            threshold=threshold,
            share=share,
            sample=tf.maximum(-(-(end - begin) * SAMPLED // k), FEWEST_SAMPLED),  # `hvd_sparse.partition.sketch_sample`
            seed=now.seed,
            is_active=now.is_active,
        )
        bucket.sketch = sketch if self._predicts else None
        now.finite.append(finite)

    def learn(self, bucket: IndexBucket, count: tf.Tensor, sketches: tf.Tensor, now: Round) -> list[tf.Operation]:
        """Update the threshold: from the sketches, or by scaling it."""
        if isinstance(self._threshold, ScaledThreshold):
            return self._threshold.learn(bucket.ks[0], count, bucket.threshold, now)
        return self._threshold.learn(bucket.ks[0], sketches, self._codec.exchange.rank(), now)


class Random(Selection):
    """Random-k: every rank draws the same indices from the seed and the step, so that they need not be sent."""

    sends_indices = False

    def select_indices(self, bucket: IndexBucket, now: Round) -> None:
        """Set the indices that all ranks draw."""
        residuals = self._codec.accumulate(bucket.arrivals, now)
        n = sum(arrival.feedback.size for arrival in bucket.arrivals)
        with tf.control_dependencies(residuals):
            indices = tf.numpy_function(
                lambda k, seed: stratified_sample(n, int(k), int(seed)),
                [bucket.ks[0], now.seed],
                tf.int64,
                stateful=False,
            )
        bucket.indices = tf.ensure_shape(indices, [None])


SELECTIONS: dict[str, type[Selection]] = {"leader": Leader, "partition": Partition, "random": Random}
