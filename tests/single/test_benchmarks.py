"""The benchmarks run, at small sizes: what they check holds, and their last line tells their figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
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


@pytest.mark.skipif("OMPI_COMM_WORLD_SIZE" in os.environ, reason="starts jobs of its own, not inside another job")
def test_hybrid(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "hybrid.py"), "--seeds", "0", "--steps", "3", "--out", str(tmp_path)]
    done = subprocess.run([*command, "--runs", "both 0.05"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads((tmp_path / "hybrid.json").read_text())["runs"]
    assert len(run["links"]) == 4 and run["backward_ratio"] > 19.0
    assert "| both 0.05 | 1 | 1 |" in (tmp_path / "hybrid.md").read_text()
