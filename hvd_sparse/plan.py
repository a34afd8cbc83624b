"""`hvd_sparse plan`: predict each method's step time on a network, and recommend one.

    hvd_sparse plan --parameters 25.6e6 --compute-ms 180 --bandwidth 1gbit --ranks 8
    horovodrun -np 8 -H host1:4,host2:4 hvd_sparse plan --measure --parameters 25.6e6 --compute-ms 180
    torchrun --no-python --nproc-per-node 2 hvd_sparse plan --measure --parameters 25.6e6 --compute-ms 180

With --measure, bandwidth, latency and world size are those of the running job, unless they are given. The time of a
rank to select, encode and decode is measured on this machine, with one thread: the table is for gradients on CPUs. It
is a prediction: see hvd_sparse.performance_model.
"""

import argparse
import bisect
import importlib.util
import json
import math
import os
import time
from dataclasses import asdict
from typing import NamedTuple

import numpy as np

from hvd_sparse import native
from hvd_sparse.algorithms import Algorithm, Settings
from hvd_sparse.dense_fallback import DenseFallback, TensorSize
from hvd_sparse.job_network import CYCLES, ROUNDS, measure_job
from hvd_sparse.library import FRAMEWORKS
from hvd_sparse.performance_model import (
    FLOAT32,
    MOST_RANKS,
    Method,
    Network,
    Profile,
    break_even,
    dense,
    gathered,
    largest_world_size,
    scattered,
    shared,
)
from hvd_sparse.threshold import ThresholdHint
from hvd_sparse.wire import top_k_count

FACTORS = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
DENSITIES = (0.001, 0.01)
MICRO_DENSITY = 0.01  # the smallest with known quality of training
MOST_MEASURED = 16_000_000  # elements; of more, the time is scaled up
LATENCY_US = 50.0
OWN = {"horovod": "hvd.Compression", "ddp": "Compression"}  # what has none and fp16
NAMES = {"torch": "model.named_parameters()", "tensorflow": "model.trainable_variables"}  # in the printed call
ON_CPU = (
    "Sparse methods compress on one thread of this CPU; with gradients on a GPU they are faster than this table says."
)
CLEARLY = 1.2  # no method is so many times as fast as the recommended one
NOTICED = 1.05  # times as fast: the fastest method is named from here on, if another is recommended


class Candidate(NamedTuple):
    """A method to compare, the call that selects it, and its settings; None if it does not compress."""

    method: Method
    call: str
    settings: Algorithm | None = None

    @property
    def changes_fewer(self) -> bool:
        """Whether fewer elements change in a step than with a gather: with MiCRO, and with a reduce-scatter."""
        return self.settings is not None and (self.settings.name == "micro" or self.settings.exchange != "gather")

    @property
    def risk(self) -> int:
        """The order of methods by what they may cost in accuracy, from 0: dense, fewer elements sent, fewer changed."""
        if self.settings is None:
            return 0
        return 3 if self.changes_fewer else 2 if self.is_for_long_runs else 1

    @property
    def is_for_long_runs(self) -> bool:
        """Whether it needs about 10,000 steps to reach the quality of dense training."""
        return self.settings is not None and self.settings.schedule.planned < max(DENSITIES)

    def is_sent_dense(self, world_size: int) -> bool:
        """Return whether the dense fallback sends the model dense, as payloads have more bytes."""
        if self.settings is None:
            return False
        tensors = {"model": TensorSize((self.method.profile.parameters,), FLOAT32)}
        return DenseFallback(self.settings, tensors, world_size).sends_dense(self.settings.schedule.planned)


def rate(text: str) -> float:
    """Return bits per second, from "1gbit" and the like."""
    for unit, factor in UNITS.items():
        if text.lower().endswith(unit):
            return positive(text, number(text[: -len(unit)]) * factor)
    raise argparse.ArgumentTypeError(f"a rate must end with kbit, mbit or gbit, such as 1gbit; got {text!r}")


def count(text: str) -> int:
    """Return a whole number, from "25.6e6", "25.6M", "7B" and the like."""
    factor = FACTORS.get(text[-1:].lower(), 1.0)
    value = round(factor * number(text if factor == 1.0 else text[:-1]), 6)
    if not 1 <= value < math.inf or value != int(value):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, such as 25.6e6; got {text!r}")
    return int(value)


def number(text: str) -> float:
    """Return the number that a text stands for; NaN, which is in no range, if it stands for none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def positive(text: str, value: float | None = None) -> float:
    """Return the number that a text stands for: `value`, or else the text itself. It must be above 0."""
    value = number(text) if value is None else value
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, and finite; got {text!r}")
    return value


def not_negative(text: str) -> float:
    """Return the number that a text stands for, which must be at least 0."""
    value = number(text)
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, and finite; got {text!r}")
    return value


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="hvd_sparse plan",
        description="Predict the step time of each method on a network, and recommend one.",
        epilog="horovodrun ... hvd_sparse plan --measure measures the network of that job; torchrun --no-python, too.",
    )
    parser.add_argument("--parameters", type=count, required=True, help="elements of the model, such as 25.6M")
    parser.add_argument("--compute-ms", type=positive, required=True, help="forward, backward, optimizer of one rank")
    parser.add_argument(
        "--overlap", type=float, default=0.5, help="part of that during which gradients are sent (default: %(default)s)"
    )
    parser.add_argument("--bandwidth", type=rate, help="of a rank, each way, such as 1gbit")
    parser.add_argument("--latency-us", type=not_negative, help=f"of a message (default: {LATENCY_US:g})")
    parser.add_argument("--ranks", type=count, help="world size")
    parser.add_argument("--measure", action="store_true", help="measure what of these is not given, in the running job")
    parser.add_argument(
        "--framework", choices=FRAMEWORKS, help="of the call, and of the job (default: the first that is installed)"
    )
    parser.add_argument(
        "--host", choices=CYCLES, help="what exchanges gradients (default: ddp under torchrun, else horovod)"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args(arguments)
    args.host = args.host or ("ddp" if "TORCHELASTIC_RUN_ID" in os.environ else "horovod")
    if args.host == "ddp" and args.framework == "tensorflow":
        parser.error("--host ddp is for PyTorch, got --framework tensorflow")
    args.framework = "torch" if args.host == "ddp" else args.framework
    if not 0.0 <= args.overlap <= 1.0:
        parser.error(f"--overlap must be in [0, 1], got {args.overlap}")
    if args.ranks == 1:
        parser.error("--ranks must be 2 at least, got 1: one rank exchanges nothing")
    if not args.measure and (args.bandwidth is None or args.ranks is None):
        parser.error("give --bandwidth and --ranks, or --measure in a job under horovodrun, mpirun or torchrun")
    return args


def own_work(n: int, density: float) -> tuple[float, float]:
    """Return the seconds to accumulate, select and encode n elements, and to decode and add one rank's payload."""
    size = min(n, MOST_MEASURED)
    k = top_k_count(size, density)
    random = np.random.default_rng(0)
    gradient = random.standard_normal(size, np.float32)
    residual, velocity, total = (np.zeros(size, np.float32) for _ in range(3))
    hint, compress, decode = ThresholdHint(), [], []
    for _ in range(ROUNDS):
        start = time.thread_time()  # one thread does it all, and other programs' work should not count
        indices, values, info, _ = native.accumulate_top_k(
            gradient, residual, velocity, k=k, threshold_hint=hint.value(k), momentum=0.9
        )
        payload = native.pack(indices, values, size, k)
        residual[indices] = velocity[indices] = 0.0
        compress.append(time.thread_time() - start)
        hint.update(k, info[0], int(info[1]))
        start = time.thread_time()
        indices, values = native.unpack(payload, size, k)
        total[indices] += values
        decode.append(time.thread_time() - start)
    scale = n / size
    return scale * float(np.median(compress[1:])), scale * float(np.median(decode[1:]))


def installed() -> str:
    """Return the first framework that is installed, or else the first of all."""
    return next((one for one in FRAMEWORKS if importlib.util.find_spec(one)), FRAMEWORKS[0])


def candidates(args: argparse.Namespace) -> list[Candidate]:
    """Return the methods to compare, dense first."""
    compute, n, cycle = 1e-3 * args.compute_ms, args.parameters, CYCLES[args.host]
    overlap, parameters = args.overlap * compute, NAMES[args.framework or installed()]
    plain = Profile([n], compute, overlap, wait=cycle)
    made = [
        Candidate(Method("dense", dense(), plain), f"{OWN[args.host]}.none"),
        Candidate(Method("fp16", dense(2), plain), f"{OWN[args.host]}.fp16"),
    ]
    for density in DENSITIES:
        compress, decode = own_work(n, density)
        profile = Profile([n], compute, overlap, compress, decode, wait=cycle)
        call = f"Compression.dgc({parameters}, density={density:g}, momentum=0.9, warmup=warmup_steps)"
        settings = Settings.dgc(None, density=density, exchange="gather")
        made.append(Candidate(Method(f"DGC {density:g}", gathered(density), profile), call, settings))
        # Only the first of three collectives overlaps with backward, and the others wait for the one before.
        first = Profile([n], compute, 0.5 * overlap, compress, decode, wait=3 * cycle, decoded=2.0)
        call = call.replace("momentum", 'exchange="reduce_scatter", complete=True, momentum')
        settings = Settings.dgc(None, density=density, exchange="reduce_scatter", complete=True)
        method = Method(f"DGC {density:g}, reduce-scatter", scattered(density, complete=True), first)
        made.append(Candidate(method, call, settings))
        if density >= MICRO_DENSITY:
            late = Profile([n], compute, compress=compress, wait=2 * cycle)  # indices and values come after backward
            call = f"Compression.micro({parameters}, density={density:g})"
            settings = Settings.micro(None, density=density)
            made.append(Candidate(Method(f"MiCRO {density:g}", shared(density), late), call, settings))
    return made


def recommend(used: list[Candidate], network: Network, world_size: int) -> tuple[Candidate, Candidate]:
    """Return the candidate to recommend, and the fastest one.

    Of those whose step takes less than CLEARLY times that of the fastest, it is the one that may cost least accuracy.

    Args:
        used: Candidates, dense training among them.
        network: The link of each rank.
        world_size: Number of ranks.
    """

    def seconds(one: Candidate) -> float:
        """Return the seconds of a step."""
        return one.method.step(network, world_size)

    fastest = min(used, key=seconds)
    near = [one for one in used if seconds(one) < CLEARLY * seconds(fastest)]
    return min(near, key=lambda one: (one.risk, seconds(one))), fastest


class Comparison(NamedTuple):
    """The methods on a network, dense first. best: what is recommended. short: to runs of fewer than 10,000 steps."""

    made: list[Candidate]
    used: list[Candidate]  # without those that the dense fallback sends dense
    best: Candidate
    fastest: Candidate
    short: Candidate


def compare(args: argparse.Namespace, network: Network, world_size: int) -> Comparison:
    """Return the methods, and which of them to recommend."""
    made = candidates(args)
    used = [one for one in made if not one.is_sent_dense(world_size)]
    best, fastest = recommend(used, network, world_size)
    short, _ = recommend([one for one in used if not one.is_for_long_runs], network, world_size)
    return Comparison(made, used, best, fastest, short)


def report(args: argparse.Namespace, network: Network, world_size: int) -> str:
    """Return the table, and the recommendation."""
    found, microseconds = compare(args, network, world_size), 1e6 * network.latency
    plain, best, cost = found.made[0].method, found.best, network.gather_cost
    gather = "" if cost == 1.0 else f", a byte of a gather takes {cost:.2g} times one of an all-reduce"
    lines = [
        f"{args.parameters:,} parameters, {args.compute_ms:g} ms of compute, {world_size} ranks, "
        f"{network.bandwidth / 1e9:.3g} Gbit/s, {microseconds:{',.0f' if microseconds >= 100.0 else '.3g'}} us{gather}",
        ON_CPU,
        "",
        f"{'method':<27}{'step, ms':>10}{'speed-up':>12}{'vs 1 rank':>10}{'pays at':>17}{'up to ranks':>13}",
    ]
    for one in found.made:
        sent_dense = f"{one.method.name:<27}{'sent dense: payloads have more bytes':>49}"
        lines.append(row(one, plain, network, world_size) if one in found.used else sent_dense)
    lines += ["", f"Recommended: {best.method.name}", *usage(best, args.host)]
    gain = best.method.step(network, world_size) / found.fastest.method.step(network, world_size)
    if gain >= NOTICED:
        lines.append(f"{found.fastest.method.name} is {gain:.2f} times as fast, but may cost more accuracy.")
    if found.short is not best:
        lines += [f"With fewer than 10,000 steps: {found.short.method.name}", *usage(found.short, args.host)]
    return "\n".join(lines)


def as_json(args: argparse.Namespace, network: Network, world_size: int) -> str:
    """Return the same as one line of JSON."""
    found = compare(args, network, world_size)
    base, methods = found.made[0].method.step(network, world_size), []
    for one in found.made:
        step = one.method.step(network, world_size) if one in found.used else None
        figures = {"step_ms": step and 1e3 * step, "speedup": step and base / step, "is_sent_dense": step is None}
        methods.append({"name": one.method.name, "call": one.call, **figures})
    asked = {"parameters": args.parameters, "compute_ms": args.compute_ms, "ranks": world_size, "host": args.host}
    names = {"recommended": found.best.method.name, "recommended_below_10000_steps": found.short.method.name}
    return json.dumps({**asked, "network": asdict(network), "methods": methods, **names})


def usage(one: Candidate, host: str) -> list[str]:
    """Return the lines that say how to use a candidate."""
    lines = [f"    compression={one.call}"]
    if host == "ddp":
        lines = [f"    compression = {one.call}", "    compression.register(model)"]
        lines = ["    from hvd_sparse.torch.ddp import Compression", *lines]
    if "momentum" in one.call:
        lines.append("    warmup_steps: a tenth of the run's steps; momentum of the optimizer: 0")
        if not one.is_for_long_runs:
            lines.append("    With SGD and fewer than 1,000 steps try factor_masking=False, and gradient_dropping.")
    if one.changes_fewer:
        lines.append("    It changes fewer elements in a step than a gather, so it may cost accuracy: compare.")
    return lines


def row(one: Candidate, plain: Method, network: Network, world_size: int) -> str:
    """Return the line of a method that sends payloads, or of dense training, with which it is compared."""
    method = one.method
    step, base = method.step(network, world_size), plain.step(network, world_size)
    pays, most = "", ""
    if method is not plain:
        limit = break_even(method, plain, network, world_size)
        pays = "any" if step < base else "never"
        if limit is not None:
            rounded = f"{limit / 1e9:,.0f}" if limit >= 1e12 else f"{limit / 1e9:.3g}"
            pays = f"{'<' if (step < base) == (network.bandwidth < limit) else '>'} {rounded} Gbit/s"
        ranks = most_ranks(one, plain, network, world_size) if step < base else None
        most = "-" if ranks is None else "any" if ranks >= MOST_RANKS else str(ranks)
    return (
        f"{method.name:<27}{1e3 * step:>10.1f}{base / step:>11.2f}x{method.speedup(network, world_size):>9.1f}x"
        f"{pays:>17}{most:>13}"
    )


def most_ranks(one: Candidate, plain: Method, network: Network, world_size: int) -> int | None:
    """Return the world size up to which a method is faster than dense training, and sends payloads; None if none is."""
    ranks = largest_world_size(one.method, plain, network)
    if ranks is None or not one.is_sent_dense(ranks):
        return ranks
    return world_size + bisect.bisect_left(range(world_size, ranks), True, key=one.is_sent_dense) - 1


def main(arguments: list[str] | None = None) -> None:
    """Measure if asked to, and print the result on rank 0."""
    args = parse_arguments(arguments)
    bandwidth, latency, world_size, rank = args.bandwidth, args.latency_us, args.ranks, 0
    if args.measure:
        measured, ranks, rank, args.framework = measure_job(args.framework, args.host)
        bandwidth, world_size = bandwidth or measured.bandwidth, world_size or ranks
        latency = 1e6 * measured.latency if latency is None else latency
    latency = LATENCY_US if latency is None else latency
    network = Network(bandwidth, 1e-6 * latency, measured.gather_cost if args.measure else 1.0)
    if rank == 0:
        print((as_json if args.json else report)(args, network, world_size))


if __name__ == "__main__":
    main()
