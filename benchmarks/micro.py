"""Compare the cost of MiCRO's selection and steps with exact top-k, and its actual density with the target.

    make bench-micro        or: python benchmarks/micro.py --output benchmarks/results/micro.md

Selection: the CPU time of one of N ranks beyond accumulation, in one process; the other ranks are assumed to have equal
residuals. Whole steps: ResNet-50's tensors, in turns with `topk` and `dgc` in one run. Density: 4 ranks whose gradients
become ten times smaller at one step, in comparison with the authors' controller. The figures of a row are from one run.
Look at the ratios: milliseconds depend on the machine.
"""

import argparse
import importlib
import json
import shlex
import statistics
import sys
from pathlib import Path
from time import process_time

import numpy as np
import torch
from common import last_json
from machine import machine

from hvd_sparse.buckets import BucketLayout
from hvd_sparse.partition import PredictedThreshold, partition, sketch_sample
from hvd_sparse.reference.partition import make_sketch
from hvd_sparse.threshold import ThresholdHint
from hvd_sparse.torch import bucket_ops, ops, varying_ops

N, DENSITY = 25_600_000, 0.001
DROP = 30  # the step in which gradients become ten times smaller
METHODS = {
    "topk": ("topk", {"density": DENSITY}),
    "dgc": ("dgc", {"density": DENSITY, "momentum": 0.9}),
    "micro": ("micro", {"density": DENSITY}),
}


class Rank:
    """The last of `ranks` simulated ranks. The others are assumed to have the same residual."""

    def __init__(self, n: int, ranks: int):
        self.residual, self.threshold = torch.zeros(n), PredictedThreshold()
        self.ranks, self.k, self.step = ranks, round(DENSITY * n), 0

    def select(self, gradient: torch.Tensor) -> float:
        """Take a step; return the seconds of accumulation and selection."""
        n, last = len(gradient), self.ranks - 1
        begin, end = partition(self.step, last, self.ranks, n)
        start = process_time()
        bar, share = self.threshold.plan(self.k, self.ranks)
        indices, sketch, reached, _ = varying_ops.accumulate_partition(
            [gradient],
            [self.residual],
            factors=[1.0],
            begins=[0],
            begin=begin,
            end=end,
            threshold=bar,
            share=share,
            sample=sketch_sample(end - begin, self.k),
            seed=self.step,
        )
        seconds = process_time() - start
        bar, sketches = min(bar, reached.item()), []
        for rank in range(last):  # the other ranks' counts equal this rank's counts in their partitions
            others = self.residual[slice(*partition(self.step, rank, self.ranks, n))].numpy()
            sketches.append(make_sketch(others, bar, None, sketch_sample(len(others), self.k), self.step))
        start = process_time()
        self.threshold.learn(self.k, last, np.stack([*sketches, sketch.numpy()]))
        seconds += process_time() - start
        self.residual.index_fill_(0, ops.filter_threshold(self.residual, bar)[0], 0.0)
        self.residual.index_fill_(0, indices, 0.0)
        self.step += 1
        return seconds


def measure_selection(n: int, rounds: int, settle: int) -> list[str]:
    """Return the rows of a table: the cost of exact top-k, in a separate pass and while accumulating, and of MiCRO."""
    generator = np.random.default_rng(0)
    scale = np.exp(generator.standard_normal(n // 1000, np.float32)).repeat(1000)
    pool = torch.from_numpy(generator.standard_normal(n + 997, np.float32))
    ranks = {size: Rank(n, size) for size in (2, 4, 8, 16)}
    plain, k, hint = torch.zeros(n), round(DENSITY * n), ThresholdHint()
    fused, layout = torch.zeros(n), BucketLayout([n], [k], [], False)
    payload, hints = torch.empty(ops.payload_size(n, k), dtype=torch.uint8), bucket_ops.new_hints(1)
    seconds: dict = {name: [] for name in ("accumulate", "topk", "fused", *ranks)}
    for step in range(settle + rounds):
        gradient = pool[step * 31 % 997 :][:n] * torch.from_numpy(scale)
        start = process_time()
        ops.accumulate(gradient, plain)
        accumulated = process_time()
        indices, _, info = ops.select_top_k(plain, k, step, hint.value(k))
        selected = process_time()
        hint.update(k, float(info[0]), int(info[1]))
        plain.index_fill_(0, indices, 0.0)
        packs = process_time()
        bucket_ops.accumulate_bucket(
            [gradient], [fused], layout=layout, out=payload, factors=[1.0], hints=hints, seed=step, members=[0]
        )
        packed = process_time()
        bucket_ops.clear_bucket(payload, [fused], layout=layout, members=[0])
        taken = {size: rank.select(gradient) for size, rank in ranks.items()}
        if step >= settle:
            seconds["accumulate"].append(accumulated - start)
            seconds["topk"].append(selected - accumulated)
            seconds["fused"].append(packed - packs - (accumulated - start))
            for size, value in taken.items():
                seconds[size].append(value - (accumulated - start))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    rows = [
        f"| accumulate alone | {1e3 * median['accumulate']:.2f} | |",
        f"| exact top-k, a separate pass | {1e3 * median['topk']:.2f} | 1 |",
        f"| exact top-k while accumulating, and packing | {1e3 * median['fused']:.2f} "
        f"| {median['fused'] / median['topk']:.2f} |",
    ]
    for size in ranks:
        rows.append(f"| MiCRO, {size} ranks | {1e3 * median[size]:.2f} | {median[size] / median['topk']:.2f} |")
    return rows


def measure_steps(framework_name: str, rounds: int, settle: int) -> dict:
    """Return the seconds of whole steps of every method. All ranks must call it."""
    steps = importlib.import_module("steps")
    framework = importlib.import_module(steps.FRAMEWORKS[framework_name])
    settings = argparse.Namespace(rounds=rounds, settle=settle)
    seconds = steps.measure(framework, steps.MODELS["resnet50"], METHODS, settings)
    return seconds if framework.rank() == 0 else {}


def trace() -> dict:
    """Return the density divided by the target, for both controllers. All ranks must call it."""
    steps = importlib.import_module("pytorch_steps")
    n, made = 1_000_000, {}
    generator = torch.Generator().manual_seed(steps.rank())
    scale = torch.exp(torch.randn(100, generator=torch.Generator().manual_seed(9))).repeat_interleave(n // 100)
    for controller in ("histogram", "scaling"):
        parameter = torch.nn.Parameter(torch.zeros(n))
        method = steps.Compression.micro([("only", parameter)], density=DENSITY, controller=controller)
        optimizer = steps.hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=0.01), named_parameters=[("only", parameter)], compression=method
        )
        made[controller] = []
        for step in range(2 * DROP):
            optimizer.zero_grad()
            gradient = torch.randn(n, generator=generator) * scale * (0.1 if step >= DROP else 1.0)
            torch.autograd.backward([parameter.view_as(parameter)], [gradient])
            optimizer.step()
            made[controller].append(method.stats()["step"]["density"] / DENSITY)
    return made if steps.rank() == 0 else {}


def run_job(ranks: int, *arguments: str) -> dict:
    """Run this script on several ranks; return the last line that rank 0 prints."""
    return last_json(["mpirun", "-np", str(ranks), sys.executable, __file__, *arguments])


def write_report(args) -> str:
    """Measure everything; return the report as Markdown."""
    lines = [
        "# MiCRO: what selection costs",
        "",
        f"`{shlex.join(['python', 'benchmarks/micro.py', *sys.argv[1:]])}`; {machine()}",
        "",
    ]
    lines += [f"Selection of {DENSITY} of {N:,} elements, one thread, beyond accumulating the gradient.", ""]
    lines += [
        "| selection | ms | over exact top-k |",
        "|---|---|---|",
        *measure_selection(N, 3 * args.rounds, args.settle),  # differences of much larger numbers
        "",
    ]
    lines += [f"Whole steps, ResNet-50's 161 tensors, density {DENSITY}, one host, ratios of medians.", ""]
    lines += ["| framework | ranks | topk, ms | dgc over topk | micro over topk |", "|---|---|---|---|---|"]
    for framework in args.frameworks:
        for ranks in args.ranks:
            job = (
                "--job",
                "steps",
                "--frameworks",
                framework,
                "--rounds",
                str(args.rounds),
                "--settle",
                str(args.settle),
            )
            seconds = run_job(ranks, *job)
            over = [f"{seconds[name] / seconds['topk']:.2f}" for name in ("dgc", "micro")]
            lines.append(f"| {framework} | {ranks} | {1e3 * seconds['topk']:.1f} | {' | '.join(over)} |")
    densities = run_job(4, "--job", "trace")
    lines += ["", f"Density over the target, 4 ranks; gradients become ten times smaller in step {DROP}.", ""]
    shown = [0, 1, 2, 5, 10, 20, DROP - 1, DROP, DROP + 1, DROP + 5, 2 * DROP - 1]
    lines += [f"| controller | {' | '.join(map(str, shown))} | from 10 on |", "|---" * (len(shown) + 2) + "|"]
    for controller, values in densities.items():
        row = " | ".join(f"{values[step]:.2f}" for step in shown)
        lines.append(f"| {controller} | {row} | {min(values[10:]):.2f} to {max(values[10:]):.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the report, or run one rank of a job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the page, too")
    parser.add_argument("--frameworks", nargs="+", choices=("pytorch", "tensorflow"), default=["pytorch", "tensorflow"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--settle", type=int, default=15, help="first steps, that do not count")
    parser.add_argument("--job", choices=("steps", "trace"), help="be a rank")
    args = parser.parse_args()
    if args.job:
        found = trace() if args.job == "trace" else measure_steps(args.frameworks[0], args.rounds, args.settle)
        if found:
            print(json.dumps(found))
        return
    torch.set_num_threads(1)
    page = write_report(args)
    print(page)
    if args.output is not None:
        args.output.write_text(page)


if __name__ == "__main__":
    main()
