"""Train one model with every method, and compare accuracy, density, build-up, local error, traffic and time.

    horovodrun -np 4 python examples/compare_methods.py --density 0.01
    horovodrun -np 4 python examples/compare_methods.py --framework tensorflow --methods none dgc dgc:values=int2

A method may be followed by a colon and settings of its compressor: dct:lifespan=100,drain=50. The default threshold of
hard_threshold is the magnitude that a fraction `--density` of the first gradient reaches. Writes steps.csv,
comparison.md and comparison.png into --out; the last line is one JSON object.
"""

import argparse
import ast
import importlib
import time
from pathlib import Path

import comparison_report
import digits_data
import numpy as np
import reporting

DENSITY = 0.01  # of all methods, to compare them
FRAMEWORKS = {"pytorch": "pytorch_comparison", "tensorflow": "tensorflow2_comparison"}


def variant(text):
    """Parse METHOD or METHOD:name=value,... into (text, method, settings)."""
    method, _, rest = text.partition(":")
    if method not in reporting.METHODS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(reporting.METHODS)}, got {method!r}")
    if rest and method in reporting.DENSE_METHODS:
        raise argparse.ArgumentTypeError(f"{method} has no settings, got {rest!r}")
    settings = {}
    for pair in filter(None, rest.split(",")):
        name, equals, value = pair.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"expected name=value behind the colon, got {pair!r}")
        try:
            settings[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            settings[name] = value
    return text, method, settings


def parse_arguments():
    """Read the command line; start Horovod through the framework's own part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everything = [variant(method) for method in reporting.METHODS if method != "fp16"]
    parser.add_argument("--framework", choices=FRAMEWORKS, default="pytorch", help="(default: %(default)s)")
    parser.add_argument(
        "--methods", nargs="+", type=variant, default=everything, metavar="METHOD", help="(default: all but fp16)"
    )
    parser.add_argument("--density", type=reporting.density, help=f"not of none, fp16 (default: {DENSITY})")
    parser.add_argument("--batch-size", type=reporting.positive_integer, default=4, help="(default: %(default)s)")
    parser.add_argument("--epochs", type=reporting.positive_integer, default=10, help="(default: %(default)s)")
    parser.add_argument(
        "--warmup-epochs",
        type=reporting.non_negative,
        default=1,
        help="epochs over which the learning rate rises; the density does not change (default: %(default)s)",
    )
    parser.add_argument("--lr", type=reporting.positive, default=0.02, help="(default: %(default)s)")
    parser.add_argument("--momentum", type=reporting.momentum, default=0.9, help="(default: %(default)s)")
    parser.add_argument("--seed", type=reporting.whole_number, default=0, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("comparison"), help="folder (default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="print the JSON line only")
    args = parser.parse_args()
    chosen = [method for _, method, _ in args.methods]
    reporting.refuse_others(parser, args, {"--density": reporting.SPARSE_METHODS}, chosen, "--methods")
    args.density = args.density or DENSITY
    for text, method, own in args.methods:
        reporting.check_settings(parser, method, settings_of(method, own, args), text)
    args.trainer = importlib.import_module(FRAMEWORKS[args.framework]).Trainer
    is_hierarchical = any(own.get("exchange") == "hierarchical" for *_, own in args.methods)
    args.rank, args.size = args.trainer.start("dynamic" if is_hierarchical else None)
    args.verbose = args.rank == 0 and not args.quiet
    if args.size < 2:
        raise SystemExit(
            "nothing is exchanged, and nothing compressed, by one process: start it under horovodrun -np 4"
        )
    return args


def settings_of(method, own, args):
    """Return the arguments of a method's compressor; a hard threshold's value is not known before training."""
    if method in reporting.DENSE_METHODS:
        return own
    if method == "hard_threshold":
        return {"value": 1.0, "min_numel": reporting.MIN_NUMEL, **own}
    density = {} if "sparsity" in own else {"density": args.density}
    momentum = {"momentum": args.momentum} if method in reporting.LOCAL_MOMENTUM else {}
    return {**density, "min_numel": reporting.MIN_NUMEL, "seed": args.seed, **momentum, **own}


def first_threshold(trainer, data, args):
    """Return the threshold that the wanted part of the first gradient reaches."""
    first = digits_data.epoch_batches(len(data[0]), 0, args)[0]
    return quantile(trainer.first_gradient(data[0][first], data[2][first]), args.density)


def quantile(gradient, density):
    """Return the magnitude that this fraction of all elements reaches."""
    magnitudes = np.sort(np.concatenate([np.abs(part).reshape(-1) for part in gradient]))
    return float(magnitudes[-max(1, round(density * magnitudes.size))])


def train(label, method, own, data, args):
    """Train with one method; return one dict a step, and the accuracy and loss after each epoch."""
    trainer = args.trainer(args.seed)
    momentum = 0.0 if method in reporting.LOCAL_MOMENTUM else args.momentum
    settings = settings_of(method, own, args)
    if method == "hard_threshold" and "value" not in own:
        settings["value"] = first_threshold(trainer, data, args)
    trainer.compress(method, settings, args.lr, momentum)
    steps, rows, epochs = args.epochs * args.steps_per_epoch, [], []
    shifts = np.random.default_rng([args.seed, args.rank])
    with reporting.Progress(steps, args) as bar:
        bar.set_description(label)
        for epoch in range(args.epochs):
            for batch in digits_data.epoch_batches(len(data[0]), epoch, args):
                rate = reporting.learning_rate(args.lr, len(rows), steps, args.warmup_steps)
                images = digits_data.shifted(data[0][batch], shifts)
                start = time.perf_counter()
                loss, union = trainer.step(images, data[2][batch], rate)
                seconds = time.perf_counter() - start
                rows.append({"method": label, "step": len(rows), "loss": loss, **measures(trainer, union, seconds)})
                bar.update()
            loss, correct = trainer.evaluate(data[1], data[3])
            epochs.append({"loss": loss / len(data[3]), "accuracy": 100 * correct / len(data[3])})
            bar.set_postfix(accuracy=f"{epochs[-1]['accuracy']:.1f} %")
            bar.report({"method": label, "epoch": epoch + 1, **epochs[-1]})
    return rows, epochs


def measures(trainer, union, seconds):
    """Return what one step did. union: elements of the large tensors' sum over ranks that are not zero."""
    stats = trainer.stats()
    split = stats["step"]["seconds"]
    n, dense = trainer.large, trainer.parameters - trainer.large
    sent = trainer.mean(stats["step"]["density"]) * trainer.parameters - dense
    union = n if sent == n else union  # gradients of zero are sent, too
    return {
        "sent": sent / n,
        "achieved": union / n,
        "build_up": union / max(sent, 1.0),
        "local_error": stats["residual_norm"],
        "bytes_out": stats["step"]["payload_bytes"],
        "bytes_in": stats["step"]["received_bytes"],
        "select": split.get("compress"),
        "exchange": split.get("exchange"),
        "apply": split.get("decompress"),
        "seconds": seconds,
    }


def main():
    """Run the comparison; every rank takes part, rank 0 reports."""
    args = parse_arguments()
    data = digits_data.load()
    digits_data.count_steps(len(data[0]), args)
    results = {}
    for label, method, own in args.methods:
        results[label] = train(label, method, own, data, args)
    if args.rank == 0:
        comparison_report.write(results, args)
        reporting.print_record(comparison_report.as_json(results, args))


if __name__ == "__main__":
    main()
