"""Compare gather, reduce-scatter and hierarchical exchange on hosts joined by a slow network; write the table.

    make bench-network-exchanges      or: python benchmarks/network/exchanges.py --rates 100mbit 1gbit none

Uses the hosts of `run.py`: eight hosts with one rank, and four hosts with two. The table has, for DGC at density 0.01,
the samples per second of one rank, the bytes per step that it passes to the network, and the prediction of
`hvd_sparse.performance_model` from the run without a limit. Writes results/network_exchanges.json and .md. The last
line of output is one JSON object.
"""

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import RESULTS, load, save
from hosts import enter_switch, hosts
from methods import EXCHANGES, METHODS, MODELS
from records import UNLIMITED, without_limit
from run import measure, middle
from validation import link_of, one_method

LAYOUTS = {"8x1": (8, 1), "4x2": (4, 2)}  # {name: (hosts, ranks per host)}
METHODS_OF = {1: [name for name in EXCHANGES if "hosts" not in name], 2: list(EXCHANGES)}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="(default: %(default)s)")
    parser.add_argument(
        "--rates", nargs="+", default=["100mbit", "250mbit", "1gbit", UNLIMITED], help="(default: %(default)s)"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["mlp10"], help="(default: %(default)s)")
    parser.add_argument("--methods", nargs="+", choices=EXCHANGES, default=list(EXCHANGES), help="(default: all)")
    parser.add_argument("--batch-size", type=int, default=8, help="of a rank (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="to measure for (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of all methods, to take medians (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def predicted(run: dict, results: list[dict]) -> float | None:
    """Return the predicted milliseconds of a step, with the profile from the run without a limit."""
    free = without_limit(run, results)
    if free is None or run["rate"] == UNLIMITED:
        return None
    ranks = run["hosts"] * run["ranks_per_host"]
    profiled = {**free, "hosts": ranks}
    return 1e3 * one_method(METHODS[run["method"]], profiled).step(link_of(run), ranks)


def table(results: list[dict]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = ["| model | hosts x ranks | rate | exchange | samples a second | MB out of a rank | ms, predicted |"]
    lines += ["|---|---|---|---|---:|---:|---:|"]
    for run in results:
        prediction = predicted(run, results)
        steps = f"{run['step_ms']:.1f}" + ("" if prediction is None else f", {prediction:.1f}")
        lines.append(
            f"| {run['model']} | {run['hosts']} x {run['ranks_per_host']} | {run['rate']} | "
            f"{METHODS[run['method']].label} | {run['samples_per_second']:.1f} | "
            f"{run['bytes_per_step'] / 1e6:.2f} | {steps} |"
        )
    return [*lines, ""]


def main() -> None:
    """Measure each layout, and write the report."""
    args = parse_arguments()
    enter_switch()
    path = args.out / "network_exchanges.json"
    results, session = load(path), time.strftime("%Y-%m-%d %H:%M")
    for layout, model in itertools.product(args.layouts, args.models):
        count, ranks = LAYOUTS[layout]
        with hosts(count, ranks) as lab:
            for rate in args.rates:
                lab.shape(None if rate == UNLIMITED else rate)
                point = {"framework": "pytorch", "model": model, "hosts": count, "rate": rate, "ranks_per_host": ranks}
                point |= {"batch_size": args.batch_size}
                rounds: dict[str, list[dict]] = {}
                asked = [name for name in METHODS_OF[ranks] if name in args.methods]
                for _, together in itertools.groupby(asked, key=lambda name: METHODS[name].package == "ddp"):
                    for figures in measure(lab, point, list(together), args):
                        rounds.setdefault(figures["method"], []).append(figures)
                        print(f"{point}, {figures['method']}: {figures['samples_per_second']:.2f}", flush=True)
                same = [one for one in results if all(one[key] == point[key] for key in point)]
                results = [one for one in results if one not in same or one["method"] not in rounds]
                results += [{**point, **middle(found), "session": session} for found in rounds.values()]
                save(path, results)
    (args.out / "network_exchanges.md").write_text("\n".join(["# Exchanges", "", *table(results)]))
    print(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
