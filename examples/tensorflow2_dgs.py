"""Train asynchronously with a parameter server and dual-way sparsification (DGS), or one of its baselines.

    mpirun -np 4 python examples/tensorflow2_dgs.py --method dgs                       # three workers, one server
    mpirun -np 2 python examples/tensorflow2_dgs.py --task char_lstm --servers colocated

Tasks: `digits`, a convolutional network with batch normalisation, and `char_lstm`, an LSTM on the source of Python's
standard library. Works with Keras 3 and Keras 2 (TF_USE_LEGACY_KERAS=1); Horovod itself is not needed.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf  # isort: skip  # before mpi4py: else MPI_Finalize calls TensorFlow's copy of hwloc, and crashes

import asynchronous_run
import char_data
import numpy as np
import reporting
import tensorflow2_device

from hvd_sparse.tensorflow.asynchronous import connect


class Digits(asynchronous_run.Digits):
    """The network with images float32[n, 8, 8, 1]."""

    def make_model(self):
        """Return the network, built."""
        layers = tf.keras.layers
        return tf.keras.Sequential(
            [
                tf.keras.Input((8, 8, 1)),
                layers.Conv2D(32, 3, padding="same", use_bias=False),
                layers.BatchNormalization(momentum=0.9),
                layers.ReLU(),
                layers.Conv2D(64, 3, padding="same", activation="relu"),
                layers.MaxPool2D(2),
                layers.Flatten(),
                layers.Dense(128, activation="relu"),
                layers.Dense(10),
            ]
        )

    def batches(self):
        """Yield (inputs, targets) endlessly."""
        for images, labels in self.arrays():
            yield (tf.constant(images[..., None]),), tf.constant(labels)

    def carried(self, inputs, state):
        """Return what the model takes; nothing goes on from batch to batch."""
        return inputs[0]

    def split(self, outputs):
        """Return logits and state of what the model returned."""
        return outputs, ()

    def evaluate(self, model):
        """Return loss and accuracy, in percent, on the test set."""
        logits = model(self.test_images[..., None], training=False)
        accuracy = 100.0 * float(np.mean(np.argmax(logits, axis=1) == self.test_labels))
        return float(loss_of(self.test_labels, logits)), accuracy


class CharLSTM(asynchronous_run.CharLSTM):
    """The network, whose state is given and returned."""

    def make_model(self):
        """Return embedding, LSTM and a linear layer: (characters, two states) to (logits, two states)."""
        layers, hidden = tf.keras.layers, self.args.hidden
        characters = tf.keras.Input((None,), dtype="int64")
        state = [tf.keras.Input((hidden,)), tf.keras.Input((hidden,))]
        embedded = layers.Embedding(len(char_data.CHARACTERS), 64)(characters)
        output, *after = layers.LSTM(hidden, return_sequences=True, return_state=True)(embedded, initial_state=state)
        return tf.keras.Model([characters, *state], [layers.Dense(len(char_data.CHARACTERS))(output), *after])

    def batches(self):
        """Yield (inputs, targets) endlessly; the first of a pass has a state of zeros with it."""
        for characters, targets, is_start in self.arrays():
            zeros = self.zeros(len(characters)) if is_start else ()
            yield (tf.constant(characters), *zeros), tf.constant(targets)

    def zeros(self, batch):
        """Return the state to begin with."""
        return tf.zeros([batch, self.args.hidden]), tf.zeros([batch, self.args.hidden])

    def carried(self, inputs, state):
        """Return what the model takes: the state of before, unless a new one comes with the inputs."""
        return [inputs[0], *(inputs[1:] or state)]

    def split(self, outputs):
        """Return logits and state of what the model returned."""
        return outputs[0], tuple(outputs[1:])

    def evaluate(self, model):
        """Return loss per character, and perplexity, on the held-out text."""
        run = tf.function(lambda inputs: model(inputs, training=False), reduce_retracing=True)
        state, losses, count = self.zeros(char_data.EVALUATION_STREAMS), 0.0, 0
        for characters, targets in self.held_out_windows():
            logits, state = self.split(run([tf.constant(characters), *state]))
            losses += float(loss_of(targets, logits)) * targets.size
            count += targets.size
        return losses / count, char_data.perplexity(losses / count)


TASKS = {"digits": Digits, "char_lstm": CharLSTM}


def loss_of(labels, logits):
    """Return the mean cross entropy."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def make_step(task, model, optimizer, clip_norm):
    """Return a function that takes one training step on a batch, and returns loss and state."""

    @tf.function
    def step(inputs, targets, state):
        with tf.GradientTape() as tape:
            logits, state = task.split(model(task.carried(inputs, state), training=True))
            loss = loss_of(targets, logits)
        gradients = tape.gradient(loss, model.trainable_variables)
        if clip_norm:
            gradients, _ = tf.clip_by_global_norm(gradients, clip_norm)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss, state

    return step


def train(session, task, model, args):
    """Train; return one dict of metrics per evaluation, on the first worker, of the servers' model."""
    optimizer = session.optimizer(
        lambda step: reporting.learning_rate(args.lr, step, args.steps, args.warmup_steps), args.weight_decay
    )
    update, batches, state = make_step(task, model, optimizer, args.clip_norm), task.batches(), ()
    everyones = task.make_model()

    def step(_):
        nonlocal state
        inputs, targets = next(batches)
        loss, state = update(inputs, targets, state)
        return float(loss)

    def evaluate():
        session.load_global(everyones)
        return task.evaluate(everyones)

    return asynchronous_run.train(session, task, args, step, evaluate)


def prepare(args):
    """Set TensorFlow up: as many threads as asked for, memory of a GPU as needed, seeds."""
    tensorflow2_device.prepare()
    tf.keras.utils.set_random_seed(args.seed)


if __name__ == "__main__":
    asynchronous_run.run("tensorflow2_dgs", __doc__, TASKS, prepare, connect, train)
