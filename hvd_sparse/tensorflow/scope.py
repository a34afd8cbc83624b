"""What is selected together, and what travels together, in one step: what both scopes share.

Horovod traces compress, allreduce and decompress of a gradient into a branch of its own. Nothing can be shared between
branches, so a whole step is laid out in the graph around them, when the first gradient of a call is seen: memories,
selections, the allgathers of a few buckets, the vote. A branch then takes its part out of it.

    present   a sum over ranks, started with the step: do all take part, at the same step, with the same settings?
              All other collectives wait for it: one that not every rank starts would never end
    memory    each gradient is accumulated, and what to send is selected
    payloads  packed and gathered
    vote      how many gradients were not finite on any rank: if there are, the step does not count
    clear     what was sent leaves the memory, if the step counts
"""

import abc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from hvd_sparse.algorithms import Algorithm
from hvd_sparse.centres import segments_of
from hvd_sparse.half import HALF, largest_sent, rest_of
from hvd_sparse.members import is_elastic
from hvd_sparse.schedule import Constant
from hvd_sparse.tensorflow import ops
from hvd_sparse.tensorflow.exchange import Exchange, digest_numbers
from hvd_sparse.tensorflow.memory import ResidualMemory, clip_factor
from hvd_sparse.tensorflow.threshold import ThresholdHints
from hvd_sparse.tensorflow.traffic import Counted, Traffic
from hvd_sparse.units import Units
from hvd_sparse.wire import largest_payload, top_k_count

TOKEN_ELEMENTS = 2  # of `ops.token`


@dataclass
class Entry:
    """One gradient of a step."""

    name: str
    gradient: tf.Tensor
    memory: ResidualMemory
    is_sparse: bool  # whether it ever travels as a payload
    factor: tf.Tensor | None = None  # what the gradient is scaled with when it is accumulated
    carried: tf.Tensor | None = None  # what Horovod's own allreduce carries: a token, or the dense gradient
    taken: tuple | None = None  # what it sends dense, and what becomes of its memory, if it never travels otherwise
    decode: Callable[[], tf.Tensor] | None = None  # gives the reduced gradient, float32[n]


@dataclass
class Step:
    """What all entries of a step share."""

    number: tf.Tensor  # int64, from 0
    seed: tf.Tensor  # int64
    density: tf.Tensor | float
    is_dense: tf.Tensor | None  # whether everything travels dense at present; None if the schedule never gets there
    units: Units  # the loss scale in it is a tensor
    suffix: str  # tells several calls in one graph apart
    is_active: tf.Tensor | bool = True  # whether the gradients enter the memories: not where all travels dense
    present: tf.Operation | None = None
    token: tf.Tensor | None = None  # what travels in place of a gradient; its sum tells how Horovod reduces
    finite: list[tf.Tensor] = field(default_factory=list)  # bool, of any shape: was each gradient finite everywhere?
    overflow: tf.Tensor | None = None
    void: tf.Tensor | None = None  # whether no payload counts: after an overflow, or when all travels dense
    counted: Counted = field(default_factory=Counted)


@dataclass
class Selection:
    """A selection to be sent."""

    k: tf.Tensor
    indices: tf.Tensor
    values: tf.Tensor  # as they stood in the memory
    sent: tf.Tensor  # as they travel
    payload: tf.Tensor
    info: tf.Tensor | None  # of `ops.select_top_k`

    @property
    def left(self) -> tf.Tensor:
        """What rounding on the wire keeps back."""
        return self.values - self.sent


class Scope(abc.ABC):
    """What both scopes share: memories, and the layout of a step."""

    def __init__(
        self,
        algorithm: Algorithm,
        memories: dict[str, ResidualMemory],
        step: tf.Variable,
        loss_scale: tf.Variable,
        exchange: Exchange,
        traffic: Traffic,
    ):
        self.algorithm = algorithm
        self.memories = memories
        self.exchange = exchange
        self._step = step
        self._loss_scale = loss_scale
        self._traffic = traffic
        self._hints = ThresholdHints(self._selections())
        self.kept: list[tf.Variable] = []  # thresholds that outlive a step and decide what is sent, in rows
        self.kept_rows: Mapping[str, int] = {}  # of each selection that has one

    def describe(self) -> list[str]:
        """Return one line a variable that decays, for the comparison between ranks."""
        decays = {name: memory.weight_decay for name, memory in self.memories.items()}
        return [f"weight_decay of {name} = {decay!r}" for name, decay in decays.items() if decay]

    def build(
        self, gradients: dict[str, tf.Tensor], reduction: float, suffix: str, lines: list[str]
    ) -> tuple[dict[str, Entry], Step]:
        """Lay out a step for these gradients in the current graph; return an entry for each, and the step.

        reduction: what a sum over ranks is multiplied with. suffix: tells several calls in one graph apart. lines: the
        settings, which must be the same on every rank.
        """
        entries = [
            Entry(name, gradient, self.memories[name], self._is_ever_sparse(name))
            for name, gradient in gradients.items()
        ]
        step = self._begin(reduction, suffix, [*lines, *gradients])
        self._scale(entries, step.units)
        sparse = [entry for entry in entries if entry.is_sparse]
        selections = self._choose(sparse, step) if sparse else None
        self._vote(step, entries)
        sent = self._send(sparse, selections, step) if sparse else []
        done = list(sent)
        for entry in entries:
            done += self._carry(entry, step, sent if entry.is_sparse else [])
            step.counted.add(dense_bytes=entry.memory.size * entry.gradient.dtype.size, elements=entry.memory.size)
        with tf.control_dependencies(done):
            done = [self._step.assign(step.number + 1), *self._traffic.end_step(step.counted)]
        if not tf.compat.v1.executing_eagerly_outside_functions():
            # A graph of TensorFlow 1 runs what the results depend on, and no more.
            with tf.control_dependencies(done):
                step.overflow = tf.identity(step.overflow)
        return {entry.name: entry for entry in entries}, step

    def result(self, entry: Entry, step: Step, reduced: tf.Tensor) -> tf.Tensor:
        """Return a reduced gradient in its own type and shape, from what Horovod made of what was carried."""
        gradient = entry.gradient
        shape, dtype = entry.memory.variable.shape, gradient.dtype

        def dense() -> tf.Tensor:
            """Take what Horovod reduced."""
            return tf.where(step.overflow, tf.constant(float("nan"), dtype), tf.cast(tf.reshape(reduced, shape), dtype))

        def decoded() -> tf.Tensor:
            """Take the payloads' sum."""
            token, expected = tf.cast(reduced, tf.float32), step.units.reduction * step.units.world_size
            return tf.cast(ops.take_sum(entry.decode(), token, expected, step.overflow, shape), dtype)

        if not entry.is_sparse:
            return dense()
        return decoded() if step.is_dense is None else tf.cond(step.is_dense, dense, decoded)

    @abc.abstractmethod
    def _selections(self) -> list[str]:
        """Return the names of the selections of a step: each has a threshold of its own."""

    @abc.abstractmethod
    def _choose(self, entries: list[Entry], step: Step):
        """Accumulate and select; tell the step which gradients were finite; return what `_send` is to be given."""

    @abc.abstractmethod
    def _send(self, entries: list[Entry], selections, step: Step) -> list[tf.Operation]:
        """Gather what was selected; give each entry its `decode`; return what the step has to have done."""

    def _is_ever_sparse(self, name: str) -> bool:
        return self.memories[name].may_wait

    def _begin(self, reduction: float, suffix: str, lines: list[str]) -> Step:
        schedule, number = self.algorithm.schedule, self._step.read_value()
        if is_elastic():
            number = self.exchange.furthest(f"furthest{suffix}", number)
        density, is_dense = None, None
        if isinstance(schedule, Constant):
            density = schedule.value
        else:
            density = tf.numpy_function(lambda n: schedule.density(int(n)), [number], tf.float64, stateful=False)
            density.set_shape([])
            if schedule.highest >= 1.0:
                is_dense = density >= 1.0
        base = ((self.algorithm.seed << 32) + 2**63) % 2**64 - 2**63  # as a signed integer of 64 bits
        units = Units(self.exchange.size(), reduction, self._loss_scale.read_value())
        step = Step(number, number + base, density, is_dense, units, suffix)
        if is_dense is not None:
            step.is_active = tf.logical_not(is_dense)
        step.present = self._check_presence(step, lines)
        step.token = once(step.present, ops.token(self.exchange.rank()))
        return step

    def _check_presence(self, step: Step, lines: list[str]) -> tf.Operation:
        """Compare step, loss scale and settings with all ranks; what needs all of them has to wait for it.

        The sums S of x and Q of x^2 over N ranks tell whether all x are equal: S^2 = N * Q (Cauchy and Schwarz); for
        whole numbers exactly, for a loss scale but for rounding.
        """
        digests = tf.constant(digest_numbers(lines), tf.float64)
        loss_scale = step.units.loss_scale
        numbers = tf.concat([[tf.cast(step.number, tf.float64)], [loss_scale], digests], 0)
        own = tf.concat([tf.ones([1], tf.float64), numbers, tf.square(numbers)], 0)
        step.counted.add(payload_bytes=8 * own.shape[0])
        ranks = self.exchange.size()
        sums = self.exchange.allreduce(f"present{step.suffix}", own)
        total, squares = tf.split(sums[1:], 2)
        equal = tf.equal(tf.square(total), squares * ranks)
        scales_equal = tf.abs(tf.square(total[1]) - squares[1] * ranks) <= 1e-9 * tf.square(total[1])
        joined = "hvd_sparse does not work with hvd.join(), Horovod cannot gather from ranks that joined; present:"
        apart = "hvd_sparse: the ranks are not at the same step; load the state on every rank or on none. Mean step:"
        other = "hvd_sparse: the ranks do not agree on model, settings or the gradients that are there. Digests:"
        scaled = "hvd_sparse: loss_scale must be a number above 0, the same on every rank. Here, and the mean:"
        with tf.control_dependencies([tf.debugging.Assert(tf.equal(sums[0], ranks), [joined, sums[0]])]):
            checks = [
                tf.debugging.Assert(equal[0], [apart, total[0] / ranks]),
                tf.debugging.Assert(scales_equal & (loss_scale > 0.0), [scaled, loss_scale, total[1] / ranks]),
                tf.debugging.Assert(tf.reduce_all(equal[2:]), [other, total[2:]]),
            ]
        return tf.group(*checks)

    def _vote(self, step: Step, entries: list[Entry]) -> None:
        dense = [self._dense_is_finite(entry, step) for entry in entries]
        finite = tf.concat([tf.reshape(one, [-1]) for one in (*step.finite, *dense)], 0)
        bad = tf.reduce_sum(tf.cast(tf.logical_not(finite), tf.float64))
        # With the step in it no vote is a constant, which TensorFlow would send once and never again.
        own = tf.stack([bad, tf.cast(step.number, tf.float64)])
        step.overflow = self.exchange.allreduce(f"vote{step.suffix}", once(step.present, own))[0] > 0.0
        step.void = step.overflow if step.is_dense is None else tf.logical_or(step.overflow, step.is_dense)
        step.counted.add(payload_bytes=16)

    def _dense_is_finite(self, entry: Entry, step: Step) -> tf.Tensor:
        """Return whether what an entry sends dense, if it does so in this step, is finite everywhere."""
        if not entry.is_sparse:
            *entry.taken, finite = self._take_all(entry, step)
            return finite
        if step.is_dense is None:
            return tf.constant(True)
        return tf.cond(step.is_dense, lambda: self._take_all(entry, step)[-1], lambda: tf.constant(True))

    def _take_all(self, entry: Entry, step: Step) -> tuple[tf.Tensor, dict[str, tf.Tensor], tf.Tensor]:
        """Return what an entry sends dense, what its buffers become if the step counts, and whether all is finite."""
        units = step.units
        averages = units.reduction * units.world_size <= 1.0
        most = largest_sent(units.world_size, averages) if entry.gradient.dtype == tf.float16 else math.inf
        return entry.memory.take_all(entry.gradient, entry.factor, units, most)

    def _scale(self, entries: list[Entry], units: Units) -> None:
        """Give each entry its factor: to units of the memory, and clipped."""
        whole = getattr(self.algorithm, "clip_norm", None) is not None and self.algorithm.clip_scope == "model"
        if whole:
            factor = clip_factor(self.algorithm, units, [entry.gradient for entry in entries])
        for entry in entries:
            entry.factor = factor if whole else entry.memory.factor(entry.gradient, units)

    def _carry(self, entry: Entry, step: Step, before: list[tf.Operation]) -> list[tf.Operation]:
        """Give Horovod what it is to allreduce; return the change of the memory of what travels dense.

        before: what else changes this memory. A graph of TensorFlow 1 orders nothing by itself.
        """
        if entry.is_sparse and step.is_dense is None:
            entry.carried = step.token
            step.counted.add(payload_bytes=8)
            return []
        with tf.control_dependencies(before):
            sent, after = entry.taken or self._take_all(entry, step)[:2]
        keep = step.overflow
        if not entry.is_sparse:
            entry.carried = once(step.present, sent)
            step.counted.add(payload_bytes=entry.memory.size * sent.dtype.size, sent=entry.memory.size)
        else:
            keep = tf.logical_or(keep, tf.logical_not(step.is_dense))
            token = tf.cast(step.token, sent.dtype)
            carried = tf.cond(step.is_dense, lambda: tf.reshape(sent, [-1]), lambda: token)
            entry.carried = once(step.present, carried)
            # Not tf.size: TensorFlow's optimizer takes the shape of one branch for that of both.
            elements = tf.where(step.is_dense, entry.memory.size, TOKEN_ELEMENTS)
            step.counted.add(payload_bytes=elements * sent.dtype.size)
            step.counted.add(sent=tf.where(step.is_dense, entry.memory.size, 0))
        buffers = entry.memory.buffers
        with tf.control_dependencies([sent]):
            return [
                buffers[kind].assign(tf.where(keep, buffers[kind].read_value(), new)) for kind, new in after.items()
            ]

    def _counts(self, sizes: list[int], step: Step) -> tf.Tensor:
        """Return k of every selection, int64[selections]; 1 when its payload does not count."""
        sizes = tf.constant(sizes, tf.float64)
        counts = tf.clip_by_value(tf.floor(step.density * sizes + 0.5), 1.0, sizes)
        if step.is_dense is not None:
            counts = tf.where(step.is_dense, tf.ones_like(counts), counts)
        return tf.cast(counts, tf.int64)

    def _gather(self, name: str, message: tf.Tensor, most_bytes: int, step: Step) -> tf.Tensor:
        gathered = self.exchange.allgather(f"{name}{step.suffix}", once(step.present, message), most_bytes)
        step.counted.add(surplus_bytes=tf.size(gathered, tf.int64) - 2 * tf.size(message, tf.int64))
        return gathered

    def _held(self, entry: Entry, total: tf.Tensor, step: Step, cleared: list[tf.Operation]) -> list[tf.Operation]:
        """Give an entry its sum, float32[n], or what a gradient of 16 bits holds of it.

        The rest goes back to the ranks' residuals, once these are `cleared` of what was sent. Returns that change.
        """
        dtype = entry.gradient.dtype
        if dtype.name not in HALF:
            entry.decode = lambda: total
            return []
        held = tf.cast(tf.cast(tf.clip_by_value(total, -float(dtype.max), float(dtype.max)), dtype), tf.float32)
        entry.decode = lambda: held
        part = tf.cast(rest_of(self.exchange.rank(), step.units.world_size) / step.units.outgoing(), tf.float32)
        rest = tf.where(step.void, tf.zeros_like(total), (total - held) * part)
        with tf.control_dependencies(cleared):
            return [entry.memory.residual.assign_add(rest)]

    def _clear(self, memory: ResidualMemory, indices: tf.Tensor, values, left, step: Step) -> list[tf.Operation]:
        """Take what was sent out of the memory, unless the step does not count."""
        operations = []
        for kind, new in memory.after_sending(indices, left).items():
            old = values if kind == "residual" else memory.buffers[kind].sparse_read(indices)
            new = tf.where(step.void, old, new)
            operations.append(ops.scatter_update(memory.buffers[kind], indices, new))
        return operations

    def _largest_payload(self, entries: list[Entry], density: float) -> int:
        """Return what one selection in all of these takes at most, in bytes."""
        n, form = _size(entries), (self.algorithm.coding, self.algorithm.values)
        return largest_payload(n, top_k_count(n, density), *form, self._segments(entries))

    def _segments(self, entries: list[Entry]) -> np.ndarray | None:
        """Return what shares the centres of low-bit values."""
        return segments_of([entry.memory.variable.shape.as_list() for entry in entries], self.algorithm)


def _size(entries: list[Entry]) -> int:
    return sum(entry.memory.size for entry in entries)


def once(operation: tf.Operation, tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor, once the operation has run."""
    with tf.control_dependencies([operation]):
        return tf.identity(tensor)
