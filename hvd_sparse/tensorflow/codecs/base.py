"""The common part of all codecs: the gradients of a step, and the interface of a codec."""

import abc
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from hvd_sparse.algorithms import Algorithm
from hvd_sparse.buckets import plan_buckets
from hvd_sparse.granularity import channels_of, segments_of
from hvd_sparse.half import HALF, rest_of
from hvd_sparse.reduce_scatter import Bounds
from hvd_sparse.tensorflow import bucket_ops, ops
from hvd_sparse.tensorflow.devices import beside
from hvd_sparse.tensorflow.error_feedback import ErrorFeedback, read_after
from hvd_sparse.tensorflow.exchange import Exchange
from hvd_sparse.tensorflow.traffic import Counted
from hvd_sparse.units import Units
from hvd_sparse.wire import LOW_BITS, largest_payload, payload_size, top_k_count


@dataclass
class Arrival:
    """One gradient of a step."""

    name: str
    gradient: tf.Tensor
    dtype: tf.DType  # of the gradient that Horovod passed; in a hierarchical exchange, `gradient` becomes another
    feedback: ErrorFeedback
    is_sparse: bool  # whether it is sent as a payload in any step
    clip_ratio: tf.Tensor | float = 1.0
    factor: tf.Tensor | None = None  # the factor of the gradient when it is accumulated, with the clip ratio
    carried: tf.Tensor | None = None  # the tensor for Horovod's all-reduce: a token or dense
    taken: list | None = None  # the dense tensor, and a dict of the buffers' next content
    decode: Callable[[], tf.Tensor] | None = None  # returns the reduced gradient, float32[n]

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of the whole variable."""
        variable = self.feedback.variable
        return getattr(variable, "whole", variable).shape


@dataclass
class Round:
    """The data that all gradients of a step share."""

    number: tf.Tensor  # int64, from 0
    seed: tf.Tensor  # int64
    density: tf.Tensor | float
    is_dense: tf.Tensor | None  # whether this step is dense; None if no step can be
    units: Units  # with a tensor as loss scale
    suffix: str  # distinguishes several calls in one graph
    is_active: tf.Tensor | bool = True  # whether gradients are accumulated: false in a dense step
    present: tf.Operation | None = None
    token: tf.Tensor | None = None  # sent instead of a gradient; its sum tells the reduction
    finite: list[tf.Tensor] = field(default_factory=list)  # bool, of any shape: was each gradient finite everywhere?
    seconds: tf.Tensor | None = None  # since the previous step began; None: not measured
    noted: list[tf.Operation] = field(default_factory=list)  # operations that record all ranks' mean seconds
    overflow: tf.Tensor | None = None
    ignores_payloads: tf.Tensor | None = None  # after an overflow, or in a dense step
    counted: Counted = field(default_factory=Counted)
    balances: tf.Tensor | None = None  # whether this step agrees on the regions of a reduce-scatter
    messages: list = field(default_factory=list)  # of reduce-scatters


@dataclass
class Bucket:
    """The message of several gradients: those of a bucket, or all."""

    name: str  # of the collective
    arrivals: list[Arrival]
    message: tf.Tensor | None  # uint8[bytes]; None: nothing to send
    most_bytes: int  # upper bound for any rank
    ks: tf.Tensor  # of the selections, int64[selections]
    info: tf.Tensor | None = None  # results of the selections, for the next thresholds
    scattered: object | None = None  # its Python state in a reduce-scatter
    excess: tuple | None = None  # rounding errors of the sums that this rank owns: indices, values
    completing: tuple | None = None  # kept indices and this rank's residuals there, if these are all-reduced


class Codec(abc.ABC):
    """Turns the gradients of a step into messages, and the messages of all ranks into sums."""

    def __init__(self, algorithm: Algorithm, feedback: Mapping[str, ErrorFeedback], exchange: Exchange):
        self.algorithm = algorithm
        self.feedback = feedback
        self.exchange = exchange
        self.thresholds: list[tf.Variable] = []  # thresholds that persist across steps, by row
        self.threshold_rows: Mapping[str, int] = {}  # the row of each selection
        self.regions: Bounds = {}  # of reduce-scatters: part of a checkpoint

    @abc.abstractmethod
    def encode(self, arrivals: list[Arrival], now: Round) -> list[Bucket]:
        """Accumulate and select; add to `now.finite` which gradients were finite. arrivals: in the order of names."""

    @property
    def values(self) -> str:
        """The type of the values in messages."""
        return self.algorithm.values

    def region_numbers(self, now: Round) -> tf.Tensor | None:
        """Return this rank's numbers for the vote, by which the ranks compare their regions."""
        return None

    def collect(self, bucket: Bucket, now: Round) -> tf.Tensor | None:
        """Return the messages of all ranks, uint8[bytes], in rank order; None if none are sent."""
        if bucket.message is None:
            return None
        return gather(self.exchange, bucket.name, bucket.message, bucket.most_bytes, now)

    @abc.abstractmethod
    def decode(self, bucket: Bucket, gathered: tf.Tensor | None, now: Round) -> list[tf.Operation]:
        """Clear the sent entries; set each arrival's `decode`; return the operations that the step must run."""

    def learn(self, buckets: list[Bucket], now: Round) -> list[tf.Operation]:
        """Update the thresholds or hints of the next step's selections."""
        return []

    def miss(self, now: Round) -> list[tf.Operation]:
        """Update the thresholds in a step without gradients that are sent as payloads."""
        return []

    def accumulate(self, arrivals: list[Arrival], now: Round) -> list[tf.Tensor]:
        """Accumulate each gradient, and return the residuals."""
        residuals = []
        for arrival in arrivals:
            finite = arrival.feedback.accumulate(arrival.gradient, arrival.factor, now.units, now.is_active)
            now.finite.append(finite)
            residuals.append(read_after(arrival.feedback.residual, finite))
        return residuals

    def _counts(self, sizes: list[int], now: Round) -> tf.Tensor:
        """Return k of every selection, int64[selections]; 1 in a dense step, where payloads are ignored."""
        sizes = tf.constant(sizes, tf.float64)
        counts = tf.clip_by_value(tf.floor(now.density * sizes + 0.5), 1.0, sizes)
        if now.is_dense is not None:
            counts = tf.where(now.is_dense, tf.ones_like(counts), counts)
        return tf.cast(counts, tf.int64)

    def _set_sum(
        self, arrival: Arrival, total: tf.Tensor, now: Round, cleared: list[tf.Operation]
    ) -> list[tf.Operation]:
        """Set an arrival's `decode` to its sum, float32[n], clamped to the range of a 16-bit gradient.

        The excess returns to the ranks' residuals, after these are `cleared` at the sent entries. Returns this
        operation.
        """
        if arrival.dtype.name not in HALF:
            arrival.decode = lambda: total
            return []
        with beside(arrival.feedback.device):
            rank, retained = self.exchange.rank(), arrival.feedback.retained
            rounded, excess = round_to_half(total, arrival.dtype, rank, now.units, retained)
            arrival.decode = lambda: rounded
            rest = tf.where(now.ignores_payloads, tf.zeros_like(total), excess)
            with tf.control_dependencies(cleared):
                return [arrival.feedback.residual.assign_add(rest)]

    def _cut(self, arrivals: list[Arrival], indices: tf.Tensor, *columns: tf.Tensor) -> list[tuple]:
        """Split ascending indices into the concatenated variables: for each, arrival, indices in it, and columns."""
        offsets = [0, *itertools.accumulate(arrival.feedback.size for arrival in arrivals)]
        bounds = tf.searchsorted(indices, tf.constant(offsets, tf.int64), out_type=tf.int64)
        sizes = bounds[1:] - bounds[:-1]
        inner, *others = (tf.split(tensor, sizes, num=len(arrivals)) for tensor in (indices, *columns))
        inner = [own - offset for own, offset in zip(inner, offsets, strict=False)]
        return list(zip(arrivals, inner, *others, strict=True))

    def _clear_parts(
        self, arrivals: list[Arrival], indices: tf.Tensor, values: tf.Tensor, left: tf.Tensor, now: Round
    ) -> list[tf.Operation]:
        """Clear the sent entries in each variable; left: what their residuals keep."""
        done = []
        for arrival, own, old, rest in self._cut(arrivals, indices, values, left):
            done += self._clear(arrival.feedback, own, old, rest, now)
        return done

    def _clear(self, feedback: ErrorFeedback, indices: tf.Tensor, values, left, now: Round) -> list[tf.Operation]:
        """Clear the sent entries, unless the step is skipped."""
        operations = []
        for kind, new in feedback.after_sending(left).items():
            old = values if kind == "residual" else feedback.buffers[kind].sparse_read(indices)
            new = tf.where(now.ignores_payloads, old, new)
            operations.append(ops.scatter_update(feedback.buffers[kind], indices, new))
        return operations

    def _largest_payload(self, arrivals: list[Arrival], density: float) -> int:
        """Return the maximum bytes of the payload of one selection in all of these gradients."""
        n, form = sum(arrival.feedback.size for arrival in arrivals), (self.algorithm.coding, self.algorithm.values)
        return largest_payload(n, top_k_count(n, density), *form, self._segments(arrivals))

    def _segments(self, arrivals: list[Arrival]) -> np.ndarray | None:
        """Return the groups that share the quantization levels of low-bit values."""
        return segments_of([arrival.feedback.variable.shape.as_list() for arrival in arrivals], self.algorithm)


class BucketCodec(Codec):
    """The common part of codecs with a payload for each variable, which are sent in buckets of `bucket_bytes`."""

    @property
    def bucket_bytes(self) -> int:
        """The maximum bytes of a message. A single payload that is larger gets a separate message."""
        return self.algorithm.bucket_bytes

    def _buckets(self, arrivals: list[Arrival]) -> Iterator[tuple[str, list[Arrival], slice]]:
        """Cut the arrivals, in the order of names, into buckets; yield each bucket's name, arrivals and their slice."""
        begin = 0
        for name, members in plan_buckets(self._settled_sizes(arrivals), self.bucket_bytes, "bucket").items():
            part = slice(begin, begin + len(members))
            yield name, arrivals[part], part
            begin = part.stop

    def _settled_sizes(self, arrivals: list[Arrival]) -> dict[str, int]:
        """Return the payloads' sizes at the final density, as a graph's buckets always have the same members."""
        density = self.algorithm.schedule.planned
        form, sizes = (self.algorithm.coding, self.algorithm.values), {}
        for arrival in arrivals:
            n = arrival.feedback.size
            sizes[arrival.name] = payload_size(n, top_k_count(n, density), *form, self._segments([arrival]))
        return sizes

    def _form(self, arrivals: list[Arrival], **options) -> dict:
        """Return the coding of payloads, as arguments of the bucket operators."""
        algorithm = self.algorithm
        has_levels = self.values in LOW_BITS
        channels = (
            [channels_of(arrival.feedback.variable.shape, algorithm) for arrival in arrivals] if has_levels else []
        )
        return {"coding": algorithm.coding, "value_dtype": self.values, "channels": channels, **options}

    def _delivered(self, bucket: Bucket, sums: list[tf.Tensor], now: Round, form: dict) -> list[tf.Operation]:
        """Clear the sent entries, unless the step is skipped; set the arrivals' sums; return the operations to run."""
        buffers = [arrival.feedback.cleared() for arrival in bucket.arrivals]
        memory = ([own[0] for own in buffers], [velocity for own in buffers for velocity in own[1:]])
        options = {**form, "retained": bucket.arrivals[0].feedback.retained}
        with beside(bucket.arrivals[0].feedback.device):
            cleared = bucket_ops.clear_bucket(bucket.message, bucket.ks, now.ignores_payloads, *memory, **options)
        done = [cleared]
        for arrival, total in zip(bucket.arrivals, sums, strict=True):
            done += self._set_sum(arrival, total, now, [cleared])
        return done


def round_to_half(
    total: tf.Tensor, dtype: tf.DType, rank: int, units: Units, retained: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """Clamp and round a float32 sum over ranks to a 16-bit type; return it, float32, and the excess for this residual.

    units: those of the ranks, among which this is `rank`; they share the excess, of which residuals have kept
    `retained` times already. An infinite sum has none.
    """
    rounded = tf.cast(tf.cast(tf.clip_by_value(total, -float(dtype.max), float(dtype.max)), dtype), tf.float32)
    part = (1.0 - retained) * rest_of(rank, units.world_size) / units.outgoing()
    excess = (total - rounded) * tf.cast(part, tf.float32)
    return rounded, tf.where(tf.math.is_finite(excess), excess, tf.zeros_like(excess))


def gather(exchange: Exchange, name: str, payloads: tf.Tensor, most_bytes: int, now: Round) -> tf.Tensor:
    """All-gather the payloads, uint8[bytes], in rank order, and count their bytes."""
    now.counted.add(payload_bytes=tf.size(payloads, tf.int64))
    gathered = exchange.allgather(f"{name}{now.suffix}", once(now.present, payloads), most_bytes)
    now.counted.add(surplus_bytes=tf.size(gathered, tf.int64) - 2 * tf.size(payloads, tf.int64))
    return gathered


def once(operation: tf.Operation, tensor: tf.Tensor, name: str | None = None) -> tf.Tensor:
    """Return the tensor, under this name, with a dependency on the operation."""
    with tf.control_dependencies([operation]):
        return tf.identity(tensor, name)
