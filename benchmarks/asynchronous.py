"""Compare the quality of asynchronous methods with many workers, simulated in one process; write the tables.

    make results-asynchronous      or: python benchmarks/asynchronous.py --tasks digits --workers 4 8 --seeds 0 1
    python benchmarks/asynchronous.py --name dct_figure_8 --tasks digits --workers 8 --rates 0.05 --seeds 0 1 2 \\
        --methods asgd dct_async/{0.05,0.05/1,0.05/10,0.05/100,0.25,0.1,0.02,0.005}

The simulation decides the order in which pushes arrive. Workers have equal speed, with a random variation of 20 %, so
the staleness of an update is about the number of other workers. All runs of a task make the same number of updates;
each update is one worker's gradient of one batch. Each row of the table is a method with a number of workers. Its
learning rate is the best of a grid that is the same for all rows, tuned with a separate seed. The momentum is 0.7 up to
8 workers, 0.45 up to 16, then 0.3. Servers, workers and messages are the code that runs over MPI.

Runs that the file already has are skipped, so a call continues an interrupted one. Runs of another batch size are never
overwritten. The last line of output is one JSON object. The setting is that of Table 3 of DGS (Yan et al., 2020), at
another scale.

The second command has Figures 8b and 8d of "Dynamic Communication Thresholding" (Gupta et al., 2021): the loss for
life-spans at density 0.05, and for densities at a life-span of 1000.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
import time
from pathlib import Path

import numpy as np
from common import RESULTS, missing, refuse_other_settings
from machine import machine
from tqdm import tqdm

SPARSE = {"density": 0.01, "min_numel": 0}
METHODS = {  # {name: (method, settings)}; the momentum is added
    "asgd": ("asgd", {}),
    "gd_async": ("gd_async", SPARSE),
    "dgc_async": ("dgc_async", SPARSE),
    "dgs": ("dgs", SPARSE),
    "dgs, pull 0.01": ("dgs", {**SPARSE, "pull_density": 0.01}),
    "msgd": ("msgd", {}),
}
COMPARED = tuple(METHODS)
LIFESPAN = 1000
METHODS |= {  # {"dct_async/DENSITY/LIFESPAN": ...}
    f"dct_async/{density}{f'/{lifespan}' * (lifespan < LIFESPAN)}": (
        "dct_async",
        {**SPARSE, "density": density, "lifespan": lifespan, "band": None},
    )
    for density, lifespan in [
        *itertools.product([0.05], [1, 10, 100, LIFESPAN]),
        *itertools.product([0.25, 0.1, 0.02, 0.005], [LIFESPAN]),
    ]
}
UPDATES = {"digits": 20_000, "char_lstm": 8_000}  # number of updates by all workers together
RATES = [0.005, 0.015, 0.05, 0.15]
TUNING_SEED = 1000
KEYS = ("task", "updates", "name", "workers", "momentum", "lr", "seed")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=UPDATES, default=list(UPDATES), help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8, 16, 32], help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="(default: %(default)s)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(COMPARED), help="(default: %(default)s)")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="learning rates (default: %(default)s)")
    parser.add_argument("--updates", type=int, help=f"of all workers together (default: {UPDATES})")
    parser.add_argument("--batch-size", type=int, default=8, help="of a worker (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="runs at the same time (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run after so many")
    parser.add_argument("--name", default="asynchronous_tuned", help="of the files (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def momentum_of(name: str, workers: int) -> float:
    """Return the momentum for a number of workers: the paper's on CIFAR-10, on ImageNet, and its trial on 32."""
    if METHODS[name][0] in ("asgd", "gd_async", "dct_async"):
        return 0.0
    return 0.7 if workers <= 8 else 0.45 if workers <= 16 else 0.3


def rows_of(args: argparse.Namespace) -> list[dict]:
    """Return the rows to tune and train: msgd with one worker, the others with each number of workers."""
    return [
        {
            "task": task,
            "updates": args.updates or UPDATES[task],
            "name": name,
            "workers": count,
            "momentum": momentum_of(name, count),
        }
        for task in args.tasks
        for workers in args.workers
        for name in args.methods
        for count in ([1] if name == "msgd" else [workers])
    ]


def train(job: tuple[dict, int]) -> dict:
    """Train once; return a record of the run with its results."""
    import torch
    from asynchronous_tasks import TASKS

    from hvd_sparse.parameter_server import METHODS as CLASSES
    from hvd_sparse.parameter_server import Simulation, by_speed

    run, batch_size = job
    began = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(run["seed"])
    task = TASKS[run["task"]](batch_size)
    named = dict(task.model.named_parameters())
    name, settings = METHODS[run["name"]]
    momentum = {"momentum": run["momentum"]} if run["momentum"] else {}
    start = {name: parameter.detach().numpy().copy() for name, parameter in named.items()}
    simulation = Simulation(CLASSES[name](**settings, **momentum), start, run["workers"])
    random = [np.random.default_rng([run["seed"], worker]) for worker in range(run["workers"])]

    def load(parameters) -> None:
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(torch.from_numpy(parameters[name]))

    def gradients(worker, parameters):
        load(parameters)
        task.model.zero_grad()
        task.loss(random[worker], worker).backward()
        return {name: parameter.grad.numpy() for name, parameter in named.items()}

    def rate(done: int) -> float:
        return run["lr"] * 0.1 ** sum(done >= part * run["updates"] for part in (0.6, 0.8))

    simulation.run(by_speed([1.0] * run["workers"], run["seed"]), run["updates"], gradients, rate)
    load(simulation.parameters())
    with torch.no_grad():
        metric, loss = task.evaluate()
    return {**run, "metric": metric, "loss": loss, **traffic(simulation), "seconds": time.monotonic() - began}


def traffic(simulation) -> dict:
    """Return the traffic relative to dense updates in both directions, and the mean staleness."""
    own = [worker.traffic for worker in simulation.workers]
    dense = 4 * simulation.layout.numel * sum(one.pushes for one in own)
    hello = 4 * simulation.layout.numel * len(own)  # bytes of the initial parameters of all workers
    stale = simulation.servers[0].statistics.staleness
    return {
        "ratio_up": dense / sum(one.bytes_up for one in own),
        "ratio_down": dense / (sum(one.bytes_down for one in own) - hello),
        "staleness": sum(steps * count for steps, count in stale.items()) / sum(stale.values()),
    }


def of(runs: list[dict], row: dict) -> list[dict]:
    """Return the runs of a row."""
    return [run for run in runs if all(run[key] == value for key, value in row.items())]


def best_rate(runs: list[dict], row: dict, rates: list[float]) -> float | None:
    """Return the learning rate of the tuning run with the lowest loss; None if a tuning run is missing.

    With one rate there is nothing to tune.
    """
    if len(rates) == 1:
        return rates[0]
    tried = {run["lr"]: run["loss"] for run in of(runs, {**row, "seed": TUNING_SEED}) if run["lr"] in rates}
    if len(tried) < len(rates):
        return None
    return min(tried, key=lambda rate: tried[rate] if math.isfinite(tried[rate]) else math.inf)


def table(runs: list[dict], task: str, updates: int, rates: list[float]) -> str:
    """Return a Markdown table of a task: one row for each method and number of workers, means over the seeds."""
    metric = {"digits": "accuracy, %", "char_lstm": "perplexity"}[task]
    lines = [
        f"| method | workers | momentum | rate | seeds | {metric} | lowest to highest | loss | ratio up | ratio down |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    where = {"task": task, "updates": updates}
    rows = list(dict.fromkeys((run["workers"], run["name"], run["momentum"]) for run in of(runs, where)))
    for workers, name, momentum in sorted(rows, key=lambda row: (row[0], list(METHODS).index(row[1]))):
        row = {**where, "workers": workers, "name": name, "momentum": momentum}
        rate = best_rate(runs, row, rates)
        own = [run for run in of(runs, {**row, "lr": rate}) if run["seed"] != TUNING_SEED]
        if not own:
            continue
        found = sorted(run["metric"] for run in own)
        mean = {key: statistics.mean(run[key] for run in own) for key in ("loss", "ratio_up", "ratio_down")}
        lines.append(
            f"| {name} | {workers} | {momentum:g} | {rate:g} | {len(own)} | {statistics.mean(found):.2f} | "
            f"{found[0]:.2f} to {found[-1]:.2f} | {mean['loss']:.4f} | {mean['ratio_up']:.1f} | "
            f"{mean['ratio_down']:.1f} |"
        )
    return "\n".join(lines)


def write(runs: list[dict], args: argparse.Namespace) -> str:
    """Write runs and tables; return the tables."""
    args.out.mkdir(parents=True, exist_ok=True)
    summary = {"rates": args.rates, "batch_size": args.batch_size, "machine": machine(), "runs": runs}
    (args.out / f"{args.name}.json").write_text(json.dumps(summary, indent=1) + "\n")
    kinds = list(dict.fromkeys((run["task"], run["updates"]) for run in runs))
    text = "\n\n".join(
        f"## {task}, {updates} updates\n\n{table(runs, task, updates, args.rates)}" for task, updates in kinds
    )
    page = args.out / f"{args.name}.md"
    head = page.read_text().split("\n## ")[0].rstrip() if page.exists() else "# Rates tuned for each method"
    page.write_text(f"{head}\n\n{text}\n")
    return text


def made_before(args: argparse.Namespace) -> list[dict]:
    """Return the runs in the file; exit if they are of another batch size."""
    file = args.out / f"{args.name}.json"
    wanted = {"batch_size": args.batch_size}
    summary = json.loads(file.read_text()) if file.exists() else {**wanted, "runs": []}
    refuse_other_settings(file, {"batch_size": summary.get("batch_size")}, wanted)
    return summary["runs"]


def run_missing(wanted: list[dict], runs: list[dict], args: argparse.Namespace, end: float, pool) -> None:
    """Train the missing runs until `end`, and write the results after each run."""
    keys = missing([tuple(run[key] for key in KEYS) for run in wanted], runs, KEYS)
    jobs = iter([(dict(zip(KEYS, run, strict=True)), args.batch_size) for run in keys])
    timely = (job for job in jobs if time.monotonic() < end)
    waiting = [pool.apply_async(train, (job,)) for _, job in zip(range(args.processes), timely, strict=False)]
    with tqdm(unit="run") as progress:
        while waiting:
            runs.append(waiting.pop(0).get())
            write(runs, args)
            progress.update()
            waiting += [pool.apply_async(train, (job,)) for _, job in zip(range(1), timely, strict=False)]


def main() -> None:
    """Tune and then train what is missing."""
    args = parse_arguments()
    end, runs = time.monotonic() + args.seconds, made_before(args)
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        for row in {json.dumps(row): row for row in rows_of(args)}.values():
            if len(args.rates) > 1:
                tuning = [{**row, "lr": rate, "seed": TUNING_SEED} for rate in args.rates]
                run_missing(tuning, runs, args, end, pool)
            rate = best_rate(runs, row, args.rates)
            if rate is not None:
                run_missing([{**row, "lr": rate, "seed": seed} for seed in args.seeds], runs, args, end, pool)
    print(write(runs, args))
    print(json.dumps({"benchmark": "asynchronous", "runs": len(runs), "seconds": sum(run["seconds"] for run in runs)}))


if __name__ == "__main__":
    main()
