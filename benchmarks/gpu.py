"""Time DGC's compress and the reduction of payloads on a GPU, and compare both with copies and with torch.topk.

    make bench-gpu        or: python benchmarks/gpu.py [--check-only] [--out benchmarks/results]

First, steps are compared with the CPU operators, bit for bit. Then, in one run:

    sizes    one tensor of 20,000 to 400 million float32, densities 0.001 and 0.01
    buckets  many tensors in one call: 160 x 20,000, ResNet-50's, and tensors of odd sizes
    forms    value types and codings
    hints    steps whose threshold hint is missing or wrong
    topk     the same step with torch.topk and PyTorch's operators
    waiting  what MiCRO and SIDCo add: operators after which the host goes on with what the device found

compress is: accumulate, select, pack, clear. Times are medians of CUDA events, with launches that do not wait for the
host, as in training, where the host runs ahead. `of bytes` is compress over moving 20 bytes an element at the bandwidth
of a copy (the gradient is read, velocity and residual are read and written). `call` is the time until the device is
done if the host starts when the device is idle; `replay` the same with a captured CUDA graph. `reduce` decodes and adds
8 payloads. Writes gpu.json and gpu.md. The last line of output is one JSON object.
"""

import argparse
import json
import math
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from steps import MODELS

from hvd_sparse.buckets import BucketLayout
from hvd_sparse.torch import bucket_ops, ops, varying_ops
from hvd_sparse.wire import payload_size, top_k_count

HERE = Path(__file__).resolve().parent
MOMENTUM = 0.9
RANKS = 8
BUSY_CYCLES = 6_000_000  # about three milliseconds
BYTES_MOVED = 20  # per element: three float32 read, two written
ROUNDS = 15
SETTLE = 30  # steps before the timing, in which threshold hints adapt
SIZES = (20_000, 100_000, 1_000_000, 4_000_000, 10_000_000, 25_000_000, 100_000_000, 400_000_000)
DENSITIES = (0.001, 0.01)
LARGE = 100_000_000
RESNET50 = [torch.Size(shape).numel() for shape in MODELS["resnet50"]]
BUCKETS = {  # title: sizes, density, one selection for all
    "160 x 20,000": ([20_000] * 160, 0.001, False),
    "ResNet-50, each tensor": (RESNET50, 0.001, False),
    'ResNet-50, scope="model"': (RESNET50, 0.001, True),
    '25 x 1,000,003, scope="model"': ([1_000_003] * 25, 0.001, True),
    '25 x 1,000,000, scope="model"': ([1_000_000] * 25, 0.001, True),
}
FORMS = {  # title: density, form
    "float16": (0.001, {"value_dtype": "float16"}),
    "int2": (0.001, {"value_dtype": "int2"}),
    "int1": (0.001, {"value_dtype": "int1"}),
    "elias_fano": (0.001, {"coding": "elias_fano"}),
    "bitmap": (0.01, {"coding": "bitmap"}),
}
MICRO_RANKS = 4
HINTS = {"none": 0.0, "half": 0.5, "double": 2.0}  # the factor of the last threshold


class Worker:
    """One rank's step of a bucket of tensors."""

    def __init__(self, sizes, density, joint=False, device="cuda", **form):
        ns = [sum(sizes)] if joint else sizes
        self.ks, self.form = [top_k_count(n, density) for n in ns], form
        self.ns, self.device = ns, device
        self.layout, self.members = BucketLayout(sizes, self.ks, (), joint), list(range(len(sizes)))
        self.residuals, self.velocities, self.sums = (
            list(torch.zeros(sum(sizes), device=device).split(sizes)) for _ in range(3)
        )
        self.payload_sizes = [payload_size(n, k, **form) for n, k in zip(ns, self.ks, strict=True)]
        self.message = torch.zeros(sum(self.payload_sizes), dtype=torch.uint8, device=device)
        self.hints = bucket_ops.new_hints(len(ns), device)

    def compress(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Accumulate, select, pack and clear; return info, float64[selections, 2]."""
        places = {"layout": self.layout, "members": self.members, **self.form}
        rule = {"factors": [1.0] * len(self.members), "momentum": MOMENTUM, "seed": 1}
        lists = (gradients, self.residuals, self.velocities)
        info, _ = bucket_ops.accumulate_bucket(*lists, hints=self.hints, out=self.message, **places, **rule)
        bucket_ops.clear_bucket(self.message, self.residuals, self.velocities, **places)
        return info

    def gather(self) -> None:
        """Set the messages of all ranks: other ranks send entries at other places."""
        messages, random = [self.message.cpu()], torch.Generator().manual_seed(0)
        for _ in range(1, RANKS):
            parts = []
            for n, k, size in zip(self.ns, self.ks, self.payload_sizes, strict=True):
                indices = torch.arange(k) * (n // k) + torch.randint(n // k, (k,), generator=random)
                values = torch.randn(k, generator=random)
                if "value_dtype" in self.form:
                    values = ops.quantize(values, self.form["value_dtype"])
                parts.append(torch.empty(size, dtype=torch.uint8))
                ops.pack(indices, values, n, k, parts[-1], **self.form)
            messages.append(torch.cat(parts))
        self.gathered = torch.stack(messages).to(self.device)

    def reduce(self) -> None:
        """Add the payloads of all ranks."""
        places = {"layout": self.layout, "members": self.members, **self.form}
        bucket_ops.reduce_bucket(self.gathered, self.sums, 1.0 / RANKS, **places)


class PlainWorker:
    """The same step with PyTorch's operators. Its payload has 32-bit indices."""

    def __init__(self, n: int, k: int):
        self.k = k
        self.residual, self.velocity = torch.zeros(n, device="cuda"), torch.zeros(n, device="cuda")

    def compress(self, gradients: list[torch.Tensor]) -> None:
        """Accumulate, select and clear."""
        (gradient,) = gradients
        self.finite = torch.isfinite(gradient).all()
        self.velocity.mul_(MOMENTUM).add_(gradient)
        self.residual.add_(self.velocity)
        indices = torch.topk(self.residual.abs(), self.k, sorted=False).indices
        self.payload = (indices.to(torch.int32), self.residual[indices])
        self.residual.index_fill_(0, indices, 0.0)
        self.velocity.index_fill_(0, indices, 0.0)


class Gradients:
    """Seeded gradients. The scales of the elements are log-normal, as those of layers are."""

    def __init__(self, sizes):
        self.generator = torch.Generator("cuda").manual_seed(0)
        self.scale = torch.empty(sum(sizes), device="cuda").normal_(generator=self.generator).exp_()
        self.gradient = torch.empty(sum(sizes), device="cuda")
        self.parts = list(self.gradient.split(sizes))

    def next(self) -> list[torch.Tensor]:
        """Draw the next step's gradients into the same buffers."""
        self.gradient.normal_(generator=self.generator).mul_(self.scale)
        return self.parts


def check(sizes: list[int], density: float, steps: int, joint: bool = False) -> None:
    """Compare a few steps with the CPU's, bit for bit."""
    source = Gradients(sizes)
    found, expected = (Worker(sizes, density, joint, device) for device in ("cuda", "cpu"))
    for step in range(steps):
        gradients = source.next()
        found.compress(gradients)
        expected.compress([gradient.cpu() for gradient in gradients])
        for worker in (found, expected):
            worker.gather()
            worker.reduce()
        for name in ("message", "residuals", "velocities", "sums"):
            pairs = zip(_flat(getattr(found, name)), _flat(getattr(expected, name)), strict=True)
            if not all(torch.equal(mine.cpu(), theirs) for mine, theirs in pairs):
                raise AssertionError(f"{name} of {sum(sizes)} elements in step {step} is not that of the CPU")
    if ops.take_decode_status(found.message).tolist()[0] != 0:
        raise AssertionError("a payload was refused")
    print(f"{steps} steps of {sum(sizes):,} elements, {sum(found.ks):,} of them sent: equal to the CPU's", flush=True)


def _flat(tensors: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def on_device(action: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Return the median microseconds on the device of an action that is enqueued while the device is still busy."""
    times = []
    for _ in range(ROUNDS):
        before()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES)
        start.record()
        action()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


def by_clock(action: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Return the median microseconds from the call on an idle device until the device is done."""
    times = []
    for _ in range(ROUNDS):
        before()
        torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def captured(action: Callable[[], object]) -> Callable[[], None]:
    """Return the replay of a CUDA graph of an action."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph.replay


def measure(title: str, sizes: list[int], density: float, joint: bool = False, **form) -> dict:
    """Return the figures of one case, in microseconds and ratios."""
    source, worker, n = Gradients(sizes), Worker(sizes, density, joint, **form), sum(sizes)
    for _ in range(SETTLE):
        worker.compress(source.next())
    copy = _copy_time(n)
    compress = on_device(lambda: worker.compress(source.parts), source.next)
    call = by_clock(lambda: worker.compress(source.parts), source.next)
    worker.gather()
    row = {
        "title": title,
        "elements": n,
        "tensors": len(sizes),
        "density": density,
        "copy_us": copy,
        "compress_us": compress,
        "compress_over_bytes": compress / (copy * BYTES_MOVED / 8),
        "call_us": call,
        "reduce_us": (reduced := on_device(worker.reduce)),
        "reduce_over_copy": reduced / copy,
    }
    row["replay_us"] = by_clock(captured(lambda: worker.compress(source.parts)), source.next)
    return _shown(row)


def measure_hints() -> list[dict]:
    """Return the figures of steps whose hint is missing or wrong."""
    source, worker, rows = Gradients([LARGE]), Worker([LARGE], 0.001), []
    copy = _copy_time(LARGE)
    for title, factor in HINTS.items():
        for _ in range(SETTLE):
            worker.compress(source.next())

        def spoil(by=factor):
            source.next()
            worker.hints[:, 0].mul_(by)

        compress = on_device(lambda: worker.compress(source.parts), spoil)
        ratio = compress / (copy * BYTES_MOVED / 8)
        rows.append(_shown({"title": title, "compress_us": compress, "compress_over_bytes": ratio}))
    return rows


def measure_plain(sizes: dict[float, dict]) -> list[dict]:
    """Return the figures of steps with torch.topk. sizes: by density, the row of as many elements."""
    rows = []
    for density, ours in sizes.items():
        source, plain = Gradients([LARGE]), PlainWorker(LARGE, top_k_count(LARGE, density))
        for _ in range(3):
            plain.compress(source.next())
        compress = on_device(lambda worker=plain, drawn=source: worker.compress(drawn.parts), source.next)
        row = {"title": "topk", "density": density, "compress_us": compress}
        rows.append(_shown({**row, "topk_over_compress": compress / ours["compress_us"]}))
    return rows


class Partition:
    """MiCRO's selection on one rank, with the threshold of the step before."""

    def __init__(self, residuals: list[torch.Tensor]):
        sizes = [residual.numel() for residual in residuals]
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        share = top_k_count(sum(sizes), 0.001) / MICRO_RANKS
        self.options = {"factors": [1.0] * len(sizes), "begins": begins, "begin": 0, "end": sum(sizes) // MICRO_RANKS}
        self.options |= {"share": share, "sample": 1 << 16}
        self.residuals, self.threshold = residuals, math.inf

    def select(self, gradients: list[torch.Tensor]) -> None:
        """Accumulate and select."""
        found = varying_ops.accumulate_partition(gradients, self.residuals, threshold=self.threshold, **self.options)
        self.threshold = found[2].item()


def measure_waiting() -> list[dict]:
    """Return the call times of MiCRO's selection in its partition, and of SIDCo's fits, for ResNet-50's tensors."""
    source, rows = Gradients(RESNET50), []
    residuals = list(torch.zeros(sum(RESNET50), device="cuda").split(RESNET50))
    ks, partition = [top_k_count(size, 0.001) for size in RESNET50], Partition(residuals)
    for title, action in {
        "accumulate_partition": lambda: partition.select(source.parts),
        "fit_thresholds": lambda: varying_ops.fit_thresholds(residuals, ks, [2] * len(ks)),
    }.items():
        for _ in range(SETTLE):
            source.next()
            action()
        rows.append(_shown({"title": title, "call_us": by_clock(action, source.next)}))
    return rows


def _copy_time(n: int) -> float:
    source, target = torch.zeros(n, device="cuda"), torch.empty(n, device="cuda")
    return on_device(lambda: target.copy_(source))


def _shown(row: dict) -> dict:
    """Print a row; return it with rounded numbers."""
    rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
    print("  " + ", ".join(f"{key} {value}" for key, value in rounded.items()), flush=True)
    torch.cuda.empty_cache()
    return rounded


def describe() -> str:
    """Return GPU, driver and versions, as text."""
    driver = ""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = f", driver {subprocess.run(query, capture_output=True, text=True).stdout.split()[0]}"
    return f"{torch.cuda.get_device_name()}{driver}, PyTorch {torch.__version__}"


def table(rows: list[dict]) -> list[str]:
    """Return the lines of a table of `measure`'s rows."""
    head = "| | elements | density | copy | compress | of bytes | call | replay | reduce | of a copy |"
    lines = [head, "|---|" + "---:|" * 9]
    for row in rows:
        times = " | ".join(f"{row[key]:,.0f}" for key in ("copy_us", "compress_us"))
        calls = " | ".join(f"{row[key]:,.0f}" for key in ("call_us", "replay_us", "reduce_us"))
        head = f"{row['title']} | {row['elements']:,} | {row['density']:g} | {times}"
        lines.append(f"| {head} | {row['compress_over_bytes']:.2f} | {calls} | {row['reduce_over_copy']:.2f} |")
    return lines


def page(found: dict) -> str:
    """Return the page of results."""
    lines = [
        f"{found['machine']} (`make bench-gpu`). Times in microseconds; `benchmarks/gpu.py` says what they are.",
        "",
    ]
    lines += ["One tensor:", "", *table(found["sizes"]), ""]
    lines += ["Many tensors in one call:", "", *table(found["buckets"]), ""]
    lines += [f"{LARGE:,} elements, other payloads:", "", *table(found["forms"]), ""]
    lines += [f"{LARGE:,} elements, density 0.001, a threshold hint that is missing or wrong:", ""]
    lines += ["| hint | compress | of bytes |", "|---|---:|---:|"]
    lines += [
        f"| {row['title']} | {row['compress_us']:,.0f} | {row['compress_over_bytes']:.2f} |" for row in found["hints"]
    ]
    lines += ["", f"{LARGE:,} elements, the same step with `torch.topk` and PyTorch's operators:", ""]
    lines += ["| density | microseconds | of ours |", "|---:|---:|---:|"]
    for row in found["topk"]:
        lines.append(f"| {row['density']:g} | {row['compress_us']:,.0f} | {row['topk_over_compress']:.1f} |")
    lines += ["", f"ResNet-50's tensors, operators that the host waits for; MiCRO on one of {MICRO_RANKS} ranks:", ""]
    lines += ["| operator | call |", "|---|---:|"]
    lines += [f"| `{row['title']}` | {row['call_us']:,.0f} |" for row in found["waiting"]]
    return "\n".join([*lines, ""])


def main() -> None:
    """Check, time, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check-only", action="store_true", help="compare with the CPU, without timing")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="(default: %(default)s)")
    arguments = parser.parse_args()
    for density in DENSITIES:
        check([1_000_003], density, 5)
        check([20_000, 7, 1_000_003, 4096], density, 5, joint=True)
    check([LARGE], 0.001, 1)
    if arguments.check_only:
        return
    found = {"machine": describe()}
    found["sizes"] = [measure("", [n], density) for n in SIZES for density in DENSITIES]
    found["buckets"] = [measure(title, *case) for title, case in BUCKETS.items()]
    found["forms"] = [measure(title, [LARGE], density, **form) for title, (density, form) in FORMS.items()]
    found["hints"] = measure_hints()
    found["topk"] = measure_plain({row["density"]: row for row in found["sizes"] if row["elements"] == LARGE})
    found["waiting"] = measure_waiting()
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    (arguments.out / "gpu.md").write_text(page(found))
    large = [row for row in found["sizes"] if row["elements"] == LARGE]
    figures = {f"compress_over_bytes at {row['density']}": row["compress_over_bytes"] for row in large}
    figures |= {f"topk_over_compress at {row['density']}": row["topk_over_compress"] for row in found["topk"]}
    print(json.dumps({"machine": found["machine"], **figures}))


if __name__ == "__main__":
    main()
