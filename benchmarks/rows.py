"""Time the selection in rows of a matrix and its payload, and compare them with torch.topk on the same work.

Before the timing, every result is checked against the reference and against torch.topk. The operations take turns in
one run on one thread, and figures are ratios of medians. The last line of output is one JSON object with these ratios:

    select_pack_over_topk  mask and payload / torch.topk(x.abs(), k, dim=1) and a gather of values; goal: <= 0.2
    select_over_topk       mask only / the same
    select_over_copy, laplace_over_copy, filter_over_copy, pack_over_copy, unpack_over_copy
                           each operation / a copy of the matrix

    make bench-rows        or: python benchmarks/rows.py --rows 512 --columns 4096 --density 0.05
"""

import argparse
import json
import platform
import statistics

import numpy as np
import torch
from common import timed

from hvd_sparse import native_rows, reference
from hvd_sparse.torch import row_ops
from hvd_sparse.wire import top_k_count


class Activations:
    """Seeded matrices. The scales of the rows are log-normal, as activations of different samples are."""

    def __init__(self, rows: int, columns: int):
        self.generator = np.random.default_rng(0)
        self.shape = rows, columns

    def next(self) -> torch.Tensor:
        """Draw the next batch."""
        values = self.generator.standard_normal(self.shape, np.float32)
        return torch.from_numpy(values * np.exp(0.25 * self.generator.standard_normal((self.shape[0], 1), np.float32)))


def with_topk(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the columns and values of the k largest elements of each row, with torch.topk."""
    columns = torch.topk(values.abs(), k, dim=1).indices
    return columns, values.gather(1, columns)


def select_and_pack(values: torch.Tensor, k: int, seed: int) -> np.ndarray:
    """Return the payload of the k largest elements of each row."""
    mask, _ = row_ops.select_top_k_rows(values, k, seed)
    return native_rows.pack_rows(values.numpy(), mask.numpy())


def check(columns: int, k: int) -> None:
    """Compare a small matrix with the NumPy reference and with torch.topk."""
    values = Activations(20, columns).next()
    mask, thresholds = row_ops.select_top_k_rows(values, k, 7)
    expected, bars = reference.select_top_k_rows(values.numpy(), k, 7)
    np.testing.assert_array_equal(mask.numpy(), expected)
    np.testing.assert_array_equal(thresholds.numpy(), bars)
    chosen, kept = with_topk(values, k)
    np.testing.assert_array_equal(mask.numpy(), torch.zeros_like(mask).scatter_(1, chosen, True).numpy())
    payload = native_rows.pack_rows(values.numpy(), mask.numpy())
    np.testing.assert_array_equal(payload, reference.pack_rows(values.numpy(), expected))
    found, places = native_rows.unpack_rows(payload, tuple(values.shape), 20 * k, "float32")
    np.testing.assert_array_equal(found, torch.zeros_like(values).scatter_(1, chosen, kept).numpy())
    np.testing.assert_array_equal(places, expected)
    laplace = row_ops.laplace_threshold_rows(values, 0.05).numpy()
    np.testing.assert_array_equal(laplace, reference.laplace_threshold_rows(values.numpy(), 0.05))
    passed = row_ops.filter_threshold_rows(values, torch.from_numpy(laplace))
    np.testing.assert_array_equal(passed.numpy(), reference.filter_threshold_rows(values.numpy(), laplace))


def measure(rows: int, columns: int, k: int, density: float, rounds: int) -> dict[str, float]:
    """Return the median seconds of each operation and of its comparison, measured in turns."""
    source, copy = Activations(rows, columns), torch.empty(rows, columns)
    names = ("topk", "select_pack", "select", "laplace", "filter", "pack", "unpack", "copy")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        values = source.next()
        array, thresholds = values.numpy(), row_ops.laplace_threshold_rows(values, density)
        mask = row_ops.select_top_k_rows(values, k, turn)[0].numpy()
        payload = native_rows.pack_rows(array, mask)
        seconds["copy"].append(timed(copy.copy_, values))
        seconds["select_pack"].append(timed(select_and_pack, values, k, turn))
        seconds["topk"].append(timed(with_topk, values, k))
        seconds["select"].append(timed(row_ops.select_top_k_rows, values, k, turn))
        seconds["laplace"].append(timed(row_ops.laplace_threshold_rows, values, density))
        seconds["filter"].append(timed(row_ops.filter_threshold_rows, values, thresholds))
        seconds["pack"].append(timed(native_rows.pack_rows, array, mask))
        seconds["unpack"].append(timed(native_rows.unpack_rows, payload, array.shape, rows * k, "float32"))
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    """Check, time, print milliseconds, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--density", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    k = top_k_count(arguments.columns, arguments.density)
    check(arguments.columns, k)
    print(f"{arguments.rows} x {arguments.columns} float32, {k} of each row; checked against the reference and top-k")
    seconds = measure(arguments.rows, arguments.columns, k, arguments.density, arguments.rounds)
    for name, median in seconds.items():
        print(f"{name:12} {1e3 * median:8.3f} ms  {4e-9 * arguments.rows * arguments.columns / median:6.2f} GB/s")
    figures = {"machine": platform.machine(), "torch": torch.__version__, "rows": arguments.rows}
    figures |= {"columns": arguments.columns, "k": k}
    figures["select_pack_over_topk"] = round(seconds["select_pack"] / seconds["topk"], 3)
    figures["select_over_topk"] = round(seconds["select"] / seconds["topk"], 3)
    for name in ("select", "laplace", "filter", "pack", "unpack"):
        figures[f"{name}_over_copy"] = round(seconds[name] / seconds["copy"], 2)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
