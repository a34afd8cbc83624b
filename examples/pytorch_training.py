"""The common part of the PyTorch examples: host framework, optimizer, compression, learning rate, sums over ranks.

The host is Horovod, or PyTorch's DistributedDataParallel (`--host ddp`). The baselines (`none`, `fp16`) are the host's
own and run without the plugin.
"""

import importlib
import math

import char_data
import plots
import reporting
import torch

from hvd_sparse.checkpoint import atomic_file

HOSTS = {"horovod": "pytorch_horovod", "ddp": "pytorch_ddp"}


def start(parser):
    """Parse the command line, start the host framework, choose the device."""
    host = host_of(parser.parse_args())
    args = reporting.parse_arguments(parser, host)
    if args.powersgd and (args.host, args.method) != ("ddp", "none"):
        parser.error("--powersgd is for --host ddp --method none")
    if args.powersgd and getattr(args, "checkpoint", None):
        parser.error("--checkpoint is not for --powersgd: its error feedback would be lost")
    if args.device is None:
        args.device = "cuda" if host.has_cuda() else "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU")
    if args.device == "cuda":
        torch.cuda.set_device(host.local_rank() % torch.cuda.device_count())
    torch.set_flush_denormal(True)  # an optimizer's momentum decays to denormals, which slow down the processor
    torch.manual_seed(args.seed)
    return args


def finish(args):
    """End the host framework; the last call of every rank, when nothing holds the model any more."""
    host_of(args).finish()


def add_arguments(parser, **defaults):
    """Add the switches that all PyTorch examples share."""
    reporting.add_arguments(parser, **defaults)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(default: cuda where the host can use it)")
    parser.add_argument(
        "--host",
        choices=HOSTS,
        default="horovod",
        help="who exchanges gradients; ddp: DistributedDataParallel, started by torchrun (default: %(default)s)",
    )
    parser.add_argument(
        "--powersgd", type=reporting.positive_integer, metavar="RANK", help="PyTorch's PowerSGD, to compare with"
    )


def host_of(args):
    """Return the module of the host framework, which is imported only now."""
    return importlib.import_module(HOSTS[args.host])


def make_compression(model, args, warmup_steps):
    """Make the compressor that the arguments ask for; a single process needs none."""
    host = host_of(args)
    method = args.method if args.size > 1 or args.method in reporting.DENSE_METHODS else "none"
    settings = reporting.compression_settings(args, warmup_steps)
    compression = reporting.choose_compression(host, host.PLUGIN, method, model.named_parameters(), settings)
    if args.tensorboard and args.rank == 0 and reporting.compresses(args):
        from torch.utils.tensorboard import SummaryWriter

        compression.log_to(SummaryWriter(args.tensorboard))
    return compression


def make_sgd(model, args):
    """Return SGD, which leaves momentum and weight decay to a compressor that applies them."""
    if reporting.compresses_momentum(args):
        return torch.optim.SGD(model.parameters(), lr=args.lr)
    return torch.optim.SGD(
        model.parameters(),
        lr=args.lr,
        momentum=args.momentum,
        nesterov=args.nesterov,
        weight_decay=args.weight_decay,
    )


def distribute(model, args, warmup_steps, make_optimizer=make_sgd):
    """Return the model to train, its optimizer and its compressor; all ranks begin with the parameters of rank 0."""
    compression = make_compression(model, args, warmup_steps)
    return host_of(args).distribute(model, make_optimizer(model, args), compression, args, warmup_steps)


def save(model, optimizer, compression, rows, steps, args):
    """Write args.checkpoint: model, optimizer, the sum of all ranks' error feedback, metrics; every rank calls it.

    A job that is killed meanwhile leaves the previous epoch's file. A job with another world size can resume from it.
    """
    model = getattr(model, "module", model)  # the model inside DistributedDataParallel
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rows": rows, "steps": steps}
    state["method"] = args.method
    if reporting.compresses(args):
        state["compression"] = compression.state_dict(summed=True)
    if args.rank == 0:
        with atomic_file(args.checkpoint) as file:
            torch.save(state, file)


def load(model, optimizer, compression, args):
    """Restore args.checkpoint; return metrics and number of steps: [] and 0 without a checkpoint."""
    if not reporting.has_checkpoint(args, host_of(args).sum_over_ranks):
        return [], 0
    state = torch.load(args.checkpoint, map_location=args.device, weights_only=True)
    reporting.check_method(state["method"], args)
    getattr(model, "module", model).load_state_dict(state["model"])
    own = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state["optimizer"])
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group.update(settings)  # with one rank the optimizer has the momentum, not the compressor
    if "compression" in state:
        if reporting.compresses(args):
            compression.load_state_dict(state["compression"])
        else:
            reporting.warn_of_dropped_residuals(args)
    return state["rows"], state["steps"]


def count_parameters(model):
    """Return the number of elements of all parameters."""
    return sum(p.numel() for p in model.parameters())


def apply_gradients(model, optimizer, args):
    """Step the optimizer; clip the averaged gradient first unless the compressor clips."""
    host_of(args).step(model, optimizer, 0 if reporting.compresses_momentum(args) else args.clip_norm)


def set_learning_rate(optimizer, peak, step, steps, warmup_steps):
    """Set the rate of this step."""
    for group in optimizer.param_groups:
        group["lr"] = reporting.learning_rate(peak, step, steps, warmup_steps)


def add_step_arguments(parser, steps, evaluations):
    """Add the switches of `train_steps`, with the defaults of one example."""
    positive, more = reporting.positive_integer, "(default: %(default)s)"
    rise = "steps over which the learning rate rises and the density falls (default: a tenth of the steps)"
    parser.add_argument("--steps", type=positive, default=steps, help=more)
    parser.add_argument("--warmup-steps", type=reporting.whole_number, help=rise)
    parser.add_argument("--evaluations", type=positive, default=evaluations, help=more)


def train_steps(model, optimizer, losses, evaluate, traffic, args):
    """Train for `args.steps` steps; return one dict of metrics for each of `args.evaluations`.

    losses: yields the loss of each step. evaluate: returns the mean loss on the held-out data.
    """
    rows, seen = [], []
    interval = math.ceil(args.steps / args.evaluations)
    bar = reporting.Progress(args.steps, args)
    for step in range(args.steps):
        set_learning_rate(optimizer, args.lr, step, args.steps, args.warmup_steps)
        optimizer.zero_grad()
        loss = next(losses)
        loss.backward()
        apply_gradients(model, optimizer, args)
        traffic.steps += 1
        seen.append(loss.item())
        bar.update()
        if (step + 1) % interval == 0 or step + 1 == args.steps:
            train_loss = sum_over_ranks([sum(seen) / len(seen)], "train", args)[0] / args.size
            row = {"step": step + 1, "train_loss": train_loss, "held_out_loss": evaluate()}
            row["perplexity"] = char_data.perplexity(row["held_out_loss"])
            rows.append(row | traffic.since_last())
            bar.report(rows[-1])
            seen = []
    bar.close()
    return rows


def report_steps(example, title, rows, traffic, seconds, args, **settings):
    """Print the JSON line, then plot the rows of `train_steps`, unless `--plot ""`; rank 0 alone does."""
    if args.rank != 0:
        return
    last = {"perplexity": rows[-1]["perplexity"], "loss": rows[-1]["held_out_loss"], "seconds": seconds}
    curve = [[row["step"], row["held_out_loss"]] for row in rows]
    reporting.print_json(example, args, traffic, **last, curve=curve, **settings)
    method = reporting.method_shown(args)
    path = f"{example.removeprefix('pytorch_')}-{method.replace(' ', '_')}.png" if args.plot is None else args.plot
    if path:
        panels = [["train_loss", "held_out_loss"], ["perplexity"], ["bytes_per_step"]]
        plots.plot_curves(rows, "step", panels, f"{title}, {method}, {args.size} ranks", path)


def sum_over_ranks(values, name, args):
    """Sum a list of numbers over all ranks; every rank gets the same floats."""
    return host_of(args).sum_over_ranks(values, name)
