"""All ranks send the same elements of the whole model: first which, then a sum of the values at these.

float32 values are summed by an allreduce. What has fewer bits is gathered and summed in rank order: the sum has then
lost nothing that is not in a residual.
"""

import abc
import itertools

import numpy as np
import tensorflow as tf

from hvd_sparse.centres import by_group
from hvd_sparse.reference import hash_index, stratified_sample
from hvd_sparse.tensorflow import ops
from hvd_sparse.tensorflow.memory import read_after
from hvd_sparse.tensorflow.scope import Entry, Scope, Selection, Step, once
from hvd_sparse.tensorflow.threshold import ScaledThreshold
from hvd_sparse.threshold import HISTOGRAM_BINS, exact_count, histogram_cut, sampled_histogram
from hvd_sparse.wire import LOW_BITS, largest_payload


class UnionScope(Scope):
    """Each rank names elements, none of them twice; the values at all that were named are summed."""

    def _selections(self) -> list[str]:
        return ["model"]

    def _choose(self, entries: list[Entry], step: Step) -> Selection:
        residual = self._accumulate(entries, step)
        k = self._counts([residual.shape[0]], step)[0]
        indices, info = self._name_elements(residual, k, step)
        return Selection(k, indices, residual, residual, None, info)

    def _accumulate(self, entries: list[Entry], step: Step) -> tf.Tensor:
        """Bring all gradients into their memories; return the whole residual."""
        residuals = []
        for entry in entries:
            memory = entry.memory
            finite = memory.accumulate(entry.gradient, entry.factor, step.units, step.is_active)
            step.finite.append(finite)
            residuals.append(read_after(memory.residual, finite))
        return tf.concat(residuals, 0)

    @abc.abstractmethod
    def _name_elements(self, residual: tf.Tensor, k: tf.Tensor, step: Step) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Return ascending indices that this rank names, and what the next step's hint learns from."""

    def _send(self, entries: list[Entry], selection: Selection, step: Step) -> list[tf.Operation]:
        residual = selection.values
        indices = self._union(selection.indices, residual.shape[0], step)
        values = tf.gather(residual, indices)
        count = tf.size(indices)
        done = self._learn(selection, count, step)
        step.counted.add(sent=count if step.is_dense is None else tf.where(step.is_dense, 0, count))
        sum_values = self._sum_values if self.algorithm.values == "float32" else self._sum_quantized
        total, travelled = sum_values(entries, indices, values, step)
        sent = Selection(selection.k, indices, values, travelled, None, None)
        done += self._clear_parts(entries, sent, step)
        whole = tf.scatter_nd(indices[:, None], total, tf.shape(residual, tf.int64))
        return done + self._give_parts(entries, whole, step, list(done))

    def _learn(self, selection: Selection, count: tf.Tensor, step: Step) -> list[tf.Operation]:
        """Keep what the next step starts from; `count`: how many elements all ranks named."""
        if selection.info is None:
            return []
        return self._hints.update(["model"], selection.k[None], selection.info[None])

    def _give_parts(self, entries: list[Entry], whole: tf.Tensor, step: Step, cleared: list) -> list[tf.Operation]:
        """Give each entry its part of the sum; return what that changes in the memories."""
        parts = tf.split(whole, [entry.memory.size for entry in entries])
        return [
            change
            for entry, part in zip(entries, parts, strict=True)
            for change in self._held(entry, part, step, cleared)
        ]

    def _clear_parts(self, entries: list[Entry], selection: Selection, step: Step) -> list[tf.Operation]:
        """Cut the selection into that of each variable."""
        offsets = [0, *itertools.accumulate(entry.memory.size for entry in entries)]
        bounds = tf.searchsorted(selection.indices, tf.constant(offsets, tf.int64), out_type=tf.int64)
        parts = [
            tf.split(tensor, bounds[1:] - bounds[:-1], num=len(entries))
            for tensor in (selection.indices, selection.values, selection.left)
        ]
        done = []
        for entry, offset, indices, values, left in zip(entries, offsets, *parts, strict=False):
            done += self._clear(entry.memory, indices - offset, values, left, step)
        return done

    def _sum_values(self, entries: list[Entry], indices: tf.Tensor, values: tf.Tensor, step: Step) -> tuple:
        """Return the sum of all ranks' values, and these as they travelled."""
        step.counted.add(payload_bytes=4 * tf.size(indices))
        scaled = once(step.present, values * tf.cast(step.units.outgoing(), tf.float32))  # the sum might overflow
        return self.exchange.allreduce(f"values{step.suffix}", scaled), values

    def _sum_quantized(self, entries: list[Entry], indices: tf.Tensor, values: tf.Tensor, step: Step) -> tuple:
        """Do the same in a payload of fewer bits, in which all that shares a centre lies together."""
        dtype, layout, segments = self.algorithm.values, self._segments(entries), None
        n, count = sum(entry.memory.size for entry in entries), tf.size(indices, tf.int64)
        places = order = tf.range(count)
        if dtype in LOW_BITS:
            grouped = tf.numpy_function(
                lambda indices: by_group(indices, layout), [indices], (tf.int64, tf.int64), stateful=False
            )
            order, segments = tf.ensure_shape(grouped[0], [None]), tf.ensure_shape(grouped[1], [None, 2])
        sent = ops.quantize(tf.gather(values, order), dtype, self.algorithm.centre, places, segments)
        k = tf.maximum(count, 1)  # no elements at all: an empty contribution
        form = ("dense", dtype, segments)
        payload = ops.pack(places, sent, k, k, *form)
        step.counted.add(payload_bytes=tf.size(payload, tf.int64))
        most_bytes = largest_payload(n, n, "dense", dtype, layout)
        gathered = tf.reshape(self._gather("values", payload, most_bytes, step), [self.exchange.size(), -1])
        total = ops.reduce_payloads(gathered, 0, k, k, step.units.outgoing(), *form)[:count]
        back = order[:, None]
        return tuple(tf.scatter_nd(back, part, tf.shape(values, tf.int64)) for part in (total, sent))

    def _union(self, own: tf.Tensor, n: int, step: Step) -> tf.Tensor:
        """Return what all ranks named, ascending."""
        coding, ranks = self.algorithm.coding, self.exchange.size()
        payload = ops.pack(own, tf.zeros(tf.shape(own)), n, tf.maximum(tf.size(own, tf.int64), 1), coding, "none")
        step.counted.add(payload_bytes=tf.size(payload, tf.int64))
        gathered = self._gather("model", payload, largest_payload(n, n, coding, "none"), step)
        offsets, counts = tf.unstack(ops.locate_payloads(gathered, [n], ranks, coding, "none")[:, :, 0])
        ends = tf.concat([offsets[1:], tf.size(gathered, tf.int64)[None]], 0)
        parts = [
            ops.unpack(gathered[offsets[rank] : ends[rank]], n, counts[rank], coding, "none")[0]
            for rank in range(ranks)
        ]
        return tf.sort(tf.concat(parts, 0))


class LeaderScope(UnionScope):
    """CLT-k: the rank whose turn it is names its k largest, the others none."""

    def _name_elements(self, residual: tf.Tensor, k: tf.Tensor, step: Step) -> tuple[tf.Tensor, tf.Tensor | None]:
        hint = self._hints.values(["model"], k[None])[0]

        def lead() -> tuple[tf.Tensor, tf.Tensor]:
            """Select."""
            indices, _, info = ops.select_top_k(residual, k, step.seed, hint)
            return indices, info

        def follow() -> tuple[tf.Tensor, tf.Tensor]:
            """Name nothing, and forget the hint."""
            return tf.zeros([0], tf.int64), tf.zeros([2], tf.float64)

        return tf.cond(tf.equal(step.number % self.exchange.size(), self.exchange.rank()), lead, follow)


class PartitionScope(UnionScope):
    """MiCRO: every rank names what reaches the threshold in the partition whose turn it is."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._scaled = ScaledThreshold() if self.algorithm.controller == "scaling" else None
        if self._scaled is not None:
            self.kept, self.kept_rows = self._scaled.variables, self._scaled.rows

    def _name_elements(self, residual: tf.Tensor, k: tf.Tensor, step: Step) -> tuple[tf.Tensor, tf.Tensor | None]:
        n, rank, ranks = residual.shape[0], self.exchange.rank(), self.exchange.size()
        number = (step.number + rank) % ranks  # as `hvd_sparse.threshold.partition` has it
        begin, end = number * n // ranks, (number + 1) * n // ranks
        part = residual[begin:end]
        if self._scaled is not None:
            return ops.filter_threshold(part, self._scaled.at(k))[0] + begin, None
        return self._above_cut(part, k, step) + begin, None

    def _learn(self, selection: Selection, count: tf.Tensor, step: Step) -> list[tf.Operation]:
        return [] if self._scaled is None else self._scaled.learn(selection.k, count, step.void)

    def _above_cut(self, part: tf.Tensor, k: tf.Tensor, step: Step) -> tf.Tensor:
        """Return which of a partition's elements are above the threshold that all ranks read off their histograms."""
        histogram = tf.numpy_function(
            lambda part, k, seed: sampled_histogram(part, int(k), int(seed)),
            [part, k, step.seed],
            tf.float32,
            stateful=False,
        )
        histogram = tf.ensure_shape(histogram, [HISTOGRAM_BINS])
        step.counted.add(payload_bytes=4 * HISTOGRAM_BINS)
        total = self.exchange.allreduce(f"histogram{step.suffix}", once(step.present, histogram))
        threshold = tf.numpy_function(
            lambda total, k: np.float64(histogram_cut(total, int(k)).threshold), [total, k], tf.float64, stateful=False
        )
        indices = ops.filter_threshold(part, tf.ensure_shape(threshold, []))[0]
        rank = self.exchange.rank()

        def count(total, own, part, k, count, seed) -> np.int64:
            """Return how many of the largest to name in place of these, or 0."""
            return np.int64(
                exact_count(histogram_cut(total, int(k)), own, part, int(count), int(hash_index(seed, rank)))
            )

        given = [total, histogram, part, k, tf.size(indices), step.seed]
        largest = tf.ensure_shape(tf.numpy_function(count, given, tf.int64, stateful=False), [])

        def select() -> tf.Tensor:
            """Name exactly so many, but no zeros."""
            selected, values, _ = ops.select_top_k(part, largest, step.seed)
            return tf.boolean_mask(selected, tf.not_equal(values, 0.0))

        return tf.cond(largest > 0, select, lambda: indices)


class RandomScope(UnionScope):
    """Random-k: every rank draws the same elements from the seed and the step, so that none has to be named."""

    def _name_elements(self, residual: tf.Tensor, k: tf.Tensor, step: Step) -> tuple[tf.Tensor, tf.Tensor | None]:
        n = residual.shape[0]
        indices = tf.numpy_function(
            lambda k, seed: stratified_sample(n, int(k), int(seed)), [k, step.seed], tf.int64, stateful=False
        )
        return tf.ensure_shape(indices, [None]), None

    def _union(self, own: tf.Tensor, n: int, step: Step) -> tf.Tensor:
        return own
