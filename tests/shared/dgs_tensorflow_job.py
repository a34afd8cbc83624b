"""Train a small network on digits with DGS in TensorFlow, on every rank:

    python dgs_tensorflow_job.py FILE SERVERS [OPTION...]

FILE: .npz with images float32[n, 64] and labels. SERVERS: a number, or "colocated". OPTIONS: "keras" or "tf_keras"
(which makes the model), "overlap", "eager". Every worker prints one JSON line: accuracy and loss of the servers' model
on held-out data, and statistics.
"""

import json
import sys

import numpy as np
import tensorflow as tf

from hvd_sparse.tensorflow.asynchronous import DGS, connect

STEPS, BATCH = 240, 16  # steps of all workers together, and the batch size


def make_model(keras):
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(48, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dense(10),
        ]
    )


def loss_of(model, images, labels, training):
    logits = model(images, training=training)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def train(session, model, images, labels, wrap):
    random, steps = np.random.default_rng(session.rank), STEPS // session.workers
    optimizer = session.optimizer(lambda step: 0.1 * (1.0 - step / steps), weight_decay=1e-4)

    @wrap
    def step(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(model, images, labels, True)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    for _ in range(steps):
        batch = random.integers(0, len(images), BATCH)
        step(tf.constant(images[batch]), tf.constant(labels[batch]))


def main():
    path, servers, *options = sys.argv[1:]
    if "tf_keras" in options:
        import tf_keras as keras
    else:
        import keras
    with np.load(path) as file:
        images, labels = file["images"], file["labels"]
    model = make_model(keras)
    method = DGS(density=0.05, momentum=0.5, min_numel=100)
    servers = servers if servers == "colocated" else int(servers)
    session = connect(model, method, servers=servers, overlap="overlap" in options, timeout=120.0)
    if not session.is_worker:
        try:
            session.optimizer(0.1)
        except RuntimeError as error:
            assert "is a server: call serve() on it" in str(error)
        assert not any(session.serve().values())
        return
    train(session, model, images[:1400], labels[:1400], (lambda f: f) if "eager" in options else tf.function)
    session.load_global()
    logits = model(images[1400:], training=False)
    found = {
        "accuracy": float(np.mean(np.argmax(logits, 1) == labels[1400:])),
        "loss": float(loss_of(model, images[1400:], labels[1400:], False)),
        "stats": session.stats(),
    }
    print(json.dumps(found))
    session.close()


if __name__ == "__main__":
    main()
