"""Time training steps on random data with a choice of model and gradient compression.

horovodrun -np 4 python examples/tensorflow2_synthetic_benchmark.py --model lstm --method dgc
"""

import argparse
import time

import tensorflow2_training as training  # isort: skip, it chooses Keras 2 before TensorFlow is imported

import horovod.tensorflow as hvd
import reporting
import synthetic
import tensorflow as tf
from synthetic import CLASSES, SEQUENCE_LENGTH

layers = tf.keras.layers


def make_model(name, width):
    """Return the model, built; `width` scales every layer."""
    if name == "mlp":
        hidden = [layers.Dense(width, activation="relu") for _ in range(2)]
        return tf.keras.Sequential([tf.keras.Input((width,)), *hidden, layers.Dense(CLASSES)])
    if name == "lstm":
        hidden = [layers.LSTM(width, return_sequences=True), layers.LSTM(width)]
        return tf.keras.Sequential([tf.keras.Input((SEQUENCE_LENGTH, width)), *hidden, layers.Dense(CLASSES)])
    model = tf.keras.Sequential([tf.keras.Input((64, 64, 3))])
    for stage in range(4):
        for stride in (2, 1):
            model.add(layers.Conv2D(width << stage, 3, stride, padding="same", use_bias=False))
            model.add(layers.BatchNormalization())
            model.add(layers.ReLU())
    model.add(layers.GlobalAveragePooling2D())
    model.add(layers.Dense(CLASSES))
    return model


def train_batches(count, step, data, target, traffic):
    """Take `count` training steps on the same batch and return the seconds per step."""
    start = time.perf_counter()
    for _ in range(count):
        step(data, target).numpy()
        traffic.steps += 1
    return (time.perf_counter() - start) / max(1, count)


def main():
    """Run the benchmark; every rank takes part, rank 0 reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    synthetic.add_arguments(parser)
    args = training.start(parser)
    args.width = synthetic.default_width(args)
    model = make_model(args.model, args.width)
    compression = training.make_compression(model, args, warmup_steps=0)
    hvd.broadcast_variables(model.variables, root_rank=0)
    traffic = reporting.Traffic(training.count_parameters(model), compression, args)
    data = tf.random.normal([args.batch_size, *model.input_shape[1:]])
    target = tf.random.uniform([args.batch_size], maxval=CLASSES, dtype=tf.int64)
    synthetic.describe(traffic, len(model.trainable_variables), args)
    step = training.make_step(model, training.make_sgd(args, args.lr), compression, args)
    name = "tensorflow2_synthetic_benchmark"

    def measured(count):
        return train_batches(count, step, data, target, traffic)

    synthetic.report(name, measured, traffic, training.sum_over_ranks, args)


if __name__ == "__main__":
    main()
