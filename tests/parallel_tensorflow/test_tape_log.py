"""log_to reports the numbers of stats() after the requested steps, from inside a traced step."""

import warnings

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from gradients import draw
from tf_helpers import as_gradients, make_variables, reduce_through_tape, several

from hvd_sparse.tensorflow import Compression
from hvd_sparse.tensorflow.keras import LogCompression

SHAPES = {"big": (120, 50), "small": (64,)}


@several
def test_each_step_is_reported_as_stats_tells_it():
    variables = make_variables(SHAPES)
    compression = Compression.gradient_dropping(list(variables.values()), density=0.01)
    reports = []
    write = (lambda numbers, step: reports.append((step, numbers))) if hvd.rank() == 0 else None
    compression.log_to(write, every=2, prefix="rank")
    for t in range(5):
        reduce_through_tape(variables, as_gradients(variables, draw(SHAPES, t, hvd.rank())), compression)
        stats = compression.stats()
        if t % 2 and hvd.rank() == 0:
            step, numbers = reports[-1]
            assert step == t + 1 == stats["steps"]
            assert numbers["rank/payload_bytes"] == stats["step"]["payload_bytes"] > 0
            assert numbers["rank/ratio"] == stats["step"]["ratio"]
            assert numbers["rank/residual_norm"] == pytest.approx(stats["residual_norm"], rel=1e-6) and step > 0
    assert [step for step, _ in reports] == ([2, 4] if hvd.rank() == 0 else [])
    compression.log_to(None)
    for t in range(5, 7):
        reduce_through_tape(variables, as_gradients(variables, draw(SHAPES, t, hvd.rank())), compression)
    assert len(reports) == (2 if hvd.rank() == 0 else 0)


@several
def test_on_some_ranks_alone_is_refused_on_all():
    """Their graphs would differ, and Horovod's names with them."""
    variables = make_variables(SHAPES)
    compression = Compression.gradient_dropping(list(variables.values()), density=0.01)
    if hvd.rank() == 0:
        compression.log_to(print)
    with pytest.raises(ValueError, match="log_to was called = "):
        reduce_through_tape(variables, as_gradients(variables, draw(SHAPES, 0, hvd.rank())), compression)


@several
def test_too_late_is_refused():
    variables = make_variables(SHAPES)
    compression = Compression.gradient_dropping(list(variables.values()), density=0.01)
    reduce_through_tape(variables, as_gradients(variables, draw(SHAPES, 0, hvd.rank())), compression)
    with pytest.raises(RuntimeError, match=r"call log_to\(\) before the first training step"):
        compression.log_to(print)
    with pytest.raises(TypeError, match="writer must be a SummaryWriter"):
        Compression.gradient_dropping(list(make_variables(SHAPES).values())).log_to("runs")


def test_graphs_of_tensorflow_1_are_refused():
    with tf.Graph().as_default():
        compression = Compression.gradient_dropping([tf.compat.v1.get_variable("w", [2000])])
        with pytest.raises(RuntimeError, match=r"write compression.stats\(session=...\)"):
            compression.log_to(print)


@several
def test_keras_logs():
    import horovod.tensorflow.keras as hvd_keras

    model = tf.keras.Sequential([tf.keras.Input([64]), tf.keras.layers.Dense(100), tf.keras.layers.Dense(10)])
    compression = Compression.gradient_dropping(model, density=0.01)
    optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), compression=compression)
    model.compile(optimizer, "mse")
    inputs, seen = np.ones([32, 64], np.float32), []
    see = tf.keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))
    callbacks = [LogCompression(compression, prefix="sent"), see]
    history = model.fit(inputs, np.zeros([32, 10]), batch_size=8, epochs=2, verbose=0, callbacks=callbacks).history
    stats = compression.stats()
    assert stats["steps"] == 8
    assert len(seen) == 2 and seen[-1]["sent/payload_bytes"] == stats["step"]["payload_bytes"] > 0
    assert history["sent/residual_norm"][-1] == pytest.approx(stats["residual_norm"])


@several
@pytest.mark.parametrize("reduces", [False, True])
def test_keras_logs_of_a_compressor_that_nothing_uses_warn_once(reduces):
    """Such as with Keras 3, `compile` with its own optimizer, and no train_step with a tape."""

    class Model(tf.keras.Sequential):
        def train_step(self, data):
            inputs, targets = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(inputs) - targets) ** 2)
            if reduces:
                tape = hvd.DistributedGradientTape(tape, compression=compression)
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return {"loss": loss}

    model = Model([tf.keras.Input([8]), tf.keras.layers.Dense(4)])
    variables = model.trainable_variables
    compression = Compression.gradient_dropping(model, density=0.1)
    model.compile(tf.keras.optimizers.SGD(0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callbacks = [LogCompression(compression)]
        model.fit(np.ones([8, 8]), np.zeros([8, 4]), batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    told = sum("no step of this epoch has reduced gradients" in str(one.message) for one in caught)
    assert told == (not reduces and hvd.rank() == 0)
    assert compression.stats()["steps"] == 2 * reduces
