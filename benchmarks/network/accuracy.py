"""Train two examples on hosts joined by a slow network: seconds until each method is as good as dense training's end.

    python benchmarks/network/accuracy.py --hosts 4 --rates 100mbit 1gbit --seeds 0 1 2

Each run starts an example as a user would, with mpirun over the hosts, and records the time of each line of its table.
Writes results/network_accuracy.json, .md and .png, and skips runs that the file already has. The last line of output is
one JSON object.
"""

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import RESULTS, ROOT, load, missing, save
from curves import Curve, follow
from hosts import Hosts, enter_switch, hosts
from records import UNLIMITED

KEYS = ("example", "rate", "method", "seed", "hosts")


class Example(NamedTuple):
    """A script, its options, and the column of its table that measures the model's quality."""

    script: str
    options: list[str]
    metric: str
    is_better: str  # "higher" or "lower"
    steps: int = 0  # steps of dense training, a tenth of them warm-up; 0: as in `options`


EXAMPLES = {
    "digits": Example("pytorch_digits.py", ["--epochs", "30", "--warmup-epochs", "3"], "accuracy", "higher"),
    "char_lstm": Example(
        "pytorch_char_lstm.py",
        ["--evaluations", "20", "--hidden", "256"],
        "perplexity",
        "lower",
        steps=1000,
    ),
}
LONGER = 1.5  # if the example counts steps, DGC and PowerSGD train this many times as many steps
METHODS = {
    "dense": ["--method", "none"],
    "fp16": ["--method", "fp16"],
    "dgc": ["--method", "dgc", "--density", "0.001"],
    "dgc_0.01": ["--method", "dgc", "--density", "0.01"],
    "ddp": ["--host", "ddp"],
    "ddp_fp16": ["--host", "ddp", "--method", "fp16"],
    "powersgd": ["--host", "ddp", "--powersgd", "1"],
    "powersgd_4": ["--host", "ddp", "--powersgd", "4"],
    "ddp_dgc": ["--host", "ddp", "--method", "dgc", "--density", "0.001"],
    "ddp_dgc_0.01": ["--host", "ddp", "--method", "dgc", "--density", "0.01"],
}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"], help="(default: %(default)s)")
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=list(EXAMPLES), help="(default: all)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="(default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def train(lab: Hosts, run: dict) -> Curve:
    """Train, and return the curve of the run."""
    example = EXAMPLES[run["example"]]
    options = [*example.options, *METHODS[run["method"]], "--seed", str(run["seed"]), "--plot", ""]
    if example.steps:
        is_longer = "--density" in options or "--powersgd" in options
        steps = round(example.steps * (LONGER if is_longer else 1.0))
        options += ["--steps", str(steps), "--warmup-steps", str(steps // 10)]
    command = lab.mpirun([sys.executable, str(ROOT / "examples" / example.script), *options])
    meeting = {"MASTER_ADDR": lab.addresses[0], "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}  # for DDP's ranks
    return follow(command, example.metric, meeting)


def describe(run: dict) -> str:
    """Return the name of a run."""
    return f"{run['example']}, {run['rate']}, {run['method']}, seed {run['seed']}"


def seconds_until(curve: Curve, goal: float, is_better: str) -> float | None:
    """Return the time at which a metric first reached a goal; None if it never did."""
    sign = 1 if is_better == "higher" else -1
    return next((seconds for seconds, metric in curve if sign * metric >= sign * goal), None)


def summarize(results: list[dict]) -> list[dict]:
    """Return one row for each example, rate and method: medians over the seeds that reached the goal.

    The goal is the final metric of dense training at the same rate, under Horovod, or under DDP if Horovod did not run:
    the median over its seeds.
    """
    rows = []
    for example, rate, method in dict.fromkeys((one["example"], one["rate"], one["method"]) for one in results):
        row = {"example": example, "rate": rate, "method": method}
        own = [one for one in results if all(one[key] == row[key] for key in row)]
        same = [one for one in results if (one["example"], one["rate"]) == (example, rate)]
        ends = {host: [one["curve"][-1][1] for one in same if one["method"] == host] for host in ("dense", "ddp")}
        dense = ends["dense"] or ends["ddp"]
        if not dense:
            continue
        goal = statistics.median(dense)
        times = [seconds_until(one["curve"], goal, EXAMPLES[example].is_better) for one in own]
        reached = [seconds for seconds in times if seconds is not None]
        row |= {
            "seeds": len(own),
            "reached": len(reached),
            "seconds": statistics.median(reached) if reached else None,
            "run_seconds": statistics.median(one["curve"][-1][0] for one in own),
            "metric": statistics.mean(one["curve"][-1][1] for one in own),
        }
        rows.append(row)
    return rows


def write(results: list[dict], count: int, folder: Path) -> list[dict]:
    """Write tables and plot; return the rows."""
    rows = summarize(results)
    lines = ["# Time to accuracy on slow networks", ""]
    lines += [
        f"{count} hosts. Seconds until a run reaches the goal: the median final figure of dense training's seeds",
        f"(DDP's, if Horovod was not run). DGC and PowerSGD train the LSTM {LONGER} times as many steps as dense.",
    ]
    for example, spec in EXAMPLES.items():
        if all(row["example"] != example for row in rows):
            continue
        lines += ["", f"## {example}", ""]
        lines += [f"| rate | method | seconds | seeds that got there | whole run, s | {spec.metric} at the end |"]
        lines += ["|---|---|---:|---:|---:|---:|"]
        for row in rows:
            if row["example"] == example:
                seconds = "never" if row["seconds"] is None else f"{row['seconds']:.0f}"
                cells = [row["rate"], row["method"], seconds, f"{row['reached']} of {row['seeds']}"]
                lines.append("| " + " | ".join([*cells, f"{row['run_seconds']:.0f}", f"{row['metric']:.4g}"]) + " |")
    (folder / "network_accuracy.md").write_text("\n".join([*lines, ""]))
    plot(results, folder / "network_accuracy.png")
    return rows


def plot(results: list[dict], path: Path) -> None:
    """Plot the metric against time: a panel for each example and rate, a line for each seed."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((one["example"], one["rate"]) for one in results))
    figure = Figure(figsize=(4.5 * len(panels), 3.6), layout="constrained")
    for axis, (example, rate) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True):
        for number, method in enumerate(METHODS):
            own = [one for one in results if (one["example"], one["rate"], one["method"]) == (example, rate, method)]
            for place, one in enumerate(own):
                label = method if place == 0 else None
                axis.plot(*zip(*one["curve"], strict=True), color=f"C{number}", label=label, linewidth=1)
        axis.set(title=f"{example}, {rate}", xlabel="seconds", ylabel=EXAMPLES[example].metric, xscale="log")
        axis.xaxis.set_minor_formatter("")  # labels at all ticks would overlap
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run what is missing, and write the report."""
    args = parse_arguments()
    enter_switch()
    path = args.out / "network_accuracy.json"
    results = [{"hosts": 4, **one} for one in load(path)]  # as all were that do not say it
    asked = itertools.product(args.examples, args.rates, args.methods, args.seeds, [args.hosts])
    with hosts(args.hosts) as lab:
        for wanted in missing(asked, results, KEYS):
            run = dict(zip(KEYS, wanted, strict=True))
            lab.shape(None if run["rate"] == UNLIMITED else run["rate"])
            run["curve"] = train(lab, run)
            results.append(run)
            save(path, results)
            seconds, metric = run["curve"][-1]
            print(f"{describe(run)}: {metric:.4g} after {seconds:.0f} s", flush=True)
    of_hosts = [one for one in results if one["hosts"] == args.hosts]
    print(json.dumps({"results": write(of_hosts, args.hosts, args.out)}))


if __name__ == "__main__":
    main()
