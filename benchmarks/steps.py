"""Time whole training steps, compressed and dense, of models with many tensors on one host.

    make bench-steps        or: mpirun -np 2 python benchmarks/steps.py --framework tensorflow
    torchrun --nproc-per-node 2 benchmarks/steps.py --framework ddp

A step is backward (of a sum of products, which costs almost nothing), exchange and optimizer. `many` has 160 tensors of
20,000 elements, `resnet50` has the 161 tensors of that network. Two ranks on one host take dense and compressed steps
in turns in one run, so the difference is the cost of compression, without a gain on a network. The last line of output
is one JSON object with `step_over_dense` for each method.
"""

import argparse
import importlib
import json
import statistics
from time import perf_counter

import numpy as np

FRAMEWORKS = {"pytorch": "pytorch_steps", "tensorflow": "tensorflow2_steps", "ddp": "ddp_steps"}


def resnet50() -> list[tuple[int, ...]]:
    """Return the shapes of ResNet-50's parameters in PyTorch's order: 161 tensors, 25,557,032 elements."""
    shapes = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for outputs, size, source in ((width, 1, inputs), (width, 3, width), (4 * width, 1, width)):
                shapes += [(outputs, source, size, size), (outputs,), (outputs,)]
            if block == 0:
                shapes += [(4 * width, inputs, 1, 1), (4 * width,), (4 * width,)]
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


MODELS = {"many": [(20_000,)] * 160, "resnet50": resnet50()}


def measure(framework, shapes: list[tuple[int, ...]], methods: dict[str, dict], args) -> dict[str, float]:
    """Return the median seconds of a step of each method, measured in turns."""
    rng = np.random.default_rng(framework.rank())
    pool = rng.standard_normal(max(int(np.prod(shape)) for shape in shapes) + 997, np.float32)
    models = {name: framework.Model(name, shapes, method) for name, method in methods.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for step in range(args.settle + args.rounds):
        starts = [(step * 31 + i * 7) % 997 for i in range(len(shapes))]
        parts = [pool[at : at + int(np.prod(s))].reshape(s) for at, s in zip(starts, shapes, strict=True)]
        for name, model in models.items():
            gradients = [framework.as_tensor(part.copy()) for part in parts]  # copies, as a step may write to them
            start = perf_counter()
            model.step(gradients)
            if step >= args.settle:
                seconds[name].append(perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    """Measure both models; print ms and ratios, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=FRAMEWORKS, default="pytorch")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--settle", type=int, default=15, help="first steps, that do not count")
    args = parser.parse_args()
    framework = importlib.import_module(FRAMEWORKS[args.framework])
    methods = {
        "dense": None,
        "dgc": ("dgc", {"density": args.density, "momentum": 0.9}),
        "dgc_model": ("dgc", {"density": args.density, "momentum": 0.9, "scope": "model"}),
        "dct": ("dct", {"density": args.density}),
    }
    figures = {"framework": args.framework, "density": args.density, "world_size": framework.size()}
    for name in args.models:
        seconds = measure(framework, MODELS[name], methods, args)
        ratios = {method: round(value / seconds["dense"], 2) for method, value in seconds.items() if method != "dense"}
        figures[name] = {"dense_ms": round(1e3 * seconds["dense"], 2), "step_over_dense": ratios}
        if framework.rank() == 0:
            print(f"{name}: " + ", ".join(f"{method} {1e3 * value:.2f} ms" for method, value in seconds.items()))
    if framework.rank() == 0:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
