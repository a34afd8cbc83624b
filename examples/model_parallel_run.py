"""The common part of the model-parallel examples of both frameworks: switches, batches, training loop and report.

The task: predict each next character of the source of Python's standard library, by a small causal transformer that is
cut into stages of whole blocks. An example has a trainer, one a rank, with

    Trainer(args, communicator)        builds this rank's part of the network and its pipeline
    step(inputs, targets, lr)          trains on a batch; returns its loss
    evaluate(inputs, targets)          returns the loss of a batch
    stats()                            `Pipeline.stats()`
    boundaries()                       `ThresholdBoundary.stats()` of those inside this rank's part
    dp_ratio()                         dense over sent bytes of Horovod's gradients; 1.0 without replicas
    close()
"""

import argparse
import math
import time

import char_data
import numpy as np
import plots
import reporting
from mpi4py import MPI

from hvd_sparse.model_parallel import SCHEDULES, THRESHOLDS, ProcessGrid

SETTINGS = (
    "boundaries density threshold micro_batches schedule steps batch_size sequence_length width blocks heads lr seed"
).split()
HELD_OUT_BATCHES, HELD_OUT_ROWS = 8, 32  # of each evaluation
CHARACTERS = len(char_data.CHARACTERS)


def parse_arguments(description, add_arguments=None):
    """Read the command line. add_arguments(parser): adds those that one example alone has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_argument_group("model parallelism")
    group.add_argument(
        "--boundaries",
        type=reporting.whole_number,
        help="number of cuts (default: one stage per rank); on one rank, to study sparsity without a network",
    )
    group.add_argument(
        "--density", type=reporting.density, default=0.1, help="of what crosses a boundary (default: %(default)s)"
    )
    group.add_argument("--threshold", choices=THRESHOLDS, default="topk", help="(default: %(default)s)")
    group.add_argument("--micro-batches", type=reporting.positive_integer, default=4, help="(default: %(default)s)")
    group.add_argument("--schedule", choices=tuple(SCHEDULES), default="gpipe", help="(default: %(default)s)")
    group = parser.add_argument_group("training")
    group.add_argument("--steps", type=reporting.positive_integer, default=500, help="(default: %(default)s)")
    group.add_argument("--warmup-steps", type=reporting.whole_number, help="(default: a tenth of the steps)")
    group.add_argument(
        "--batch-size", type=reporting.positive_integer, default=16, help="of a replica (default: %(default)s)"
    )
    group.add_argument("--sequence-length", type=reporting.positive_integer, default=64, help="(default: %(default)s)")
    group.add_argument("--lr", type=reporting.positive, default=0.002, help="peak, of Adam (default: %(default)s)")
    group.add_argument("--width", type=reporting.positive_integer, default=128, help="(default: %(default)s)")
    group.add_argument("--blocks", type=reporting.positive_integer, default=4, help="(default: %(default)s)")
    group.add_argument("--heads", type=reporting.positive_integer, default=4, help="(default: %(default)s)")
    group.add_argument("--evaluations", type=reporting.positive_integer, default=5, help="(default: %(default)s)")
    group = parser.add_argument_group("run")
    group.add_argument("--seed", type=reporting.whole_number, default=0, help="(default: %(default)s)")
    group.add_argument("--plot", metavar="FILE", help="draw the losses")
    group.add_argument("--quiet", action="store_true", help="print the JSON line only")
    if add_arguments is not None:
        add_arguments(parser)
    args = parser.parse_args()
    if args.width % args.heads:
        parser.error(f"--width {args.width} must be a multiple of --heads {args.heads}")
    check_micro_batches(parser, args)
    return args


def check_micro_batches(parser, args):
    """End the program with an error if a micro-batch would be empty."""
    if args.batch_size < args.micro_batches:
        parser.error(f"--batch-size {args.batch_size} is less than --micro-batches {args.micro_batches}")


def place(args, grid):
    """Set the arguments that depend on this rank: grid, size, rank, verbose, and the stages of the network."""
    args.grid, args.rank, args.size = grid, grid.rank, grid.size
    args.verbose = args.rank == 0 and not args.quiet
    if args.boundaries is None:
        args.boundaries = grid.stages - 1
    if grid.stages not in (1, args.boundaries + 1):
        needed = args.boundaries + 1
        raise SystemExit(f"--boundaries {args.boundaries} needs {needed} ranks a replica, or one; got {grid.stages}")
    if args.blocks <= args.boundaries:
        raise SystemExit(f"--blocks must be more than there are boundaries, {args.boundaries}; got {args.blocks}")
    args.warmup_steps = reporting.warmup_steps(args.warmup_steps, args.steps)


def stages_here(args):
    """Return the numbers of this rank's stages: one, or all stages if a replica has one rank."""
    return range(args.boundaries + 1) if args.grid.stages == 1 else [args.grid.stage]


def blocks_of(stage, args):
    """Return the numbers of the transformer's blocks that a stage has."""
    return np.array_split(np.arange(args.blocks), args.boundaries + 1)[stage].tolist()


def is_first(stage):
    """Return whether a stage has the embedding."""
    return stage == 0


def is_last(stage, args):
    """Return whether a stage has the final normalisation and the decoder."""
    return stage == args.boundaries


class Text:
    """Windows of the text: characters, and each one's next, int64[batch, length]."""

    def __init__(self, args):
        self.args = args
        self.train_text, self.held_out_text = char_data.load_text()

    def batches(self):
        """Yield batches endlessly, drawn by seed and replica: the same on all stages of a replica."""
        random = np.random.default_rng([self.args.seed, self.args.grid.replica])
        while True:
            yield self._windows(self.train_text, random, self.args.batch_size)

    def held_out(self):
        """Yield batches of the held-out text, always the same."""
        random = np.random.default_rng(7)
        for _ in range(HELD_OUT_BATCHES):
            yield self._windows(self.held_out_text, random, HELD_OUT_ROWS)

    def _windows(self, text, random, rows):
        length = self.args.sequence_length
        starts = random.integers(0, len(text) - length, rows)
        windows = text[starts[:, None] + np.arange(length + 1)]
        return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])


def train(trainer, args):
    """Train; return one dict of metrics per evaluation."""
    text, rows, losses, interval = Text(args), [], [], math.ceil(args.steps / args.evaluations)
    batches = text.batches()
    with reporting.Progress(args.steps, args) as bar:
        for number in range(1, args.steps + 1):
            rate = reporting.learning_rate(args.lr, number - 1, args.steps, args.warmup_steps)
            losses.append(trainer.step(*next(batches), rate))
            bar.update()
            if number % interval == 0 or number == args.steps:
                loss = float(np.mean([trainer.evaluate(*batch) for batch in text.held_out()]))
                train_loss = float(np.mean(losses))
                rows.append(
                    {"step": number, "train_loss": train_loss, "loss": loss, "perplexity": char_data.perplexity(loss)}
                )
                bar.set_postfix(loss=f"{loss:.3f}", perplexity=f"{rows[-1]['perplexity']:.2f}")
                bar.report({key: float(value) for key, value in rows[-1].items()})
                losses = []
    return rows


def report(example, rows, everyone, seconds, args):
    """Print a table and a JSON line of all ranks' reports, then draw the plot; on rank 0."""
    if args.verbose:
        print("\nsent between stages, headers included")
        reporting.print_table([table_row(one) for one in everyone])
    settings = {name: getattr(args, name) for name in SETTINGS}
    results = {name: rows[-1][name] for name in ("loss", "perplexity")} | summary(everyone)
    places = {"world_size": args.size, "stages": args.grid.stages, "replicas": args.grid.replicas}
    reporting.print_record({"example": example, **results, "seconds": seconds, **settings, **places})
    if args.plot:
        title = f"{args.boundaries} boundaries, density {args.density:g}, {args.threshold}"
        plots.plot_curves(rows, "step", [["train_loss", "loss"], ["perplexity"]], title, args.plot)


def describe(trainer, args):
    """Return a rank's report."""
    grid = args.grid
    occupancies = [one["mean_occupancy"] for one in trainer.boundaries()]
    places = {"rank": grid.rank, "stage": grid.stage, "replica": grid.replica, "stages": grid.stages}
    return {**places, **trainer.stats(), "inside": occupancies, "dp_ratio": trainer.dp_ratio()}


def table_row(one):
    """Return a rank's row of the traffic table."""
    row = {name: one[name] for name in ("rank", "replica", "stage")}
    for name in ("forward", "backward"):
        dense, sent = (one[name][f"{what}_bytes"] / 1e6 for what in ("dense", "sent"))
        row |= {f"{name}, MB": dense, f"{name} sent": sent, f"{name} ratio": one[name]["ratio"]}
    return {**row, "occupancy": one["occupancy"], "targets, MB": one["targets_bytes"] / 1e6}


def summary(everyone):
    """Return the JSON fields of the traffic: the occupancy of all boundaries, and the compression ratios."""
    result = {"occupancy": occupancy(everyone)}
    for name in ("forward", "backward"):
        dense, sent = (sum(one[name][f"{what}_bytes"] for one in everyone) for what in ("dense", "sent"))
        result[f"{name}_ratio"] = dense / sent if sent else 1.0
    ratios = [one["dp_ratio"] for one in everyone]
    return {**result, "dp_ratio": len(ratios) / sum(1.0 / ratio for ratio in ratios)}


def occupancy(everyone):
    """Return the mean retained fraction of all boundaries, between and within ranks; 1.0 without boundaries."""
    between = [one["occupancy"] for one in everyone if one["stage"] < one["stages"] - 1]
    kept = between + [value for one in everyone for value in one["inside"]]
    return float(np.mean(kept)) if kept else 1.0


def run(example, description, make_trainer, *, prepare=None, connect=None, add_arguments=None):
    """Run an example on every rank.

    make_trainer(args, communicator): see above. prepare(args): sets the framework up. connect(args): starts Horovod and
    returns grid and communicator; without it all ranks are stages of one pipeline. add_arguments: see
    `parse_arguments`.
    """
    args = parse_arguments(description, add_arguments)
    if connect is None:
        world = MPI.COMM_WORLD
        grid, communicator = ProcessGrid(world.Get_rank(), world.Get_size(), world.Get_size()), world
    else:
        grid, communicator = connect(args)
    place(args, grid)
    if prepare is not None:
        prepare(args)
    trainer = make_trainer(args, communicator)
    begin = time.perf_counter()
    rows = train(trainer, args)
    trainer.close()
    everyone = MPI.COMM_WORLD.gather(describe(trainer, args), 0)
    if args.rank == 0:
        report(example, rows, everyone, time.perf_counter() - begin, args)
