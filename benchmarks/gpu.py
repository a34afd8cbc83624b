"""Time DGC's compress on a GPU, and compare it with the bytes it must move and with the same work using torch.topk.

Before the timing, each result is compared with the CPU operators, bit for bit. Times are medians of CUDA events. Within
a run, the operations to compare take turns. The last line of output is one JSON object with these ratios:

    compress_over_bytes   compress (accumulate, select, pack, clear) / moving 20 bytes per element (read the gradient,
                          read and write velocity and residual) at the bandwidth of a copy; goal: <= 1.5
    topk_over_compress    the same with torch.topk and PyTorch operators / compress; goal: >= 5
    reduce_over_copy      decoding and adding 8 payloads / copying the gradient; writing zeros alone takes half a copy

    make bench-gpu        or: python benchmarks/gpu.py --elements 100000000 --density 0.001
"""

import argparse
import json
import statistics

import torch
from entries import draw_entries

from hvd_sparse.buckets import BucketLayout
from hvd_sparse.torch import ops
from hvd_sparse.wire import payload_size, top_k_count

MOMENTUM = 0.9
RANKS = 8
BUSY_CYCLES = 4_000_000  # about two milliseconds
BYTES_MOVED = 20  # per element: three float32 read, two written


class Worker:
    """The work of one rank on one tensor of n elements."""

    def __init__(self, n: int, k: int, device: str):
        self.n, self.k, self.device = n, k, device
        self.residual, self.velocity = torch.zeros(n, device=device), torch.zeros(n, device=device)
        self.payload = torch.zeros(payload_size(n, k), dtype=torch.uint8, device=device)
        self.sum = torch.empty(n, device=device)
        self.hints = ops.new_hints(1, device)
        self.layout = BucketLayout([n], [k])
        self.steps = 0

    def compress(self, gradient: torch.Tensor) -> None:
        """Accumulate, select, pack, and clear the sent elements."""
        lists = ([gradient], [self.residual], [self.velocity])
        options = {
            "factors": [1.0],
            "momentum": MOMENTUM,
            "seed": self.steps,
            "out": self.payload,
            "layout": self.layout,
        }
        ops.accumulate_bucket(*lists, hints=self.hints, **options)
        ops.clear_bucket(self.payload, [self.residual], [self.velocity], layout=self.layout)
        self.steps += 1

    def gather(self) -> None:
        """Simulate other ranks, which send the same values at other places."""
        indices, values = ops.unpack(self.payload.cpu(), self.n, self.k)
        parts = []
        for rank in range(RANKS):
            places = draw_entries(self.n, self.k, rank)[0] if rank > 0 else indices
            part = torch.empty(self.payload.numel(), dtype=torch.uint8)
            ops.pack(torch.as_tensor(places), values, self.n, self.k, part)
            parts.append(part)
        self.gathered = torch.stack(parts).to(self.device)

    def reduce(self) -> None:
        """Add the payloads of all ranks."""
        ops.reduce_bucket(self.gathered, [self.sum], 1.0 / RANKS, layout=self.layout)


class PlainWorker:
    """The same work with PyTorch operators. Its payload has 32-bit indices."""

    def __init__(self, n: int, k: int):
        self.k = k
        self.residual, self.velocity = torch.zeros(n, device="cuda"), torch.zeros(n, device="cuda")

    def compress(self, gradient: torch.Tensor) -> None:
        """Accumulate, select and clear."""
        self.finite = torch.isfinite(gradient).all()
        self.velocity.mul_(MOMENTUM).add_(gradient)
        self.residual.add_(self.velocity)
        indices = torch.topk(self.residual.abs(), self.k, sorted=False).indices
        self.payload = (indices.to(torch.int32), self.residual[indices])
        self.residual.index_fill_(0, indices, 0.0)
        self.velocity.index_fill_(0, indices, 0.0)


class Gradients:
    """Seeded gradients. The scales of the elements are log-normal, as those of layers are."""

    def __init__(self, n: int):
        self.generator = torch.Generator("cuda").manual_seed(0)
        self.scale = torch.empty(n, device="cuda").normal_(generator=self.generator).exp_()
        self.gradient = torch.empty(n, device="cuda")

    def next(self) -> torch.Tensor:
        """Draw the next step's gradient into the same buffer."""
        return self.gradient.normal_(generator=self.generator).mul_(self.scale)


def check(n: int, density: float, steps: int) -> None:
    """Compare a few steps with the CPU's, bit for bit."""
    k = top_k_count(n, density)
    source, native, expected = Gradients(n), Worker(n, k, "cuda"), Worker(n, k, "cpu")
    for step in range(steps):
        gradient = source.next()
        native.compress(gradient)
        expected.compress(gradient.cpu())
        for worker in (native, expected):
            worker.gather()
            worker.reduce()
        for name in ("payload", "residual", "velocity", "sum"):
            if not torch.equal(getattr(native, name).cpu(), getattr(expected, name)):
                raise AssertionError(f"{name} of {n} elements in step {step} is not that of the CPU")
    if ops.take_decode_status(native.sum).tolist()[0] != 0:
        raise AssertionError("a payload was refused")
    print(f"{steps} steps of {n:,} elements, {k:,} of them sent: equal to the CPU's", flush=True)


def timed(action, *arguments) -> float:
    """Return the device seconds of an action that is enqueued while the device is still busy.

    This is the case in training, where the host runs ahead of the device. The time excludes launches that the device
    would have to wait for.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(BUSY_CYCLES)
    start.record()
    action(*arguments)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def measure(n: int, k: int, rounds: int, settle: int) -> dict[str, float]:
    """Return the median seconds of compress after a few steps, and of the operations it is compared with."""
    source, native, plain, copy = Gradients(n), Worker(n, k, "cuda"), PlainWorker(n, k), torch.empty(n, device="cuda")
    for _ in range(settle):
        native.compress(source.next())
    for _ in range(3):
        plain.compress(source.next())
    native.gather()
    native.reduce()
    actions = {
        "copy": lambda gradient: copy.copy_(gradient),
        "compress": native.compress,
        "topk": plain.compress,
        "reduce": lambda _: native.reduce(),
    }
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        gradient = source.next()
        for name, action in actions.items():
            torch.cuda.synchronize()
            seconds[name].append(timed(action, gradient))
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    """Check, time, print GB/s and ratios, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=100_000_000)
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--settle", type=int, default=60, help="steps before timing starts")
    arguments = parser.parse_args()
    n, k = arguments.elements, top_k_count(arguments.elements, arguments.density)
    check(1_000_003, arguments.density, 5)
    check(n, arguments.density, 2)
    seconds = measure(n, k, arguments.rounds, arguments.settle)
    bytes_of = {
        "copy": 8 * n,
        "compress": BYTES_MOVED * n,
        "topk": BYTES_MOVED * n,
        "reduce": 4 * n,
    }
    for name, value in seconds.items():
        print(
            f"  {name:<9} {1e3 * value:8.3f} ms   {1e-9 * bytes_of[name] / value:8.1f} GB/s of {bytes_of[name]:,} bytes"
        )
    moving = seconds["copy"] * BYTES_MOVED / 8
    figures = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "elements": n,
        "density": arguments.density,
        "compress_over_bytes": round(seconds["compress"] / moving, 3),
        "topk_over_compress": round(seconds["topk"] / seconds["compress"], 2),
        "reduce_over_copy": round(seconds["reduce"] / seconds["copy"], 3),
        "copy_gb_per_s": round(8e-9 * n / seconds["copy"], 1),
        "compress_ms": round(1e3 * seconds["compress"], 4),
        "reduce_ms": round(1e3 * seconds["reduce"], 4),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
