"""Train a click model in stages and in replicas at once, sparse on every link (DCT-MP and DCT-DP).

    mpirun -np 4 python examples/pytorch_dct_hybrid.py                      # two stages, two replicas
    mpirun -np 6 python examples/pytorch_dct_hybrid.py --stages 3 --density 0.1

The clicks are synthetic: see `click_data.py`. The network is like DLRM, the splits are those of "Dynamic
Communication Thresholding" (Gupta et al., 2021, section 3.1 and tables 1 to 3). Activations are sent by MPI between the
stages of a replica, gradients by Horovod between the replicas of a stage, with `Compression.dct`.
"""

import argparse
import math
import time

import click_data
import horovod.torch as hvd
import model_parallel_run
import numpy as np
import pytorch_click_model as model
import reporting
import torch
import torch.nn.functional as F
from mpi4py import MPI

from hvd_sparse.model_parallel import SCHEDULES, THRESHOLDS
from hvd_sparse.torch import Compression
from hvd_sparse.torch.model_parallel import Pipeline, ThresholdBoundary, hybrid

SETTINGS = "stages density threshold dp_density lifespan steps batch_size micro_batches schedule lr seed".split()
DENSITY, THRESHOLD = 0.05, "topk"  # of boundaries


def parse_arguments():
    """Read the command line, start Horovod, and say where this rank is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, choices=(1, 2, 3), default=2, help="(default: %(default)s)")
    parser.add_argument(
        "--order", choices=("pipeline", "replica"), default="pipeline", help="which ranks are neighbours"
    )
    parser.add_argument(
        "--density", type=reporting.density, help=f"of activations; 1 is dense (default: {DENSITY}); not of one stage"
    )
    parser.add_argument("--threshold", choices=THRESHOLDS, help=f"(default: {THRESHOLD}); not of one stage")
    parser.add_argument(
        "--dp-density", type=reporting.density, default=0.05, help="of gradients; 1 is dense (default: %(default)s)"
    )
    parser.add_argument("--lifespan", type=reporting.positive_integer, help="of dct, for gradients (default: its own)")
    parser.add_argument("--steps", type=reporting.positive_integer, default=2000, help="(default: %(default)s)")
    parser.add_argument(
        "--rows", type=reporting.positive_integer, default=200000, help="of data (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=reporting.positive_integer, default=128, help="of a replica (default: %(default)s)"
    )
    parser.add_argument("--micro-batches", type=reporting.positive_integer, default=1, help="(default: %(default)s)")
    parser.add_argument("--schedule", choices=tuple(SCHEDULES), default="gpipe", help="(default: %(default)s)")
    parser.add_argument("--lr", type=reporting.positive, default=1e-3, help="of Adam (default: %(default)s)")
    parser.add_argument("--evaluations", type=reporting.positive_integer, default=5, help="(default: %(default)s)")
    parser.add_argument("--seed", type=reporting.whole_number, default=0, help="(default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="print the JSON line only")
    args = parser.parse_args()
    model_parallel_run.check_micro_batches(parser, args)
    boundaries = dict.fromkeys(("--density", "--threshold"), ("2", "3"))
    reporting.refuse_others(parser, args, boundaries, [str(args.stages)], "--stages")
    args.density, args.threshold = args.density or DENSITY, args.threshold or THRESHOLD
    if args.lifespan is not None and args.dp_density == 1.0:
        parser.error("--lifespan is for --dp-density below 1: gradients are dense")
    try:
        where = hybrid(args.stages, args.order)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    args.rank, args.grid = where.grid.rank, where.grid
    try:
        click_data.check_rows(args.rows, args.batch_size, args.grid.replicas)
    except ValueError as error:
        parser.error(str(error))
    args.verbose = args.rank == 0 and not args.quiet
    return args, where


class Trainer:
    """This rank's stage, its pipeline, and Horovod's optimizer of its replicas."""

    def __init__(self, args, where):
        grid = where.grid
        self.stage = model.make_stages(args.stages, args.seed)[grid.stage]
        self.pipeline = Pipeline(
            self.stage,
            boundary=model.boundary_of(self.stage, ThresholdBoundary(args.density, args.threshold)),
            micro_batches=args.micro_batches,
            schedule=args.schedule,
            loss=F.binary_cross_entropy_with_logits,
            communicator=where.communicator,
        )
        named = list(self.stage.named_parameters())
        self.compression = hvd.Compression.none
        self.dense_bytes = 4 * sum(parameter.numel() for _, parameter in named)
        if args.dp_density < 1.0 and grid.replicas > 1:
            given = {} if args.lifespan is None else {"lifespan": args.lifespan}
            self.compression = Compression.dct(named, args.dp_density, process_set=where.process_set, **given)
            args.lifespan = self.compression.algorithm.lifespan
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(self.stage.parameters(), lr=args.lr),
            named_parameters=named,
            compression=self.compression,
            backward_passes_per_step=args.micro_batches,
            process_set=where.process_set,
        )

    def step(self, clicks, batch):
        """Train on a batch; return this replica's loss."""
        self.optimizer.zero_grad()
        loss = self.pipeline.step(*data(clicks, batch))
        self.optimizer.step()
        return loss

    def evaluate(self, clicks):
        """Return the loss of the test set."""
        return self.pipeline.evaluate(*data(clicks, slice(None)))

    def accuracy(self, clicks):
        """Return the accuracy in percent, on the last stage; None elsewhere."""
        inputs, labels = data(clicks, slice(None))
        logits = self.pipeline.predict(inputs)
        return None if logits is None else 100.0 * ((logits > 0) == (labels > 0)).double().mean().item()

    def traffic(self, args):
        """Return this rank's traffic: forward, backward, and to the replicas of its stage."""
        gradients = {"dense_bytes": self.dense_bytes * args.steps, "sent_bytes": self.dense_bytes * args.steps}
        if hasattr(self.compression, "stats"):
            total = self.compression.stats()["total"]
            gradients = {"dense_bytes": total["dense_bytes"], "sent_bytes": total["payload_bytes"]}
        if args.grid.replicas == 1:
            gradients = {"dense_bytes": 0, "sent_bytes": 0}
        stats = self.pipeline.stats()
        place = {"rank": args.rank, "stage": args.grid.stage, "replica": args.grid.replica}
        return {**place, **{name: stats[name] for name in ("forward", "backward", "occupancy")}, "replicas": gradients}


def data(clicks, rows):
    """Return ((features, categories), labels) of some rows."""
    inputs = torch.from_numpy(clicks.dense[rows]), torch.from_numpy(clicks.categories[rows])
    return inputs, torch.from_numpy(clicks.clicked[rows])


def train(trainer, args):
    """Train; return one dict of metrics per evaluation."""
    clicks, test = click_data.Clicks(args.rows, seed=0), click_data.Clicks(max(1, args.rows // 10), seed=1)
    grid, rows, losses = args.grid, [], []
    batches = click_data.batches(clicks, args.batch_size, args.seed, grid.replica, grid.replicas)
    interval = math.ceil(args.steps / args.evaluations)
    with reporting.Progress(args.steps, args) as bar:
        for number in range(1, args.steps + 1):
            losses.append(trainer.step(clicks, next(batches)))
            bar.update()
            if number % interval == 0 or number == args.steps:
                loss = trainer.evaluate(test)
                rows.append({"step": number, "train_loss": float(np.mean(losses)), "loss": loss})
                bar.set_postfix(loss=f"{loss:.4f}", best=f"{test.best_loss():.4f}")
                bar.report(rows[-1])
                losses = []
    rows[-1]["accuracy"] = trainer.accuracy(test)
    return rows


def report(rows, everyone, seconds, args):
    """Print the traffic of every link, and a JSON line; on rank 0."""
    links = [traffic for traffic, _ in everyone]
    if args.verbose:
        print("\nwhat each rank sent: MB dense would be, MB sent")
        reporting.print_table([table_row(one) for one in links])
    ratios = {}
    for name, link in (("forward_ratio", "forward"), ("backward_ratio", "backward"), ("dp_ratio", "replicas")):
        dense, sent = (sum(one[link][f"{what}_bytes"] for one in links) for what in ("dense", "sent"))
        ratios[name] = dense / sent if sent else 1.0
    kept = [one["occupancy"] for one in links if one["stage"] < args.stages - 1]
    accuracy = float(np.mean([found for _, found in everyone if found is not None]))
    results = {"loss": rows[-1]["loss"], "accuracy": accuracy, "occupancy": float(np.mean(kept)) if kept else 1.0}
    settings = {name: getattr(args, name) for name in SETTINGS}
    places = {"world_size": args.grid.size, "replicas": args.grid.replicas}
    record = {"example": "pytorch_dct_hybrid", **results, **ratios, "seconds": seconds, **settings, **places}
    reporting.print_record({**record, "data": "generated", "links": links})


def table_row(one):
    """Return a rank's row of the table."""
    row = {name: one[name] for name in ("rank", "stage", "replica")}
    for name in ("forward", "backward", "replicas"):
        row |= {name: one[name]["dense_bytes"] / 1e6, f"{name} sent": one[name]["sent_bytes"] / 1e6}
    return row


def main():
    """Train on every rank; the first reports."""
    args, where = parse_arguments()
    torch.set_num_threads(1)
    for line in MPI.COMM_WORLD.gather(args.grid.describe(), 0) or []:
        if args.verbose:
            print(line)
    trainer = Trainer(args, where)
    begin = time.perf_counter()
    rows = train(trainer, args)
    everyone = MPI.COMM_WORLD.gather((trainer.traffic(args), rows[-1]["accuracy"]), 0)
    trainer.pipeline.close()
    if args.rank == 0:
        report(rows, everyone, time.perf_counter() - begin, args)


if __name__ == "__main__":
    main()
