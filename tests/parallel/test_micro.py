"""MiCRO: Algorithm 1 step by step, the requested density, and unusual sizes."""

import horovod.torch as hvd
import numpy as np
import pytest
import tiers
import torch
from gradients import draw, whole_numbers
from helpers import drive, make_parameters, memory_of
from micro_oracle import MicroOracle
from test_conservation import Ledger

from hvd_sparse.partition import histogram_cut
from hvd_sparse.threshold import SMALLEST
from hvd_sparse.torch import Compression

N = 100_000
SCALES = {
    "even": np.ones(N),
    "layers": np.exp(1.5 * np.random.default_rng(0).standard_normal(8)).repeat(N // 8),
    "heavy": np.exp(np.random.default_rng(1).standard_normal(N)),
}


def gradients_of(shapes, step, rank, scale):
    return {name: value * scale.reshape(value.shape) for name, value in draw(shapes, step, rank).items()}


SCHEDULES = {"flat": lambda t: 1.0, "drop": lambda t: 0.1 if t >= 50 else 1.0, "rise": lambda t: 10.0 ** (t // 40)}


@pytest.mark.skipif(hvd.size() == 1, reason="Horovod compresses nothing with one process")
@pytest.mark.parametrize(
    ("kind", "schedule"),
    tiers.choice(
        [("even", "flat"), ("layers", "drop"), ("heavy", "rise"), ("layers", "rise"), ("even", "drop")],
        *[("even", "flat"), ("layers", "drop"), ("heavy", "rise")],
    ),
)
def test_every_step_is_that_of_the_paper_and_the_density_is_right(kind, schedule):
    """Within 10 % of k = 1000 in each step from the tenth on, with layers of different scales, when gradients jump."""
    shapes = {"only": (N,)}
    parameters = make_parameters(shapes)
    compression = Compression.micro(parameters.items(), density=0.01, min_numel=0)
    oracle, counts = MicroOracle(N, hvd.size(), 1000), []
    for t in range(100 if tiers.ALL else 60):
        scale = SCALES[kind] * SCHEDULES[schedule](t)
        everyone = [gradients_of(shapes, t, rank, scale) for rank in range(hvd.size())]
        everyone_flat = np.stack([one["only"] for one in everyone])
        expected = oracle.expect(everyone_flat)
        reduced = drive(compression, parameters, everyone[hvd.rank()])["only"].double().numpy()
        np.testing.assert_array_equal(reduced != 0, expected, err_msg=f"step {t}")
        counts.append(oracle.check(everyone_flat, reduced))
        assert counts[-1] == round(compression.stats()["step"]["density"] * N)  # no two ranks send the same element
    np.testing.assert_array_equal(memory_of(compression, parameters, "only"), oracle.errors[hvd.rank()])
    assert all(900 <= count <= 1100 for count in counts[10:]), counts


def test_the_authors_controller_scales_the_threshold_by_the_count_before():
    """From 1 / (2 sqrt(k)), by 1.005, 1.00125 or 0.995; the counts of all ranks decide."""
    shapes, n, k = {"only": (4000,)}, 4000, 40
    parameters = make_parameters(shapes)
    compression = Compression.micro(parameters.items(), density=0.01, min_numel=0, controller="scaling")
    oracle, threshold, seen = MicroOracle(n, hvd.size(), k), 0.5 / np.sqrt(k), set()
    for t in range(800):
        gradients = np.stack([draw(shapes, t, rank)["only"] / 16 for rank in range(hvd.size())])
        accumulated = np.abs(oracle.errors + gradients)[oracle.owners(), np.arange(n)]
        clear = np.abs(accumulated - threshold).min() > 1e-5 * threshold
        reduced = drive(compression, parameters, {"only": gradients[hvd.rank()]})["only"].double().numpy()
        count = oracle.check(gradients, reduced)
        assert not clear or count == (accumulated >= threshold).sum(), f"step {t}"
        scale = 1.005 if count > 1.1 * k else 1.00125 if count > 0.909 * k else 0.995
        threshold *= scale
        seen.add(scale)
    assert seen == {1.005, 1.00125, 0.995}


@pytest.mark.parametrize("n", [1, 2, 3, 5, 17])
def test_fewer_elements_than_ranks_and_other_small_sizes(n):
    shapes = {"only": (n,)}
    parameters = make_parameters(shapes)
    compression = Compression.micro(parameters.items(), density=0.3, min_numel=0)
    ledger = Ledger(parameters)
    for t in range(12):
        gradients = whole_numbers(shapes, t, hvd.rank())
        ledger.feed(gradients)
        ledger.receive(drive(compression, parameters, gradients))
    ledger.check(compression)


@pytest.mark.rank_counts
def test_several_tensors_are_one_vector():
    """Laid out by name; partitions do not respect the tensors' borders."""
    shapes = {"a": (300, 7), "b": (4000,), "c": (11, 13, 17)}
    n = sum(int(np.prod(shape)) for shape in shapes.values())
    parameters = make_parameters(shapes)
    compression = Compression.micro(parameters.items(), density=0.05, min_numel=100)
    oracle = MicroOracle(n, hvd.size(), round(0.05 * n))
    for t in range(10):
        everyone = [draw(shapes, t, rank) for rank in range(hvd.size())]
        reduced = drive(compression, parameters, everyone[hvd.rank()])
        flat = [np.concatenate([one[name].reshape(-1) for name in shapes]) for one in everyone]
        flat, whole = np.stack(flat), torch.cat([reduced[name].reshape(-1) for name in shapes]).double().numpy()
        np.testing.assert_array_equal(whole != 0, oracle.expect(flat), err_msg=f"step {t}")
        oracle.check(flat, whole)


@pytest.mark.parametrize("kind", ["normal", "laplace", "cauchy", "uniform", "one value"])
@pytest.mark.parametrize("k", [10, 1000, 30_000])
def test_a_histogram_tells_the_threshold(kind, k):
    """Of all 100,000 values: within 3 % of k, or 10 values; ties cannot be cut, and come whole."""
    rng = np.random.default_rng(k)
    values = {
        "normal": rng.standard_normal,
        "laplace": rng.laplace,
        "cauchy": rng.standard_cauchy,
        "uniform": rng.random,
        "one value": lambda size: np.full(size, 3.0),
    }[kind](size=N).astype(np.float32)
    histogram = np.bincount((values.view(np.uint32) & 0x7FFFFFFF) >> 19, minlength=4096).astype(np.float32)
    reached = int((np.abs(values) >= histogram_cut(histogram, k).threshold).sum())
    assert reached in (0, N) if kind == "one value" else abs(reached - k) <= max(10, 0.03 * k)


def test_too_few_values_let_everything_pass():
    values = np.float32([0.0, 0.0, 1e-40, 2.0])
    histogram = np.bincount(values.view(np.uint32) >> 19, minlength=4096).astype(np.float32)
    assert histogram_cut(histogram, 3).threshold == SMALLEST
    assert histogram_cut(np.zeros(4096, np.float32), 1).threshold == SMALLEST
    infinite = np.bincount(np.float32([np.inf, 1.0]).view(np.uint32) >> 19, minlength=4096).astype(np.float32)
    assert histogram_cut(infinite, 1).threshold == np.inf
