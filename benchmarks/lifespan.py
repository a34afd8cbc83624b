"""Time DCT's steps that compute new thresholds, and steps that keep them, for several life-spans; and dense steps.

    make bench-lifespan        or: mpirun -np 2 python benchmarks/lifespan.py --lifespans 1 100 256

In the paper, a sort in every step made DCT slower than dense training. This benchmark trains a model of `--tensors`
tensors with `--elements` float32 elements on random gradients through Horovod. `select` is the compressor's time before
the exchange; `whole` includes backward, exchange and optimizer. The life-spans take turns in one run. Times are
medians, and ratios are to the dense step. The last line of output is one JSON object.
"""

import argparse
import json
import statistics
from time import perf_counter

import horovod.torch as hvd
import numpy as np
import torch

from hvd_sparse.threshold import Turns
from hvd_sparse.torch import Compression


class Run:
    """A model with one compressor, and the seconds of its steps with and without new thresholds."""

    def __init__(self, lifespan: int | None, args: argparse.Namespace):
        self.lifespan, self.args = lifespan, args
        names = [f"tensor{i:03}" for i in range(args.tensors)]
        self.parameters = {f"{lifespan}.{name}": torch.nn.Parameter(torch.zeros(args.elements)) for name in names}
        named = list(self.parameters.items())
        self.compression = None
        if lifespan is not None:
            self.compression = Compression.dct(named, density=args.density, lifespan=lifespan)
            self.turns = Turns(self.compression.algorithm, args.tensors)
        optimizer = torch.optim.SGD(self.parameters.values(), lr=0.01)
        used = self.compression or hvd.Compression.none
        self.optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=used)
        self.steps: list[dict] = []

    def step(self, gradients: list[torch.Tensor]) -> None:
        """Take a step and record its time."""
        start = perf_counter()
        self.optimizer.zero_grad()
        pairs = zip(self.parameters.values(), gradients, strict=True)
        torch.autograd.backward([parameter.view(-1) for parameter, _ in pairs], gradients)
        self.optimizer.step()
        whole = perf_counter() - start
        number, count = len(self.steps), self.args.tensors
        row = {"whole": whole, "select": 0.0, "density": 1.0, "refreshed": 0}
        if self.compression is not None:
            stats = self.compression.stats()["step"]
            refreshed = sum(self.turns.refreshes(number, position) for position in range(count))
            row |= {"select": stats["seconds"]["compress"], "density": stats["density"], "refreshed": refreshed}
        self.steps.append(row)

    def check(self) -> None:
        """Check that the first step, which computes all thresholds, sends exactly k elements of each tensor."""
        if self.compression is not None:
            k = max(1, round(self.args.density * self.args.elements))
            expected = k / self.args.elements
            if abs(self.compression.stats()["step"]["density"] - expected) > 1e-12:
                raise AssertionError(
                    f"the first step sent {self.compression.stats()['step']['density']}, not {expected}"
                )

    def summary(self, dense: float) -> dict:
        """Return medians in ms, without the first steps, and ratios to a dense step."""
        steps = self.steps[self.args.settle :]
        kinds = {
            "refresh": [row for row in steps if row["refreshed"]],
            "keep": [r for r in steps if not r["refreshed"]],
        }
        result = {"lifespan": self.lifespan, "density": statistics.mean(row["density"] for row in steps)}
        for kind, rows in kinds.items():
            for name in ("select", "whole"):
                result[f"{kind}_{name}_ms"] = 1000 * statistics.median(row[name] for row in rows) if rows else None
        result["mean_select_ms"] = 1000 * statistics.mean(row["select"] for row in steps)
        result["whole_over_dense"] = statistics.median(row["whole"] for row in steps) / dense
        return result


def main() -> None:
    """Train with the life-spans in turns; print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lifespans", type=int, nargs="+", default=[1, 100, 256])
    parser.add_argument("--tensors", type=int, default=16)
    parser.add_argument("--elements", type=int, default=400_000)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--settle", type=int, default=32, help="first steps, that do not count")
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    rng = np.random.default_rng(hvd.rank())
    scale = np.exp(np.random.default_rng(99).standard_normal(args.elements, np.float32))
    pool = [torch.from_numpy(rng.standard_normal(args.elements, np.float32) * scale) for _ in range(23)]
    runs = [Run(lifespan, args) for lifespan in (None, *args.lifespans)]
    for step in range(args.steps):
        gradients = [pool[(step * 5 + i) % len(pool)] for i in range(args.tensors)]
        for run in runs:
            run.step(gradients)
            if step == 0:
                run.check()
    if hvd.rank() == 0:
        report(runs, args)


def report(runs: list[Run], args: argparse.Namespace) -> None:
    """Print the table and the JSON line."""
    dense = statistics.median(row["whole"] for row in runs[0].steps[args.settle :])
    rows = [run.summary(dense) for run in runs[1:]]
    names = list(rows[0])
    print("| " + " | ".join(name.replace("_", " ") for name in names) + " |\n" + "|---" * len(names) + "|")
    for row in rows:
        cells = ["-" if row[name] is None else f"{row[name]:.4g}" for name in names]
        print("| " + " | ".join(cells) + " |")
    print(f"dense step: {1000 * dense:.4g} ms")
    print(json.dumps({"dense_whole_ms": 1000 * dense, "world_size": hvd.size(), "lifespans": rows}))


if __name__ == "__main__":
    main()
