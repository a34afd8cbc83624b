"""All ranks send the same elements of the whole model: first which, then a sum of the values at these.

float32 values are summed by an all-reduce. Quantized values are gathered and summed in rank order: what the sum loses
then is in a residual. These sums depend on what was gathered, so this codec asks the exchange for them itself.
"""

import abc
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from hvd_sparse.granularity import by_group
from hvd_sparse.sampling import hash_index, stratified_sample
from hvd_sparse.tensorflow import ops
from hvd_sparse.tensorflow.codecs.base import Bucket, Codec, Entry, Round, gather, once
from hvd_sparse.tensorflow.threshold import ScaledThreshold, ThresholdHints
from hvd_sparse.threshold import HISTOGRAM_BINS, exact_count, histogram_cut, sampled_histogram
from hvd_sparse.wire import LOW_BITS, largest_payload


@dataclass
class Named(Bucket):
    """What this rank names."""

    residual: tf.Tensor | None = None  # of the whole model, accumulated
    indices: tf.Tensor | None = None


class SharedIndices(Codec):
    """Each rank names elements, none of them twice; the values at all that were named are summed."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._selection = SELECTIONS[self.algorithm.layout](self)
        self.thresholds, self.threshold_rows = self._selection.thresholds, self._selection.threshold_rows

    def encode(self, entries: list[Entry], now: Round) -> list[Bucket]:
        """Accumulate; name elements, in a message without values, where the others cannot know them."""
        residual = tf.concat(self._accumulate(entries, now), 0)
        n, coding, payload = residual.shape[0], self.algorithm.coding, None
        k = self._counts([n], now)
        indices, info = self._selection.indices(residual, k[0], now)
        if self._selection.is_named:
            count = tf.maximum(tf.size(indices, tf.int64), 1)
            payload = ops.pack(indices, tf.zeros(tf.shape(indices)), n, count, coding, "none")
        most = largest_payload(n, n, coding, "none")
        return [Named("model", entries, payload, most, k, info, residual=residual, indices=indices)]

    def decode(self, named: Named, gathered: tf.Tensor | None, now: Round) -> list[tf.Operation]:
        """Sum the values of all ranks at what was named, and clear these."""
        residual, entries = named.residual, named.entries
        indices = named.indices if gathered is None else self._union(gathered, residual.shape[0])
        values = tf.gather(residual, indices)
        count = tf.size(indices)
        done = self._selection.learn(named, count, now)
        now.counted.add(sent=count if now.is_dense is None else tf.where(now.is_dense, 0, count))
        sum_values = self._sum_values if self.algorithm.values == "float32" else self._sum_quantized
        total, sent = sum_values(entries, indices, values, now)
        done += self._clear_parts(entries, indices, values, values - sent, now)
        whole = tf.scatter_nd(indices[:, None], total, tf.shape(residual, tf.int64))
        return done + self._give_parts(entries, whole, now, list(done))

    def _give_parts(self, entries: list[Entry], whole: tf.Tensor, now: Round, cleared: list) -> list[tf.Operation]:
        """Give each entry its part of the sum; return what that changes in their error feedback."""
        parts = tf.split(whole, [entry.feedback.size for entry in entries])
        return [
            change
            for entry, part in zip(entries, parts, strict=True)
            for change in self._held(entry, part, now, cleared)
        ]

    def _sum_values(self, entries: list[Entry], indices: tf.Tensor, values: tf.Tensor, now: Round) -> tuple:
        """Return the sum of all ranks' values, and these as they were sent."""
        now.counted.add(payload_bytes=4 * tf.size(indices))
        scaled = once(now.present, values * tf.cast(now.units.outgoing(), tf.float32))  # the sum might overflow
        return self.exchange.allreduce(f"values{now.suffix}", scaled), values

    def _sum_quantized(self, entries: list[Entry], indices: tf.Tensor, values: tf.Tensor, now: Round) -> tuple:
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
        form = ("dense", dtype, segments)
        payload = ops.pack(places, sent, k, k, *form)
        most_bytes = largest_payload(n, n, "dense", dtype, layout)
        gathered = tf.reshape(gather(self.exchange, "values", payload, most_bytes, now), [now.units.world_size, -1])
        total = ops.reduce_payloads(gathered, 0, k, k, now.units.outgoing(), *form)[:count]
        back = order[:, None]
        return tuple(tf.scatter_nd(back, part, tf.shape(values, tf.int64)) for part in (total, sent))

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
    def indices(self, residual: tf.Tensor, k: tf.Tensor, now: Round) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Return ascending indices into the residual of the whole model, and what the next step's hint learns from."""

    def learn(self, named: Named, count: tf.Tensor, now: Round) -> list[tf.Operation]:
        """Keep what the next step starts from. count: how many elements all ranks named."""
        return []


class Leader(Selection):
    """CLT-k: the rank whose turn it is names its k largest, the others none."""

    def __init__(self, codec: SharedIndices):
        super().__init__(codec)
        self._hints = ThresholdHints(["model"])

    def indices(self, residual: tf.Tensor, k: tf.Tensor, now: Round) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Return those, and what the next step's hint learns from."""
        hint = self._hints.values(["model"], k[None])[0]
        world_size, rank = now.units.world_size, self._codec.exchange.rank()

        def lead() -> tuple[tf.Tensor, tf.Tensor]:
            """Select."""
            indices, _, info = ops.select_top_k(residual, k, now.seed, hint)
            return indices, info

        def follow() -> tuple[tf.Tensor, tf.Tensor]:
            """Name nothing, and forget the hint."""
            return tf.zeros([0], tf.int64), tf.zeros([2], tf.float64)

        return tf.cond(tf.equal(now.number % world_size, rank), lead, follow)

    def learn(self, named: Named, count: tf.Tensor, now: Round) -> list[tf.Operation]:
        """Keep the threshold as the next step's hint."""
        return self._hints.update(["model"], named.ks, named.info[None])


class Partition(Selection):
    """MiCRO: every rank names what reaches the threshold in the partition whose turn it is."""

    def __init__(self, codec: SharedIndices):
        super().__init__(codec)
        self._scaled = ScaledThreshold() if codec.algorithm.controller == "scaling" else None
        if self._scaled is not None:
            self.thresholds, self.threshold_rows = self._scaled.variables, self._scaled.rows

    def indices(self, residual: tf.Tensor, k: tf.Tensor, now: Round) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Return those, and what the next step's hint learns from."""
        n, rank, ranks = residual.shape[0], self._codec.exchange.rank(), now.units.world_size
        number = (now.number + rank) % ranks  # as `hvd_sparse.threshold.partition` has it
        begin, end = number * n // ranks, (number + 1) * n // ranks
        part = residual[begin:end]
        if self._scaled is not None:
            return ops.filter_threshold(part, self._scaled.at(k))[0] + begin, None
        return self._above_cut(part, k, now) + begin, None

    def learn(self, named: Named, count: tf.Tensor, now: Round) -> list[tf.Operation]:
        """Scale the threshold, if it is scaled."""
        return [] if self._scaled is None else self._scaled.learn(named.ks[0], count, now.void)

    def _above_cut(self, part: tf.Tensor, k: tf.Tensor, now: Round) -> tf.Tensor:
        """Return which of a partition's elements are above the threshold that all ranks read off their histograms."""
        histogram = tf.numpy_function(
            lambda part, k, seed: sampled_histogram(part, int(k), int(seed)),
            [part, k, now.seed],
            tf.float32,
            stateful=False,
        )
        histogram = tf.ensure_shape(histogram, [HISTOGRAM_BINS])
        now.counted.add(payload_bytes=4 * HISTOGRAM_BINS)
        total = self._codec.exchange.allreduce(f"histogram{now.suffix}", once(now.present, histogram))
        threshold = tf.numpy_function(
            lambda total, k: np.float64(histogram_cut(total, int(k)).threshold), [total, k], tf.float64, stateful=False
        )
        indices = ops.filter_threshold(part, tf.ensure_shape(threshold, []))[0]
        rank = self._codec.exchange.rank()

        def count(total, own, part, k, count, seed) -> np.int64:
            """Return how many of the largest to name in place of these, or 0."""
            return np.int64(
                exact_count(histogram_cut(total, int(k)), own, part, int(count), int(hash_index(seed, rank)))
            )

        given = [total, histogram, part, k, tf.size(indices), now.seed]
        largest = tf.ensure_shape(tf.numpy_function(count, given, tf.int64, stateful=False), [])

        def select() -> tf.Tensor:
            """Name exactly so many, but no zeros."""
            selected, values, _ = ops.select_top_k(part, largest, now.seed)
            return tf.boolean_mask(selected, tf.not_equal(values, 0.0))

        return tf.cond(largest > 0, select, lambda: indices)


class Random(Selection):
    """Random-k: every rank draws the same elements from the seed and the step, so that none has to be named."""

    is_named = False

    def indices(self, residual: tf.Tensor, k: tf.Tensor, now: Round) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Return those, and what the next step's hint learns from."""
        n = residual.shape[0]
        indices = tf.numpy_function(
            lambda k, seed: stratified_sample(n, int(k), int(seed)), [k, now.seed], tf.int64, stateful=False
        )
        return tf.ensure_shape(indices, [None]), None


SELECTIONS: dict[str, type[Selection]] = {"leader": Leader, "partition": Partition, "random": Random}
