"""Share what every PyTorch example needs: arguments, compression, traffic counts, tables, plots, JSON.

The baselines (`none`, `fp16`) use Horovod's own compressors and run without the plugin.
"""

import argparse
import json
import math

import horovod.torch as hvd
import torch

DENSE_METHODS = ("none", "fp16")
DEFAULT_DENSITY = {"none": 1.0, "fp16": 1.0, "gradient_dropping": 0.01, "dgc": 0.001}
METHODS = tuple(DEFAULT_DENSITY)


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


def add_arguments(parser, batch_size, lr=None, clip_norm=0.0, lr_help="default: %(default)s"):
    """Add the switches that all examples share, with the defaults of one example."""
    group = parser.add_argument_group("compression")
    group.add_argument("--method", choices=METHODS, default="none", help="gradient compression (default: none)")
    group.add_argument(
        "--density",
        type=density,
        help="share of each gradient that is sent (default: 0.01 for gradient_dropping, 0.001 for dgc); "
        "the dense methods ignore it",
    )
    group.add_argument(
        "--scope",
        choices=("tensor", "model"),
        default="tensor",
        help="select per tensor or over the whole model (default: tensor)",
    )
    group = parser.add_argument_group("optimizer")
    group.add_argument(
        "--batch-size", type=positive_integer, default=batch_size, help="samples a rank and step (default: %(default)s)"
    )
    group.add_argument("--lr", type=positive, default=lr, help=f"peak learning rate ({lr_help})")
    group.add_argument("--momentum", type=momentum, default=0.9, help="(default: %(default)s)")
    group.add_argument("--nesterov", action="store_true", help="use Nesterov momentum")
    group.add_argument("--weight-decay", type=non_negative, default=0.0, help="(default: %(default)s)")
    group.add_argument(
        "--clip-norm",
        type=non_negative,
        default=clip_norm,
        help="largest gradient norm; 0 turns clipping off (default: %(default)s)",
    )
    group = parser.add_argument_group("run")
    group.add_argument("--seed", type=whole_number, default=0, help="(default: %(default)s)")
    group.add_argument("--device", choices=("cpu", "cuda"), help="(default: cuda where Horovod was built for it)")
    group.add_argument("--quiet", action="store_true", help="print the JSON line only")


def parse_arguments(parser):
    """Parse the command line, resolve the defaults that depend on other switches and start Horovod."""
    args = parser.parse_args()
    if args.nesterov and not args.momentum:
        parser.error("--nesterov needs a --momentum above 0")
    if not args.density or args.method in DENSE_METHODS:
        args.density = DEFAULT_DENSITY[args.method]
    hvd.init()
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() and hvd.cuda_built() else "cpu"
    if args.device == "cuda":
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    torch.manual_seed(args.seed)
    args.verbose = hvd.rank() == 0 and not args.quiet
    return args


def compresses_momentum(args):
    """Tell whether the compressor does momentum, weight decay and clipping: a single process never calls it."""
    return args.method == "dgc" and hvd.size() > 1


def make_compression(model, args, warmup_steps):
    """Make the compressor that the arguments ask for (a single process needs none); no warm-up if its steps are 0."""
    if args.method in DENSE_METHODS or hvd.size() == 1:
        return hvd.Compression.fp16 if args.method == "fp16" else hvd.Compression.none
    from hvd_sparse.torch import Compression

    shared = {"density": args.density, "warmup": warmup_steps or None, "scope": args.scope, "seed": args.seed}
    if args.method == "gradient_dropping":
        return Compression.gradient_dropping(model.named_parameters(), **shared)
    return Compression.dgc(
        model.named_parameters(),
        momentum=args.momentum,
        nesterov=args.nesterov,
        weight_decay=args.weight_decay,
        clip_norm=args.clip_norm or None,
        clip_scope=args.scope,
        **shared,
    )


def make_optimizer(model, args, warmup_steps):
    """Return Horovod's distributed SGD and its compressor, after broadcasting the parameters of rank 0."""
    compression = make_compression(model, args, warmup_steps)
    if compresses_momentum(args):
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    else:
        optimizer = torch.optim.SGD(
            model.parameters(),
            lr=args.lr,
            momentum=args.momentum,
            nesterov=args.nesterov,
            weight_decay=args.weight_decay,
        )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression), compression


def apply_gradients(model, optimizer, args):
    """Step the optimizer; clip the averaged gradient first unless the compressor clips."""
    if not args.clip_norm or compresses_momentum(args):
        optimizer.step()
    else:
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
        with optimizer.skip_synchronize():
            optimizer.step()


def set_learning_rate(optimizer, peak, step, steps, warmup_steps):
    """Set the rate of this step: a linear rise over `warmup_steps`, then half a cosine down to 0."""
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    factor = (step + 1) / warmup_steps if step < warmup_steps else 0.5 * (1 + math.cos(math.pi * progress))
    for group in optimizer.param_groups:
        group["lr"] = peak * factor


def sum_over_ranks(values, name):
    """Sum a list of numbers over all ranks; every rank gets the same floats."""
    return hvd.allreduce(torch.tensor(values, dtype=torch.float64), name=name, op=hvd.Sum).tolist()


class Traffic:
    """Count the gradient bytes that this rank sends; `dense` is what float32 would have taken."""

    def __init__(self, model, method, compression):
        self.compression, self.steps, self.seen = compression, 0, (0, 0)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.dense_bytes = 4 * self.parameters if hvd.size() > 1 else 0
        self.dense_ratio = 2.0 if method == "fp16" and hvd.size() > 1 else 1.0

    def stats(self):
        """Return {"step": ..., "total": ...} with dense_bytes, payload_bytes, ratio, density and seconds."""
        if hasattr(self.compression, "stats"):
            return self.compression.stats()
        return {
            name: {
                "dense_bytes": size,
                "payload_bytes": int(size / self.dense_ratio),
                "ratio": self.dense_ratio,
                "density": 1.0,
                "seconds": {},
            }
            for name, size in (("step", self.dense_bytes), ("total", self.dense_bytes * self.steps))
        }

    def since_last(self):
        """Return the mean payload bytes a step since the last call, and the density of the last step."""
        stats, (payload, steps) = self.stats(), self.seen
        self.seen = (stats["total"]["payload_bytes"], self.steps)
        mean = (self.seen[0] - payload) / max(1, self.steps - steps)
        return {"bytes_per_step": int(mean), "density": stats["step"]["density"]}

    def summary(self):
        """Return the JSON fields: totals of the run under plain names, the last step's under `last_step`."""
        stats = self.stats()
        fields = ("dense_bytes", "payload_bytes", "ratio", "density")
        return {
            **{name: stats["total"][name] for name in fields},
            "compression_seconds": stats["total"]["seconds"],
            "last_step": {name: stats["step"][name] for name in fields},
            "steps": self.steps,
            "parameters": self.parameters,
        }


def print_table(rows):
    """Print a list of dicts with the same keys, one column a key."""
    lines = [list(rows[0])] + [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def plot_curves(rows, x, panels, title, path):
    """Draw one panel for each list of keys in `panels` against key `x` and save the figure to `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(panels), 3.5), layout="constrained")
    for axis, keys in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for key in keys:
            axis.plot([row[x] for row in rows], [row[key] for row in rows], marker=".", label=key.replace("_", " "))
        axis.set_xlabel(x)
        axis.set_ylabel(" / ".join(keys).replace("_", " "))
        axis.grid(alpha=0.3)
        if keys == ["bytes_per_step"] and rows[-1]["bytes_per_step"]:
            axis.set_yscale("log")
        axis.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def print_json(example, args, traffic, **results):
    """Print the run as one line of JSON; numbers that are not finite become null."""
    settings = {name: getattr(args, name) for name in ("scope", "seed", "batch_size", "lr")}
    record = {
        "example": example,
        "method": args.method,
        **results,
        **traffic.summary(),
        **settings,
        "target_density": args.density,
        "world_size": hvd.size(),
    }
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    print(json.dumps(finite, allow_nan=False), flush=True)
