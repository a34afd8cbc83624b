"""Time hybrid training (stages and replicas) on hosts joined by a slow network, dense and with DCT; write the table.

    python benchmarks/network/stages.py --rates 100mbit 1gbit none

Each run is `examples/pytorch_dct_hybrid.py` with the settings of `benchmarks/hybrid.py`, with one host for each rank.
The paper reports the gain in training time in section 3.3 and Table 5 (Gupta et al., 2021). Writes
results/network_stages.json and .md, and skips runs that the file already has. The last line of output is one JSON
object.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import RESULTS, last_json, load, missing, save
from hosts import Hosts, enter_switch, hosts
from hybrid import DENSE, EXAMPLE, RUNS
from records import UNLIMITED

STEPS, LIMIT_SECONDS = 300, 900
KEYS = ("rate", "name", "round")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="(default: all)")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", UNLIMITED], help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of all runs, to take medians (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def seconds_of(lab: Hosts, name: str) -> float:
    """Return the seconds of a run, without the start of the processes."""
    stages, density, dp_density = RUNS[name]
    options = {"stages": stages, "density": density, "dp-density": dp_density, "steps": STEPS}
    options |= {"rows": 20_000, "evaluations": 1}
    switches = [part for key, value in options.items() for part in (f"--{key}", str(value))]
    command = lab.mpirun([sys.executable, str(EXAMPLE), "--quiet", *switches])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return last_json(command, env=environment, timeout=LIMIT_SECONDS)["seconds"]


def table(results: list[dict]) -> list[str]:
    """Return the lines of a Markdown table: medians, and the gain over dense training at the same rate."""
    medians = {
        key: statistics.median(one["seconds"] for one in results if (one["rate"], one["name"]) == key)
        for key in dict.fromkeys((one["rate"], one["name"]) for one in results)
    }
    lines = ["| rate | run | ranks | seconds | less time than dense, % | rounds |", "|---|---|---:|---:|---:|---:|"]
    for (rate, name), median in medians.items():
        dense = medians.get((rate, DENSE[RUNS[name][0]]))
        gain = "" if dense is None else f"{100.0 * (1.0 - median / dense):.1f}"
        rounds = sum((one["rate"], one["name"]) == (rate, name) for one in results)
        lines.append(f"| {rate} | {name} | {2 * RUNS[name][0]} | {median:.1f} | {gain} | {rounds} |")
    return lines


def main() -> None:
    """Run what is missing, and write the report."""
    args = parse_arguments()
    enter_switch()
    path = args.out / "network_stages.json"
    results = load(path)
    wanted = missing(itertools.product(args.rates, args.runs, range(args.rounds)), results, KEYS)
    for count, runs in itertools.groupby(sorted(wanted, key=ranks_of), key=ranks_of):
        with hosts(count) as lab:
            for rate, name, number in sorted(runs, key=lambda run: run[2]):
                lab.shape(None if rate == UNLIMITED else rate)
                results.append({"rate": rate, "name": name, "round": number, "seconds": seconds_of(lab, name)})
                save(path, results)
                print(f"{rate}, {name}: {results[-1]['seconds']:.1f} s", flush=True)
    title = f"# Hybrid training on slow networks, {STEPS} steps, two replicas, one host for each rank"
    (args.out / "network_stages.md").write_text("\n".join([title, "", *table(results), ""]))
    print(json.dumps({"results": results}))


def ranks_of(run: tuple) -> int:
    """Return the number of ranks of a run."""
    return 2 * RUNS[run[1]][0]


if __name__ == "__main__":
    main()
