"""Time a worker's whole compress against torch.topk on the same work, and against memcpy of the gradient.

Every result is checked against the reference before it is timed. Figures are ratios of medians, measured in turns in
one run, one thread: absolute times depend on the machine. The last line is one JSON object.

    make bench        or: python benchmarks/kernels.py --elements 25600000 --density 0.001
"""

import argparse
import json
import platform
import statistics
from time import perf_counter

import numpy as np
import torch

from hvd_sparse import reference
from hvd_sparse.algorithms import DeepGradientCompression, GradientDropping
from hvd_sparse.threshold import ThresholdHint
from hvd_sparse.torch import ops
from hvd_sparse.torch.memory import make_memory
from hvd_sparse.wire import payload_size, top_k_count


class Worker:
    """What one rank does to one tensor in one step: check, accumulate, select, pack, clear."""

    def __init__(self, algorithm, n: int):
        self.n, self.k = n, top_k_count(n, algorithm.density_at(0))
        self.memory = make_memory(algorithm, torch.empty(1).expand(n))
        self.hint = ThresholdHint()
        self.payload = torch.zeros(payload_size(n, self.k), dtype=torch.uint8)

    def compress(self, gradient: torch.Tensor) -> None:
        """Do it as `hvd_sparse.torch` does."""
        if not ops.all_finite(gradient):
            raise ValueError("the benchmark's gradient is finite")
        self.memory.accumulate(gradient)
        indices, values, info = ops.select_top_k(self.memory.residual, self.k, 0, self.hint.value(self.k))
        threshold, passed = info.tolist()
        self.hint.update(self.k, threshold, int(passed))
        ops.pack(indices, values, self.n, self.k, self.payload)
        self.memory.clear(indices, None)

    def compress_with_topk(self, gradient: torch.Tensor) -> None:
        """Do the same work with torch.topk, and 32-bit indices for a payload."""
        torch.isfinite(gradient).all()
        self.memory.accumulate(gradient)
        residual = self.memory.residual
        indices = torch.topk(residual.abs(), self.k, sorted=False).indices
        self.plain = (indices.to(torch.int32), residual[indices])
        self.memory.clear(indices, None)


class Gradients:
    """Seeded gradients with scales that differ between elements, log-normally, as those of layers do."""

    def __init__(self, n: int):
        self.generator = torch.Generator().manual_seed(0)
        self.scale = torch.exp(torch.randn(n, generator=self.generator))
        self.now = torch.empty(n)

    def next(self) -> torch.Tensor:
        """Draw the next step's gradient, into the same tensor."""
        return self.now.normal_(generator=self.generator).mul_(self.scale)


def check(algorithm, n: int = 1_000_003) -> None:
    """Compare three steps on a smaller tensor with the NumPy reference, and with torch.topk."""
    native, plain = Worker(algorithm, n), Worker(algorithm, n)
    source = Gradients(n)
    for _ in range(3):
        gradient = source.next()
        native.compress(gradient)
        plain.compress_with_topk(gradient)
        indices, values = reference.unpack(native.payload.numpy(), n, native.k)
        order = np.argsort(plain.plain[0].numpy())
        np.testing.assert_array_equal(indices, plain.plain[0].numpy()[order])
        np.testing.assert_array_equal(values, plain.plain[1].numpy()[order])
        np.testing.assert_array_equal(native.memory.residual.numpy(), plain.memory.residual.numpy())


def timed(action, *arguments) -> float:
    """Return the seconds that an action takes."""
    start = perf_counter()
    action(*arguments)
    return perf_counter() - start


def measure(algorithm, n: int, rounds: int, settle: int) -> dict[str, float]:
    """Return the median seconds of a settled worker's compress, and of what it is compared with.

    They are run in turns, so that the machine's moods fall on all alike; each step has a gradient of its own, and the
    worker first takes `settle` steps, since a filling residual is not what selection meets in training.
    """
    source, native, plain = Gradients(n), Worker(algorithm, n), Worker(algorithm, n)
    copy, out = torch.empty(n), torch.empty(n)
    for _ in range(settle):
        native.compress(source.next())
    plain.compress_with_topk(source.now)
    gathered = native.payload.repeat(8, 1)
    seconds: dict[str, list[float]] = {name: [] for name in ("compress", "memcpy", "accumulate", "reduce", "topk")}
    for turn in range(rounds):
        gradient = source.next()
        seconds["memcpy"].append(timed(copy.copy_, gradient))
        seconds["compress"].append(timed(native.compress, gradient))
        seconds["accumulate"].append(timed(plain.memory.accumulate, gradient))
        seconds["reduce"].append(timed(ops.reduce_payloads, gathered, 0, n, native.k, out))
        if turn % 5 == 0:
            seconds["topk"].append(timed(plain.compress_with_topk, gradient))
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    """Check, time, print GB/s and ratios, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=25_600_000)
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--settle", type=int, default=60, help="steps before timing starts")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    n, k = arguments.elements, top_k_count(arguments.elements, arguments.density)
    figures = {
        "elements": n,
        "density": arguments.density,
        "threads": arguments.threads,
        "machine": platform.processor(),
    }
    methods = {
        "": DeepGradientCompression(density=arguments.density),
        "gd_": GradientDropping(density=arguments.density),
    }
    for prefix, algorithm in methods.items():
        check(algorithm)
        print(f"{algorithm.name}: equal to the reference and to torch.topk")
        seconds = measure(algorithm, n, arguments.rounds, arguments.settle)
        for name, value in seconds.items():
            print(f"  {name:<10} {1e3 * value:9.2f} ms   {4e-9 * n / value:7.2f} GB/s of gradient")
        figures[prefix + "topk_over_compress"] = round(seconds["topk"] / seconds["compress"], 2)
        figures[prefix + "compress_over_memcpy"] = round(seconds["compress"] / seconds["memcpy"], 2)
        figures[prefix + "reduce_over_memcpy"] = round(seconds["reduce"] / seconds["memcpy"], 2)
    figures["bytes_per_entry"] = round(payload_size(n, k) / k, 4)
    figures["ratio"] = round(4 * n / payload_size(n, k), 1)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
