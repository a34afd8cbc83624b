"""Train a small convolutional network on scikit-learn's digits with a gradient tape and a choice of compression.

horovodrun -np 4 python examples/tensorflow2_digits.py --method dgc
"""

import argparse
import time

import tensorflow2_training as training  # isort: skip, it chooses Keras 2 before TensorFlow is imported

import digits_data
import horovod.tensorflow as hvd
import numpy as np
import reporting
import tensorflow as tf


def parse_arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    digits_data.add_arguments(parser)
    digits_data.add_checkpoint(parser)
    return training.start(parser)


def evaluate(model, images, labels, args):
    """Return mean loss and accuracy in percent over the test set, each rank testing its share."""
    images, labels = images[args.rank :: args.size, ..., None], labels[args.rank :: args.size]
    output = model(images, training=False)
    loss = float(training.loss_of(labels, output)) * len(labels)
    correct = int(np.sum(np.argmax(output, axis=1) == labels))
    loss, correct, count = training.sum_over_ranks([loss, correct, len(labels)], "test")
    return loss / count, 100 * correct / count


def train(model, optimizer, compression, traffic, data, args):
    """Train until there have been `args.epochs` epochs, and return one dict of metrics per epoch."""
    train_images, test_images, train_labels, test_labels = data
    rows, done = training.load(model, optimizer, compression, args)
    traffic.resume(done)
    optimizer.iterations.assign(len(rows) * args.steps_per_epoch)  # by which the learning rate falls
    step = training.make_step(model, optimizer, compression, args)
    shifts = np.random.default_rng([args.seed, args.rank, len(rows)])
    with reporting.Progress(args.epochs * args.steps_per_epoch, args) as bar:
        for epoch in range(len(rows), args.epochs):
            losses = 0.0
            for batch in digits_data.epoch_batches(len(train_images), epoch, args):
                images = digits_data.shifted(train_images[batch], shifts)[..., None]
                losses += float(step(tf.constant(images), tf.constant(train_labels[batch])))
                traffic.steps += 1
                bar.update()
            train_loss = training.sum_over_ranks([losses], "train")[0] / args.steps_per_epoch / args.size
            test_loss, accuracy = evaluate(model, test_images, test_labels, args)
            digits_data.end_epoch(rows, bar, train_loss, test_loss, accuracy, traffic)
            if args.checkpoint:
                training.save(model, optimizer, compression, rows, traffic.steps, args)
    return rows


def main():
    """Run the example; every rank takes part, rank 0 reports."""
    args = parse_arguments()
    data = digits_data.load()
    digits_data.count_steps(len(data[0]), args)
    model = training.digits_model()
    compression = training.make_compression(model, args, args.warmup_steps)
    rate = training.LearningRate(args.lr, args.epochs * args.steps_per_epoch, args.warmup_steps)
    optimizer = training.make_sgd(args, rate)
    hvd.broadcast_variables(model.variables, root_rank=0)
    traffic = reporting.Traffic(training.count_parameters(model), compression, args)

    start = time.perf_counter()
    rows = train(model, optimizer, compression, traffic, data, args)
    digits_data.report("tensorflow2_digits", rows, traffic, time.perf_counter() - start, args)


if __name__ == "__main__":
    main()
