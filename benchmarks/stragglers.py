"""Measure batches per second when one of four workers is five times slower: asynchronous and with Horovod.

    make bench-stragglers      or: python benchmarks/stragglers.py

A gradient takes 40 ms, and the slow worker's 200 ms. Workers sleep for this time, so that the machine's cores do not
matter. The model has 99,000 parameters. The modes take turns for several rounds, and the figures are medians. The last
line of output is one JSON object.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from common import last_json

WORKER = Path(__file__).resolve().parent / "straggler_worker.py"
MODES = ("synchronous:dense", "synchronous:dgc", "asynchronous:asgd", "asynchronous:dgs")


def measure(mode: str, workers: int, seconds: float) -> float:
    """Return the batches per second of all workers together."""
    command = ["mpirun", "-np", str(workers + 1), "--oversubscribe", sys.executable, str(WORKER), mode, str(seconds)]
    return last_json(command, timeout=60 + 10 * seconds)["batches_per_second"]


def main() -> None:
    """Measure all modes in turns, and print their ratios to Horovod's dense steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, help="one of them slow (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    args = parser.parse_args()
    found = {mode: [] for mode in MODES}
    for number in range(args.rounds):
        for mode in MODES:
            found[mode].append(measure(mode, args.workers, args.seconds))
            print(f"round {number + 1}: {mode:20} {found[mode][-1]:7.1f} batches a second", flush=True)
    rates = {mode: statistics.median(values) for mode, values in found.items()}
    over = {mode: rate / rates[MODES[0]] for mode, rate in rates.items()}
    for mode, rate in rates.items():
        print(f"{mode:20} {rate:7.1f} batches a second, {over[mode]:.2f} x Horovod's dense steps")
    print(json.dumps({"benchmark": "stragglers", "workers": args.workers, "over_synchronous_dense": over}))


if __name__ == "__main__":
    main()
