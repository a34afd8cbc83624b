"""Time compress, and compare it with the framework's own top-k on the same work, and with copying the gradient.

Before the timing, every result is checked against the reference. The operations take turns in one run on one thread.
Figures are ratios of medians, because absolute times depend on the machine. The last line of output is one JSON object.

    make bench        or: python benchmarks/kernels.py --framework tensorflow --elements 25600000 --density 0.001
"""

import argparse
import importlib
import json
import platform
import statistics

import numpy as np
from common import median_seconds, timed

from hvd_sparse import reference
from hvd_sparse.algorithms import Settings
from hvd_sparse.wire import payload_size, positions_size, top_k_count

FRAMEWORKS = {"pytorch": "pytorch_worker", "tensorflow": "tensorflow2_worker"}


class Gradients:
    """Seeded gradients. The scales of the elements are log-normal, as those of layers are."""

    def __init__(self, n: int):
        self.generator = np.random.default_rng(0)
        self.scale = np.exp(self.generator.standard_normal(n, np.float32))

    def next(self) -> np.ndarray:
        """Draw the next step's gradient."""
        return self.generator.standard_normal(len(self.scale), np.float32) * self.scale


def check(framework, algorithm, n: int = 1_000_003) -> None:
    """Compare three steps of a smaller tensor with the NumPy reference and with the framework's top-k."""
    native, plain = framework.Worker(algorithm, n), framework.Worker(algorithm, n)
    source = Gradients(n)
    for _ in range(3):
        gradient = framework.as_tensor(source.next())
        native.compress(gradient)
        plain.compress_with_topk(gradient)
        ours, theirs = native.arrays(), plain.arrays()
        indices, values = reference.unpack(ours["payload"], n, native.k)
        order = np.argsort(theirs["indices"])
        np.testing.assert_array_equal(indices, theirs["indices"][order])
        np.testing.assert_array_equal(values, theirs["values"][order])
        np.testing.assert_array_equal(ours["residual"], theirs["residual"])


def measure(framework, algorithm, n: int, rounds: int, settle: int) -> dict[str, float]:
    """Return the median seconds of compress, and of the operations it is compared with.

    The operations take turns, so that disturbances of the machine affect all of them. Each step has a new gradient. The
    worker first takes `settle` steps, because residuals that still grow are not typical of training.
    """
    source, native, plain = Gradients(n), framework.Worker(algorithm, n), framework.Worker(algorithm, n)
    copy = np.empty(n, np.float32)
    for _ in range(settle):
        native.compress(framework.as_tensor(source.next()))
    plain.compress_with_topk(framework.as_tensor(source.next()))
    native.reduce(8), plain.accumulate(framework.as_tensor(source.next()))
    seconds: dict[str, list[float]] = {name: [] for name in ("compress", "memcpy", "accumulate", "reduce", "topk")}
    for turn in range(rounds):
        array = source.next()
        gradient = framework.as_tensor(array)
        seconds["memcpy"].append(timed(np.copyto, copy, array))
        seconds["compress"].append(timed(native.compress, gradient))
        seconds["accumulate"].append(timed(plain.accumulate, gradient))
        seconds["reduce"].append(timed(native.reduce, 8))
        if turn % 5 == 0:
            seconds["topk"].append(timed(plain.compress_with_topk, gradient))
    return {name: statistics.median(times) for name, times in seconds.items()}


def ratio(seconds: float, others: float) -> float:
    """Return the ratio of two times, rounded to three digits."""
    return float(f"{seconds / others:.3g}")


def measure_threads(framework, algorithm, n: int, rounds: int, settle: int) -> dict[str, float]:
    """Return the speed-up of two threads over one, for compress and for its sums alone."""
    source, worker, plain = Gradients(n), framework.Worker(algorithm, n), framework.Worker(algorithm, n)
    work = {"": worker.compress, "sums_": plain.sums}
    seconds: dict[tuple[str, int], list[float]] = {(name, threads): [] for name in work for threads in (1, 2)}
    for turn in range(settle + rounds):
        for (name, threads), times in seconds.items():
            framework.use_threads(threads)
            took = timed(work[name], framework.as_tensor(source.next()))
            if turn >= settle:
                times.append(took)
    median = {key: statistics.median(times) for key, times in seconds.items()}
    return {name: ratio(median[name, 1], median[name, 2]) for name in work}


def measure_codings(framework, n: int, k: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return for each coding of positions the bits per index, and the median seconds of packing and unpacking."""
    generator, result = np.random.default_rng(1), {}
    indices = np.sort(generator.choice(n, k, replace=False))
    values = generator.standard_normal(k, np.float32)
    for coding in ("run_length", "elias_fano"):
        payload = framework.pack(indices, values, n, coding)
        np.testing.assert_array_equal(np.asarray(payload), reference.pack(indices, values, n, k, coding))
        np.testing.assert_array_equal(framework.unpack(payload, n, k, coding), indices)
        seconds = {
            "pack": median_seconds(rounds, framework.pack, indices, values, n, coding),
            "unpack": median_seconds(rounds, framework.unpack, payload, n, k, coding),
        }
        result[coding] = {"bits": 8 * positions_size(coding, n, k) / k, **seconds}
    return result


def main() -> None:
    """Check, time, print GB/s and ratios, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=25_600_000)
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--settle", type=int, default=60, help="steps before timing starts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--framework", choices=FRAMEWORKS, default="pytorch")
    arguments = parser.parse_args()
    framework = importlib.import_module(FRAMEWORKS[arguments.framework])
    framework.use_threads(arguments.threads)
    n, k = arguments.elements, top_k_count(arguments.elements, arguments.density)
    figures = {
        "framework": arguments.framework,
        "elements": n,
        "density": arguments.density,
        "threads": arguments.threads,
        "machine": platform.processor(),
    }
    methods = {
        "": Settings.dgc(None, arguments.density),
        "gd_": Settings.gradient_dropping(None, arguments.density),
    }
    compress = None  # seconds of the first method
    for prefix, algorithm in methods.items():
        check(framework, algorithm)
        print(f"{algorithm.name}: equal to the reference and to the framework's own top-k")
        seconds = measure(framework, algorithm, n, arguments.rounds, arguments.settle)
        for name, value in seconds.items():
            print(f"  {name:<10} {1e3 * value:9.2f} ms   {4e-9 * n / value:7.2f} GB/s of gradient")
        compress = compress or seconds["compress"]
        figures[prefix + "topk_over_compress"] = ratio(seconds["topk"], seconds["compress"])
        figures[prefix + "compress_over_memcpy"] = ratio(seconds["compress"], seconds["memcpy"])
        figures[prefix + "reduce_over_memcpy"] = ratio(seconds["reduce"], seconds["memcpy"])
    if framework.CAN_CHANGE_THREADS:
        faster = measure_threads(framework, methods[""], n, arguments.rounds, arguments.settle // 2)
        figures |= {f"{name}two_threads_over_one": times for name, times in faster.items()}
        framework.use_threads(arguments.threads)
    for coding, found in measure_codings(framework, n, k, 5 * arguments.rounds).items():
        print(f"{coding}: {found['bits']:.3f} bits an index, {1e3 * found['pack']:.2f} ms to pack, ", end="")
        print(f"{1e3 * found['unpack']:.2f} ms to unpack")
        figures[f"{coding}_bits"] = round(found["bits"], 3)
        figures[f"{coding}_over_compress"] = ratio(found["pack"] + found["unpack"], compress)
    figures["bytes_per_entry"] = round(payload_size(n, k) / k, 4)
    figures["ratio"] = round(4 * n / payload_size(n, k), 1)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
