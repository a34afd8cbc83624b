"""Train on hosts joined by a slow network, with the methods of this package and with others; write the tables.

    make bench-network      or: python benchmarks/network/run.py --hosts 2 4 8 --rates 100mbit 1gbit 10gbit none

Hosts are network namespaces on this machine (`hosts.py`) with one rank each and one thread per rank. Links are limited
in both directions. The figures are the samples per second of one rank, and its share of the speed of the same job
without a limit, if both were measured by one command. Writes results/network.json, .md, and plots, and skips runs that
the file already has. The last line of output is one JSON object.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import RESULTS, load, missing, save
from hosts import Hosts, enter_switch, hosts
from methods import FRAMEWORKS, MAIN, METHODS, MODELS
from records import UNLIMITED
from report import write

WORKER = Path(__file__).resolve().parent / "worker.py"
LIMIT_SECONDS = 900  # limit for one method
KEPT = str(1 << 34)  # malloc keeps this many bytes: mapping pages is slow, because hosts share a machine
KEYS = ("framework", "model", "hosts", "rate", "batch_size", "method")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[4], help="(default: %(default)s)")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", UNLIMITED], help="(default: %(default)s)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["mlp38"], help="(default: %(default)s)")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(MAIN), help=f"(default: {' '.join(MAIN)})"
    )
    parser.add_argument("--framework", choices=FRAMEWORKS, default="pytorch", help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="of a rank (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=8.0, help="to measure for (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="of all methods, to take medians (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="measure what is there already, too")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def measure(
    lab: Hosts, point: dict, methods: list[str], args: argparse.Namespace, more: Sequence[str] = ()
) -> Iterator[dict]:
    """Yield the figures of each method as they arrive. One job measures all methods, because its start takes long.

    In TensorFlow each round has a job: Horovod keeps every compression, and so its model, until the process ends. With
    `--in-turns`, all rounds need the same models, and have one job.

    Args:
        more: Options of `worker.py`.
    """
    if point["framework"] == "tensorflow" and args.rounds > 1 and "--in-turns" not in more:
        for _ in range(args.rounds):
            yield from measure(lab, point, methods, argparse.Namespace(**{**vars(args), "rounds": 1}), more)
        return
    options = ["--framework", point["framework"], "--model", point["model"], "--methods", *methods]
    options += [
        "--seconds",
        str(args.seconds),
        "--batch-size",
        str(args.batch_size),
        "--rounds",
        str(args.rounds),
        *more,
    ]
    environment = {**os.environ, "MASTER_ADDR": lab.addresses[0], "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
    environment |= {"MALLOC_MMAP_THRESHOLD_": KEPT, "MALLOC_TRIM_THRESHOLD_": KEPT}
    environment |= {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1"}
    command = lab.mpirun([sys.executable, str(WORKER), *options])
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, **both) as process:
        timer = threading.Timer(LIMIT_SECONDS * args.rounds * len(methods), lab.stop)
        timer.start()
        output = []
        try:
            for line in map(str.strip, process.stdout):
                output.append(line)
                if line.startswith("{"):
                    yield json.loads(line)
        finally:
            timer.cancel()
    if process.returncode != 0:
        raise RuntimeError(f"{point} failed, or took longer than it may:\n" + "\n".join(output[-80:]))


def main() -> None:
    """Measure what is missing, and write the report."""
    args = parse_arguments()
    enter_switch()
    path = args.out / "network.json"
    results = load(path)
    points = list(itertools.product([args.framework], args.models, args.hosts, args.rates, [args.batch_size]))
    session = time.strftime("%Y-%m-%d %H:%M")
    asked = [(*point, method) for point in points for method in args.methods if is_there(method, args.framework)]
    wanted = asked if args.again else missing(asked, results, KEYS)
    for count, runs in itertools.groupby(sorted(wanted, key=lambda run: run[2]), key=lambda run: run[2]):
        with hosts(count) as lab:
            for (*point, _), own in itertools.groupby(runs, key=job_of):
                named = dict(zip(KEYS[:-1], point, strict=True))
                lab.shape(None if named["rate"] == UNLIMITED else named["rate"])
                rounds: dict[str, list[dict]] = {}
                for figures in measure(lab, named, [run[-1] for run in own], args):
                    rounds.setdefault(figures["method"], []).append(figures)
                    run = (*point, figures["method"])
                    results = [one for one in results if tuple(one[key] for key in KEYS) != run]
                    results.append({**named, **middle(rounds[figures["method"]]), "session": session})
                    save(path, results)
                    print(f"{', '.join(map(str, run))}: {figures['samples_per_second']:.2f} samples/s", flush=True)
    chosen = [one for one in results if tuple(one[key] for key in KEYS) in asked]
    print(json.dumps({"results": write(results, chosen, args.out)}))


def middle(rounds: list[dict]) -> dict:
    """Return the round with the median step time, and the number of rounds."""
    return {**sorted(rounds, key=lambda one: one["step_ms"])[len(rounds) // 2], "rounds": len(rounds)}


def job_of(run: tuple) -> tuple:
    """Return the key of runs that one job can measure: Horovod and DDP need different jobs."""
    return (*run[:-1], METHODS[run[-1]].package == "ddp")


def is_there(method: str, framework: str) -> bool:
    """Return whether a framework has a method."""
    return framework == "pytorch" or METHODS[method].package != "ddp"


if __name__ == "__main__":
    main()
