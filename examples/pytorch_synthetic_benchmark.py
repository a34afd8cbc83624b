"""Time training steps on random data with a choice of model and gradient compression.

horovodrun -np 4 python examples/pytorch_synthetic_benchmark.py --model lstm --method dgc
torchrun --nproc-per-node 4 examples/pytorch_synthetic_benchmark.py --model lstm --method dgc --host ddp
"""

import argparse
import functools
import time

import pytorch_training as training
import reporting
import synthetic
import torch
import torch.nn.functional as F
from synthetic import CLASSES, SEQUENCE_LENGTH
from torch import nn


class LSTM(nn.Module):
    """Two LSTM layers that read a sequence of vectors and classify it by the last output."""

    def __init__(self, width):
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, sequence):
        """Return the class logits of each sequence."""
        return self.classifier(self.lstm(sequence)[0][:, -1])


def convolution(channels_in, channels_out, stride):
    """Make a 3 x 3 convolution with batch normalization and ReLU."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(channels_out), nn.ReLU()
    )


def make_model(name, width):
    """Return the model and the shape of one sample; `width` scales every layer."""
    if name == "mlp":
        layers = [nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)), (width,)
    if name == "lstm":
        return LSTM(width), (SEQUENCE_LENGTH, width)
    layers, channels = [], 3
    for stage in range(4):
        layers += [convolution(channels, width << stage, 2), convolution(width << stage, width << stage, 1)]
        channels = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)), (3, 64, 64)


def parse_arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    synthetic.add_arguments(parser, training.add_arguments)
    args = training.start(parser)
    args.width = synthetic.default_width(args)
    return args


def train_batches(count, model, optimizer, traffic, data, target, args):
    """Take `count` training steps on the same batch and return the seconds per step."""
    start = time.perf_counter()
    for _ in range(count):
        optimizer.zero_grad()
        F.cross_entropy(model(data), target).backward()
        training.apply_gradients(model, optimizer, args)
        traffic.steps += 1
    if args.device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / max(1, count)


def run(args):
    """Measure; every rank takes part, rank 0 reports."""
    model, sample_shape = make_model(args.model, args.width)
    model.to(args.device)
    model, optimizer, compression = training.distribute(model, args, warmup_steps=0)
    traffic = reporting.Traffic(training.count_parameters(model), compression, args)
    data = torch.randn(args.batch_size, *sample_shape, device=args.device)
    target = torch.randint(CLASSES, (args.batch_size,), device=args.device)
    synthetic.describe(traffic, len(list(model.parameters())), args)

    def step(count):
        return train_batches(count, model, optimizer, traffic, data, target, args)

    sum_over_ranks = functools.partial(training.sum_over_ranks, args=args)
    synthetic.report("pytorch_synthetic_benchmark", step, traffic, sum_over_ranks, args)


def main():
    """Run the example on every rank."""
    args = parse_arguments()
    run(args)
    training.finish(args)


if __name__ == "__main__":
    main()
