"""Measure the bytes that a rank receives and its decoding time, with a gather and a reduce-scatter, on simulated ranks.

    python benchmarks/exchanges.py
    python benchmarks/exchanges.py --density 0.001 --jobs --out FOLDER

The ranks run one after the other, on one thread, with the code of real training jobs (`hvd_sparse.reduce_scatter`, and
`reduce_payloads` of a gather), but slices of arrays replace the collectives. Half of each rank's selection is common to
all ranks. Nine tenths of it are in one tenth of the elements, as in a model whose layers differ. A second table has the
bytes received in real jobs of a small model under mpirun (`exchanges_job.py`). Writes exchanges.json and .md to
benchmarks/results, and with other settings to the folder `--out`. The last line of output is one JSON object.
"""

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from common import RESULTS, last_json
from entries import ENTRY_BYTES

from hvd_sparse import native
from hvd_sparse.reduce_scatter import MessageFormat, Regions, SparseVector
from hvd_sparse.torch import ops
from hvd_sparse.wire import payload_size, top_k_count

JOB = Path(__file__).resolve().parent / "exchanges_job.py"


def drawn(n: int, k: int, random: np.random.Generator, common: np.ndarray) -> SparseVector:
    """Return one rank's selection: half is common to all ranks, nine tenths are in the first tenth of elements."""
    tenth = max(k, n // 10)
    own = np.unique(np.concatenate([random.integers(0, tenth, k), random.integers(0, n, k // 8)]))
    own = random.permutation(own[~np.isin(own, common, assume_unique=True)])[: k - common.size]
    indices = np.sort(np.concatenate([common, own]))
    if indices.size != k:
        raise RuntimeError(f"{indices.size} elements were drawn, not {k}")
    return SparseVector(indices, random.standard_normal(k).astype(np.float32))


def measure(n: int, k: int, ranks: int) -> dict:
    """Return the figures for one number of ranks: those of rank 0, and the most bytes that any rank receives."""
    random = np.random.default_rng(0)
    common = np.unique(random.integers(0, max(k, n // 10), k))[: k // 2]
    selected = [drawn(n, k, random, common) for _ in range(ranks)]
    form = MessageFormat(n, k, "run_length", "float32", "mean")
    regions = [Regions(form, ranks, rank) for rank in range(ranks)]
    counts = sum(one.count(own) for one, own in zip(regions, selected, strict=True))
    for one in regions:
        one.balance(counts)
    sent = [one.split(own) for one, own in zip(regions, selected, strict=True)]
    parts = [np.split(one.message, np.cumsum(one.splits)[:-1]) for one in sent]
    received = [np.concatenate([part[owner] for part in parts]) for owner in range(ranks)]
    start = perf_counter()
    payloads = [regions[0].reduce(received[0], sent[0].padding, 0)[0]]
    reduce_seconds = perf_counter() - start
    payloads += [regions[rank].reduce(received[rank], sent[rank].padding, 0)[0] for rank in range(1, ranks)]
    gathered = np.concatenate(payloads)
    total = np.ones(n, np.float32)  # its pages are there before the clock starts
    start = perf_counter()
    kept = regions[0].join(gathered)
    total[:] = 0.0
    total[kept.indices] = kept.values
    join_seconds = perf_counter() - start
    check(selected, kept, regions[0])
    sizes = [
        received[rank].size - int(sent[rank].splits[rank]) + gathered.size - payloads[rank].size
        for rank in range(ranks)
    ]
    return {
        "ranks": ranks,
        "gather_bytes": (ranks - 1) * payload_size(n, k),
        "scatter_bytes": max(sizes),
        "scatter_entries": max(sizes) / ENTRY_BYTES / k,
        "gather_decode_ms": 1e3 * decode_all(selected, n, k),
        "scatter_decode_ms": 1e3 * (reduce_seconds + join_seconds),
        "union": int(np.unique(np.concatenate([own.indices for own in selected])).size),
        "kept": int(kept.indices.size),
    }


def check(selected: list[SparseVector], kept: SparseVector, regions: Regions) -> None:
    """Raise an error unless the result has the exact sums over ranks, and each region's largest ones."""
    total = sum_of(selected, regions.form.n)
    if not np.array_equal(total[kept.indices], kept.values):
        raise RuntimeError("what owners keep are not the sums of all ranks")
    rest = np.abs(total)
    rest[kept.indices] = 0.0
    for begin, end in zip(regions.bounds[:-1], regions.bounds[1:], strict=True):
        here = kept.values[(kept.indices >= begin) & (kept.indices < end)]
        if here.size == regions.kept_count and rest[begin:end].max(initial=0.0) > np.abs(here).min():
            raise RuntimeError("a larger sum was left out")


def decode_all(selected: list[SparseVector], n: int, k: int) -> float:
    """Return the seconds of a job's call that decodes the payloads of all ranks into a dense gradient; check it."""
    gathered = torch.from_numpy(np.stack([native.pack(own.indices, own.values, n, k) for own in selected]))
    out = torch.ones(n)  # as in `measure`
    start = perf_counter()
    ops.reduce_payloads(gathered, 0, n, k, out)
    seconds = perf_counter() - start
    if not np.array_equal(out.numpy(), sum_of(selected, n)):
        raise RuntimeError("the decoded gradient is not the sum of all ranks")
    return seconds


def sum_of(selected: list[SparseVector], n: int) -> np.ndarray:
    """Return the sum of all ranks' selections, float32[n], added in rank order."""
    total = np.zeros(n, np.float32)
    for own in selected:
        total[own.indices] += own.values
    return total


def run_job(ranks: int) -> dict:
    """Return the bytes that the ranks of a real job receive."""
    return last_json(["mpirun", "-np", str(ranks), "--oversubscribe", sys.executable, str(JOB)])


def write(simulated: list[dict], jobs: list[dict], n: int, density: float, out: Path) -> None:
    """Write the results and two tables."""
    lines = [
        f"{n:,} elements, density {density:g}, one rank of so many (`python benchmarks/exchanges.py`):",
        "",
        "| ranks | received, gather | reduce-scatter | in entries, times k | elements changed | ms to decode |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for one in simulated:
        lines.append(
            f"| {one['ranks']} | {one['gather_bytes'] / 1e6:.2f} MB | {one['scatter_bytes'] / 1e6:.2f} MB | "
            f"{one['scatter_entries']:.2f} | {one['union']:,}, {one['kept']:,} | "
            f"{one['gather_decode_ms']:.1f}, {one['scatter_decode_ms']:.1f} |"
        )
    lines += ["", "Elements changed, and milliseconds until the dense gradient is there: gather, reduce-scatter.", ""]
    lines += ["Real jobs of 300,000 elements in three tensors, the rank that receives most, with all headers:", ""]
    lines += ["| ranks | received, gather | in entries, times k | received, reduce-scatter | in entries, times k |"]
    lines += ["|---:|---:|---:|---:|---:|"]
    for one in jobs:
        cells = [str(one["ranks"])]
        for exchange in ("gather", "reduce_scatter"):
            cells += [f"{one[f'{exchange}_bytes']:,.0f} bytes", f"{one[f'{exchange}_entries']:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    out.mkdir(parents=True, exist_ok=True)
    (out / "exchanges.md").write_text("\n".join([*lines, ""]))
    (out / "exchanges.json").write_text(json.dumps({"simulated": simulated, "jobs": jobs}, indent=1) + "\n")


def main() -> None:
    """Measure each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=25_557_032, help="(default: %(default)s, as ResNet-50 has)")
    parser.add_argument("--density", type=float, default=0.01, help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8, 16, 32, 64, 256])
    parser.add_argument("--jobs", type=int, nargs="*", default=[2, 3, 4, 8, 16], help="ranks of real jobs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    defaults = vars(parser.parse_args([]))
    if args.out == RESULTS and vars(args) != defaults:
        parser.error(f"{RESULTS}/exchanges.json has results of the default settings: name another folder with --out")
    torch.set_num_threads(1)
    k = top_k_count(args.parameters, args.density)
    simulated, jobs = [], []
    measure(args.parameters, k, 2)  # the first call takes longer
    for ranks in args.ranks:
        simulated.append(measure(args.parameters, k, ranks))
        print(json.dumps(simulated[-1]), flush=True)
    for ranks in args.jobs:
        jobs.append(run_job(ranks))
        print(json.dumps(jobs[-1]), flush=True)
    write(simulated, jobs, args.parameters, args.density, args.out)
    print(json.dumps({"simulated": simulated, "jobs": jobs}))


if __name__ == "__main__":
    main()
