"""Measure the cost of fitting a threshold: SIDCo's compress, compared with Gradient Dropping at the same density.

    make bench-sidco        or: python benchmarks/sidco.py --output benchmarks/results/sidco.md

One rank and one thread compress one tensor of 25.6 M elements, and ResNet-50's 161 tensors, at two densities. A
compress is what the codecs of `hvd_sparse` do: accumulate, find the threshold, select, pack, clear; without the sum
over ranks. All methods take the same gradients in turns in one run. Figures are ratios of medians of the process's CPU
time. Milliseconds depend on the machine.
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
from common import last_json
from machine import machine
from steps import MODELS

from hvd_sparse.algorithms import Settings

FRAMEWORKS = {"pytorch": "pytorch_worker", "tensorflow": "tensorflow2_worker"}
SHAPES = {"one": [(25_600_000,)], "resnet50": MODELS["resnet50"]}
TITLES = {"one": "one of 25,600,000 elements", "resnet50": "ResNet-50's 161"}
METHODS = {
    "gd": lambda density: Settings.gradient_dropping(None, density, min_numel=0),
    "sidco": lambda density: Settings.sidco(None, density, min_numel=0),
    "three stages": lambda density: Settings.sidco(None, density, min_numel=0, stages=3),
    "gamma": lambda density: Settings.sidco(None, density, min_numel=0, distribution="gamma"),
}


def gradients(shapes: list[tuple[int, ...]]):
    """Yield each step's gradients. The scales of the elements are log-normal, as those of layers are."""
    generator = np.random.default_rng(0)
    scales = [np.exp(generator.standard_normal(shape, np.float32)) for shape in shapes]
    while True:
        yield [generator.standard_normal(scale.shape, np.float32) * scale for scale in scales]


def measure(framework, shapes: list[tuple[int, ...]], density: float, rounds: int, settle: int) -> dict[str, float]:
    """Return each method's median CPU seconds of a compress after a few steps, and its sent number of elements over k.

    The methods take turns, so that disturbances of the machine affect all of them.
    """
    codecs = {name: framework.Codec(method(density), shapes) for name, method in METHODS.items()}
    seconds, sent = ({name: [] for name in codecs} for _ in range(2))
    for step, drawn in zip(range(settle + rounds), gradients(shapes), strict=False):
        for name, codec in codecs.items():
            given = [framework.as_tensor(gradient.copy()) for gradient in drawn]
            start = process_time()
            codec.compress(given)
            if step >= settle:
                seconds[name].append(process_time() - start)
                sent[name].append(codec.sent)
    expected = statistics.mean(sent["gd"])
    figures = {name: statistics.median(times) for name, times in seconds.items()}
    return figures | {f"{name} sent": statistics.mean(counts) / expected for name, counts in sent.items()}


def run_job(framework: str, shapes: str, density: float, args) -> dict[str, float]:
    """Measure in a separate process."""
    options = {"job": shapes, "frameworks": framework, "densities": density, "rounds": args.rounds}
    command = [sys.executable, __file__, "--settle", str(args.settle)]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return last_json(command)


def write_report(args) -> str:
    """Measure everything; return the report as Markdown."""
    lines = [
        "# SIDCo: what fitting a threshold costs",
        "",
        f"`{shlex.join(['python', 'benchmarks/sidco.py', *sys.argv[1:]])}`",
        "",
        f"{machine()}. CPU time of a compress (accumulate, select, pack, clear)",
        "of one rank on one thread, medians in turns; over Gradient Dropping's at the same density.",
        "",
        "| framework | tensors | density | Gradient Dropping, ms | SIDCo | three stages | gamma |",
        "|---|---|---|---|---|---|---|",
    ]
    for framework in args.frameworks:
        for shapes in args.tensors:
            for density in args.densities:
                found = run_job(framework, shapes, density, args)
                over = [f"{found[name] / found['gd']:.2f}" for name in METHODS if name != "gd"]
                row = [framework, TITLES[shapes], str(density), f"{1e3 * found['gd']:.1f}", *over]
                lines.append(f"| {' | '.join(row)} |")
                print(lines[-1], {name: round(found[f"{name} sent"], 3) for name in METHODS}, flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the report, or one measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the page, too")
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--tensors", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--densities", nargs="+", type=float, default=[0.001, 0.01])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--settle", type=int, default=15, help="first steps, that do not count")
    parser.add_argument("--job", choices=SHAPES, help="measure these alone, and print JSON")
    args = parser.parse_args()
    if args.job:
        framework = importlib.import_module(FRAMEWORKS[args.frameworks[0]])
        framework.use_threads(1)
        print(json.dumps(measure(framework, SHAPES[args.job], args.densities[0], args.rounds, args.settle)))
        return
    page = write_report(args)
    print(page)
    if args.output is not None:
        args.output.write_text(page)


if __name__ == "__main__":
    main()
