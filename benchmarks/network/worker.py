"""One rank of timed training jobs. `run.py` starts it on every host. Rank 0 prints one JSON line for each method."""

import argparse
import dataclasses
import gc
import importlib
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from methods import FRAMEWORKS, METHODS, MODELS

from hvd_sparse.job_network import measure_network

TRIED = 2  # steps that determine how many steps to time; if that number is not larger, these steps are the result


def main() -> None:
    """Train with each method for about the given number of seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", choices=FRAMEWORKS, default="pytorch")
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--methods", nargs="+", choices=METHODS, required=True, help="of DDP all, or none")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--in-turns", action="store_true", help="rounds of a few steps of each, not of all steps")
    args = parser.parse_args()
    if args.in_turns:
        take_turns(args)
        return
    job = link = None
    for method in args.methods * args.rounds:
        package = METHODS[method].package
        module = importlib.import_module("ddp" if package == "ddp" else FRAMEWORKS[args.framework])
        del job
        gc.collect()
        job = module.Job(args.model, METHODS[method], args.batch_size)
        figures = measure(job, args)
        if link is None and package != "ddp":
            link = dataclasses.asdict(measure_network(module.hvd, module.tensors))
        if job.rank == 0:
            print(json.dumps({"method": method, **figures, "link": link}), flush=True)
    job.close()


def take_turns(args: argparse.Namespace) -> None:
    """Train with all methods in turns of a few steps, so that a drift of the machine's speed affects all of them."""
    module = importlib.import_module(FRAMEWORKS[args.framework])
    jobs = {method: module.Job(args.model, METHODS[method], args.batch_size) for method in args.methods}
    steps, seconds = {}, {method: [] for method in jobs}
    for method, job in jobs.items():
        job.run(job.method.settles_in)
        steps[method] = job.largest(int(np.ceil(args.seconds * TRIED / job.run(TRIED) / args.rounds)))
    for _ in range(args.rounds):
        for method, job in jobs.items():
            seconds[method].append(job.run(steps[method]) / steps[method])
    if job.rank == 0:
        for method in jobs:
            print(json.dumps({"method": method, "steps": steps[method], "seconds": seconds[method]}), flush=True)
    job.close()


def measure(job, args: argparse.Namespace) -> dict:
    """Return the figures of a job."""
    job.run(job.method.settles_in)
    before, steps, elapsed = job.own_seconds(), TRIED, job.run(TRIED)
    wanted = job.largest(int(np.ceil(args.seconds * TRIED / elapsed)))
    if wanted > TRIED:
        before, steps, elapsed = job.own_seconds(), wanted, job.run(wanted)
    compress, decompress = ((after - earlier) / steps for after, earlier in zip(job.own_seconds(), before, strict=True))
    return {
        "samples_per_second": args.batch_size * steps / elapsed,
        "steps": steps,
        "step_ms": 1e3 * elapsed / steps,
        "compute_ms": 1e3 * job.compute(steps=5),
        "compress_ms": 1e3 * compress,
        "decompress_ms": 1e3 * decompress,
        "bytes_per_step": job.bytes_per_step(),
    }


if __name__ == "__main__":
    main()
