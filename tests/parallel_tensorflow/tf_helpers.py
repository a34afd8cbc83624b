"""Variables, and functions with which Horovod reduces given gradients of them."""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from gradients import SHAPES, draw, whole_numbers

several = pytest.mark.skipif(hvd.size() == 1, reason="Horovod compresses nothing with one process")


def make_variables(shapes=SHAPES, dtype=tf.float32, seed=1):
    """Return {name: tf.Variable}, the same on every rank."""
    drawn = draw(shapes, step=0, rank=0, seed=seed)
    return {name: tf.Variable(tf.cast(drawn[name], dtype), name=name) for name in shapes}


def loss_with(variables, gradients):
    """Return a loss whose gradients are exactly these."""
    return tf.add_n([tf.reduce_sum(tf.cast(variables[n] * g, tf.float64)) for n, g in gradients.items()])


def reduce_through_tape(variables, gradients, compression, **options):
    """Return {name: reduced gradient} of {name: gradient}, by hvd.DistributedGradientTape."""
    with tf.GradientTape() as tape:
        loss = loss_with(variables, gradients)
    tape = hvd.DistributedGradientTape(tape, compression=compression, **options)
    names = list(gradients)
    return dict(zip(names, tape.gradient(loss, [variables[n] for n in names]), strict=True))


def as_gradients(variables, arrays):
    """Return {name: tensor of the variable's type} from {name: array}."""
    return {name: tf.cast(tf.constant(array), variables[name].dtype) for name, array in arrays.items()}


class Reducer:
    """Reduce gradients through hvd.DistributedGradientTape, eagerly or in one tf.function."""

    def __init__(self, variables, compression, graph=True, **options):
        self.variables = variables
        self.compression = compression

        def reduce(gradients):
            return reduce_through_tape(variables, gradients, compression, **options)

        self._reduce = tf.function(reduce, autograph=False) if graph else reduce  # with it: test_models.py

    def __call__(self, gradients):
        """Return {name: float64 array}, reduced, from {name: array} of this rank."""
        reduced = self._reduce(as_gradients(self.variables, gradients))
        assert all(reduced[n].dtype == self.variables[n].dtype for n in gradients)
        return {n: tf.cast(g, tf.float64).numpy() for n, g in reduced.items()}


def total(array):
    """Return the sum over the ranks, in float64."""
    return hvd.allreduce(tf.constant(np.asarray(array, np.float64)), op=hvd.Sum, name="total").numpy()


def reduce_whole_numbers(reduce, steps, after_step=lambda step: None):
    """Reduce gradients of whole numbers; return what all ranks put in and what came out, {name: float64 array} each."""
    fed = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    out = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(steps):
        gradients = whole_numbers(SHAPES, step, hvd.rank())
        reduced = reduce(gradients)
        assert_ranks_agree(reduced)
        for name in SHAPES:
            fed[name] += total(gradients[name])
            out[name] += reduced[name]
        after_step(step)
    return fed, out


def memory_of(compression, name, kind="residual"):
    """Return a buffer of this rank, float64[n]; zeros where a variable has none."""
    memory = compression.feedback[name]
    found = memory.buffers.get(kind)
    return np.zeros(memory.size) if found is None else found.numpy().astype(np.float64)


def residual_of(compression, name):
    """Return the residual of this rank, float64[n]; zeros where a variable has none."""
    return memory_of(compression, name)


def assert_ranks_agree(arrays):
    """Assert that every rank has the same bits of {name: array}."""
    own = np.concatenate([np.frombuffer(np.ascontiguousarray(arrays[n]).tobytes(), np.uint8) for n in sorted(arrays)])
    bits = hvd.allgather(tf.constant(own[None]), name="bits").numpy()
    assert (bits == bits[0]).all(), "ranks differ"


def assert_alive():
    """Assert that collectives still work on all ranks."""
    assert hvd.allreduce(tf.ones([3]), op=hvd.Sum, name="alive").numpy().tolist() == [hvd.size()] * 3
