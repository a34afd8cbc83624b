"""The life cycle of one optimizer step, as a graph: its operations and their order.

Horovod traces compress, all-reduce and decompress of each gradient into a separate branch of the graph. Branches cannot
share state, so the first gradient of a call builds the graph of the whole step around them. A codec turns the gradients
of a bucket into a message, the exchange sends it, and the codec turns the messages of all ranks into sums. Each branch
then reads the sum of its own gradient.

    present   an all-reduce that starts the step: do all ranks take part, at the same step, with the same settings?
              It waits for the first gradient of the backward pass, as a forward pass may end with an error.
              All other collectives wait for it, as a collective that not every rank starts would never end
    encode    accumulates each gradient, selects the entries to send and packs them
    vote      counts the gradients that were not finite on any rank: if there are any, the step is skipped; also
              compares the regions of a reduce-scatter
    decode    gathers and sums the payloads, and clears the sent entries unless the step is skipped
    carry     passes Horovod's own all-reduce a token for each gradient, or the tensor itself if it is sent dense
"""

import math
from collections.abc import Callable
from time import perf_counter

import numpy as np
import tensorflow as tf

from hvd_sparse import weight_decay
from hvd_sparse.algorithms import Algorithm
from hvd_sparse.dense_fallback import DenseFallback, TensorSize
from hvd_sparse.half import largest_sent
from hvd_sparse.members import is_elastic
from hvd_sparse.sampling import signed
from hvd_sparse.schedule import Constant
from hvd_sparse.tensorflow import ops
from hvd_sparse.tensorflow.codecs import CODECS
from hvd_sparse.tensorflow.codecs.base import Arrival, Round, once
from hvd_sparse.tensorflow.devices import CPU, beside, on_cpu
from hvd_sparse.tensorflow.error_feedback import ErrorFeedback, clip_ratio
from hvd_sparse.tensorflow.exchange import PRESENCE_NUMBERS, Exchange
from hvd_sparse.tensorflow.hierarchical import Hosts
from hvd_sparse.tensorflow.presence import check_presence
from hvd_sparse.tensorflow.traffic import TrafficVariables
from hvd_sparse.traffic import DenseFallbackStats
from hvd_sparse.units import Units

TOKEN_ELEMENTS = 2  # elements of `ops.token`


class Step:
    """Builds the optimizer steps of one compressor."""

    def __init__(
        self,
        algorithm: Algorithm,
        feedback: dict[str, ErrorFeedback],
        number: tf.Variable,
        loss_scale: tf.Variable,
        exchange: Exchange,
        traffic: TrafficVariables,
        hosts: Hosts | None = None,
    ):
        self.algorithm = algorithm
        self.feedback = feedback
        self.exchange = exchange
        self.hosts = hosts
        self.device = next((one.device for one in feedback.values()), CPU)
        self._number = number
        self._loss_scale = loss_scale
        self._traffic = traffic
        self._fallback: DenseFallback | None = None
        self.marks: list[tuple[tf.Variable, list[int]]] = []  # whose error feedback this is, and this rank's own
        self._began = 0.0  # start of the last step, if steps are timed
        self._timings = 0  # steps begun and durations noted since the timing started
        self._between = (algorithm, exchange) if hosts is None else (hosts.algorithm, hosts.column)
        self.codec = CODECS[algorithm.selection](self._between[0], feedback, self._between[1])

    def describe(self) -> list[str]:
        """Return one line for each variable with weight decay, for the configuration check across ranks."""
        return weight_decay.describe({name: feedback.weight_decay for name, feedback in self.feedback.items()})

    def fallback(self) -> DenseFallback:
        """Return the rule that decides which tensors are sent dense at the current world size."""
        algorithm, exchange = self._between
        size = exchange.size()
        if self._fallback is None or self._fallback.world_size != size:
            compressed = {name: feedback.variable for name, feedback in self.feedback.items() if feedback.is_compressed}
            tensors = {name: TensorSize(tuple(one.shape.as_list()), one.dtype.size) for name, one in compressed.items()}
            one_by_one = self.hosts is None  # the shards of a step are all sparse, or all dense
            self._fallback, self._timings = DenseFallback(algorithm, tensors, size, one_by_one), 0
        return self._fallback

    def reset(self) -> None:
        """Reset the timings of the dense fallback."""
        self._began, self._timings = 0.0, 0
        if self._fallback is not None:
            self._fallback.reset()

    def explain(self, steps: int) -> DenseFallbackStats:
        """Return the entry of `stats` on the choice between payloads and dense tensors in the last of `steps` steps."""
        if steps == 0:
            return DenseFallback.unused(self.algorithm)
        # That of the last step: with another rank's end, Horovod forgets the sizes of process sets.
        fallback = self.fallback() if self._fallback is None else self._fallback
        return fallback.explain(steps - 1, self.algorithm.schedule.density(steps - 1))

    def build(
        self,
        gradients: dict[str, tf.Tensor],
        reduction: float,
        passes: int,
        scale: tf.Tensor | None,
        suffix: str,
        lines: list[str],
        log: Callable[[int], None] | None,
    ) -> tuple[dict[str, Arrival], Round]:
        """Build a step for these gradients in the current graph; return an `Arrival` for each, and their `Round`.

        reduction: the factor for sums over ranks. passes: the backward passes that are summed in each gradient, if
        Horovod divides the result by their number, else 1. scale: the loss scale of the scaler, or None. suffix:
        distinguishes several calls in one graph. lines: the settings, which must be the same on every rank. log: called
        after each step with the number of steps so far.
        """
        compressed = {name for name in gradients if self.feedback[name].is_compressed} - self.fallback().always
        arrivals = [
            Arrival(name, gradient, gradient.dtype, self.feedback[name], name in compressed)
            for name, gradient in gradients.items()
        ]
        with tf.control_dependencies([list(gradients.values())[-1]]):  # the first of the backward pass
            now = self._begin(reduction, passes, scale, suffix, [*lines, *gradients])
        self._set_factors(arrivals, now.units)
        inner = self._inner(now)
        if self.hosts is not None:
            self.hosts.add(arrivals, now)
        sparse = sorted((arrival for arrival in arrivals if arrival.is_sparse), key=lambda arrival: arrival.name)
        buckets = self.codec.encode(sparse, inner) if sparse else []
        now.finite += self._take(arrivals, now, inner.units)
        self._vote(now)
        inner = self._inner(now)  # with the results of the vote
        sent = self.codec.learn(buckets, inner) if sparse else self.codec.miss(inner)
        for bucket in buckets:
            sent += self.codec.decode(bucket, self.codec.collect(bucket, inner), inner)
        if self.hosts is not None:
            self.hosts.deliver(arrivals, now)
        for arrival in arrivals:
            self._carry(arrival, now)
            size = arrival.shape.num_elements()
            now.counted.add(dense_bytes=size * arrival.dtype.size, elements=size)
        counts, small = tf.logical_not(now.overflow), [arrival for arrival in arrivals if not arrival.is_sparse]
        done = [*sent, *now.noted, *self._commit(small, counts, [])]
        if now.is_dense is not None:
            done += self._commit(sparse, tf.logical_and(counts, now.is_dense), sent)
        with tf.control_dependencies(done):
            done = [self._number.assign(now.number + 1), *self._traffic.end_step(now.counted, now.overflow)]
        if log is not None:
            with tf.control_dependencies(done):
                tf.numpy_function(lambda number: np.int64(log(int(number)) or 0), [now.number + 1], tf.int64)
        if not tf.compat.v1.executing_eagerly_outside_functions():
            # A TensorFlow 1 graph runs only the operations on which the results depend.
            with tf.control_dependencies(done):
                now.overflow = tf.identity(now.overflow)
        return {arrival.name: arrival for arrival in arrivals}, now

    def result(self, arrival: Arrival, now: Round, reduced: tf.Tensor) -> tf.Tensor:
        """Return a reduced gradient in its own type and shape, given the tensor that Horovod reduced."""
        shape, dtype = arrival.shape, arrival.dtype

        def dense() -> tf.Tensor:
            """Return the dense tensor that Horovod reduced; NaN everywhere after an overflow."""
            nothing_or_nan = tf.sqrt(-tf.cast(now.overflow, dtype))  # -0, or NaN; a constant would stop check_numerics
            return tf.cast(tf.reshape(reduced, shape), dtype) + nothing_or_nan

        def decoded() -> tf.Tensor:
            """Return the sum of the payloads."""
            with on_cpu(self.device):
                token = tf.cast(reduced, tf.float32)
                expected = tf.cast(now.units.reduction * now.units.world_size, tf.float32)
            with beside(self.device):
                return tf.cast(ops.take_sum(arrival.decode(), token, expected, now.overflow, shape), dtype)

        if not arrival.is_sparse:
            return dense()
        is_payload = now.is_dense is None or self.hosts is not None
        return decoded() if is_payload else tf.cond(now.is_dense, dense, decoded)

    def _begin(self, reduction: float, passes: int, scale: tf.Tensor | None, suffix: str, lines: list[str]) -> Round:
        number = self._number.read_value()
        if is_elastic():
            number = self._catch_up(number, suffix)
        density, is_dense, seconds = self._density(number)
        base = signed(self.algorithm.seed << 32)
        loss_scale = self._loss_scale.read_value() if scale is None else scale
        # A gradient is S * passes times the mean, and so is the result that Horovod divides by `passes` afterwards.
        units = Units(self.exchange.size(), reduction, loss_scale * passes)
        now = Round(number, number + base, density, is_dense, units, suffix, seconds=seconds)
        if is_dense is not None:
            now.is_active = tf.logical_not(is_dense)
        now.present = check_presence(self.exchange, suffix, number, loss_scale, self._is_misplaced(), lines)
        now.counted.add(payload_bytes=8 * PRESENCE_NUMBERS)
        now.token = once(now.present, ops.token(self.exchange.rank()))
        return now

    def _inner(self, now: Round) -> Round:
        """Return the `Round` for the codec: in a hierarchical exchange, that of a column."""
        return now if self.hosts is None else self.hosts.inner(now)

    def _density(self, number: tf.Tensor) -> tuple[float | tf.Tensor, tf.Tensor | None, tf.Tensor | None]:
        """Return a step's density; whether the step is dense, None if no step can be; and the seconds of the last one.

        The seconds are None unless the dense fallback measures them. A density that never changes is a number.
        """
        schedule, fallback = self.algorithm.schedule, self.fallback()
        may_be_dense = fallback.is_measured or fallback.sends_dense(schedule.highest)
        chooses = fallback.is_measured or (may_be_dense and self.hosts is not None)
        if isinstance(schedule, Constant) and not chooses:
            return schedule.value, None, None
        outputs = [tf.float64, tf.float64]
        density, seconds = tf.numpy_function(self._choose, [number], outputs, stateful=fallback.is_measured)
        density.set_shape([])
        seconds.set_shape([])
        is_dense = density >= 1.0 if may_be_dense else None
        return density, is_dense, seconds if fallback.is_measured else None

    def _catch_up(self, number: tf.Tensor, suffix: str) -> tf.Tensor:
        """Return the step with which all ranks of an elastic job go on.

        If they have timed different steps, as a rank is new or a step has failed on some ranks, all of them start the
        timing of the dense fallback anew: from different durations, they would choose differently.
        """
        name = f"furthest{suffix}"
        if not self.fallback().is_measured:
            return self.exchange.furthest(name, number)

        def forget(differ) -> np.int64:
            """Reset the timings, if those of the ranks differ."""
            if differ:
                self.reset()
            return np.int64(0)

        timings = tf.numpy_function(lambda: np.int64(self._timings), [], tf.int64)
        own = tf.stack([number, tf.ensure_shape(timings, []), -timings])
        number, most, least = tf.unstack(self.exchange.furthest(name, own), 3)
        return once(tf.numpy_function(forget, [tf.not_equal(most, -least)], tf.int64).op, number)

    def _choose(self, number) -> tuple[float, float]:
        """Return the density of a step, and the seconds since the previous step began; 0 if unknown."""
        now = perf_counter()
        self._timings += 1
        seconds, self._began = now - self._began if self._began else 0.0, now
        density = self.algorithm.schedule.density(int(number))
        return np.float64(self.fallback().choose(int(number), density)), seconds

    def _note(self, number, seconds) -> np.int64:
        """Pass the mean of the ranks' seconds to the dense fallback."""
        self.fallback().note(int(number), float(seconds))
        self._timings += 1
        return np.int64(0)

    def _is_misplaced(self) -> tf.Tensor:
        """Return 1.0 if a checkpoint has restored what another rank, or another model, saved, else 0.0.

        In an elastic job too: rank and size are those at creation, which a later change of ranks does not change.
        """
        if not self.marks:
            return tf.zeros([], tf.float64)
        restored = tf.concat([variable.read_value() for variable, _ in self.marks], 0)
        own = [number for _, numbers in self.marks for number in numbers]
        return tf.cast(tf.reduce_any(tf.not_equal(restored, own)), tf.float64)

    def _vote(self, now: Round) -> None:
        """Set from all ranks' votes whether to skip the step, and whether to balance regions; note their durations."""
        finite = tf.concat([tf.reshape(one, [-1]) for one in now.finite], 0)
        bad = tf.reduce_sum(tf.cast(tf.logical_not(finite), tf.float64))
        step = tf.cast(now.number, tf.float64)  # a constant would be sent by TensorFlow only once
        seconds = [] if now.seconds is None else [now.seconds]
        regions = self._region_numbers(now)
        own = tf.concat([tf.stack([bad, step, *seconds]), tf.reshape(regions, [-1])], 0)
        sums = self.exchange.allreduce(f"vote{now.suffix}", once(now.present, own))
        all_bad, _, all_seconds, all_regions = tf.split(sums, [1, 1, len(seconds), regions.shape.num_elements()])
        now.overflow = all_bad[0] > 0.0
        if regions.shape[0] > 0:
            now.balances = self._balances(tf.reshape(all_regions, regions.shape))
        if seconds:
            mean = all_seconds[0] / self.exchange.size()
            now.noted.append(tf.numpy_function(self._note, [now.number, mean], tf.int64).op)
        now.ignores_payloads = now.overflow if now.is_dense is None else tf.logical_or(now.overflow, now.is_dense)
        now.counted.add(payload_bytes=8 * own.shape[0])

    def _region_numbers(self, now: Round) -> tf.Tensor:
        """Return the numbers by which ranks compare their regions, float64[shards, 3]; [0, 3] if there are no regions.

        Ranks with different shards have different regions: each has the row of its shard, with zeros in the others.
        """
        numbers = self.codec.region_numbers(now)
        if self.hosts is None:
            return tf.zeros([0, 3], tf.float64) if numbers is None else numbers[None]
        if self.hosts.algorithm.exchange == "gather":
            return tf.zeros([0, 3], tf.float64)
        # With "auto", shards of different sizes may decide differently: the rows are there on every rank.
        own = tf.zeros([3], tf.float64) if numbers is None else numbers
        return tf.one_hot(self.hosts.shard, self.hosts.host_size, dtype=tf.float64)[:, None] * own

    def _balances(self, sums: tf.Tensor) -> tf.Tensor:
        """Return whether ranks with this shard balance regions in this step, by `must_balance` of the sums."""
        hosts = self.hosts
        shard, ranks = (0, self.exchange.size()) if hosts is None else (hosts.shard, hosts.host_count)
        due, known, squares = tf.unstack(sums[shard])
        return (due > 0.0) | tf.not_equal(tf.square(known), squares * ranks)

    def _take(self, arrivals: list[Arrival], now: Round, inner: Units) -> list[tf.Tensor]:
        """Set `taken` of the gradients that are sent dense in this step; return which are finite everywhere, if any.

        inner: the units of gradients that are sent as payloads in other steps.
        """
        finite = []
        for arrival in arrivals:
            if not arrival.is_sparse:
                *arrival.taken, is_finite = self._take_all(arrival, now.units)
                finite.append(is_finite)
        sparse = [arrival for arrival in arrivals if arrival.is_sparse]
        if now.is_dense is not None and sparse:
            finite += self._take_in_dense_steps(sparse, now, inner)
        with beside(self.device):
            return [tf.stack(finite)] if finite else []

    def _take_in_dense_steps(self, sparse: list[Arrival], now: Round, inner: Units) -> list[tf.Tensor]:
        """Set `taken` of gradients that are payloads in other steps; return for each whether it is finite."""

        def dense() -> list:
            """Return the dense tensors of all sparse gradients."""
            return [self._take_all(arrival, inner) for arrival in sparse]

        def token() -> list:
            """Return tokens, and no changes of buffers."""
            nothing, yes = tf.zeros([0]), tf.constant(True)
            tokens = [tf.cast(now.token, arrival.feedback.dense_dtype(arrival.gradient.dtype)) for arrival in sparse]
            return [
                (sent, dict.fromkeys(arrival.feedback.buffers, nothing), yes)
                for sent, arrival in zip(tokens, sparse, strict=True)
            ]

        # One tf.cond for all gradients: a step of payloads does not compute the dense tensors.
        finite = []
        for arrival, (*taken, is_finite) in zip(sparse, tf.cond(now.is_dense, dense, token), strict=True):
            arrival.taken = taken
            finite.append(is_finite)
        return finite

    def _take_all(self, arrival: Arrival, units: Units) -> tuple[tf.Tensor, dict[str, tf.Tensor], tf.Tensor]:
        """Return a gradient's dense tensor, the next content of its buffers, and whether the tensor is finite."""
        half = arrival.gradient.dtype == tf.float16
        most = largest_sent(units.world_size, units.averages) if half else math.inf
        with beside(self.device):
            return arrival.feedback.take_all(arrival.gradient, arrival.factor, units, most)

    def _set_factors(self, arrivals: list[Arrival], units: Units) -> None:
        """Set each gradient's factor, from the gradient to units of the error feedback, including clipping."""
        gradients = [arrival.gradient for arrival in arrivals]
        if self.algorithm.clips == "tensor":
            ratios = [clip_ratio(self.algorithm, units, [gradient], self.device) for gradient in gradients]
        elif self.algorithm.clips == "model":
            ratios = [clip_ratio(self.algorithm, units, gradients, self.device)] * len(arrivals)
        else:
            ratios = [1.0] * len(arrivals)
        for arrival, ratio in zip(arrivals, ratios, strict=True):
            arrival.clip_ratio, arrival.factor = ratio, tf.cast(ratio * units.incoming, tf.float32)

    def _carry(self, arrival: Arrival, now: Round) -> None:
        """Set the tensor that Horovod all-reduces: a token, or the dense tensor."""
        name = self.exchange.op_name(f"{arrival.name}{now.suffix}")
        if arrival.is_sparse and (now.is_dense is None or self.hosts is not None):
            # In the type of a dense gradient: `groups` of Horovod all-reduce tensors of one type together.
            arrival.carried = tf.identity(tf.cast(now.token, arrival.feedback.dense_dtype(arrival.dtype)), name)
            now.counted.add(payload_bytes=TOKEN_ELEMENTS * arrival.carried.dtype.size)
            return
        sent, size = arrival.taken[0], tf.constant(arrival.feedback.size, tf.int64)
        with beside(self.device):
            arrival.carried = once(now.present, tf.reshape(sent, [-1]) if arrival.is_sparse else sent, name)
        # Not tf.size: TensorFlow's graph optimizer assumes the shape of one branch for both.
        elements = tf.where(now.is_dense, size, tf.constant(TOKEN_ELEMENTS, tf.int64)) if arrival.is_sparse else size
        now.counted.add(payload_bytes=elements * sent.dtype.size)
        now.counted.add(sent=tf.where(now.is_dense, size, tf.zeros_like(size)) if arrival.is_sparse else size)

    def _commit(self, arrivals: list[Arrival], counts: tf.Tensor, before: list[tf.Operation]) -> list[tf.Tensor]:
        """Update the error feedback of dense gradients if `counts` is true; return tensors that depend on the update.

        before: other operations that change the buffers, as a TensorFlow 1 graph does not order operations by itself.
        """

        def change() -> tf.Tensor:
            """Update all buffers."""
            with beside(self.device):
                changes = [
                    arrival.feedback.buffers[kind].assign(new)
                    for arrival in arrivals
                    for kind, new in arrival.taken[1].items()
                ]
            with tf.control_dependencies(changes):
                return tf.constant(True)

        with tf.control_dependencies([*before, *(arrival.taken[0] for arrival in arrivals)]):
            return [tf.cond(counts, change, lambda: tf.constant(False))] if arrivals else []
