"""Finds the variable of a gradient, as Horovod calls `compress` with the gradient alone.

The variable is in a local list of Horovod's own stack frames while it traces `compress`.
"""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_sparse.algorithms import Algorithm
from hvd_sparse.frames import frames, local, warn
from hvd_sparse.messages import clips_late, two_momenta
from hvd_sparse.schedule import is_always_dense
from hvd_sparse.tensorflow.codecs.base import Arrival, Round
from hvd_sparse.tensorflow.exchange import Exchange
from hvd_sparse.tensorflow.variables import Variables
from hvd_sparse.units import REDUCTIONS

CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")  # of Keras' optimizers
SCALER_V1 = tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer
NOT_SCALED = (
    "hvd_sparse: a loss scaler multiplies the gradients, and compression.loss_scale was never set: residuals, "
    "clip_norm and weight_decay are in wrong units. Scale the loss inside the tape, loss = "
    "self.optimizer.scale_loss(loss), and before the gradients are reduced set compression.loss_scale = "
    "self.optimizer.scale_loss(1.0); with Keras 2: get_scaled_loss(loss) and self.optimizer.loss_scale"
)
NEVER_CALLED = (
    "hvd_sparse: Horovod's optimizer has reduced no gradients with this compressor yet. Only fit and "
    "optimizer.minimize(loss, variables, tape=tape) reduce: with tape.gradient() and optimizer.apply_gradients() each "
    "rank trains alone. There, use hvd.DistributedGradientTape(tape, compression=...) and an optimizer of Keras' own"
)


@dataclass(frozen=True)
class Call:
    """One traced call of Horovod's function that reduces a list of gradients."""

    gradients: list  # of Tensor, IndexedSlices or None
    variables: list
    in_order: bool  # whether compress is called in the order of the list
    reduction: int
    process_set: hvd.ProcessSet
    optimizer: object  # the calling Keras or v1 optimizer, None under a tape
    passes: int  # by which Horovod divides the result: backward passes that are summed before, to be averaged
    scaler: Any  # the loss scaler of Keras or TensorFlow 1 that unscales the result; None without one, or under a tape
    sums_passes: bool  # whether Horovod's Keras optimizer sums several backward passes before
    applier: Any  # under a tape: `self.optimizer` of a caller, such as a model with a train_step; None without one

    def positions(self, tensor) -> list[int]:
        """Return the positions of a gradient in the list."""
        return [i for i, gradient in enumerate(self.gradients) if gradient is tensor]


def is_stand_in(variable) -> bool:
    """Return whether a variable is a placeholder for a variable that the caller of a saved model passes.

    When Keras saves a model in TensorFlow's format, it traces the optimizer's functions again with placeholders.
    """
    operation = getattr(getattr(variable, "handle", None), "op", None)
    return operation is not None and operation.type == "Placeholder"


def find_call(tensor) -> Call | None:
    """Return the call of Horovod's `allreduce_grads` that passed this gradient, None if there is none.

    In that function, the local lists `grads` and `vars` match position by position. AutoGraph renames the function,
    but its rewritten code keeps the names of local variables.
    """
    found = _frames_of_call(tensor)
    if found is None:
        return None
    reducing, listing, owners = found
    gradients, variables = list(local(listing, "grads")), list(local(listing, "vars") or [])
    if len(gradients) != len(variables):
        return None
    helper = next(filter(_sums_passes, reversed(owners)), None)
    averages = helper is not None and helper.average_aggregated_gradients
    owners = [owner for owner in owners if not _sums_passes(owner)]
    at = next((i for i, owner in enumerate(owners) if _reduces(owner)), None)
    under_tape = at is None
    return Call(
        gradients,
        variables,
        in_order=not isinstance(local(listing, "groups"), list),
        reduction=local(reducing, "op"),
        process_set=local(reducing, "process_set"),
        optimizer=None if under_tape else owners[at],
        passes=helper.backward_passes_per_step if averages else 1,
        scaler=None if under_tape else next(filter(_unscales, reversed(owners[at + 1 :])), None),
        sums_passes=helper is not None,
        applier=_first_optimizer(owners) if under_tape else None,
    )


def _frames_of_call(tensor) -> tuple | None:
    """Return the frames of Horovod's `allreduce` and `allreduce_grads` that passed a gradient, and their callers.

    The callers are the objects `self` of the frames around, the innermost first. None if there are no such frames.
    """
    around, reducing = frames(100), None
    for place, frame in enumerate(around):
        name = frame.f_code.co_name
        if name.endswith("allreduce") and local(frame, "compression") is not None:
            reducing = frame
        elif reducing is not None and name.endswith("allreduce_grads") and _holds(local(frame, "grads"), tensor):
            return reducing, frame, [local(outer, "self") for outer in around[place + 1 :]]
    return None


def _sums_passes(owner) -> bool:
    """Return whether this is Horovod's helper that sums several backward passes."""
    return _has(owner, "locally_aggregated_grads")


def _reduces(owner) -> bool:
    """Return whether this is an optimizer of Horovod: a trainer's own class may have the first of these methods."""
    return _has(owner, "apply_gradients") and _has(owner, "_allreduce_grads")


def _unscales(owner) -> bool:
    """Return whether this is a loss scaler, which is around Horovod's optimizer."""
    return isinstance(owner, SCALER_V1) or _has(owner, "get_unscaled_gradients")


def _first_optimizer(owners: Iterable) -> Any:
    """Return the first `owner.optimizer` that is there, such as a model's; None without one."""
    for owner in owners:
        with contextlib.suppress(Exception):  # a property of the user's, perhaps, which is not ready
            if owner.optimizer is not None:
                return owner.optimizer
    return None


def _has(owner, name: str) -> bool:
    """Return whether an object has an attribute; no, if looking for it raises an error, as an object of a user may."""
    with contextlib.suppress(Exception):
        return hasattr(owner, name)
    return False


def loss_scale_of(scaler) -> tf.Tensor | None:
    """Return the loss scale of a `Call.scaler`, a float64 scalar; None without one."""
    if scaler is None:
        return None
    return tf.cast(scaler._loss_scale() if isinstance(scaler, SCALER_V1) else scaler.loss_scale, tf.float64)


def _is_dynamic(scaler) -> bool:
    if isinstance(scaler, SCALER_V1):
        return scaler._doing_dynamic_loss_scaling()
    return getattr(scaler, "dynamic", False)


def _holds(gradients, tensor) -> bool:
    return isinstance(gradients, list | tuple) and any(gradient is tensor for gradient in gradients)


class Traced:
    """A gradient between its compress and its decompress, during tracing."""

    def __init__(self, arrival: Arrival, now: Round):
        self.arrival = arrival
        self.now = now


class TracedCall:
    """One call of Horovod's, which passes its gradients one by one."""

    def __init__(self, call: Call, traced: Mapping[int, Traced]):
        self._call = call
        self._left = dict(traced)

    def expects(self, tensor: tf.Tensor) -> bool:
        """Return whether this gradient belongs to the call and has not been passed yet."""
        return any(position in self._left for position in self._call.positions(tensor))

    def take(self, tensor: tf.Tensor) -> Traced:
        """Return what was traced of a gradient; raise ValueError if it could belong to several variables.

        A variable that is listed twice is one: of its places, Horovod passes one.
        """
        positions = [position for position in self._call.positions(tensor) if position in self._left]
        names = sorted({self._left[position].arrival.name for position in positions})
        if len(names) > 1 and not self._call.in_order:
            raise ValueError(
                f"hvd_sparse: one gradient tensor could belong to each of {', '.join(names)}: use groups=None or a "
                "number"
            )
        return self._left.pop(positions[0])


def check_call(call: Call, exchange: Exchange) -> None:
    """Refuse other reductions and process sets, functions that run eagerly, and scalers of several passes."""
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd_sparse: a compressor is traced once, as a graph, and tf.config.run_functions_eagerly(True) prevents "
            "that: call tf.config.run_functions_eagerly(False) before the gradients are reduced"
        )
    if call.reduction == hvd.Adasum:
        raise ValueError("hvd_sparse does not work with op=Adasum: use op=hvd.Average or op=hvd.Sum")
    if call.reduction not in (hvd.Average, hvd.Sum):
        raise ValueError(f"hvd_sparse: {REDUCTIONS}, got op={call.reduction}")
    exchange.check_process_set(call.process_set)
    if call.sums_passes and _is_dynamic(call.scaler):
        raise ValueError(
            "hvd_sparse: a LossScaleOptimizer changes its scale where a single rank's pass overflows, if Horovod sums "
            "several passes: use backward_passes_per_step=1, or LossScaleOptimizer(..., dynamic=False, initial_scale=S)"
        )


def check_optimizer(call: Call, algorithm: Algorithm, exchange: Exchange, is_scaled: bool) -> None:
    """Refuse a loss scaler whose scale is not known; warn of a second momentum, clipping and accumulated gradients.

    is_scaled: whether the compressor's loss_scale was set.
    """
    applier = getattr(call.applier, "inner_optimizer", call.applier)  # of a loss scaler
    inner = algorithm.local_momentum
    settings = _settings_of(call.optimizer or applier)
    outer = settings.get("momentum", settings.get("beta_1", 0.0)) if inner > 0.0 else 0.0
    if outer > 0.0 and exchange.rank() == 0:
        warn(two_momenta(outer, algorithm.name, inner))
    has_no_effect = is_always_dense(algorithm.schedule) and not algorithm.replaces_optimizer
    option = next((name for name in CLIPPING if name in settings), None)
    if option and not has_no_effect and exchange.rank() == 0:
        warn(clips_late(f"{option}={settings[option]:g} of the optimizer", algorithm, off="it to None"))
    scales = hasattr(call.applier, "dynamic_growth_steps") or getattr(call.applier, "loss_scale_factor", None)
    if scales and not is_scaled and not has_no_effect:
        raise RuntimeError(NOT_SCALED)
    steps = getattr(applier, "gradient_accumulation_steps", None)
    if steps and exchange.rank() == 0:
        warn(
            f"hvd_sparse: the optimizer has gradient_accumulation_steps={steps}, but each micro-batch is reduced and "
            "counts as a step of the compressor: its momentum and warm-up are too fast. Leave it at None, sum the "
            "micro-batches' gradients, and reduce the sum with hvd_sparse.tensorflow.reduce_gradients"
        )


def _settings_of(optimizer) -> dict[str, float]:
    """Return momentum, or beta_1, and clipping of Horovod's optimizer around one of Keras or TensorFlow 1: numbers."""
    if hasattr(optimizer, "get_config"):
        config = {}
        with tf.init_scope(), contextlib.suppress(Exception):  # a hyperparameter may be a variable; a schedule of the
            config = optimizer.get_config()  # user's need not have a configuration
        names = ("momentum", "beta_1", *CLIPPING)
        found = config or {name: getattr(optimizer, name, None) for name in names}
    else:
        inner = getattr(optimizer, "_optimizer", None)
        found = {"momentum": getattr(inner, "_momentum", None), "beta_1": getattr(inner, "_beta1", None)}
    return {name: float(value) for name, value in found.items() if isinstance(value, Real)}


def warn_of_twins(call: Call, variables: Variables) -> None:
    """Warn if Horovod keeps this call's graph, and others of the compressor have the shape and type of its variables.

    Under a tape outside a tf.function, and in its Keras optimizers, Horovod reduces in a tf.function of its own, one
    for each compressor, and for each of these optimizers. TensorFlow tells its calls apart by shapes and types, not by
    variables: for a later call with one of the others it would run the graph of this call, with its residuals.
    """
    own = variables.names_of(call.variables)
    graph = tf.compat.v1.get_default_graph()

    def kinds(names: set[str]) -> set[tuple]:
        """Return the shape and type of each variable."""
        return {(tuple(variables[name].shape.as_list()), variables[name].dtype.base_dtype) for name in names}

    is_kept = getattr(getattr(graph, "outer_graph", graph), "name", None) == "allreduce_grads"
    if is_kept and kinds(own) & kinds(set(variables) - own):
        warn(
            f"hvd_sparse: this call reduces {len(own)} of the compressor's variables, and others have shapes of these. "
            "Should another call reduce others, TensorFlow would take it for this one, and mix up their gradients: "
            "build a compressor for each call. When layers are frozen or unfrozen, compile with a new "
            "hvd.DistributedOptimizer around the same compressor, or under a tape build a new compressor with the old "
            "one's state. If no other call reduces the others, all is well"
        )


def warn_of_turns(names: set[str], reduced: set[str], variables: Iterable[str]) -> None:
    """Warn if a call reduces no variable of the calls before it, `reduced`, which it then updates: each is a step."""
    if names and reduced and names.isdisjoint(reduced):
        warn(
            "hvd_sparse: one compressor reduces different variables in several calls, and each counts as a step: a "
            "warm-up ends too early, and life-spans are cut. Build a compressor for each tape or optimizer"
        )
        reduced.update(variables)  # so that it warns once
    reduced.update(names)


def makes_optimizer() -> bool:
    """Return whether a Keras optimizer of Horovod is being created; RuntimeError if it is around one of Keras 3.

    Keras 3 never calls the methods that Horovod overrides: each rank would silently train alone.
    """
    for frame in frames():
        if frame.f_code.co_name == "create_distributed_optimizer":
            if is_keras_3(local(frame, "optimizer")):
                raise RuntimeError(
                    "hvd_sparse: Horovod's DistributedOptimizer does nothing under Keras 3: each rank would train "
                    "alone. Set the environment variable TF_USE_LEGACY_KERAS=1 before TensorFlow is imported (and "
                    "install tf-keras), or use hvd.DistributedGradientTape"
                )
            return True
    return False


def is_keras_3(optimizer) -> bool:
    """Return whether an optimizer is from Keras 3, whose optimizers define both `apply` and `apply_gradients`."""
    return any(
        cls.__module__.split(".")[0] == "keras" and "apply" in vars(cls) and "apply_gradients" in vars(cls)
        for cls in type(optimizer).__mro__
    )
