"""The common part of the digits examples of both frameworks: switches, data, batch order and report."""

import numpy as np
import plots
import reporting
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def add_arguments(parser, add_shared=reporting.add_arguments):
    """Add the switches of a digits example."""
    add_shared(parser, batch_size=4, lr=0.02)
    parser.add_argument("--epochs", type=reporting.positive_integer, default=60, help="(default: %(default)s)")
    parser.add_argument(
        "--warmup-epochs",
        type=reporting.non_negative,
        help="epochs over which the learning rate rises and the density falls (default: a tenth of the epochs)",
    )
    parser.add_argument("--plot", metavar="PATH", help='(default: digits-METHOD.png; "" for none)')


def add_checkpoint(parser):
    """Add the switch of examples that can resume from a checkpoint."""
    parser.add_argument(
        "--checkpoint",
        metavar="PATH",
        help="a file that is written after each epoch and, where it is there, read by every rank at the start",
    )


def count_steps(images, args):
    """Set args.steps_per_epoch and args.warmup_steps for a number of training images."""
    args.steps_per_epoch = images // (args.batch_size * args.size)
    if not args.steps_per_epoch:
        raise SystemExit(f"--batch-size {args.batch_size} times {args.size} ranks exceeds {images} images")
    given = None if args.warmup_epochs is None else int(args.warmup_epochs * args.steps_per_epoch)
    args.warmup_steps = reporting.warmup_steps(given, args.epochs * args.steps_per_epoch)


def end_epoch(rows, bar, train_loss, test_loss, accuracy, traffic):
    """Print an epoch's metrics, show them on the bar, and append them to the rows."""
    bar.set_postfix(loss=f"{train_loss:.3f}", accuracy=f"{accuracy:.1f} %")
    metrics = {"train_loss": train_loss, "test_loss": test_loss, "accuracy": accuracy}
    rows.append({"epoch": len(rows) + 1, **metrics, **traffic.since_last()})
    bar.report(rows[-1])


def report(example, rows, traffic, seconds, args):
    """Print the JSON line, then draw the curves, on rank 0."""
    if args.rank != 0:
        return
    results = {"accuracy": rows[-1]["accuracy"], "loss": rows[-1]["test_loss"]}
    reporting.print_json(example, args, traffic, **results, seconds=seconds, epochs=args.epochs)
    method = reporting.method_shown(args)
    path = f"digits-{method.replace(' ', '_')}.png" if args.plot is None else args.plot
    if path:
        panels = [["train_loss", "test_loss"], ["accuracy"], ["bytes_per_step"]]
        plots.plot_curves(rows, "epoch", panels, f"digits, {method}, {args.size} ranks", path)


def load():
    """Return train images, test images float32[n, 8, 8] in [0, 1], train labels, test labels; always the same split."""
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)
    train_x, test_x, train_y, test_y = train_test_split(
        images, digits.target, test_size=0.2, stratify=digits.target, random_state=0
    )
    return train_x, test_x, train_y, test_y


def epoch_batches(count, epoch, args):
    """Return this rank's batches of indices: a permutation that is equal on all ranks, sliced by rank.

    Images that do not fill a batch on every rank are left out, so that all ranks take the same number of steps.
    """
    order = np.random.default_rng([args.seed, epoch]).permutation(count)[args.rank :: args.size]
    return order[: args.steps_per_epoch * args.batch_size].reshape(args.steps_per_epoch, args.batch_size)


def shifted(images, generator):
    """Return the images, each shifted at random by at most one pixel in each direction, as data augmentation."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    rows, columns = generator.integers(0, 3, (2, len(images), 1)) + np.arange(8)
    return padded[np.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None, :]]
