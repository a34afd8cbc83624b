"""Train a small convolutional network on scikit-learn's digits with a choice of gradient compression.

horovodrun -np 4 python examples/pytorch_digits.py --method dgc
torchrun --nproc-per-node 4 examples/pytorch_digits.py --method dgc --host ddp
"""

import argparse
import time

import digits_data
import numpy as np
import pytorch_training as training
import reporting
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Sequential):
    """Two convolutions and two linear layers for 8 x 8 images; 151,306 parameters."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )


def parse_arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    digits_data.add_arguments(parser, training.add_arguments)
    digits_data.add_checkpoint(parser)
    return training.start(parser)


def as_batch(images, labels, device):
    """Return images float32[n, 1, 8, 8] and labels int64[n] as tensors on a device."""
    return torch.from_numpy(images).unsqueeze(1).to(device), torch.from_numpy(labels).to(device)


def evaluate(model, images, labels, args):
    """Return mean loss and accuracy in percent over the test set, each rank testing its share."""
    model.eval()
    images, labels = as_batch(images[args.rank :: args.size], labels[args.rank :: args.size], args.device)
    with torch.no_grad():
        output = model(images)
        loss = F.cross_entropy(output, labels, reduction="sum").item()
        correct = (output.argmax(1) == labels).sum().item()
    loss, correct, count = training.sum_over_ranks([loss, correct, len(labels)], "test", args)
    return loss / count, 100 * correct / count


def train(model, optimizer, compression, traffic, data, args):
    """Train until there have been `args.epochs` epochs, and return one dict of metrics per epoch."""
    train_images, test_images, train_labels, test_labels = data
    steps, (rows, done) = args.epochs * args.steps_per_epoch, training.load(model, optimizer, compression, args)
    traffic.resume(done)
    shifts = np.random.default_rng([args.seed, args.rank, len(rows)])
    with reporting.Progress(steps, args) as bar:
        for epoch in range(len(rows), args.epochs):
            model.train()
            losses = 0.0
            begin = epoch * args.steps_per_epoch  # not traffic.steps, which counts steps with other world sizes, too
            for step, batch in enumerate(digits_data.epoch_batches(len(train_images), epoch, args), begin):
                training.set_learning_rate(optimizer, args.lr, step, steps, args.warmup_steps)
                optimizer.zero_grad()
                images = digits_data.shifted(train_images[batch], shifts)
                images, labels = as_batch(images, train_labels[batch], args.device)
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                training.apply_gradients(model, optimizer, args)
                traffic.steps += 1
                losses += loss.item()
                bar.update()
            train_loss = training.sum_over_ranks([losses], "train", args)[0] / args.steps_per_epoch / args.size
            test_loss, accuracy = evaluate(model, test_images, test_labels, args)
            digits_data.end_epoch(rows, bar, train_loss, test_loss, accuracy, traffic)
            if args.checkpoint:
                training.save(model, optimizer, compression, rows, traffic.steps, args)
    return rows


def run(args):
    """Train; every rank takes part, rank 0 reports."""
    data = digits_data.load()
    digits_data.count_steps(len(data[0]), args)
    model = Net().to(args.device)
    model, optimizer, compression = training.distribute(model, args, args.warmup_steps)
    traffic = reporting.Traffic(training.count_parameters(model), compression, args)

    start = time.perf_counter()
    rows = train(model, optimizer, compression, traffic, data, args)
    digits_data.report("pytorch_digits", rows, traffic, time.perf_counter() - start, args)


def main():
    """Run the example on every rank."""
    args = parse_arguments()
    run(args)
    training.finish(args)


if __name__ == "__main__":
    main()
