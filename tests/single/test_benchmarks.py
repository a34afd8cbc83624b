"""The benchmarks run, at small sizes: what they check holds, and their last line tells their figures."""

import json
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
