"""The common part of the asynchronous examples of both frameworks: switches, data, batch order and report."""

import argparse
import math
import time

import asynchronous_report
import char_data
import digits_data
import numpy as np
import plots
import reporting
from mpi4py import MPI

from hvd_sparse.parameter_server import METHODS
from hvd_sparse.parameter_server.placement import MOST_THREADS, place

TASKS = ("digits", "char_lstm")
TIMEOUT = 120.0  # seconds that the first worker waits for the others' last updates: one may never have joined
SWITCHES = {  # {switch: the methods that it is for}; other switches are for all methods
    "--density": ("dgs", "dgc_async", "gd_async", "dct_async"),
    "--momentum": ("dgs", "dgc_async", "msgd"),
    "--lifespan": ("dct_async",),
}
TASK_SWITCHES = {"--epochs": ("digits",), "--hidden": ("char_lstm",), "--sequence-length": ("char_lstm",)}
TASK_DEFAULTS = {"epochs": 20, "hidden": 64, "sequence_length": 32}
SETTINGS = "method task density pull_density momentum lifespan servers threads overlap steps batch_size lr seed"


def servers(text):
    """Read --servers."""
    return text if text == "colocated" else reporting.positive_integer(text)


def parse_arguments(description):
    """Read the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_argument_group("method")
    group.add_argument("--method", choices=METHODS, default="dgs", help="(default: %(default)s)")
    group.add_argument("--density", type=reporting.density, help="pushed; not of asgd, msgd (default: the method's)")
    group.add_argument("--pull-density", type=reporting.density, help="of answers (default: all that changed)")
    group.add_argument("--momentum", type=reporting.momentum, help="of dgs, dgc_async, msgd (default: the method's)")
    group.add_argument("--lifespan", type=reporting.positive_integer, help="of dct_async (default: the method's)")
    group.add_argument("--servers", type=servers, default=1, help='ranks, or "colocated" (default: %(default)s)')
    group.add_argument(
        "--threads",
        type=reporting.positive_integer,
        default=1,
        help=f"of each rank that serves, up to {MOST_THREADS} (default: %(default)s)",
    )
    group.add_argument("--workers", type=reporting.positive_integer, help="expected number of workers, checked")
    group.add_argument("--overlap", action="store_true", help="compute while an answer is on its way")
    group = parser.add_argument_group("training")
    group.add_argument("--task", choices=TASKS, default="digits", help="(default: %(default)s)")
    group.add_argument("--epochs", type=reporting.positive_integer, help="of digits (default: 20)")
    group.add_argument(
        "--steps", type=reporting.positive_integer, help="of each worker (default: --epochs; 2000 for char_lstm)"
    )
    group.add_argument("--warmup-steps", type=reporting.whole_number, help="(default: a tenth of the steps)")
    group.add_argument("--batch-size", type=reporting.positive_integer, default=8, help="(default: %(default)s)")
    group.add_argument("--lr", type=reporting.positive, help="peak (default: 0.02 for digits, 0.5 for char_lstm)")
    group.add_argument("--weight-decay", type=reporting.non_negative, default=0.0, help="(default: %(default)s)")
    group.add_argument(
        "--clip-norm", type=reporting.non_negative, help="0: none (default: 0 for digits, 0.25 for char_lstm)"
    )
    group.add_argument("--hidden", type=reporting.positive_integer, help="of char_lstm (default: 64)")
    group.add_argument("--sequence-length", type=reporting.positive_integer, help="of char_lstm (default: 32)")
    group.add_argument("--evaluations", type=reporting.positive_integer, default=5, help="(default: %(default)s)")
    group = parser.add_argument_group("run")
    group.add_argument("--seed", type=reporting.whole_number, default=0, help="(default: %(default)s)")
    group.add_argument("--plot", metavar="FILE", help="draw how stale updates were")
    group.add_argument("--quiet", action="store_true", help="print the JSON line only")
    args = parser.parse_args()
    reporting.refuse_others(parser, args, SWITCHES, [args.method])
    reporting.refuse_others(parser, args, TASK_SWITCHES, [args.task], "--task")
    if args.steps and args.epochs:
        parser.error("--epochs is for runs without --steps: leave one of them out")
    for name, value in TASK_DEFAULTS.items():
        setattr(args, name, getattr(args, name) or value)
    return args


def start(args, tasks):
    """Find this rank's place among the workers, and fill in what depends on it; return the task of that name."""
    try:
        workers = place(MPI.COMM_WORLD.Get_size(), args.servers, args.threads).workers
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if args.workers not in (None, len(workers)):
        raise SystemExit(f"--workers {args.workers}, but {len(workers)} ranks are left to work: mpirun -np ...")
    rank = MPI.COMM_WORLD.Get_rank()
    args.size, args.rank = len(workers), workers.index(rank) if rank in workers else 0
    args.verbose = rank == 0 and not args.quiet
    task = tasks[args.task](args)
    args.steps = task.steps()
    args.warmup_steps = reporting.warmup_steps(args.warmup_steps, args.steps)
    args.lr = args.lr or task.LR
    args.clip_norm = task.CLIP_NORM if args.clip_norm is None else args.clip_norm
    return task


def make_method(args):
    """Return the method with the settings that are given; set those that the report has to the method's own."""
    settings = {name: getattr(args, name) for name in map(reporting.name_of, SWITCHES)}
    settings |= {"pull_density": args.pull_density, "seed": args.seed}
    if args.method in SWITCHES["--density"]:
        settings["warmup"] = args.warmup_steps or None
    given = {name: value for name, value in settings.items() if value is not None}
    method = METHODS[args.method](**given)
    args.density, args.momentum, args.lifespan = method.density, method.momentum, getattr(method, "lifespan", None)
    return method


class Digits:
    """Scikit-learn's digits: images float32[n, 8, 8]. `args`: size and rank are those among the workers."""

    LR, CLIP_NORM, METRIC = 0.02, 0.0, "accuracy"

    def __init__(self, args):
        self.args = args
        self.train_images, self.test_images, self.train_labels, self.test_labels = digits_data.load()
        args.steps_per_epoch = len(self.train_images) // (args.batch_size * args.size)
        if not args.steps_per_epoch:
            raise SystemExit(f"--batch-size {args.batch_size} times {args.size} workers exceeds the training images")

    def steps(self):
        """Return how many steps a worker does."""
        return self.args.steps or self.args.epochs * self.args.steps_per_epoch

    def arrays(self):
        """Yield images and labels endlessly: each epoch a permutation that the workers share out."""
        shifts, epoch = np.random.default_rng([self.args.seed, self.args.rank]), 0
        while True:
            for batch in digits_data.epoch_batches(len(self.train_images), epoch, self.args):
                yield digits_data.shifted(self.train_images[batch], shifts), self.train_labels[batch]
            epoch += 1


class CharLSTM:
    """Characters int64[batch, length] with the state of an LSTM, which goes on from window to window."""

    LR, CLIP_NORM, METRIC = 0.5, 0.25, "perplexity"

    def __init__(self, args):
        self.args = args
        self.train_text, self.held_out = char_data.load_text()
        streams = char_data.split_streams(self.train_text, args.batch_size * args.size)
        if streams.shape[1] <= args.sequence_length:
            raise SystemExit(f"--batch-size {args.batch_size} or --sequence-length {args.sequence_length} is too large")
        self.streams = streams[args.rank :: args.size]

    def steps(self):
        """Return how many steps a worker does."""
        return self.args.steps or 2000

    def arrays(self):
        """Yield inputs, targets, and whether a pass begins, endlessly, in reading order."""
        length = self.args.sequence_length
        while True:
            for begin in range(0, self.streams.shape[1] - length, length):
                window = self.streams[:, begin : begin + length + 1]
                yield window[:, :-1], window[:, 1:], begin == 0

    def held_out_windows(self):
        """Yield inputs and targets of the held-out text, in reading order."""
        streams = char_data.split_streams(self.held_out, char_data.EVALUATION_STREAMS)
        for begin in range(0, streams.shape[1] - 1, 256):
            window = streams[:, begin : begin + 257]
            yield window[:, :-1], window[:, 1:]


def run(example, description, tasks, prepare, connect, learn):
    """Run an example on every rank: servers serve, workers train, the first of them reports.

    prepare(args): initialises the framework. connect: the framework's function. learn(session, task, model, args): see
    `train`.
    """
    args = parse_arguments(description)
    prepare(args)
    task = start(args, tasks)
    model = task.make_model()
    method = make_method(args)
    try:
        session = connect(model, method, servers=args.servers, threads=args.threads, overlap=args.overlap)
    except ValueError as error:  # too many workers for the method, or too many servers for the model
        raise SystemExit(str(error)) from None
    if not session.is_worker:
        session.serve()
        return
    begin = time.perf_counter()
    with session:
        rows = learn(session, task, model, args)
        if args.rank == 0:
            report(example, rows, session.stats(), time.perf_counter() - begin, task, args)


def wait_for_others(session, updates, workers):
    """Wait until the servers have applied all updates, or all other workers have left, or a timeout has passed."""
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end:
        stats = session.stats()["all"]
        if stats["pushes"] >= updates or len(stats["departures"]) >= workers - 1:
            return
        time.sleep(0.05)


def train(session, task, args, step, evaluate):
    """Train; return one dict of metrics per evaluation, on the first worker, of the servers' model.

    step(number): runs a step, counted from 0, and returns its loss. evaluate(): returns loss and metric of the servers'
    model.
    """
    rows, losses, interval = [], [], math.ceil(args.steps / args.evaluations)
    with reporting.Progress(args.steps, args) as bar:
        for number in range(1, args.steps + 1):
            losses.append(step(number - 1))
            bar.update()
            if args.rank == 0 and (number % interval == 0 or number == args.steps):
                if number == args.steps:
                    wait_for_others(session, args.steps * args.size, args.size)
                loss, metric = evaluate()
                rows.append({"step": number, "train_loss": np.mean(losses), "loss": loss, task.METRIC: metric})
                bar.set_postfix(loss=f"{loss:.3f}", **{task.METRIC: f"{metric:.2f}"})
                bar.report({key: float(value) for key, value in rows[-1].items()})
                losses = []
    return rows


def report(example, rows, stats, seconds, task, args):
    """Print the traffic and a JSON line; then draw the plot."""
    if args.verbose:
        print(asynchronous_report.report(stats))
    settings = {name: getattr(args, name) for name in SETTINGS.split()}
    results = {"loss": rows[-1]["loss"], task.METRIC: rows[-1][task.METRIC], "seconds": seconds, "workers": args.size}
    reporting.print_record({"example": example, **settings, **results, "stats": stats})
    if args.plot:
        plots.save_plot(lambda: asynchronous_report.draw(stats), args.plot)
