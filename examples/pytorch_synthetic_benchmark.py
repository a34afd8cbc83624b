"""Time training steps on random data with a choice of model and gradient compression.

horovodrun -np 4 python examples/pytorch_synthetic_benchmark.py --model lstm --method dgc
"""

import argparse
import statistics
import time

import pytorch_training as training
import reporting
import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 1000
SEQUENCE_LENGTH = 32


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
    training.add_arguments(parser, batch_size=32, lr=0.01)
    parser.add_argument("--model", choices=("mlp", "convnet", "lstm"), default="mlp", help="(default: %(default)s)")
    parser.add_argument(
        "--width",
        type=reporting.positive_integer,
        help="features of mlp and lstm (default: 1024, 512), channels of convnet's first stage (32)",
    )
    parser.add_argument(
        "--num-warmup-batches",
        type=reporting.whole_number,
        default=10,
        help="batches before the clock starts (default: %(default)s)",
    )
    parser.add_argument(
        "--num-batches-per-iter",
        type=reporting.positive_integer,
        default=10,
        help="batches a measurement (default: %(default)s)",
    )
    parser.add_argument(
        "--num-iters", type=reporting.positive_integer, default=10, help="measurements (default: %(default)s)"
    )
    args = training.start(parser)
    args.width = args.width or {"mlp": 1024, "convnet": 32, "lstm": 512}[args.model]
    return args


def train_batches(count, model, optimizer, traffic, data, target, args):
    """Take `count` training steps on the same batch and return the seconds a step."""
    start = time.perf_counter()
    for _ in range(count):
        optimizer.zero_grad()
        F.cross_entropy(model(data), target).backward()
        training.apply_gradients(model, optimizer, args)
        traffic.steps += 1
    if args.device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / max(1, count)


def measure(step, args):
    """Warm up, then return the samples a second of each measurement on this rank."""
    step(args.num_warmup_batches)
    rates = []
    for iteration in range(args.num_iters):
        rates.append(args.batch_size / step(args.num_batches_per_iter))
        if args.verbose:
            print(f"Iteration {iteration + 1}: {rates[-1]:.1f} samples/s per rank")
    return rates


def main():
    """Run the benchmark; every rank takes part, rank 0 reports."""
    args = parse_arguments()
    model, sample_shape = make_model(args.model, args.width)
    model.to(args.device)
    optimizer, compression = training.make_optimizer(model, args, warmup_steps=0)
    traffic = reporting.Traffic(training.count_parameters(model), compression, args)
    data = torch.randn(args.batch_size, *sample_shape, device=args.device)
    target = torch.randint(CLASSES, (args.batch_size,), device=args.device)
    if args.verbose:
        print(
            f"Model {args.model}, width {args.width}: {traffic.parameters:,} parameters in "
            f"{len(list(model.parameters()))} tensors; {args.size} ranks, method {args.method}"
        )

    start = time.perf_counter()
    rates = measure(lambda count: train_batches(count, model, optimizer, traffic, data, target, args), args)
    seconds = time.perf_counter() - start

    mean, interval = statistics.fmean(rates), 1.96 * statistics.pstdev(rates)
    total = training.sum_over_ranks([mean], "samples_per_second")[0]
    if args.rank == 0:
        if args.verbose:
            sent = traffic.stats()["step"]
            print(f"Samples/s per rank: {mean:.1f} +-{interval:.1f}\nSamples/s in total: {total:.1f}")
            print(
                f"Gradients a step and rank: {sent['dense_bytes']:,} bytes as float32, "
                f"{sent['payload_bytes']:,} sent (ratio {sent['ratio']:.1f}, density {sent['density']:.2g})"
            )
        reporting.print_json(
            "pytorch_synthetic_benchmark",
            args,
            traffic,
            model=args.model,
            width=args.width,
            samples_per_second_per_rank=mean,
            samples_per_second_interval=interval,
            samples_per_second=total,
            seconds=seconds,
        )


if __name__ == "__main__":
    main()
