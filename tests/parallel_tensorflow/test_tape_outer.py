"""A tape that is active while gradients are reduced: the result is the same, and to that tape a constant."""

import functools

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf
import tiers
from gradients import SHAPES, draw
from tf_helpers import as_gradients, make_variables, several

from hvd_sparse.tensorflow import Compression

pytestmark = several
SETTINGS = {"density": 0.1, "min_numel": 100}  # body.bias and scale are sent dense
CASES = {
    "dgc": ("dgc", {"momentum": 0.9, "scope": "tensor"}),
    "warm-up": ("gradient_dropping", {"warmup": 2}),
    "dct": ("dct", {}),
    "bits": ("gradient_dropping", {"scope": "model", "values": "int1"}),
    "reduce-scatter": ("gradient_dropping", {"exchange": "reduce_scatter"}),
    "micro": ("micro", {}),
    "cltk": ("cltk", {}),
    "sidco": ("sidco", {}),
}


def loss_of(variables, gradients):
    """Return a loss whose second derivative is not zero."""
    return tf.add_n([tf.reduce_sum(gradients[n] * v * v) for n, v in variables.items()])


def reduce(tape, loss, variables, compression):
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    return tape.gradient(loss, list(variables.values()))


def after_the_tape(variables, gradients, compression):
    """As in most training loops."""
    with tf.GradientTape() as tape:
        loss = loss_of(variables, gradients)
    return reduce(tape, loss, variables, compression)


def inside_the_tape(variables, gradients, compression):
    with tf.GradientTape(persistent=True) as tape:
        return reduce(tape, loss_of(variables, gradients), variables, compression)


def under_another_tape(variables, gradients, compression):
    """As with a gradient penalty, whose tape must not see a derivative of the reduced gradients."""
    with tf.GradientTape() as outer:
        reduced = after_the_tape(variables, gradients, compression)
        listed = list(variables.values())
        target = tf.add_n([tf.reduce_sum(one**2) for one in reduced] + [tf.reduce_sum(one**3) for one in listed])
    for variable, found in zip(listed, outer.gradient(target, listed), strict=True):
        tf.debugging.assert_near(found, 3.0 * variable**2)
    return reduced


@functools.cache
def train(case, step, graph):
    """Return the reduced gradients of four steps, the first two dense during a warm-up."""
    method, settings = CASES[case]
    variables = make_variables()
    compression = getattr(Compression, method)(list(variables.values()), **SETTINGS, **settings)
    call = tf.function(step, autograph=False) if graph else step
    found = []
    for number in range(4):
        gradients = as_gradients(variables, draw(SHAPES, number, hvd.rank()))
        found.append([one.numpy().tolist() for one in call(variables, gradients, compression)])
    assert compression.stats()["steps"] == 4
    return found


@pytest.mark.parametrize("case", tiers.choice(list(CASES), "dgc", "warm-up"))
@pytest.mark.parametrize("step", [inside_the_tape, under_another_tape])
@pytest.mark.parametrize("graph", [True, False])
def test_an_active_tape_changes_nothing(case, step, graph):
    assert train(case, step, graph) == train(case, after_the_tape, True)
