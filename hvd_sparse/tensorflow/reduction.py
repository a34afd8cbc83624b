"""Reduces gradients that are computed already, such as sums over micro-batches."""

from collections.abc import Iterable

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_sparse.tensorflow.variables import unwrapped


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
        ValueError: Gradients and variables do not fit; what the compressor refuses, see `SparseCompressor`.
    """
    gradients, variables = list(gradients), [unwrapped(variable) for variable in variables]
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
        if tf.as_dtype(gradient.dtype) != variables[place].dtype:
            raise ValueError(
                f"gradients[{place}] must have the type {variables[place].dtype.name} of {variables[place].name}, got "
                f"{tf.as_dtype(gradient.dtype).name}: use tf.cast"
            )
    once: dict = {}  # the first place of each variable
    for place in given:
        once.setdefault(variables[place].ref(), place)
    sources = [reference.deref() for reference in once]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        targets = [tf.identity(variable) for variable in sources]
    tape = hvd.DistributedGradientTape(tape, **options)
    reduced = tape.gradient(targets, sources, output_gradients=[given[place] for place in once.values()])
    found = dict(zip(once, reduced, strict=True))
    return [found[variables[place].ref()] if place in given else None for place in range(len(variables))]
