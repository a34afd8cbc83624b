"""The compressors for `hvd.DistributedGradientTape(tape, compression=Compression.dgc(...))` of an unmodified Horovod.

Also for `horovod.tensorflow.keras.DistributedOptimizer` and `hvd.DistributedOptimizer`. Horovod calls `compress` and
`decompress` during tracing: they build a graph, and variables store the state that changes from step to step.
"""

import itertools
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_sparse.algorithms import Algorithm, CompressionMethods
from hvd_sparse.dense_fallback import DenseFallback
from hvd_sparse.frames import warn
from hvd_sparse.log import Logged
from hvd_sparse.members import is_elastic
from hvd_sparse.messages import NOT_COPIED, not_compressed
from hvd_sparse.tensorflow.caller import (
    Call,
    Traced,
    TracedCall,
    find_call,
    is_stand_in,
    loss_scale_of,
    makes_optimizer,
)
from hvd_sparse.tensorflow.devices import CPU, on_cpu, place_buffers
from hvd_sparse.tensorflow.error_feedback import ErrorFeedback, make_error_feedback, make_variable
from hvd_sparse.tensorflow.exchange import Exchange, digest_numbers
from hvd_sparse.tensorflow.hierarchical import Hosts, make_hosts
from hvd_sparse.tensorflow.lifetime import Lifetime, built_outside
from hvd_sparse.tensorflow.norm import sum_of_squares
from hvd_sparse.tensorflow.optimizer_checks import (
    NEVER_CALLED,
    check_call,
    check_optimizer,
    warn_of_turns,
    warn_of_twins,
)
from hvd_sparse.tensorflow.parts import Parts
from hvd_sparse.tensorflow.state import assign_all, evaluate, gather_state, identity_of, restore_state
from hvd_sparse.tensorflow.step import Step
from hvd_sparse.tensorflow.traffic import TrafficVariables
from hvd_sparse.tensorflow.variables import Variables, unwrapped
from hvd_sparse.traffic import CompressionStats
from hvd_sparse.units import checked_loss_scale

untraced = tf.autograph.experimental.do_not_convert
_optimizers = itertools.count(1)


class SparseCompressor(Logged, tf.__internal__.tracking.AutoTrackable):  # a model collects a tf.Module's variables
    """A compressor with error feedback, for one optimizer or tape; made by the methods of `Compression`.

    Build it once, outside the training step. Its variables (step, residuals, velocities) are tracked:
    `tf.train.Checkpoint(compression=...)` saves them. A gradient that is not finite on any rank skips the step on all
    ranks: every gradient becomes NaN (a LossScaleOptimizer then skips its update), and the residual adds zero for
    elements that are not finite.

    Args:
        algorithm: The settings of a method, from `hvd_sparse.algorithms`.
        variables: The trainable variables: a list, the model, or a function that returns them.
        process_set: The optimizer's `hvd.ProcessSet`; None: all ranks.

    Raises:
        ValueError: Wrong arguments; and when a step is traced, on every rank, models or settings that differ between
            ranks, or a reduction other than Sum and Average.
        TypeError: Arguments of another type.
        RuntimeError: Built by each trace of a `tf.function`; when a step is traced: `tf.config.run_functions_eagerly`,
            Keras 3's optimizers, ranks that do not call within 600 s (the environment variable HVD_SPARSE_TIMEOUT).
        tf.errors.InvalidArgumentError: In a step: `hvd.join()`, ranks at different steps, damaged payloads.
    """

    def __init__(self, algorithm: Algorithm, variables, process_set=None):
        with built_outside():
            self.step = make_variable([], "hvd_sparse/step", tf.int64)
        self.feedback: dict[str, ErrorFeedback] = {}
        self.thresholds: list[tf.Variable] = []  # thresholds that outlive a step
        self.place: tf.Variable | None = None  # whose error feedback this is: ranks, rank and shard
        self.names: tf.Variable | None = None  # a digest of the method and the variables' names
        self.hosts: Hosts | None = None
        loss_scale = make_variable([], "hvd_sparse/loss_scale", tf.float64, 1.0)
        variables = Variables(variables)
        lifetime, exchange = Lifetime(variables, self.step), Exchange(process_set)
        self._parts = Parts(algorithm, loss_scale, variables, lifetime, exchange, TrafficVariables())
        if self._parts.variables.is_loaded():
            self._make_error_feedback()
        self._parts.exchange.warn_if_single(algorithm)

    def __hash__(self):
        # Horovod caches its traced function by this hash. It must be traced again with other ranks, and for each Keras
        # optimizer, whose loss scale and number of passes are part of the graph.
        ranks = (hvd.rank(), hvd.size()) if is_elastic() and hvd.is_initialized() else ()
        is_made = makes_optimizer()
        self._parts.has_optimizer |= is_made
        return hash((id(self), *ranks, next(_optimizers) if is_made else 0))

    def __eq__(self, other):
        return self is other

    def __reduce__(self):
        raise TypeError(NOT_COPIED)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.algorithm}>"

    @property
    def algorithm(self) -> Algorithm:
        """The settings."""
        return self._parts.algorithm

    @property
    def regions(self) -> dict:
        """The regions of reduce-scatters; no attribute, as TensorFlow would track it, and refuse a checkpoint of it."""
        return self._parts.step.codec.regions if self.feedback else {}

    @property
    def loss_scale(self) -> tf.Variable:
        """The loss scale: a float64 scalar variable, 1.0 at first, the same on every rank.

        Assign to it in every step, in a `tf.function` too, before the gradients are reduced:
        `compression.loss_scale = scale`, with a number, a tensor or a variable, whose value is copied. In a graph of
        TensorFlow 1, run `compression.loss_scale.assign(scale)`.
        clip_norm, weight_decay, residuals and thresholds are in units of the unscaled gradient, and do not change
        with the scale. See docs/mixed-precision.md.
        """
        return self._parts.loss_scale

    @loss_scale.setter
    def loss_scale(self, value) -> None:
        """Take the loss scale of the next step, a finite number above 0; RuntimeError in a graph of TensorFlow 1."""
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise RuntimeError(
                "hvd_sparse: a graph of TensorFlow 1 sets loss_scale when it runs: session.run("
                "compression.loss_scale.assign(value))"
            )
        value = unwrapped(value)
        known = value if tf.is_tensor(value) or isinstance(value, tf.Variable) else checked_loss_scale(value)
        self._parts.loss_scale.assign(tf.cast(known, tf.float64))
        self._parts.is_scaled = True

    @untraced
    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, Traced | None]:
        """Compress one gradient; return the tensor for Horovod to all-reduce, and the context for `decompress`."""
        if not self._parts.exchange.is_used():
            if (found := find_call(tensor)) is not None:  # ranks outside must refuse, or they would wait for others
                self._parts.exchange.check_process_set(found.process_set)
            return tensor, None
        if self._parts.exchange.is_last_of_elastic():  # Horovod delivers the gradient itself, as long as no rank joins
            self._parts.exchange.warn_if_single(self.algorithm)
            return self._parts.exchange.unless_stale(tensor), None
        call: TracedCall | None = self._parts.call
        if call is None or not call.expects(tensor):
            found = self._find_call(tensor)
            if any(is_stand_in(variable) for variable in found.variables):
                return tensor, None
            call = self._begin(found)
        traced = call.take(tensor)
        return traced.arrival.carried, traced

    @untraced
    def decompress(self, tensor: tf.Tensor, ctx: Traced | None) -> tf.Tensor:
        """Return the reduced gradient, of the variable's shape and the gradient's type."""
        if ctx is None:
            return tensor
        reduced = self._parts.step.result(ctx.arrival, ctx.now, tensor)
        return tf.stop_gradient(reduced)  # else an outer tape would differentiate what is sent dense, and nothing else

    def stats(self, session=None) -> CompressionStats:
        """Return this rank's traffic, and the norm of its residuals.

        Args:
            session: The `tf.compat.v1.Session` of a graph of TensorFlow 1; None otherwise.

        Returns:
            {"steps": int, "skipped": how many of them, as a gradient was not finite on some rank, "step": last step,
            "total": all steps, "residual_norm": L2 norm of the residuals}. step and total have dense_bytes (without
            compression), payload_bytes (sent by all collectives: payloads, dense tensors, tokens, votes),
            received_bytes (from other ranks), ratio, density (elements sent / all elements), and seconds, which is
            empty: the operations of a graph run concurrently. "dense_fallback" is the choice in the last step, and the
            reason: {"rule": the argument, "is_dense": whether it sent all gradients dense, "tensors": number of tensors
            that are always dense, "payload_bytes", "dense_bytes": bytes that a rank receives either way in a step with
            all gradients, with those tensors dense in both, unless all are; with "measured" also "payload_seconds",
            "dense_seconds": medians of the steps timed so far, or None}.

        Raises:
            ValueError: A graph of TensorFlow 1 needs `session`.
            RuntimeError: Inside a `tf.function`.
        """
        parts = self._parts
        if parts.has_optimizer and parts.is_idle():
            warn(NEVER_CALLED)
        norm = self._parts.norm if self._parts.norm is not None else self._residual_norm()
        number, steps, skipped, *counted, norm = evaluate([self.step, *parts.traffic.variables, norm], session)
        chosen = parts.step.explain(int(number)) if self.feedback else DenseFallback.unused(self.algorithm)
        return {
            **TrafficVariables.summary(steps, *counted),
            "skipped": int(skipped),
            "residual_norm": float(norm),
            "dense_fallback": chosen,
        }

    def _residual_norm(self) -> tf.Tensor:
        residuals = [feedback.residual for feedback in self.feedback.values() if "residual" in feedback.buffers]
        squares = [sum_of_squares(residual, self._parts.step.device) for residual in residuals]
        return tf.sqrt(tf.add_n(squares)) if squares else tf.zeros([], tf.float64)

    def _begin_log(self) -> None:
        """Let steps be traced with a report; RuntimeError if one has been traced without, or in TensorFlow 1."""
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise RuntimeError("hvd_sparse: a graph of TensorFlow 1 cannot log: write compression.stats(session=...)")
        if self._parts.call is not None and not self._parts.logs:
            raise RuntimeError("hvd_sparse: call log_to() before the first training step, which was traced without it")
        self._parts.logs = True

    def state_dict(self, summed: bool = False, session=None) -> dict:
        """Return the step number, residuals, velocities and thresholds; call it between training steps.

        Args:
            summed: False: this rank's state. If each rank loads its state, at the same world size, training continues
                bit for bit as without interruption (exceptions: docs/training-loops.md). True: the sum over all ranks,
                the same on each (call it on every rank). Any world size can load this sum; thresholds start anew.
            session: The `tf.compat.v1.Session` of a graph of TensorFlow 1; None otherwise.

        Returns:
            A dictionary with copies as NumPy arrays; `hvd_sparse.checkpoint` has its layout.

        Raises:
            ValueError: A graph of TensorFlow 1 needs `session`.
            RuntimeError: Inside a `tf.function`. With `summed`: the graph is finalized, or another rank did not call
                within 600 s.
        """
        parts = self._parts
        if summed or not parts.algorithm.is_hierarchical:  # to find the hosts would wait for the other ranks
            self._load()
        return gather_state(self, parts.threshold_rows, parts.exchange, summed, parts.averages, session)

    def load_state_dict(self, state: dict, session=None) -> None:
        """Continue from `state_dict()`; call it on every rank, between training steps.

        Args:
            state: A result of `state_dict`, here or in PyTorch for the same names. The ranks divide a summed state, so
                that residuals change the weights as they would have: with op=Average their mean is that of the
                ranks that saved it.
            session: The `tf.compat.v1.Session` of a graph of TensorFlow 1; None otherwise.

        Raises:
            ValueError: On any rank the state belongs to other variables or another method, has NaN or infinity in a
                buffer, or is not summed and the world size has changed. Raised on every rank (except in an elastic
                job), before anything has changed; or a graph of TensorFlow 1 needs `session`.
            RuntimeError: Inside a `tf.function`, the graph is finalized, or another rank did not call within 600 s.
        """
        self._load()
        restore_state(self, self._parts.threshold_rows, state, self._parts.exchange, session)
        if self._parts.call is None:
            self._parts.averages = state.get("averages", True)
        assign_all(self._own_place(), session)
        self._parts.step.reset()

    def reset(self, session=None) -> None:
        """Clear residuals, step number and statistics, on every rank. Keep the loss scale.

        Args:
            session: The `tf.compat.v1.Session` of a graph of TensorFlow 1; None otherwise.

        Raises:
            ValueError: A graph of TensorFlow 1 needs `session`.
            RuntimeError: Inside a `tf.function`.
        """
        own = [self.step, *self._parts.traffic.variables, *self._buffers(), *self.thresholds]
        zeros = [(variable, np.zeros(variable.shape.as_list(), variable.dtype.as_numpy_dtype)) for variable in own]
        assign_all([*zeros, *self._own_place()], session)
        if self.feedback:
            self._parts.step.reset()

    def _buffers(self) -> list[tf.Variable]:
        return [buffer for feedback in self.feedback.values() for buffer in feedback.buffers.values()]

    def _own_place(self) -> list[tuple]:
        """Return the changes after which the error feedback is this rank's own."""
        return self._parts.step.marks if self.feedback else []

    def _load(self) -> None:
        self._parts.variables.load()
        if not self.feedback:
            self._make_error_feedback()

    def _make_error_feedback(self) -> None:
        parts = self._parts
        variables = {name: parts.variables[name] for name in parts.variables}
        parts.algorithm = parts.algorithm.with_names(variables.items())
        decays = parts.algorithm.weight_decays(variables.items())
        hosts = make_hosts(parts.algorithm, variables, decays, parts.exchange)
        own, dense, shards = parts.algorithm, parts.algorithm, {}
        if hosts is not None:
            own, dense, shards = hosts.algorithm, hosts.dense_algorithm, hosts.shards
        device, exchange = CPU, parts.exchange
        if not hvd.is_initialized() or exchange.is_used():  # else it would take memory of a GPU for nothing
            is_first = hvd.is_initialized() and not exchange.is_last_of_elastic() and exchange.rank() == 0
            device = place_buffers(parts.algorithm, variables.values(), warns=is_first)
        feedback = {
            name: make_error_feedback(
                own if name in shards else dense, shards.get(name, variable), name, decays[name], device
            )
            for name, variable in variables.items()
        }
        self.feedback.update(feedback)  # a checkpoint that was restored before has its values in this object
        parts.step = Step(parts.algorithm, feedback, self.step, parts.loss_scale, parts.exchange, parts.traffic, hosts)
        self.hosts = hosts
        self._mark_place()
        if not tf.compat.v1.executing_eagerly_outside_functions():  # a graph may be finalized before `stats`
            parts.norm = self._residual_norm()
        self.thresholds.extend(parts.step.codec.thresholds)
        parts.threshold_rows = parts.step.codec.threshold_rows

    def _mark_place(self) -> None:
        """Store whose error feedback this is, once there are ranks: a checkpoint restores that of its rank."""
        exchange = self._parts.exchange
        if self.place is None and hvd.is_initialized() and exchange.is_used():
            own = [-1 if number is None else number for number in identity_of(self.hosts, exchange).values()]
            names = [int(number) for number in digest_numbers([self.algorithm.name, *self._parts.variables])]
            self.place = make_variable([len(own)], "hvd_sparse/place", tf.int64, own)
            self.names = make_variable([len(names)], "hvd_sparse/names", tf.int64, names)
            self._parts.step.marks = [(self.place, own), (self.names, names)]

    @staticmethod
    def _find_call(tensor: tf.Tensor) -> Call:
        call = find_call(tensor)
        if call is None:
            raise ValueError(
                "hvd_sparse: this gradient did not come through hvd.DistributedGradientTape or a Horovod optimizer; "
                "give the compressor to one of these. Gradients that are computed already, as the sum over several "
                "micro-batches: hvd_sparse.tensorflow.reduce_gradients(gradients, variables, compression=compression)"
            )
        return call

    def _begin(self, call: Call) -> TracedCall:
        """Lay out a step for all gradients of the call that is being traced."""
        parts, exchange = self._parts, self._parts.exchange
        check_call(call, exchange)
        check_optimizer(call, parts.algorithm, exchange, parts.is_scaled)
        self._load()
        self._mark_place()
        description = [exchange.describe(), *parts.algorithm.describe(), *parts.variables.describe()]
        description += [*parts.step.describe(), f"log_to was called = {parts.logs}", f"averaged passes = {call.passes}"]
        if not parts.is_checked and not is_elastic():  # there the others may have agreed long ago; a step compares too
            exchange.check_configuration(description)
            parts.is_checked = True
        gradients, positions = {}, {}
        for position, (gradient, variable) in enumerate(zip(call.gradients, call.variables, strict=True)):
            if isinstance(gradient, tf.Tensor):
                name = parts.variables.name_of(variable)
                gradients[name], positions[position] = gradient, name
            elif isinstance(gradient, tf.IndexedSlices) and exchange.rank() == 0:
                warn(not_compressed(f"the sparse gradient of {variable.name}", parts.algorithm))
        if exchange.rank() == 0:
            parts.lifetime.begin()
            warn_of_twins(call, parts.variables)
            warn_of_turns(set(gradients), parts.reduced, parts.variables)
        graph = tf.compat.v1.get_default_graph()
        outer = getattr(graph, "outer_graph", graph)
        number = parts.calls_in.get(outer, 0)
        parts.calls_in[outer] = number + 1
        with outer.as_default(), tf.control_dependencies(None), on_cpu(parts.step.device):
            suffix = f".{number}" if number else ""
            log = partial(self._report, self.stats) if parts.logs else None  # to the writer that is set by then
            parts.averages = call.reduction == hvd.Average
            reduction, scale = 1.0 / exchange.size() if parts.averages else 1.0, loss_scale_of(call.scaler)
            arrivals, now = parts.step.build(gradients, reduction, call.passes, scale, suffix, description, log)
        parts.call = TracedCall(call, {position: Traced(arrivals[name], now) for position, name in positions.items()})
        return parts.call


class Compression(CompressionMethods[Any, SparseCompressor]):
    """The compressors, named like Horovod's `Compression`: `Compression.dgc(model.trainable_variables, ...)`.

    Pass the trainable variables: a list, the model, or a function that returns them. Build one compressor per
    optimizer or tape, in the same order on every rank.
    """

    none = hvd.Compression.none
    fp16 = hvd.Compression.fp16

    @classmethod
    def _build(cls, algorithm: Algorithm, parameters, process_set) -> SparseCompressor:
        return SparseCompressor(algorithm, parameters, process_set)
