"""Train a small convolutional network on scikit-learn's digits with Keras' fit and a choice of compression.

    horovodrun -np 4 python examples/tensorflow2_keras_digits.py --method dgc

Horovod needs Keras 2: TF_USE_LEGACY_KERAS=1, set here before TensorFlow is imported.
"""

import argparse
import time

import tensorflow2_training as training  # isort: skip, it chooses Keras 2 before TensorFlow is imported

import digits_data
import horovod.tensorflow.keras as hvd
import numpy as np
import reporting
import tensorflow as tf

# Keras warns that callbacks are slow: what they wait for is the training step, which fit has only started.
tf.get_logger().addFilter(lambda record: "is slow compared to the batch time" not in record.getMessage())


def parse_arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    digits_data.add_arguments(parser)
    args = training.start(parser)
    if args.clip_norm and not reporting.compresses_momentum(args):
        parser.error("--clip-norm is for dgc and samomentum here, on two ranks or more")
    return args


class Batches(tf.keras.utils.Sequence):
    """This rank's batches of an epoch, in the same order as the other examples take them."""

    def __init__(self, images, labels, args):
        super().__init__()
        self.images, self.labels, self.args, self.epoch = images, labels, args, 0
        self.shifts = np.random.default_rng([args.seed, args.rank])
        self.on_epoch_end()

    def on_epoch_end(self):
        """Draw the order of the next epoch."""
        self.order = digits_data.epoch_batches(len(self.images), self.epoch, self.args)
        self.epoch += 1

    def __len__(self):
        return len(self.order)

    def __getitem__(self, index):
        batch = self.order[index]
        return digits_data.shifted(self.images[batch], self.shifts)[..., None], self.labels[batch]


class Progress(tf.keras.callbacks.Callback):
    """Show the steps, and keep a row of metrics an epoch."""

    def __init__(self, traffic, args):
        super().__init__()
        self.traffic, self.args, self.rows = traffic, args, []
        self.bar = reporting.Progress(args.epochs * args.steps_per_epoch, args)

    def on_train_batch_end(self, batch, logs=None):
        """Count a step."""
        self.traffic.steps += 1
        self.bar.update()

    def on_epoch_end(self, epoch, logs=None):
        """Keep the metrics, averaged over the ranks.

        Horovod's MetricAverageCallback would do that, but finds no Keras 2 backend where Keras 3 is installed too.
        """
        metrics = [float(logs[name]) for name in ("loss", "val_loss", "val_accuracy")]
        sums = training.sum_over_ranks(metrics, "epoch")
        train_loss, test_loss, accuracy = (value / self.args.size for value in sums)
        digits_data.end_epoch(self.rows, self.bar, train_loss, test_loss, 100 * accuracy, self.traffic)

    def on_train_end(self, logs=None):
        """Close the bar."""
        self.bar.close()


def main():
    """Run the example; every rank takes part, rank 0 reports."""
    args = parse_arguments()
    train_images, test_images, train_labels, test_labels = digits_data.load()
    digits_data.count_steps(len(train_images), args)
    model = training.digits_model()
    compression = training.make_compression(model, args, args.warmup_steps)
    rate = training.LearningRate(args.lr, args.epochs * args.steps_per_epoch, args.warmup_steps)
    optimizer = hvd.DistributedOptimizer(training.make_sgd(args, rate), compression=compression)
    model.compile(optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    traffic = reporting.Traffic(training.count_parameters(model), compression, args)
    progress = Progress(traffic, args)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), progress]

    start = time.perf_counter()
    model.fit(
        Batches(train_images, train_labels, args),
        epochs=args.epochs,
        shuffle=False,  # else Keras draws another order of the batches
        callbacks=callbacks,
        validation_data=(test_images[..., None], test_labels),  # the whole of it on every rank: the mean is exact
        validation_batch_size=len(test_images),
        verbose=0,
    )
    digits_data.report("tensorflow2_keras_digits", progress.rows, traffic, time.perf_counter() - start, args)


if __name__ == "__main__":
    main()
