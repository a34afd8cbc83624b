"""Reduces gradients that are computed already, such as sums over micro-batches."""

from collections.abc import Iterable, Mapping

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_sparse.tensorflow.variables import resolve, unwrapped


def reduce_gradients(gradients: Iterable, variables: Iterable, **options) -> list:
    """Reduce gradients that are computed already, through `hvd.DistributedGradientTape`, eagerly or in a `tf.function`.

        gradients = reduce_gradients(sums_over_micro_batches, variables, compression=compression)

    Args:
        gradients: One tensor for each variable, of its shape and type, or None on all ranks alike. `tf.IndexedSlices`
            become dense.
        variables: The variables, in the same order; those of Keras 3, too. One that is listed several times, with its
            whole gradient each time, is reduced once.
        options: Arguments of `hvd.DistributedGradientTape`: `compression`, `op`, `process_set` and others.

    Returns:
        The reduced gradients in the same order, None where there was none.

    Raises:
        TypeError: One of the two is no list, or has entries of another type.
        ValueError: Gradients and variables do not fit; what the compressor refuses, see `SparseCompressor`.
    """
    variables = _listed_variables(variables)
    gradients = _listed_gradients(gradients)
    if len(gradients) != len(variables):
        raise ValueError(
            f"gradients must have an entry for each of the {len(variables)} variables, got {len(gradients)} entries"
        )
    given = {place: gradient for place, gradient in enumerate(gradients) if gradient is not None}
    for place, gradient in given.items():
        if not variables[place].shape.is_compatible_with(gradient.shape):
            raise ValueError(
                f"gradients[{place}] must have the shape {variables[place].shape} of {variables[place].name}, got "
                f"{gradient.shape}: pass gradients and variables in the same order"
            )
        own, given_type = variables[place].dtype.base_dtype, tf.as_dtype(gradient.dtype).base_dtype
        if given_type != own:  # a RefVariable of TensorFlow 1 has a type that refers to its base
            raise ValueError(
                f"gradients[{place}] must have the type {own.name} of {variables[place].name}, got {given_type.name}: "
                "use tf.cast"
            )
    once: dict = {}  # the first place of each variable
    for place in given:
        once.setdefault(variables[place].ref(), place)
    tape = hvd.DistributedGradientTape(_GivenGradients(), **options)
    reduced = tape.gradient([given[place] for place in once.values()], [reference.deref() for reference in once])
    found = dict(zip(once, reduced, strict=True))
    return [found[variables[place].ref()] if place in given else None for place in range(len(variables))]


class _GivenGradients(tf.GradientTape):
    """A tape whose targets are the gradients; one that records cannot watch a RefVariable of TensorFlow 1."""

    def gradient(self, target, sources, output_gradients=None):
        """Return the targets as dense tensors."""
        return [tf.convert_to_tensor(gradient) for gradient in target]


def _listed_variables(variables) -> list[tf.Variable]:
    """Return the variables, those of Keras 3 unwrapped; TypeError if they are none."""
    listed = [unwrapped(variable) for variable in resolve(variables, "variables")]
    for place, variable in enumerate(listed):
        if not isinstance(variable, tf.Variable):
            raise TypeError(
                f"variables[{place}] must be a tf.Variable, got {type(variable).__name__}: the gradients come first, "
                "reduce_gradients(gradients, variables, compression=compression)"
            )
    return listed


def _listed_gradients(gradients) -> list:
    """Return the gradients; TypeError if they are no list of tensors."""
    is_one = hasattr(gradients, "dtype")
    if is_one or isinstance(gradients, Mapping) or not isinstance(gradients, Iterable):
        raise TypeError(
            f"gradients must be a list with a tensor or None for each variable, got {type(gradients).__name__}: pass "
            f"{'[gradient]' if is_one else '[gradients[name] for ...] in the order of variables'}"
        )
    listed = list(gradients)
    for place, gradient in enumerate(listed):
        if gradient is not None and not (hasattr(gradient, "shape") and hasattr(gradient, "dtype")):
            raise TypeError(
                f"gradients[{place}] must be a tensor or None, got {type(gradient).__name__}: pass gradients and "
                "variables as two lists"
            )
    return listed
