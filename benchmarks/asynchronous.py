"""Quality of asynchronous methods at many workers, in one process with a decided order of arrivals; writes the tables.

    make results-asynchronous      or: python benchmarks/asynchronous.py --workers 1 4 8 16 32 --seeds 0 1 2

Two layers (64, 128, 10) on scikit-learn's digits: small, for many updates of each worker. Workers are equally fast, but
for 20 % at random, so that an update is about as stale as there are other workers. All runs make the same number of
updates with the same rates, each of a batch of one worker. Servers, workers and messages are those that run over MPI.
Last line: one JSON object. The same as Table 3 of DGS (Yan et al., 2020), at another size.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
from pathlib import Path

import numpy as np
from convergence import RESULTS, machine
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
SPARSE = {"density": 0.01, "min_numel": 0}
METHODS = {  # name: method, its settings; the momentum is added
    "msgd": ("msgd", {}),
    "asgd": ("asgd", {}),
    "gd_async": ("gd_async", SPARSE),
    "dgc_async": ("dgc_async", SPARSE),
    "dgs": ("dgs", SPARSE),
    "dgs, pull 0.01": ("dgs", {**SPARSE, "pull_density": 0.01}),
}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 8, 16, 32], help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: %(default)s)")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS)[:5], help="(default: %(default)s)"
    )
    parser.add_argument("--updates", type=int, default=20000, help="of all workers together (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="of a worker (default: %(default)s)")
    parser.add_argument(
        "--lr", type=float, default=0.05, help="a tenth of it after 60 and 80 %% (default: %(default)s)"
    )
    parser.add_argument("--momentum", type=float, default=0.7, help="(default: %(default)s)")
    parser.add_argument("--low-momentum", type=float, default=0.3, help="of more rows, at the most workers; 0: none")
    parser.add_argument("--processes", type=int, default=2, help="runs at the same time (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def planned(args: argparse.Namespace) -> list[dict]:
    """Return what to run: msgd on one worker, the others on all numbers of them, the most with a lower momentum too."""
    runs = []
    for name in args.methods:
        for workers in [1] if name == "msgd" else args.workers:
            momenta = [args.momentum if name not in ("asgd", "gd_async") else 0.0]
            if args.low_momentum and momenta[0] and workers == max(args.workers) > 1:
                momenta.append(args.low_momentum)
            runs += [
                {"name": name, "workers": workers, "momentum": momentum, "seed": seed}
                for momentum in momenta
                for seed in args.seeds
            ]
    return runs


def train(job: tuple[dict, argparse.Namespace]) -> dict:
    """Train once; return the run with its results."""
    import digits_data
    import torch

    from hvd_sparse.parameter_server import METHODS as CLASSES
    from hvd_sparse.parameter_server import Simulation, by_speed

    run, args = job
    torch.set_num_threads(1)
    torch.manual_seed(run["seed"])
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    train_images, test_images, train_labels, test_labels = digits_data.load()
    name, settings = METHODS[run["name"]]
    momentum = {"momentum": run["momentum"]} if run["momentum"] else {}
    start = {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}
    simulation = Simulation(CLASSES[name](**settings, **momentum), start, run["workers"])
    random = [np.random.default_rng([run["seed"], worker]) for worker in range(run["workers"])]

    def load(parameters) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(parameters[name]))

    def gradients(worker, parameters):
        load(parameters)
        batch = random[worker].integers(0, len(train_images), args.batch_size)
        images = torch.from_numpy(digits_data.shifted(train_images[batch], random[worker]))
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(images), torch.from_numpy(train_labels[batch])).backward()
        return {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}

    def rate(done: int) -> float:
        return args.lr * 0.1 ** sum(done >= part * args.updates for part in (0.6, 0.8))

    arrivals = by_speed([1.0] * run["workers"], run["seed"])
    simulation.run(arrivals, args.updates, gradients, rate)
    load(simulation.parameters())
    labels = torch.from_numpy(test_labels)
    with torch.no_grad():
        output = model(torch.from_numpy(test_images))
    return {
        **run,
        "accuracy": 100.0 * (output.argmax(1) == labels).double().mean().item(),
        "loss": torch.nn.functional.cross_entropy(output, labels).item(),
        **traffic(simulation),
    }


def traffic(simulation) -> dict:
    """Return what was sent, over what dense updates both ways would have taken, and how stale updates were."""
    own = [worker.traffic for worker in simulation.workers]
    dense = 4 * simulation.layout.numel * sum(one.pushes for one in own)
    hello = 4 * simulation.layout.numel * len(own)  # the parameters that each began with
    stale = simulation.servers[0].statistics.staleness
    return {
        "ratio_up": dense / sum(one.bytes_up for one in own),
        "ratio_down": dense / (sum(one.bytes_down for one in own) - hello),
        "staleness": sum(steps * count for steps, count in stale.items()) / sum(stale.values()),
    }


def table(results: list[dict]) -> str:
    """Return a Markdown table: a row for each method, number of workers and momentum, over the seeds."""
    lines = [
        "| method | workers | momentum | accuracy, % | lowest to highest | loss | staleness | ratio up | ratio down |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    keys = list(dict.fromkeys((run["workers"], run["name"], run["momentum"]) for run in results))
    for workers, name, momentum in sorted(keys, key=lambda key: (key[0], -key[2])):
        runs = [run for run in results if (run["workers"], run["name"], run["momentum"]) == (workers, name, momentum)]
        found = sorted(run["accuracy"] for run in runs)
        mean = {
            key: statistics.mean(run[key] for run in runs) for key in ("loss", "staleness", "ratio_up", "ratio_down")
        }
        lines.append(
            f"| {name} | {workers} | {momentum:g} | {statistics.mean(found):.2f} | {found[0]:.2f} to {found[-1]:.2f} | "
            f"{mean['loss']:.4f} | {mean['staleness']:.1f} | {mean['ratio_up']:.1f} | {mean['ratio_down']:.1f} |"
        )
    return "\n".join(lines)


def write(results: list[dict], settings: dict, out: Path) -> str:
    """Write runs and table; return the table."""
    out.mkdir(parents=True, exist_ok=True)
    summary = {"settings": settings, "machine": machine(), "runs": results}
    (out / "asynchronous.json").write_text(json.dumps(summary, indent=1) + "\n")
    text = table(results)
    (out / "asynchronous.md").write_text(f"{text}\n")
    return text


def made_before(settings: dict, out: Path) -> list[dict]:
    """Return the runs that a call with these settings has written."""
    file = out / "asynchronous.json"
    summary = json.loads(file.read_text()) if file.exists() else {"settings": None}
    return summary["runs"] if summary["settings"] == settings else []


def main() -> None:
    """Run what is missing, and write all of it after each run."""
    args = parse_arguments()
    settings = {key: getattr(args, key) for key in ("updates", "batch_size", "lr")}
    results = made_before(settings, args.out)
    known = [{key: run[key] for key in ("name", "workers", "momentum", "seed")} for run in results]
    jobs = [(run, args) for run in planned(args) if run not in known]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        for result in tqdm(pool.imap(train, jobs), total=len(jobs), unit="run"):
            results.append(result)
            write(results, settings, args.out)
    print(write(results, settings, args.out))
    print(json.dumps({"benchmark": "asynchronous", **settings, "runs": len(results)}))


if __name__ == "__main__":
    main()
