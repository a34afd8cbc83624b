"""Ranks with different data keep the same model, bit for bit."""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from gradients import draw
from tf_helpers import assert_ranks_agree, make_variables, several

from hvd_sparse.schedule import WarmUp
from hvd_sparse.tensorflow import Compression

pytestmark = [several, pytest.mark.rank_counts]
LAYERS = {"first/kernel": (12, 40), "first/bias": (40,), "second/kernel": (40, 5), "second/bias": (5,)}
STEPS = 50
COMPRESSIONS = {
    "gradient_dropping, tensor": ("gradient_dropping", {"density": 0.03, "warmup": 20, "values": "float16"}),
    "gradient_dropping, model": (
        "gradient_dropping",
        {"density": 0.03, "scope": "model", "warmup": WarmUp(0.03, steps=20, initial=1.0, factor=0.2)},
    ),
    "dgc, tensor": ("dgc", {"density": 0.03, "warmup": WarmUp(0.03, steps=20, initial=1.0, factor=0.2)}),
    "dgc, model": (
        "dgc",
        {"density": 0.03, "scope": "model", "warmup": 20, "nesterov": True, "clip_norm": 2.0, "clip_scope": "model"},
    ),
}


class Perceptron:
    """A classifier of two layers, trained by a loop of one's own."""

    def __init__(self, method, settings):
        self.variables = {n: tf.Variable(0.3 * v, name=n) for n, v in make_variables(LAYERS).items()}
        make = getattr(Compression, method)
        self.compression = make(list(self.variables.values()), min_numel=100, bucket_bytes=64, **settings)

    def loss(self, inputs, labels):
        kernel, bias, second_kernel, second_bias = self.variables.values()
        logits = tf.nn.relu(inputs @ kernel + bias) @ second_kernel + second_bias
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))

    def descend(self, inputs, labels):
        with tf.GradientTape() as tape:
            loss = self.loss(inputs, labels)
        tape = hvd.DistributedGradientTape(tape, compression=self.compression)
        variables = list(self.variables.values())
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss


def batch(step, rank):
    """Return inputs, and labels that a line tells apart."""
    inputs = draw({"inputs": (16, 12)}, step, rank)["inputs"].astype(np.float32)
    return tf.constant(inputs), tf.constant(np.argmax(inputs[:, :5], axis=1))


def test_after_50_steps_of_a_small_model():
    """All side by side, in one graph; they learn, too."""
    models = {title: Perceptron(*how) for title, how in COMPRESSIONS.items()}

    @tf.function(autograph=False)  # with it: test_models.py
    def descend(inputs, labels):
        return [model.descend(inputs, labels) for model in models.values()]

    losses = np.array([descend(*batch(step, hvd.rank())) for step in range(STEPS)])
    for (title, model), own in zip(models.items(), losses.T, strict=True):
        stats = model.compression.stats()
        assert stats["steps"] == STEPS and 0.03 < stats["step"]["density"] < 0.15, title
        assert stats["step"]["density"] < stats["total"]["density"] < 0.6 and stats["residual_norm"] > 0.0, title
        assert own[-10:].mean() < 0.8 * own[:10].mean(), title
        assert_ranks_agree({name: variable.numpy() for name, variable in model.variables.items()})
    seen = hvd.allgather(tf.constant(losses[None]), name="losses").numpy()
    assert (seen[0] != seen[1]).all(), "the ranks must have seen different data"
