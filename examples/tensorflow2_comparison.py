"""The TensorFlow half of compare_methods.py: a model with one method, step by step."""

import tensorflow2_training as training  # isort: skip, it chooses Keras 2 before TensorFlow is imported

import os

import horovod.tensorflow as hvd
import numpy as np
import reporting
import tensorflow as tf
from reporting import MIN_NUMEL, DenseStats


class Trainer:
    """One model, its optimizer and its compressor."""

    def __init__(self, seed):
        tf.keras.utils.set_random_seed(seed)
        self.model = training.digits_model()
        hvd.broadcast_variables(self.model.variables, root_rank=0)
        self.parameters = training.count_parameters(self.model)
        sizes = [variable.shape.num_elements() for variable in self.model.trainable_variables]
        self._is_large = [size >= MIN_NUMEL for size in sizes]
        self.large = sum(size for size in sizes if size >= MIN_NUMEL)

    @staticmethod
    def start(process_sets):
        """Start Horovod; return rank and number of ranks."""
        hvd.init(process_sets=process_sets)
        tf.config.threading.set_intra_op_parallelism_threads(int(os.environ.get("OMP_NUM_THREADS", "0")))
        return hvd.rank(), hvd.size()

    def compress(self, method, settings, lr, momentum):
        """Choose the compressor, by the name of its method, and make the optimizer and the step."""
        compression = reporting.choose_compression(
            hvd, "hvd_sparse.tensorflow", method, self.model.trainable_variables, settings
        )
        self.stats = getattr(compression, "stats", DenseStats(self.parameters, method).stats)
        self.rate = tf.Variable(lr)
        self._step = self._make_step(compression, tf.keras.optimizers.SGD(self.rate, momentum=momentum))

    def first_gradient(self, images, labels):
        """Return the large variables' gradients before any training, of the mean over the ranks' batches."""
        with tf.GradientTape() as tape:
            loss = training.loss_of(labels, self.model(images[..., None], training=True))
        gradients = tape.gradient(loss, self.model.trainable_variables)
        reduced = [hvd.allreduce(gradient, name=f"first.{i}") for i, gradient in enumerate(gradients)]
        return [gradient.numpy() for gradient, is_large in zip(reduced, self._is_large, strict=True) if is_large]

    def step(self, images, labels, rate):
        """Take a training step; return the loss, and how many elements of the large sums over ranks are not zero."""
        self.rate.assign(rate)
        loss, union = self._step(tf.constant(images[..., None]), tf.constant(labels))
        return float(loss), int(union)

    def mean(self, number):
        """Return the mean of a number over the ranks."""
        return float(hvd.allreduce(tf.constant(number, tf.float64), name="mean"))

    def evaluate(self, images, labels):
        """Return the summed loss and the number of right answers over the whole test set."""
        output = self.model(images[..., None], training=False)
        loss = float(training.loss_of(labels, output)) * len(labels)
        return loss, int(np.sum(np.argmax(output, axis=1) == labels))

    def _make_step(self, compression, optimizer):
        @tf.function
        def step(images, labels):
            with tf.GradientTape() as tape:
                loss = training.loss_of(labels, self.model(images, training=True))
            tape = hvd.DistributedGradientTape(tape, compression=compression)
            gradients = tape.gradient(loss, self.model.trainable_variables)
            large = [g for g, is_large in zip(gradients, self._is_large, strict=True) if is_large]
            union = tf.add_n([tf.math.count_nonzero(gradient) for gradient in large])
            optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
            return loss, union

        return step
