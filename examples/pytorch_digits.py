"""Train a small convolutional network on scikit-learn's digits with a choice of gradient compression.

horovodrun -np 4 python examples/pytorch_digits.py --method dgc
"""

import argparse
import time

import horovod.torch as hvd
import reporting
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from tqdm import tqdm


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
    reporting.add_arguments(parser, batch_size=16, lr_help="default: 0.025 times the ranks, at most 0.05")
    parser.add_argument("--epochs", type=reporting.positive_integer, default=30, help="(default: %(default)s)")
    parser.add_argument(
        "--warmup-epochs",
        type=reporting.non_negative,
        default=4,
        help="epochs over which the learning rate rises and the density falls (default: %(default)s)",
    )
    parser.add_argument("--plot", metavar="PATH", help='(default: digits-METHOD.png; "" for none)')
    args = reporting.parse_arguments(parser)
    args.lr = args.lr or min(0.025 * hvd.size(), 0.05)
    return args


def load_data(device):
    """Return train images, train labels, test images, test labels; one split, whatever the seed."""
    digits = load_digits()
    train_x, test_x, train_y, test_y = train_test_split(
        digits.images / 16, digits.target, test_size=0.2, stratify=digits.target, random_state=0
    )
    images = (torch.tensor(x, dtype=torch.float32, device=device).unsqueeze(1) for x in (train_x, test_x))
    labels = (torch.tensor(y, device=device) for y in (train_y, test_y))
    return [*images, *labels]


def epoch_batches(count, epoch, args):
    """Return this rank's batches of indices: a permutation all ranks agree on, sliced by rank.

    What does not fill a batch on every rank is left out, so that all ranks take the same number of steps.
    """
    generator = torch.Generator().manual_seed(args.seed * 100_003 + epoch)
    order = torch.randperm(count, generator=generator)[hvd.rank() :: hvd.size()]
    steps = count // (args.batch_size * hvd.size())
    return order[: steps * args.batch_size].view(steps, args.batch_size)


def evaluate(model, images, labels):
    """Return mean loss and accuracy in percent over the test set, each rank testing its share."""
    model.eval()
    images, labels = images[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]
    with torch.no_grad():
        output = model(images)
        loss = F.cross_entropy(output, labels, reduction="sum").item()
        correct = (output.argmax(1) == labels).sum().item()
    loss, correct, count = reporting.sum_over_ranks([loss, correct, len(labels)], "test")
    return loss / count, 100 * correct / count


def train(model, optimizer, traffic, data, args):
    """Train for `args.epochs` epochs and return one dict of metrics an epoch."""
    train_images, test_images, train_labels, test_labels = data
    steps_per_epoch = len(train_images) // (args.batch_size * hvd.size())
    steps, rows = args.epochs * steps_per_epoch, []
    with tqdm(total=steps, unit="step", disable=not args.verbose) as bar:
        for epoch in range(args.epochs):
            model.train()
            losses = 0.0
            for batch in epoch_batches(len(train_images), epoch, args):
                reporting.set_learning_rate(optimizer, args.lr, traffic.steps, steps, args.warmup_steps)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(train_images[batch]), train_labels[batch])
                loss.backward()
                reporting.apply_gradients(model, optimizer, args)
                traffic.steps += 1
                losses += loss.item()
                bar.update()
            train_loss = reporting.sum_over_ranks([losses], "train")[0] / steps_per_epoch / hvd.size()
            test_loss, accuracy = evaluate(model, test_images, test_labels)
            bar.set_postfix(loss=f"{train_loss:.3f}", accuracy=f"{accuracy:.1f} %")
            rows.append(
                {
                    "epoch": epoch + 1,
                    "train_loss": train_loss,
                    "test_loss": test_loss,
                    "accuracy": accuracy,
                    **traffic.since_last(),
                }
            )
    return rows


def main():
    """Run the example; every rank takes part, rank 0 reports."""
    args = parse_arguments()
    data = load_data(args.device)
    steps_per_epoch = len(data[0]) // (args.batch_size * hvd.size())
    if not steps_per_epoch:
        raise SystemExit(f"--batch-size {args.batch_size} times {hvd.size()} ranks exceeds {len(data[0])} images")
    args.warmup_steps = int(min(args.warmup_epochs, args.epochs) * steps_per_epoch)
    model = Net().to(args.device)
    optimizer, compression = reporting.make_optimizer(model, args, args.warmup_steps)
    traffic = reporting.Traffic(model, args.method, compression)

    start = time.perf_counter()
    rows = train(model, optimizer, traffic, data, args)
    seconds = time.perf_counter() - start

    if hvd.rank() == 0:
        if args.verbose:
            reporting.print_table(rows)
        path = f"digits-{args.method}.png" if args.plot is None else args.plot
        if path:
            reporting.plot_curves(
                rows,
                "epoch",
                [["train_loss", "test_loss"], ["accuracy"], ["bytes_per_step"]],
                f"digits, {args.method}, {hvd.size()} ranks",
                path,
            )
        reporting.print_json(
            "pytorch_digits",
            args,
            traffic,
            accuracy=rows[-1]["accuracy"],
            loss=rows[-1]["test_loss"],
            seconds=seconds,
            epochs=args.epochs,
        )


if __name__ == "__main__":
    main()
