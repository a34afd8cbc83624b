"""What a pipeline trains beside the loss of its last stage: the losses that layers add, and layers like dropout."""

import numpy as np
import pytest
import tensorflow as tf
from mpi4py import MPI

from hvd_sparse.tensorflow.model_parallel import Pipeline, PipelineError


def test_losses_that_layers_add_count_once_for_a_batch():
    """An L2 regularizer of each stage, whose gradient is twice the weights; samples do not change it."""
    keras = tf.keras
    kernel = {"kernel_initializer": "ones", "kernel_regularizer": keras.regularizers.L2(1.0)}
    for reduction in ("mean", "sum"):
        stage = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, use_bias=False, **kernel)])
        loss = {"loss": lambda outputs, _: 0.0 * tf.reduce_sum(outputs), "reduction": reduction}
        with Pipeline(stage, micro_batches=3, timeout=60.0, **loss) as pipeline:
            assert pipeline.step(np.ones((7, 3), np.float32), np.zeros(7, np.float32)) == 0.0
            np.testing.assert_allclose(pipeline.gradients()[0], np.full((3, 3), 2.0), rtol=1e-6)


def test_losses_that_a_compiled_layer_adds_are_refused():
    """They belong to the graph of the function, and a tape outside of it cannot differentiate them."""
    keras = tf.keras
    stage = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, activity_regularizer="l2")])
    stage.call = tf.function(stage.call)
    with pytest.raises((ValueError, PipelineError), match=r"adds a loss inside a tf\.function"):  # of another stage
        with Pipeline(stage, loss=lambda outputs, _: tf.reduce_sum(outputs), timeout=60.0) as pipeline:
            pipeline.step(np.ones((7, 3), np.float32), np.zeros(7, np.float32))


@pytest.mark.parametrize("base", ["Layer", "Model"])
def test_layers_of_a_stage_know_whether_it_trains(base):
    """Also if the stage's own call does not take `training`, as in Keras' `fit`."""
    told, keras = [], tf.keras

    class Inner(keras.layers.Layer):
        def call(self, x, training=None):
            told.append(bool(training))
            return x

    class Stage(getattr(keras.layers if base == "Layer" else keras, base)):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def call(self, x):
            return self.inner(x)

    samples = np.ones((4, 3), np.float32)
    with Pipeline(Stage(), loss=lambda outputs, _: tf.reduce_sum(outputs), timeout=60.0) as pipeline:
        for run, trains in (("evaluate", False), ("step", True), ("evaluate", False), ("predict", False)):
            getattr(pipeline, run)(*[samples, samples][: 1 + (run != "predict")])
            assert told[-1] == trains  # Keras 3 also calls a layer to build it


class Dropping(tf.keras.layers.Layer):
    """Drops half of what it gets; what is left is doubled."""

    def __init__(self):
        super().__init__()
        self.drop = tf.keras.layers.Dropout(0.5)

    def call(self, x, training=None):
        return self.drop(x, training=training)


@pytest.mark.parametrize("first", ["step", "evaluate"])
def test_a_compiled_stage_knows_whether_it_trains(first):
    stage, samples = Dropping(), np.ones((40, 30), np.float32)
    stage.call = tf.function(stage.call)
    size = MPI.COMM_WORLD.Get_size()
    with Pipeline(stage, loss=lambda outputs, _: tf.reduce_mean(tf.cast(outputs > 0, tf.float32)), timeout=60.0) as one:
        for run in (first, "evaluate", "step", "evaluate"):
            left = getattr(one, run)(samples, samples)
            assert left == 1.0 if run == "evaluate" else 0.0 < left < 0.5**size + 0.1


@pytest.mark.parametrize("failing", range(MPI.COMM_WORLD.Get_size()))
def test_a_compiled_stage_of_keras_that_cannot_know_whether_it_trains_is_refused(failing):
    class Compiled(Dropping):
        @tf.function
        def call(self, x):
            return self.drop(x)

    stage = (Compiled if MPI.COMM_WORLD.Get_rank() == failing else Dropping)()
    with pytest.raises((ValueError, PipelineError), match="give call the argument training"):
        Pipeline(stage, loss=lambda outputs, _: tf.reduce_sum(outputs), timeout=60.0)
