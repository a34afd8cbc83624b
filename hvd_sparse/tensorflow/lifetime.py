"""Tells when compressors are built in the training step, where each would live for one step only."""

import contextlib
import itertools
import math
import weakref
from collections.abc import Iterator

import tensorflow as tf

from hvd_sparse.frames import warn
from hvd_sparse.messages import NEW_EACH_STEP
from hvd_sparse.tensorflow.variables import Variables

BUILT_INSIDE = (
    "hvd_sparse: build the compressor once, outside the tf.function: in it, each trace would build another, without "
    "the residuals"
)
_clock = itertools.count()
_begun: weakref.WeakSet["Lifetime"] = weakref.WeakSet()


@contextlib.contextmanager
def built_outside() -> Iterator[None]:
    """Raise RuntimeError where TensorFlow refuses a compressor's first variable: in a function that is traced again."""
    try:
        yield
    except ValueError as error:
        if tf.inside_function():
            raise RuntimeError(BUILT_INSIDE) from error
        raise


class Lifetime:
    """When a compressor was built, and when it began to reduce.

    number: the variable that counts its steps.
    """

    def __init__(self, variables: Variables, number: tf.Variable):
        self._variables = variables
        self._number = number
        self._built_at = next(_clock)
        self._first_call_at = math.inf  # there was none yet
        self._has_warned = False  # or one before it

    def begin(self) -> None:
        """Note the first call; warn once if it follows two others, on some of its variables, that took a step each.

        Not with a state loaded, which has their residuals and their step.
        """
        if self in _begun:
            return
        self._first_call_at = next(_clock)
        earlier = [one for one in _begun if one._first_call_at < self._built_at and self._shares_variables(one)]
        before = sorted(earlier, key=lambda one: one._first_call_at)
        _begun.add(self)
        self._has_warned = any(one._has_warned for one in before)
        with tf.init_scope():  # eager, but in a graph of TensorFlow 1
            steps = [int(one._number) for one in [*before[-2:], self]] if tf.executing_eagerly() else []
        if steps == [1, 1, 0] and not self._has_warned:
            self._has_warned = True
            warn(f"{NEW_EACH_STEP}, and pass the same one to every tape")

    def _shares_variables(self, other: "Lifetime") -> bool:
        """Return whether both reduce some variable."""
        return bool(self._variables.names_of(other._variables[name] for name in other._variables))
