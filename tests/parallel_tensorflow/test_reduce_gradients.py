"""reduce_gradients reduces gradients that are computed already, as DistributedGradientTape does those of a loss."""

import warnings

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from gradients import SHAPES, draw, whole_numbers
from tf_helpers import (
    Reducer,
    as_gradients,
    assert_alive,
    assert_ranks_agree,
    make_variables,
    residual_of,
    several,
    total,
)

from hvd_sparse.tensorflow import Compression, reduce_gradients

SETTINGS = {"density": 0.05, "min_numel": 50, "dense_fallback": None}


@several
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_it_is_what_the_tape_does(graph):
    """The same bits as a loss with these gradients, with momentum and warm-up, over several steps."""
    variables = make_variables()
    made = [Compression.dgc(list(variables.values()), momentum=0.9, warmup=4, **SETTINGS) for _ in range(2)]
    through_tape = Reducer(variables, made[0], graph)

    def reduce(gradients):
        return reduce_gradients(gradients, list(variables.values()), compression=made[1], op=hvd.Average)

    direct = tf.function(reduce, autograph=False) if graph else reduce
    for step in range(6):
        drawn = draw(SHAPES, step, hvd.rank())
        expected = through_tape(drawn)
        for name, found in zip(variables, direct(list(as_gradients(variables, drawn).values())), strict=True):
            np.testing.assert_array_equal(found.numpy(), expected[name], err_msg=name)
    assert made[1].stats()["steps"] == 6


@several
def test_a_sum_over_micro_batches_is_one_step():
    """What four passes give is delivered or stays in residuals, exactly; the compressor counts one step."""
    variables = make_variables()
    compression = Compression.gradient_dropping(list(variables.values()), **SETTINGS)
    passes = [whole_numbers(SHAPES, step, hvd.rank()) for step in range(4)]

    @tf.function
    def reduce(gradients):
        summed = [tf.add_n(parts) for parts in zip(*gradients, strict=True)]
        return reduce_gradients(summed, list(variables.values()), compression=compression, op=hvd.Sum)

    found = reduce([list(as_gradients(variables, one).values()) for one in passes])
    for name, reduced in zip(variables, found, strict=True):
        given = total(sum(one[name] for one in passes))
        left = total(residual_of(compression, name)).reshape(SHAPES[name])
        np.testing.assert_array_equal(reduced.numpy() + left, given, err_msg=name)
    assert_ranks_agree({name: one.numpy() for name, one in zip(variables, found, strict=True)})
    assert compression.stats()["steps"] == 1


@several
def test_without_a_compression_sparse_gradients_and_those_that_are_not_there():
    variables = [tf.Variable(tf.zeros([4, 3])), tf.Variable(tf.zeros([5]), trainable=False), tf.Variable(tf.zeros([2]))]
    rows = tf.IndexedSlices(tf.ones([2, 3]) * (1.0 + hvd.rank()), tf.constant([1, 1]), tf.constant([4, 3]))
    found = reduce_gradients([rows, None, tf.ones([2])], variables, op=hvd.Sum)
    expected = np.zeros([4, 3])
    expected[1] = 2 * sum(range(1, hvd.size() + 1))
    np.testing.assert_array_equal(found[0].numpy(), expected)
    assert found[1] is None
    np.testing.assert_array_equal(found[2].numpy(), [hvd.size()] * 2)


@several
def test_what_does_not_fit_is_refused():
    variables = list(make_variables().values())
    with pytest.raises(ValueError, match=rf"an entry for each of the {len(variables)} variables, got 1 entries"):
        reduce_gradients([tf.zeros([3])], variables)
    wrong = [tf.zeros([3, 1, 1, 1]) for _ in variables]
    with pytest.raises(ValueError, match=r"gradients\[0\] must have the shape .* got \(3, 1, 1, 1\)"):
        reduce_gradients(wrong, variables)
    with pytest.raises(ValueError, match=r"gradients\[0\] must have the type float32 .* got float64"):
        reduce_gradients([tf.zeros(one.shape, tf.float64) for one in variables], variables)
    assert_alive()


@several
@pytest.mark.parametrize("by_reference", [False, True])
def test_both_kinds_of_variables_of_tensorflow_1(by_reference):
    """The type of one by reference is float32_ref, that of its gradient float32."""
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        variable = v1.Variable(tf.zeros([200]), use_resource=not by_reference)
        assert variable.dtype._is_ref_dtype == by_reference
        compression = Compression.topk([variable], density=0.05, min_numel=100)
        with pytest.raises(ValueError, match=r"gradients\[0\] must have the type float32 of .*, got float64: use"):
            reduce_gradients([tf.zeros([200], tf.float64)], [variable], compression=compression)
        (found,) = reduce_gradients([tf.range(200.0)], [variable], compression=compression, op=hvd.Sum)
        with v1.Session() as session:
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            expected = np.where(np.arange(200) < 190, 0, np.arange(200)) * hvd.size()
            np.testing.assert_array_equal(session.run(found), expected)


def test_arguments_of_another_type_are_refused():
    """Such as pairs, which Keras' optimizers take, and arguments in the other order."""
    variables = [tf.Variable(tf.zeros([3])), tf.Variable(tf.zeros([4, 2]))]
    gradients = [tf.zeros([3]), tf.zeros([4, 2])]
    named = dict(zip(["one", "two"], gradients, strict=True))
    wrong = {
        r"variables\[0\] must be a tf\.Variable, got EagerTensor: the gradients come first": (variables, gradients),
        r"variables must be a list of variables, got a single one": (gradients, variables[0]),
        r"variables must be a list of tf\.Variable, got a dict: pass its \.values\(\)": (
            gradients,
            {"one": variables[0]},
        ),
        r"variables must be a list of tf\.Variable, got NoneType": (gradients, None),
        r"gradients must be a list .*, got dict: pass \[gradients\[name\] for .* in the order of": (named, variables),
        r"gradients must be a list .*, got EagerTensor: pass \[gradient\]": (gradients[0], variables[:1]),
        r"gradients must be a list .*, got NoneType": (None, variables),
        r"gradients\[0\] must be a tensor or None, got tuple: pass gradients and variables as two lists": (
            zip(gradients, variables, strict=True),
            variables,
        ),
    }
    for message, arguments in wrong.items():
        with pytest.raises(TypeError, match=message):
            reduce_gradients(*arguments)


@several
@pytest.mark.parametrize("compressed", [False, True])
def test_a_variable_that_is_listed_twice_is_reduced_once(compressed):
    """Tied weights: the tape gives the whole gradient at both places."""
    tied, other = tf.Variable(tf.zeros([200])), tf.Variable(tf.zeros([3]))
    made = Compression.topk([tied, other], density=0.05, min_numel=100) if compressed else hvd.Compression.none
    listed, rows = [tied, other, tied], tf.range(200.0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tied * rows) + tf.reduce_sum(other)
    first, second, third = reduce_gradients(tape.gradient(loss, listed), listed, compression=made, op=hvd.Sum)
    kept = np.where(np.arange(200) < (190 if compressed else 0), 0.0, np.arange(200.0))
    for found in (first, third):
        np.testing.assert_array_equal(found.numpy(), hvd.size() * kept)
    np.testing.assert_array_equal(second.numpy(), [hvd.size()] * 3)


@several
def test_keras_3_warns_where_it_accumulates_what_is_reduced_already():
    """Its variables are taken, too; four micro-batches are a step if they are summed first."""
    keras = pytest.importorskip("keras", minversion="3")

    class Model(keras.Sequential):
        sums_first = False

        def train_step(self, data):
            variables, total = [variable.value for variable in self.trainable_variables], None
            for inputs, targets in zip(*(tf.split(part, 4) for part in data[:2]), strict=True):
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(inputs, targets, self(inputs, training=True)) / 4
                if not self.sums_first:
                    tape = hvd.DistributedGradientTape(tape, compression=compression)
                found = tape.gradient(loss, variables)
                total = found if total is None else [one + more for one, more in zip(total, found, strict=True)]
            if self.sums_first:
                total = reduce_gradients(total, self.trainable_variables, compression=compression)
            self.optimizer.apply(total, self.trainable_variables)
            return {"loss": loss}

    for steps, counted in ((4, 4), (None, 1)):
        model = Model([keras.Input([20]), keras.layers.Dense(30), keras.layers.Dense(1)])
        model.sums_first = steps is None
        compression = Compression.gradient_dropping(model, density=0.05)
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=steps)
        model.compile(optimizer, "mse", jit_compile=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.train_on_batch(np.ones([8, 20], np.float32), np.zeros([8, 1], np.float32))
        told = sum("gradient_accumulation_steps=4, but each micro-batch" in str(one.message) for one in caught)
        assert (told > 0) == (steps is not None and hvd.rank() == 0)
        assert compression.stats()["steps"] == counted
