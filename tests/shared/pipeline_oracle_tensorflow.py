"""Trains a TensorFlow pipeline's stages in one process without a pipeline: a tape through masks made by NumPy."""

import itertools

import numpy as np
import tensorflow as tf

from hvd_sparse import reference


class Stage(tf.Module):
    """A linear layer and tanh with float32 weights drawn from a seed."""

    def __init__(self, before, after, seed=0):
        super().__init__()
        random = np.random.default_rng([seed, before, after])
        self.kernel = tf.Variable((random.standard_normal((before, after)) / before**0.5).astype(np.float32))
        self.bias = tf.Variable(tf.zeros([after]))

    def __call__(self, x):
        return tf.tanh(tf.matmul(x, self.kernel) + self.bias)


def make_stages(sizes, seed=0):
    """Return one stage for each rank: stage s has sizes[s] input features and sizes[s + 1] output features."""
    return [Stage(before, after, seed) for before, after in itertools.pairwise(sizes)]


def cross_entropy(outputs, targets):
    """Return the mean cross-entropy over samples."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs))


class Oracle:
    """The stages, trained as the pipeline should train them: SGD with momentum."""

    def __init__(self, stages, masks, loss, micro_batches):
        self.stages, self.masks, self.loss, self.micro_batches = stages, masks, loss, micro_batches
        self.variables = [variable for stage in stages for variable in stage.trainable_variables]

    def __call__(self, x, training):
        """Return the last stage's outputs."""
        x = self.stages[0](x)
        for mask, stage in zip(self.masks, self.stages[1:], strict=True):
            x = stage(mask(x, training))
        return x

    def gradients(self, inputs, targets):
        """Return a batch's loss, and the gradients of all stages' variables, added in the order of micro-batches."""
        parts, total, sums = min(self.micro_batches, len(inputs)), 0.0, None
        for x, y in zip(np.array_split(inputs, parts), np.array_split(targets, parts), strict=True):
            with tf.GradientTape() as tape:
                loss = self.loss(self(tf.constant(x), True), tf.constant(y)) * (len(x) / len(inputs))
            found = tape.gradient(loss, self.variables)
            sums = found if sums is None else [a if b is None else a + b for a, b in zip(sums, found, strict=True)]
            total += float(loss)
        return total, sums


class Mask:
    """A boundary that uses the reference and computes the running threshold."""

    def __init__(self, density, threshold="topk", momentum=0.1):
        self.density, self.threshold, self.momentum, self.running = density, threshold, momentum, None

    def __call__(self, x, training):
        if self.density == 1.0:
            return x
        rows = tf.cast(x, tf.float32).numpy().reshape(-1, x.shape[-1])
        mask = tf.constant(self.kept(rows, training).reshape(x.shape))
        return tf.where(mask, x, tf.zeros_like(x))

    def kept(self, rows, training):
        """Return the mask, bool[B, f]."""
        if self.threshold == "topk":
            return reference.select_top_k_rows(rows, max(1, int(self.density * rows.shape[1] + 0.5)))[0]
        if not training:
            return reference.filter_threshold_rows(rows, [float(self.running)])
        thresholds = reference.laplace_threshold_rows(rows, self.density)
        mean, part = np.float32(thresholds.mean()), np.float32(self.momentum)
        self.running = mean if self.running is None else self.running + part * (mean - self.running)
        return reference.filter_threshold_rows(rows, thresholds)
