"""Train a model that is cut into stages, with sparse activations between them (DCT-MP).

    mpirun -np 2 python examples/tensorflow2_dct_mp.py --density 0.1
    mpirun -np 4 python examples/tensorflow2_dct_mp.py --threshold laplace --schedule 1f1b
    python examples/tensorflow2_dct_mp.py --boundaries 3                        # one process: sparsity without messages

The task: a small causal transformer on the source of Python's standard library; as many stages as ranks. Works with
Keras 3 and Keras 2 (TF_USE_LEGACY_KERAS=1); Horovod itself is not needed.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf  # isort: skip  # before mpi4py: else MPI_Finalize calls TensorFlow's copy of hwloc, and crashes

import model_parallel_run
import tensorflow2_device

from hvd_sparse.tensorflow.model_parallel import Pipeline, ThresholdBoundary

layers = tf.keras.layers


class Embedding(layers.Layer):
    """Characters and their positions as vectors: int64[batch, length] to float32[batch, length, width]."""

    def __init__(self, length, width):
        super().__init__()
        self.characters = layers.Embedding(model_parallel_run.CHARACTERS, width)
        self.positions = layers.Embedding(length, width)

    def call(self, characters):
        """Return the vectors."""
        return self.characters(characters) + self.positions(tf.range(tf.shape(characters)[1]))


class Block(layers.Layer):
    """A block of a transformer: attention to what came before and two dense layers, each normalised first and added."""

    def __init__(self, width, heads):
        super().__init__()
        self.norms = [layers.LayerNormalization(epsilon=1e-5) for _ in range(2)]
        self.attention = layers.MultiHeadAttention(heads, width // heads)
        self.dense = tf.keras.Sequential([layers.Dense(4 * width, activation="relu"), layers.Dense(width)])

    def call(self, x):
        """Return float32[batch, length, width], as x is."""
        normalised = self.norms[0](x)
        x = x + self.attention(normalised, normalised, use_causal_mask=True)
        return x + self.dense(self.norms[1](x))


def make_layers(stage, args):
    """Return a stage's layers: its blocks, and in the first and last stage the input and output layers."""
    found = [Block(args.width, args.heads) for _ in model_parallel_run.blocks_of(stage, args)]
    if model_parallel_run.is_first(stage):
        found.insert(0, Embedding(args.sequence_length, args.width))
    if model_parallel_run.is_last(stage, args):
        found += [layers.LayerNormalization(epsilon=1e-5), layers.Dense(model_parallel_run.CHARACTERS)]
    return found


def loss_of(logits, targets):
    """Return the mean cross entropy of each next character."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits))


class Trainer:
    """This rank's stage, its pipeline and its optimizer; see `model_parallel_run`."""

    def __init__(self, args, communicator):
        self.cuts, found = [], []  # boundaries have a row for each character: a sample is a whole sequence
        for stage in model_parallel_run.stages_here(args):
            tf.keras.utils.set_random_seed(1000 * args.seed + stage)  # the same weights on however many ranks
            if found:
                self.cuts.append(ThresholdBoundary(args.density, args.threshold, start_dim=-1, seed=args.seed))
                found.append(self.cuts[-1])
            found += built(make_layers(stage, args), stage, args)
        self.model = tf.keras.Sequential(found)
        self.model.build(shape_before(model_parallel_run.stages_here(args)[0], args))
        self.model.call = tf.function(self.model.call, reduce_retracing=True)
        self.optimizer = tf.keras.optimizers.Adam(args.lr)
        self.pipeline = Pipeline(
            self.model,
            boundary=ThresholdBoundary(args.density, args.threshold, start_dim=-1, seed=args.seed),
            micro_batches=args.micro_batches,
            schedule=args.schedule,
            loss=loss_of,
            communicator=communicator,
        )

    def step(self, inputs, targets, lr):
        """Train on a batch; return its loss."""
        loss = self.pipeline.step(inputs, targets)
        self.optimizer.learning_rate = lr
        self.optimizer.apply_gradients(zip(self.pipeline.gradients(), self.model.trainable_variables, strict=True))
        return loss

    def evaluate(self, inputs, targets):
        """Return the loss of a batch."""
        return self.pipeline.evaluate(inputs, targets)

    def stats(self):
        """Return this rank's traffic."""
        return self.pipeline.stats()

    def boundaries(self):
        """Return the statistics of the boundaries within this rank's part."""
        return [cut.stats() for cut in self.cuts]

    def dp_ratio(self):
        """Return 1.0: there are no replicas."""
        return 1.0

    def close(self):
        """End the pipeline."""
        self.pipeline.close()


def shape_before(stage, args):
    """Return the shape of a stage's input."""
    return (None, args.sequence_length) + (() if model_parallel_run.is_first(stage) else (args.width,))


def built(found, stage, args):
    """Return layers after they have been called once, so that their weights are drawn."""
    shape = (1, *shape_before(stage, args)[1:])
    x = tf.zeros(shape, tf.int64 if model_parallel_run.is_first(stage) else tf.float32)
    for layer in found:
        x = layer(x)
    return found


def prepare(args):
    """Set TensorFlow up: as many threads as asked for, memory of a GPU as needed."""
    tensorflow2_device.prepare()


if __name__ == "__main__":
    model_parallel_run.run("tensorflow2_dct_mp", __doc__, Trainer, prepare=prepare)
