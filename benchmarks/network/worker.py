"""One rank of a timed training job: `run.py` starts it on every host. Rank 0 prints one JSON line."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from methods import FRAMEWORKS, METHODS, MODELS

TRIED = 2  # steps that tell how many to time; where that is no more, these are the timed ones


def main() -> None:
    """Train for about so many seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", choices=FRAMEWORKS, default="pytorch")
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    package = METHODS[args.method].package
    module = importlib.import_module("ddp" if package == "ddp" else FRAMEWORKS[args.framework])
    job = module.Job(args.model, METHODS[args.method], args.batch_size)
    job.run(METHODS[args.method].settles_in)
    before, steps, elapsed = job.own_seconds(), TRIED, job.run(TRIED)
    wanted = job.largest(int(np.ceil(args.seconds * TRIED / elapsed)))
    if wanted > TRIED:
        before, steps, elapsed = job.own_seconds(), wanted, job.run(wanted)
    compress, decompress = ((after - earlier) / steps for after, earlier in zip(job.own_seconds(), before, strict=True))
    alone = job.compute(steps=5)
    if job.rank == 0:
        figures = {
            "samples_per_second": args.batch_size * steps / elapsed,
            "steps": steps,
            "step_ms": 1e3 * elapsed / steps,
            "compute_ms": 1e3 * alone,
            "compress_ms": 1e3 * compress,
            "decompress_ms": 1e3 * decompress,
            "bytes_per_step": job.bytes_per_step(),
        }
        print(json.dumps(figures), flush=True)
    job.close()


if __name__ == "__main__":
    main()
