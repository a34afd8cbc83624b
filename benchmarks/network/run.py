"""Train on hosts that a slow network joins, with what this package has and with what else there is; write the tables.

    make bench-network      or: python benchmarks/network/run.py --hosts 2 4 8 --rates 100mbit 1gbit 10gbit none

Hosts are network namespaces on this machine (`hosts.py`), one rank on each, one thread a rank; links are shaped in both
directions. Each figure is the samples a second of one rank, and what share that is of the same job without a limit.
Writes results/network.json, .md, and plots; runs that are there already are kept. Last line: one JSON object.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from hosts import Hosts, enter_switch, hosts
from methods import FRAMEWORKS, METHODS, MODELS
from report import write

RESULTS = Path(__file__).resolve().parent.parent / "results"
WORKER = Path(__file__).resolve().parent / "worker.py"
UNLIMITED = "none"
LIMIT_SECONDS = 900  # of one job


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[4], help="(default: %(default)s)")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", UNLIMITED], help="(default: %(default)s)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["mlp38"], help="(default: %(default)s)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="(default: all)")
    parser.add_argument("--framework", choices=FRAMEWORKS, default="pytorch", help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="of a rank (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=8.0, help="to measure for (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="measure what is there already, too")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def measure(lab: Hosts, run: dict, args: argparse.Namespace) -> dict:
    """Return the figures of a run."""
    options = ["--framework", run["framework"], "--model", run["model"], "--method", run["method"]]
    options += ["--seconds", str(args.seconds), "--batch-size", str(args.batch_size)]
    environment = {**os.environ, "MASTER_ADDR": lab.addresses[0], "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
    environment |= {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "HOROVOD_MPI_THREADS_DISABLE": "0"}
    command = lab.mpirun([sys.executable, str(WORKER), *options])
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{describe(run)} took longer than {LIMIT_SECONDS} s") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        raise RuntimeError(f"{describe(run)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(lines[-1])


def describe(run: dict) -> str:
    """Return a run's name."""
    return f"{run['framework']} {run['model']}, {run['hosts']} hosts, {run['rate']}, {run['method']}"


def main() -> None:
    """Measure what is missing; write the report."""
    args = parse_arguments()
    enter_switch()
    path = args.out / "network.json"
    results = json.loads(path.read_text()) if path.exists() else []
    keys = ("framework", "model", "hosts", "rate", "method")
    known = {tuple(one[key] for key in keys) for one in results}
    asked = []
    for count, model, rate, method in itertools.product(args.hosts, args.models, args.rates, args.methods):
        if args.framework != "pytorch" and METHODS[method].package == "ddp":
            continue
        asked.append(dict(zip(keys, (args.framework, model, count, rate, method), strict=True)))
    wanted = [run for run in asked if args.again or tuple(run.values()) not in known]
    for count, runs in itertools.groupby(wanted, key=lambda run: run["hosts"]):
        with hosts(count) as lab:
            for rate, own in itertools.groupby(runs, key=lambda run: run["rate"]):
                lab.shape(None if rate == UNLIMITED else rate)
                for run in own:
                    start = time.monotonic()
                    figures = measure(lab, run, args)
                    results = [one for one in results if any(one[key] != run[key] for key in keys)]
                    results.append({**run, **figures})
                    path.write_text("[\n" + ",\n".join(map(json.dumps, results)) + "\n]\n")
                    print(f"{describe(run)}: {figures['samples_per_second']:.2f} samples/s", end="")
                    print(f"  ({time.monotonic() - start:.0f} s)", flush=True)
    chosen = [one for one in results if {key: one[key] for key in keys} in asked]
    print(json.dumps({"results": write(results, chosen, args.out)}))


if __name__ == "__main__":
    main()
