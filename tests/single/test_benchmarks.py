"""The benchmarks run at small sizes: their checks hold, and their last line has their figures."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize("framework", ["pytorch", pytest.param("tensorflow", marks=pytest.mark.exhaustive)])
def test_kernels(framework):
    options = ["--framework", framework, "--elements", "70000", "--rounds", "2", "--settle", "2"]
    command = [sys.executable, str(BENCHMARKS / "kernels.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["framework"] == framework and figures["elements"] == 70000
    assert {"topk_over_compress", "compress_over_memcpy", "reduce_over_memcpy", "elias_fano_bits"} <= set(figures)
    assert all(value > 0 for value in figures.values() if isinstance(value, float))


def test_rows():
    options = ["--rows", "9", "--columns", "300", "--rounds", "2"]
    command = [sys.executable, str(BENCHMARKS / "rows.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["k"] == 15 and figures["select_pack_over_topk"] > 0


@pytest.mark.exhaustive
def test_boundaries(tmp_path):
    names = ["dense", "laplace, 1 split, 0.05", "gradient alone with feedback, 0.05", "topk with feedback, 0.05"]
    options = ["--seeds", "0", "--steps", "3", "--rows", "600", "--processes", "1", "--out", str(tmp_path)]
    command = [sys.executable, str(BENCHMARKS / "boundaries.py"), *options, "--runs", *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["runs"] == 4
    table = (tmp_path / "boundaries.md").read_text()
    assert all(f"| {name} |" in table for name in names)
    assert (tmp_path / "boundaries.png").read_bytes().startswith(b"\x89PNG")
    runs = json.loads((tmp_path / "boundaries.json").read_text())["runs"]
    assert all(0.0 < run["loss"] < 2.0 for run in runs)


def made_up_run(name, seed, loss, sent):
    """What the hybrid example would say: its own test starts it."""
    link = {"dense_bytes": 100_000_000, "sent_bytes": sent}
    links = [
        {"stage": stage, "replica": 0, **dict.fromkeys(("forward", "backward", "replicas"), link)} for stage in (0, 1)
    ]
    ratios = dict.fromkeys(("forward_ratio", "backward_ratio", "dp_ratio"), 100_000_000 / sent)
    return {"name": name, "seed": seed, "loss": loss, "accuracy": 80.0, **ratios, "links": links}


def test_hybrid_tables(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    hybrid = importlib.import_module("hybrid")
    runs = [
        made_up_run("dense", 0, 0.5, 100_000_000),
        made_up_run("dense", 1, 0.4, 100_000_000),
        made_up_run("both 0.05", 0, 0.51, 5_000_000),
        made_up_run("both 0.05", 1, 0.39, 5_000_000),
        made_up_run("three stages, both 0.1", 0, 0.5, 5_000_000),  # whose dense run is missing
    ]
    text = hybrid.write(runs, 3, tmp_path)
    assert "| both 0.05 | 0.4500 | -0.25 | +2.00, -2.50 | 80.00 | 20.0 | 20.0 | 20.0 |" in text
    assert "| three stages, both 0.1 | 0.5000 |  |  | 80.00 |" in text
    assert "| both 0.05 | 1 | 0 | 5.00 | 5.00 | 5.00 |" in text
    assert json.loads((tmp_path / "hybrid.json").read_text())["runs"] == runs
    assert (tmp_path / "hybrid.md").read_text().strip() == text


def test_a_share_is_of_a_run_without_a_limit_of_the_same_session(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "network"))
    report = importlib.import_module("report")
    job = {"framework": "pytorch", "model": "mlp10", "hosts": 4, "batch_size": 8, "step_ms": 10.0}
    job |= {"compute_ms": 5.0, "compress_ms": 0.0, "decompress_ms": 0.0, "bytes_per_step": 10**6}
    job |= {"link": {"bandwidth": 1e9, "latency": 1e-4}}

    def run(method, rate, session, speed, batch=8):
        more = {"method": method, "rate": rate, "session": session, "batch_size": batch}
        return {**job, **more, "samples_per_second": speed}

    results = [
        run("dense", "none", "Monday", 40.0),
        run("dense", "1gbit", "Monday", 10.0),
        run("dense", "100mbit", "Tuesday", 1.0),
        run("fp16", "none", "Tuesday", 80.0, batch=16),
        run("fp16", "1gbit", "Tuesday", 20.0),
        run("dgc", "none", None, 60.0),
        run("dgc", "1gbit", None, 30.0),
    ]
    rows = report.write(results, results, tmp_path)
    assert [one["share"] for one in rows] == [1.0, 0.25, None, 1.0, None, None, None]
    text = (tmp_path / "network.md").read_text()
    assert "| Horovod | 1.0 | 10.0 (25 %) | 40.0 |" in text
    assert "| Horovod, fp16 |  | 20.0 |  |" in text and "| Horovod, fp16 | 80.0 |" in text
    assert "of 1 runs" in text  # what the performance model can be checked with
