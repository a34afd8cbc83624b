"""Benchmarks that no other test starts run at small sizes, and their last line has their figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(script, *options):
    """Return the last line of a benchmark, a JSON object."""
    command = [sys.executable, str(BENCHMARKS / script), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_server():
    """It compares its own answers, byte by byte, with those of a server that passes over all elements."""
    sizes = ["--parameters", 20_000, "--workers", 1, 2, "--servers", 1, "--threads", 1, "--pushes", 2]
    found = run("server.py", *sizes)
    assert [(row["pull_density"], row["workers"]) for row in found["results"]] == [
        (None, 1),
        (None, 2),
        (0.01, 1),
        (0.01, 2),
    ]
    assert all(row["pushes_per_second"] > 0.0 for row in [*found["results"], *found["threads"]])


@pytest.mark.parametrize("framework", ["pytorch", pytest.param("tensorflow", marks=pytest.mark.exhaustive)])
def test_the_compress_of_sidco(framework):
    found = run("sidco.py", "--job", "resnet50", "--frameworks", framework, "--rounds", 1, "--settle", 1)
    assert found["gd sent"] == 1.0 and found["sidco sent"] > 0.0
    assert all(found[name] > 0.0 for name in ("gd", "sidco", "three stages", "gamma"))
