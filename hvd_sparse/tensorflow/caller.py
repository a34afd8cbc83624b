"""The call of Horovod that passes a gradient to `compress`: its variable, its reduction, and the optimizer around it.

Horovod passes the gradient alone. The rest is in local variables of its stack frames while it traces `compress`.
"""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_sparse.frames import frames, local
from hvd_sparse.tensorflow.codecs.base import Arrival, Round

SCALER_V1 = tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer


@dataclass(frozen=True)
class Call:
    """One traced call of Horovod's function that reduces a list of gradients."""

    gradients: list  # of Tensor, IndexedSlices or None
    variables: list
    in_order: bool  # whether compress is called in the order of the list
    reduction: int
    process_set: hvd.ProcessSet
    optimizer: object  # the calling Keras or v1 optimizer, None under a tape
    passes: int  # number of local backward passes by which Horovod divides their sum; 1 if it does not
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
