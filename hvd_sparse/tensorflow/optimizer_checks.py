"""Refuses, or warns of, wrong uses that a traced call of Horovod shows: optimizer settings, mixed-up variables."""

import contextlib
from collections.abc import Iterable
from numbers import Real

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_sparse.algorithms import Algorithm
from hvd_sparse.frames import warn
from hvd_sparse.messages import clips_late, two_momenta
from hvd_sparse.schedule import is_always_dense
from hvd_sparse.tensorflow.caller import SCALER_V1, Call
from hvd_sparse.tensorflow.exchange import Exchange
from hvd_sparse.tensorflow.variables import Variables
from hvd_sparse.units import REDUCTIONS

CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")  # of Keras' optimizers
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


def warn_of_twins(call: Call, variables: Variables) -> None:
    """Warn if Horovod keeps this call's graph, and others of the compressor have the shape and type of its variables.

    Under a tape outside a tf.function, and in its Keras optimizers, Horovod builds a tf.function that reduces: one for
    each compressor, or for each of these optimizers. TensorFlow tells its calls apart by shapes and types, not by
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


def _is_dynamic(scaler) -> bool:
    if isinstance(scaler, SCALER_V1):
        return scaler._doing_dynamic_loss_scaling()
    return getattr(scaler, "dynamic", False)
