"""The costs of exchanges that only benchmarks model agree with messages one by one, and with the paper's figures."""

import importlib
import math
from pathlib import Path

import pytest
from test_performance_model import GIGABIT, play

from hvd_sparse.performance_model import Network, Profile, gathered, scattered

NETWORK = Path(__file__).resolve().parents[2] / "benchmarks" / "network"


@pytest.fixture
def costs(monkeypatch):
    monkeypatch.syspath_prepend(str(NETWORK))
    return importlib.import_module("costs")


@pytest.mark.parametrize("world_size", [2, 4, 16, 64])
@pytest.mark.parametrize("growth", [2.0, 1.9])
def test_merged_messages_grow_up_to_dense(costs, world_size, growth):
    size, whole = 1e6, 1e7
    rounds = [min(size * growth**step, whole) for step in range(int(math.log2(world_size)))]
    found = costs.merging_all_reduce(GIGABIT, size, whole, world_size, growth)
    assert found == pytest.approx(play(GIGABIT, world_size, rounds))


def test_between_hosts_the_ranks_of_a_host_share_its_link(costs):
    """Four hosts of eight ranks send what four ranks would, not what 32 would."""
    profile = Profile([8_000_000], compute=0.1)
    found = costs.hierarchical(0.01, 8)(GIGABIT, profile, 32)
    assert found == pytest.approx(gathered(0.01)(GIGABIT, profile, 4), rel=0.01)
    assert costs.hierarchical(0.01, 8)(GIGABIT, profile, 8) == 0.0
    found = costs.hierarchical(0.01, 8, scatters=True)(GIGABIT, profile, 32)
    assert found == pytest.approx(scattered(0.01)(GIGABIT, profile, 4), rel=0.01)
    assert costs.hierarchical(0.01, 8, scatters=True)(GIGABIT, profile, 8) == 0.0


def test_alexnet_is_as_the_paper_says(costs):
    """Dense: "about 30x" on 64 nodes at 10 Gbit/s, which gives a node's time; DGC "more than 40x" at 1 Gbit/s.

    Section 5 of Deep Gradient Compression. Gradients of 232.56 MB, 0.39 MB compressed (Table 3), whose density doubles
    at each step of the exchange.
    """
    fast, slow = Network(10e9, 0.0), Network(1e9, 0.0)
    exchange = fast.all_reduce(232.56e6, 64)
    compute = 30 * exchange / (64 - 30)
    assert 64 * compute / (compute + costs.merging_all_reduce(slow, 0.39e6, 232.56e6, 64)) == pytest.approx(
        40, rel=0.02
    )
    assert 64 * compute / (compute + slow.all_reduce(232.56e6, 64)) < 6


def test_the_planned_steps_of_measured_runs(monkeypatch):
    """40 runs under Horovod have one without a limit. An exchange begins in the middle of the compute time."""
    monkeypatch.syspath_prepend(str(NETWORK))
    planned = importlib.import_module("planned")
    monkeypatch.setattr(planned.plan, "own_work", lambda n, density: (0.002, 0.0005))
    planned.planned.cache_clear()
    runs = planned.load(planned.RESULTS / "network.json")
    found = planned.errors(runs)
    assert len(found) == 40 and {row["method"] for row in found} == set(planned.NAMES)
    (row,) = (row for row in found if (row["model"], row["hosts"], row["method"]) == ("mlp38", 4, "fp16"))
    run = next(one for one in runs if {**one, **row} == {**row, **one})
    named = {"method": "dense", "rate": "none", "framework": "pytorch", "model": "mlp38", "hosts": 4}
    (free,) = (one for one in runs if named.items() <= one.items())
    network, size = Network(**run["link"]), 2 * sum(planned.numels("mlp38"))
    expected = 0.5 * free["compute_ms"] + 1e3 * network.all_reduce(size, 4)
    assert row["predicted_ms"] == pytest.approx(expected)
    assert row["error"] == pytest.approx(expected / run["step_ms"] - 1)
