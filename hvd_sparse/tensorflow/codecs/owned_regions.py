"""The codec for exactly k elements of each variable, or of all jointly, with a sparse reduce-scatter.

The twin of `hvd_sparse.torch.codecs.owned_regions`. Both call the NumPy code of `hvd_sparse.reduce_scatter`; here, each
call is an operation in the graph, between the collectives.
"""

import numpy as np
import tensorflow as tf

from hvd_sparse.granularity import segments_of
from hvd_sparse.pieces import WORD_BYTES
from hvd_sparse.reduce_scatter import (
    BINS,
    MessageFormat,
    Regions,
    Sent,
    SparseVector,
    entries_to_clear,
    known_bounds,
    region_numbers,
    selected_entries,
)
from hvd_sparse.tensorflow.codecs.base import Bucket, Round, once
from hvd_sparse.tensorflow.codecs.fixed_count import FixedCount
from hvd_sparse.wire import top_k_count


class OwnedRegions(FixedCount):
    """Selects exactly k elements; each region's owner keeps the largest sums over ranks of its region.

    At a world size for which `exchange` selects the all-gather, it is `FixedCount`.
    """

    @property
    def scatters(self) -> bool:
        """Whether the exchange is a reduce-scatter at the current world size."""
        sizes = [one.size for one in self.feedback.values() if one.is_compressed]
        return self.algorithm.scatters(self.exchange.size(), sizes)

    @property
    def values(self) -> str:
        """The value type of `Bucket.message`: float32 for a reduce-scatter, which quantizes when it sends to owners."""
        return "float32" if self.scatters else super().values

    @property
    def bucket_bytes(self) -> int:
        """The maximum bytes of a message; more if it is scattered, as each owner receives only its part."""
        return super().bucket_bytes * (self.exchange.size() if self.scatters else 1)

    def region_numbers(self, now: Round) -> tf.Tensor | None:
        """Return the numbers by which the ranks check that they have the same regions, float64[3].

        Their sum over ranks is for `must_balance`.
        """
        if not self.scatters:
            return None

        def tell(number) -> np.ndarray:
            """Return these numbers; also request an agreement if a message of this graph has no regions yet."""
            due, *digests = region_numbers(self.regions, int(number))
            unknown = any(message.known_bounds() is None for message in now.messages)
            return np.array([float(due > 0.0 or unknown), *digests])

        return tf.ensure_shape(tf.numpy_function(tell, [now.number], tf.float64), [3])

    def collect(self, bucket: Bucket, now: Round) -> tf.Tensor | None:
        """Send the selected entries to the owners of regions; return the payloads of the sums that these keep."""
        if not self.scatters:
            return super().collect(bucket, now)
        message = Scattered(self, bucket)
        now.messages.append(message)
        selected = tf.numpy_function(message.select, [bucket.message, bucket.ks], (tf.int64, tf.float32))
        indices, values = (tf.ensure_shape(part, [None]) for part in selected)
        counts = tf.cond(
            now.balances,
            lambda: self._count(message, indices, now),
            lambda: tf.zeros([min(message.n, BINS)], tf.float64),
        )
        now.counted.add(payload_bytes=tf.where(now.balances, 8 * counts.shape[0], 0))
        is_dense = tf.constant(False) if now.is_dense is None else now.is_dense
        arguments = [now.balances, is_dense, once(now.present, counts), bucket.ks, indices, values]
        own, splits = tf.numpy_function(message.split, arguments, (tf.uint8, tf.int32))
        received = self.exchange.alltoall(f"{bucket.name}{now.suffix}", tf.ensure_shape(own, [None]), splits)
        payload, *excess = tf.numpy_function(message.reduce, [received, now.seed], (tf.uint8, tf.int64, tf.float32))
        bucket.excess = tuple(tf.ensure_shape(part, [None]) for part in excess)
        name, most = f"{bucket.name}.kept{now.suffix}", message.most_kept_bytes
        gathered = self.exchange.allgather(name, tf.ensure_shape(payload, [None]), most)
        sizes = tf.size(own, tf.int64) - WORD_BYTES * tf.cast(splits[self.exchange.rank()], tf.int64)
        now.counted.add(payload_bytes=sizes + tf.size(payload, tf.int64))
        came = tf.size(received, tf.int64) - tf.size(own, tf.int64) + tf.size(gathered, tf.int64)
        now.counted.add(surplus_bytes=came - 2 * tf.size(payload, tf.int64))
        bucket.scattered = message
        return self._complete(bucket, gathered, now) if self.algorithm.complete else gathered

    def _complete(self, bucket: Bucket, gathered: tf.Tensor, now: Round) -> tf.Tensor:
        """Return the sums of all ranks' whole residuals at the kept elements, float32[kept]."""
        kept = tf.numpy_function(lambda payloads: bucket.scattered.join(payloads)[0], [gathered], tf.int64)
        kept = tf.ensure_shape(kept, [None])
        own = [arrival.feedback.residual.sparse_read(inner) for arrival, inner in self._cut(bucket.arrivals, kept)]
        bucket.completing = kept, tf.concat(own, 0)
        now.counted.add(payload_bytes=4 * tf.size(kept, tf.int64))
        padded = tf.concat([bucket.completing[1], tf.zeros([1])], 0)  # so that Horovod never gets an empty tensor
        return self.exchange.allreduce(f"{bucket.name}.completed{now.suffix}", padded)[:-1]

    def decode(self, bucket: Bucket, gathered: tf.Tensor | None, now: Round) -> list[tf.Operation]:
        """Clear the entries that this rank sent and an owner kept; set the arrivals' sums to the kept sums."""
        if not self.scatters:
            return super().decode(bucket, gathered, now)
        if bucket.completing is not None:
            sums, (kept, old) = gathered, bucket.completing
            retained = bucket.arrivals[0].feedback.retained
            done = self._clear_parts(bucket.arrivals, kept, old, retained * old, now)
        else:
            outputs = (tf.int64, tf.float32, tf.int64, tf.float32, tf.float32)
            joined = tf.numpy_function(bucket.scattered.join, [gathered], outputs)
            kept, sums, indices, old, left = (tf.ensure_shape(part, [None]) for part in joined)
            done = self._clear_parts(bucket.arrivals, indices, old, left, now)
            done += self._add_excess(bucket, now, done)
        scaled = sums * tf.cast(now.units.outgoing(), tf.float32)
        for arrival, inner, total in self._cut(bucket.arrivals, kept, scaled):
            whole = tf.scatter_nd(inner[:, None], total, tf.constant([arrival.feedback.size], tf.int64))
            done += self._set_sum(arrival, whole, now, list(done))
        return done

    def _count(self, message: "Scattered", indices: tf.Tensor, now: Round) -> tf.Tensor:
        """Return the number of all ranks' selected elements in each bin."""
        own = tf.ensure_shape(tf.numpy_function(message.count, [indices], tf.float64), [min(message.n, BINS)])
        return self.exchange.allreduce(f"{message.name}.regions{now.suffix}", own)

    def _add_excess(self, bucket: Bucket, now: Round, before: list[tf.Operation]) -> list[tf.Operation]:
        """Add the rounding errors of this rank's kept sums to the residuals, after these are cleared."""
        if self.algorithm.values == "float32":
            return []
        changes = []
        with tf.control_dependencies(before):
            for arrival, inner, rest in self._cut(bucket.arrivals, *bucket.excess):
                rest *= 1.0 - arrival.feedback.retained  # residuals have kept the other part
                rest = tf.where(now.ignores_payloads, tf.zeros_like(rest), rest)
                changes.append(arrival.feedback.residual.scatter_add(tf.IndexedSlices(rest, inner)))
        return changes


class Scattered:
    """The Python state of a message between the operations of a graph."""

    def __init__(self, codec: OwnedRegions, bucket: Bucket):
        self.name = bucket.name
        self.names = tuple(arrival.name for arrival in bucket.arrivals)
        self._codec, self._is_joint = codec, codec.is_joint
        self._sizes = [arrival.feedback.size for arrival in bucket.arrivals]
        self.n = sum(self._sizes)
        shapes = [arrival.feedback.variable.shape.as_list() for arrival in bucket.arrivals]
        self._segments = segments_of(shapes, codec.algorithm)
        self._retained = bucket.arrivals[0].feedback.retained
        self._highest = codec.algorithm.schedule.highest
        self._regions: Regions | None = None
        self._sent: Sent | None = None

    @property
    def most_kept_bytes(self) -> int:
        """The maximum bytes of the payload of a region's kept sums."""
        counts = [self.n] if self._is_joint else self._sizes
        return self._make(sum(top_k_count(n, self._highest) for n in counts)).most_kept_bytes

    def select(self, message: np.ndarray, ks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the selected entries: indices into the concatenated members, and residuals."""
        sizes = [self.n] if self._is_joint else self._sizes
        return selected_entries(message, sizes, ks.tolist(), self._codec.algorithm.coding)

    def count(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of selected elements in each bin."""
        return self._make(1).count(SparseVector(indices, indices))

    def known_bounds(self) -> np.ndarray | None:
        """Return the bounds of the regions; None if the ranks have to agree on them."""
        return known_bounds(self._codec.regions, self.names, self.n, self._codec.exchange.size())

    def split(self, balances, is_dense, counts, ks, indices, values) -> tuple[np.ndarray, np.ndarray]:
        """Return the message to the owners, and the number of words for each.

        In a dense step the graph runs this on nothing that was selected: such regions are not kept.
        """
        self._regions = self._make(int(ks.sum()))
        if balances:
            self._regions.balance(counts)
        else:
            self._regions.bounds = self.known_bounds()
        if not is_dense:
            self._codec.regions[self.names] = self._regions.bounds
        self._selected = SparseVector(indices, values)
        self._sent = self._regions.split(self._selected)
        return self._sent.message, (self._sent.splits // WORD_BYTES).astype(np.int32)

    def reduce(self, received: np.ndarray, seed) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the payload of the sums that this rank keeps, and their rounding errors."""
        payload, excess = self._regions.reduce(received, self._sent.padding, int(seed))
        return payload, excess.indices, excess.values

    def join(self, gathered: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return all kept sums, and for this rank's entries among them indices, residuals and next residuals."""
        kept = self._regions.join(gathered)
        cleared = entries_to_clear(self._selected, self._sent.entries, kept, self._retained)
        return kept.indices, kept.values, *cleared

    def _make(self, k: int) -> Regions:
        algorithm, exchange = self._codec.algorithm, self._codec.exchange
        form = MessageFormat(self.n, k, algorithm.coding, algorithm.values, algorithm.level, self._segments)
        return Regions(form, exchange.size(), exchange.rank())
