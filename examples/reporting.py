"""The common part of all examples: arguments, traffic counters, progress, tables, JSON."""

import argparse
import importlib
import json
import math
import os
import sys

from tqdm import tqdm

from hvd_sparse import algorithms

DENSE_METHODS = ("none", "fp16")
SPARSE_METHODS = tuple(sorted(algorithms.METHODS, key=lambda name: name != "dgc"))  # DGC first
METHODS = (*DENSE_METHODS, *SPARSE_METHODS)
LOCAL_MOMENTUM = ("dgc", "samomentum")  # the compressor applies momentum, and the optimizer has none
SCOPED = (*LOCAL_MOMENTUM, "gradient_dropping", "topk")
HOSTED = (*SCOPED, "micro", "cltk", "random_k")
SWITCHES = {  # {switch: the methods that it is for}; other switches are for all methods
    "--density": tuple(method for method in SPARSE_METHODS if method != "hard_threshold"),
    "--threshold": ("hard_threshold",),
    "--lifespan": ("dct",),
    "--scope": SCOPED,
    "--factor-masking": ("dgc",),
    "--values": SPARSE_METHODS,
    "--level": SPARSE_METHODS,
    "--granularity": SPARSE_METHODS,
    "--exchange": HOSTED,
    "--ranks-per-host": HOSTED,
    "--between-hosts": SCOPED,
    "--dense-fallback": SPARSE_METHODS,
    "--tensorboard": SPARSE_METHODS,
}
LOW_BIT = ("int2", "int1")
THRESHOLD = 0.01  # of hard_threshold, which has no default in the plugin
ONE_PROCESS = "one process exchanges nothing: it trains dense"
MIN_NUMEL = 1024  # smaller tensors are sent dense, where an example sets it to look at the others


def number(expected, holds, kind=float):
    """Make an argparse type for finite numbers of a kind for which `holds` is true; `expected` says it in words."""

    def convert(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not holds(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text}")
        return value

    return convert


positive_integer = number("a whole number above 0", lambda value: value > 0, int)
whole_number = number("a whole number of at least 0", lambda value: value >= 0, int)
positive = number("a number above 0", lambda value: value > 0)
non_negative = number("a number of at least 0", lambda value: value >= 0)
density = number("a number in (0, 1]", lambda value: 0 < value <= 1)
momentum = number("a number in [0, 1)", lambda value: 0 <= value < 1)


def add_compression(parser):
    """Add the switches of the methods. One that is not given is None: the compressor has its own default."""
    group = parser.add_argument_group("compression", "Defaults that are not named here are those of `Compression`.")
    group.add_argument("--method", choices=METHODS, default="none", help="gradient compression (default: none)")
    group.add_argument("--density", type=density, help="share of each gradient that is sent; not of hard_threshold")
    group.add_argument("--threshold", type=positive, help=f"of hard_threshold (default: {THRESHOLD})")
    group.add_argument("--lifespan", type=positive_integer, help="steps that dct keeps a threshold")
    group.add_argument("--scope", choices=("tensor", "model"), help="select in each tensor, or in all of them jointly")
    group.add_argument("--factor-masking", action=argparse.BooleanOptionalAction, help="of dgc: clear sent velocities")
    group.add_argument("--values", choices=("float32", "float16", "bfloat16", *LOW_BIT), help="type of what is sent")
    group.add_argument("--level", choices=("mean", "min"), help="of int2, int1")
    group.add_argument("--granularity", choices=("tensor", "channel"), help="what shares a level of int2, int1")
    group.add_argument(
        "--exchange",
        choices=("gather", "reduce_scatter", "hierarchical", "auto"),
        help="how selections become one sum; micro, cltk, random_k: gather or hierarchical",
    )
    group.add_argument("--ranks-per-host", type=positive_integer, help="for hierarchical (default: by host name)")
    group.add_argument(
        "--between-hosts",
        choices=("gather", "reduce_scatter", "auto"),
        help="exchange between hosts of hierarchical; not of micro, cltk, random_k",
    )
    group.add_argument(
        "--dense-fallback", choices=("bytes", "measured"), help="send a step dense if that is fewer bytes, or faster"
    )
    group.add_argument("--tensorboard", metavar="DIR", help="log what rank 0 sends, for TensorBoard")


def name_of(switch):
    """Return the name of a switch's value."""
    return switch.strip("-").replace("-", "_")


def refuse_others(parser, args, switches, chosen, choice="--method"):
    """End the program with an error if a switch is given that has no effect with any of the chosen methods.

    switches: {switch: the methods that it is for}. choice: the switch that chooses.
    """
    for switch, methods in switches.items():
        if getattr(args, name_of(switch)) is not None and not set(methods) & set(chosen):
            told = f"{switch} is for {choice} {', '.join(methods)}"
            parser.error(f"{told}: leave it out with {choice} {' '.join(dict.fromkeys(chosen))}")


def check_settings(parser, method, settings, label):
    """End the program with an error if the plugin refuses a method's settings. label: names them in the message."""
    if method not in DENSE_METHODS:
        try:
            getattr(importlib.import_module("hvd_sparse.algorithms").Settings, method)(None, **settings)
        except (TypeError, ValueError) as error:
            parser.error(f"{label}: {error}")


def add_arguments(parser, batch_size, lr, clip_norm=0.0):
    """Add the switches that all examples share, with the defaults of one example."""
    add_compression(parser)
    group = parser.add_argument_group("optimizer")
    group.add_argument(
        "--batch-size", type=positive_integer, default=batch_size, help="samples a rank and step (default: %(default)s)"
    )
    group.add_argument("--lr", type=positive, default=lr, help="peak learning rate (default: %(default)s)")
    group.add_argument("--momentum", type=momentum, default=0.9, help="(default: %(default)s)")
    group.add_argument("--nesterov", action="store_true", help="use Nesterov momentum")
    group.add_argument("--weight-decay", type=non_negative, default=0.0, help="(default: %(default)s)")
    group.add_argument(
        "--clip-norm", type=non_negative, default=clip_norm, help="largest norm; 0: no clipping (default: %(default)s)"
    )
    group = parser.add_argument_group("run")
    group.add_argument("--seed", type=whole_number, default=0, help="(default: %(default)s)")
    group.add_argument("--quiet", action="store_true", help="print the JSON line only")


def parse_arguments(parser, hvd):
    """Parse the command line, refuse switches without an effect, and start Horovod."""
    args = parser.parse_args()
    if args.nesterov and not args.momentum:
        parser.error("--nesterov needs a --momentum above 0")
    refuse_others(parser, args, SWITCHES, [args.method])
    low_bit = dict.fromkeys(("--level", "--granularity"), LOW_BIT)
    refuse_others(parser, args, low_bit, [args.values or "float32"], "--values")
    hosts = dict.fromkeys(("--ranks-per-host", "--between-hosts"), ("hierarchical",))
    refuse_others(parser, args, hosts, [args.exchange or "gather"], "--exchange")
    if args.nesterov and args.method == "samomentum":
        parser.error("samomentum has no --nesterov: use dgc")
    check_settings(parser, args.method, compression_settings(args, 0), f"--method {args.method}")
    hvd.init(process_sets="dynamic" if args.exchange == "hierarchical" else None)
    args.rank, args.size = hvd.rank(), hvd.size()
    args.verbose = args.rank == 0 and not args.quiet
    if args.size == 1 and args.method not in DENSE_METHODS:
        print(ONE_PROCESS, file=sys.stderr)
    return args


def compresses(args):
    """Return whether a compressor of the plugin is in use: a single process never calls it."""
    return args.method not in DENSE_METHODS and args.size > 1


def has_checkpoint(args, sum_over_ranks):
    """Return whether there is a checkpoint to resume from; end the program if only some ranks can read it.

    sum_over_ranks(values, name): as in the frameworks' modules.
    """
    if not args.checkpoint:
        return False
    if not os.path.isdir(os.path.dirname(os.path.abspath(args.checkpoint))):
        raise SystemExit(f"--checkpoint {args.checkpoint}: its folder is not there. Make it first")
    found = round(sum_over_ranks([float(os.path.exists(args.checkpoint))], "checkpoint")[0])
    if found not in (0, args.size):
        raise SystemExit(
            f"--checkpoint {args.checkpoint}: {found} of {args.size} ranks find this file, but all read it. Name a "
            "path on a disk that all hosts share, or copy it to each host"
        )
    return found > 0


def warn_of_dropped_residuals(args):
    """Say that a single process, which never calls the compressor, does not continue a checkpoint's residuals."""
    print(
        f"--checkpoint {args.checkpoint}: one process compresses nothing, so the residuals in this file are dropped",
        file=sys.stderr,
    )


def check_method(method, args):
    """End the program if a checkpoint is of another method: its residuals would be lost, and its momentum."""
    if method != args.method:
        raise SystemExit(f"--method {args.method} cannot continue {args.checkpoint}, which is of --method {method}")


def compresses_momentum(args):
    """Return whether the compressor applies momentum, weight decay and clipping."""
    return args.method in LOCAL_MOMENTUM and compresses(args)


def compression_settings(args, warmup_steps):
    """Return the arguments of `Compression.<method>` that are given; no warm-up if its steps are 0."""
    names = [name_of(switch) for switch in SWITCHES if switch not in ("--threshold", "--tensorboard")]
    settings = {"seed": args.seed, **{name: getattr(args, name) for name in names if getattr(args, name) is not None}}
    if args.method == "hard_threshold":
        return {**settings, "value": THRESHOLD if args.threshold is None else args.threshold}
    settings["warmup"] = warmup_steps or None
    if args.method == "dgc":
        settings["nesterov"] = args.nesterov
    if args.method in LOCAL_MOMENTUM:
        settings |= {"momentum": args.momentum, "weight_decay": args.weight_decay, "clip_norm": args.clip_norm or None}
        settings["clip_scope"] = settings.get("scope", "tensor")
    return settings


def choose_compression(hvd, plugin, method, tensors, settings):
    """Return Horovod's own compressor, or the one of that name in the plugin's module, imported only then."""
    if method in DENSE_METHODS:
        return getattr(hvd.Compression, method)
    return getattr(importlib.import_module(plugin).Compression, method)(tensors, **settings)


def warmup_steps(given, steps):
    """Return the steps over which the learning rate rises and the density falls: a tenth of all, unless given."""
    return min(steps, steps // 10 if given is None else given)


def learning_rate(peak, step, steps, warmup_steps):
    """Return the rate of a step: a linear rise over `warmup_steps`, then half a cosine down to 0."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps)))


class DenseStats:
    """Traffic counters for Horovod's own `none` and `fp16`, with the interface of a compressor; float32 gradients."""

    def __init__(self, parameters, method, exchanged=True):
        self.dense_bytes = 4 * parameters if exchanged else 0
        self.ratio = 2.0 if method == "fp16" and exchanged else 1.0

    def stats(self, steps=1):
        """Return {"step": ..., "total": ...} for a number of steps; the residual norm is 0."""
        return {"step": self._report(1), "total": self._report(steps), "residual_norm": 0.0}

    def _report(self, steps):
        sent = int(self.dense_bytes * steps / self.ratio)
        return {
            "dense_bytes": self.dense_bytes * steps,
            "payload_bytes": sent,
            "received_bytes": sent,
            "ratio": self.ratio,
            "density": 1.0,
            "seconds": {},
        }


class Traffic:
    """Count the gradient bytes that this rank sends; `dense` is what float32 would have taken."""

    def __init__(self, parameters, compression, args):
        self.parameters, self.compression, self.seen = parameters, compression, (0, 0)
        self.steps = self.resumed_at = 0
        self.dense = DenseStats(parameters, args.method, args.size > 1)

    def stats(self):
        """Return {"step": ..., "total": ...} with dense_bytes, payload_bytes, ratio, density and seconds."""
        if hasattr(self.compression, "stats"):
            return self.compression.stats()
        return self.dense.stats(self.steps - self.resumed_at)

    def resume(self, steps):
        """Resume after a number of steps; bytes are counted from here."""
        self.steps = self.resumed_at = steps
        self.seen = (self.stats()["total"]["payload_bytes"], steps)

    def since_last(self):
        """Return the mean payload bytes per step since the last call, and the density of the last step."""
        stats, (payload, steps) = self.stats(), self.seen
        self.seen = (stats["total"]["payload_bytes"], self.steps)
        mean = (self.seen[0] - payload) / max(1, self.steps - steps)
        return {"bytes_per_step": int(mean), "density": stats["step"]["density"]}

    def summary(self):
        """Return the JSON fields: totals under plain names, the last step's under `last_step`.

        The totals are those of `counted_steps`: of all `steps` but those before a checkpoint that the run resumed from.
        """
        stats = self.stats()
        fields = ("dense_bytes", "payload_bytes", "received_bytes", "ratio", "density")
        return {
            **{name: stats["total"][name] for name in fields},
            "compression_seconds": stats["total"]["seconds"],
            "last_step": {name: stats["step"][name] for name in fields},
            "steps": self.steps,
            "counted_steps": self.steps - self.resumed_at,
            "parameters": self.parameters,
        }


class Progress(tqdm):
    """Rank 0's progress: a table printed line by line, and below it a bar of steps where there is a terminal."""

    def __init__(self, total, args):
        super().__init__(total=total, unit="step", disable=not (args.verbose and sys.stderr.isatty()))
        self.verbose, self.widths = args.verbose, None

    def report(self, row):
        """Print a row, a dict with the same keys each time, as the next line of the table; before the first, the keys.

        A line and its end are one write, and flushed: a launcher that reads them apart may put something between.
        """
        if not self.verbose:
            return
        if self.widths is None:
            self.widths = [max(len(key), 10 if isinstance(value, float) else 6) for key, value in row.items()]
            self._print(row)
        self._print(map(as_cell, row.values()))

    def _print(self, cells):
        line = "  ".join(cell.rjust(width) for cell, width in zip(cells, self.widths, strict=True))
        self.write(line + "\n", end="")
        sys.stdout.flush()


def as_cell(value):
    """Format a value for a table."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_table(rows):
    """Print a list of dicts with the same keys, one column a key."""
    lines = [list(rows[0])] + [[as_cell(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def finite(value):
    """Return a value for JSON: numbers that are not finite become None, also inside dicts, lists and tuples."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_record(record):
    """Print a dict as one line of JSON; numbers that are not finite become null."""
    print(json.dumps(finite(record), allow_nan=False), flush=True)


def method_shown(args):
    """Return the name of the method: with --powersgd, it is PyTorch's, not one of hvd_sparse's."""
    rank = getattr(args, "powersgd", None)
    return f"powersgd of rank {rank}" if rank else args.method


def print_json(example, args, traffic, **results):
    """Print the run as one line of JSON, with the settings that its compressor has."""
    algorithm = getattr(traffic.compression, "algorithm", None)  # Horovod's own compressors have none
    settings = {name: getattr(algorithm, name) for name in ("scope", "values", "exchange") if hasattr(algorithm, name)}
    settings |= {name: getattr(args, name) for name in ("seed", "batch_size", "lr")}
    record = {
        "example": example,
        "method": method_shown(args),
        **results,
        **traffic.summary(),
        **settings,
        "target_density": 1.0 if algorithm is None else getattr(algorithm, "density", None),
        "world_size": args.size,
    }
    print_record(record)
