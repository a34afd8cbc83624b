"""Elastic jobs under horovodrun: hosts come and go, and only a removed process's residual is lost."""

import json
import os
import re
import sys

import launching
import numpy as np
import pytest
from launching import KERAS_2, launch

pytestmark = launching.MARKS
SHARED = os.path.join(os.path.dirname(__file__), "..", "shared")


def run_elastic(directory, scenario, hosts, method, job="elastic_job.py", fails=False, **settings):
    """Return what the processes that ended printed, what every process wrote down of its last batch, and the output."""
    (directory / "hosts").write_text("".join(f"{host}:1\n" for host in hosts))
    discover = directory / "discover"
    discover.write_text(f"#!/bin/sh\ncat {directory}/hosts\n")
    discover.chmod(0o755)
    command = ["horovodrun", "--gloo", "--network-interface", "lo", "-np", str(len(hosts)), "--min-np", "2"]
    command += [
        "--max-np",
        "3",
        "--host-discovery-script",
        str(discover),
        "--elastic-timeout",
        "120",
        "--gloo-timeout-seconds",
        "120",
    ]
    command += [sys.executable, os.path.join(SHARED, job), str(directory), scenario, method, json.dumps(settings)]
    code, output = launch(command, {"TF_CPP_MIN_LOG_LEVEL": "3", **KERAS_2})
    assert (code != 0) == fails, output
    ended = [json.loads(found) for found in re.findall(r"ended (\{.*\})", output)]
    return ended, [np.load(file) for file in directory.glob("*.npz")], output


def assert_nothing_is_lost(processes):
    """Assert that the change of the weights equals the gradients of all processes minus their residuals."""
    last = max(processes, key=lambda process: process["batch"])
    arrived = sum(process["total"] - process["waiting"] for process in processes)
    np.testing.assert_array_equal(arrived, last["moved"])
    assert np.abs(last["waiting"]).sum() > 0.0


METHODS = {
    "gradient_dropping": {"density": 0.01, "warmup": 30},
    "topk": {"density": 0.01},
    "dct": {"density": 0.01, "lifespan": 5},
    "micro": {"density": 0.01, "controller": "scaling"},
    "cltk": {"density": 0.01},
    "random_k": {"density": 0.01},
}
SLOW = [pytest.param(method, marks=pytest.mark.exhaustive) for method in METHODS if method != "gradient_dropping"]


@pytest.mark.parametrize("method", ["gradient_dropping", *SLOW])
def test_a_host_is_added_and_another_removed(tmp_path, method):
    """With the compression line alone: who stays keeps the residual, who comes goes on from the others' step."""
    ended, processes, output = run_elastic(tmp_path, "hosts", ["localhost", "127.1"], method, **METHODS[method])
    assert len(ended) == 2 and len(processes) == 3, output
    sizes = ended[0]["sizes"]
    assert ended[1]["sizes"] == sizes and sizes == [2] * sizes.index(3) + [3] * sizes.count(3) + [2] * 4, output
    assert_nothing_is_lost(processes)
    if "warmup" in METHODS[method]:  # also who has not seen the batches before
        selected = {0: 750, 1: 188, 2: 47}.get((len(sizes) - 1) // 10, 30)  # 1/4, 1/16, 1/64 and 1/100 of 3000
        assert all(one["density"] == pytest.approx((selected + 50) / 3050) for one in ended), (sizes, ended)


@pytest.mark.exhaustive
def test_a_process_that_dies_in_a_step_and_a_state_that_keeps_the_compression(tmp_path):
    """All go back to the last commit, residuals too: what the step under way had put into them is not there twice."""
    hosts = ["localhost", "127.1", "127.0.1"]
    ended, processes, output = run_elastic(tmp_path, "crash", hosts, "gradient_dropping", density=0.01)
    assert len(ended) == 2 and len(processes) == 3, output
    assert ended[0]["sizes"] == ended[1]["sizes"] == [3] * 4 + [2] * 4, output
    assert_nothing_is_lost(processes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("scenario", ["hosts", "crash"])
def test_a_reduce_scatter_whose_ranks_come_and_go(tmp_path, scenario):
    """A new rank knows no regions: all ranks agree on new ones, and none waits forever."""
    hosts = ["localhost", "127.1", "127.0.1"][: 3 if scenario == "crash" else 2]
    settings = {"density": 0.01, "exchange": "reduce_scatter", "dense_fallback": None}
    ended, processes, output = run_elastic(tmp_path, scenario, hosts, "gradient_dropping", **settings)
    assert len(ended) == 2 and len(processes) == 3, output
    assert ended[0]["sizes"] == ended[1]["sizes"], output
    assert_nothing_is_lost(processes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("exchange", ["gather", "reduce_scatter"])
def test_tensorflow_with_a_step_that_is_traced_in_each_round(tmp_path, exchange):
    hosts, settings = ["localhost", "127.1"], {"density": 0.01, "warmup": 30, "exchange": exchange}
    job = {"job": "elastic_tensorflow_job.py", **settings}
    ended, processes, output = run_elastic(tmp_path, "inside", hosts, "gradient_dropping", **job)
    assert len(ended) == 3 and len(processes) == 3, output
    sizes = ended[0]["sizes"]
    assert all(one == {"sizes": sizes, "steps": len(sizes)} for one in ended), output
    assert sizes == [2] * sizes.index(3) + [3] * 4, output
    assert_nothing_is_lost(processes)


@pytest.mark.exhaustive
def test_tensorflow_with_a_step_that_was_traced_for_fewer_ranks(tmp_path):
    job = {"job": "elastic_tensorflow_job.py", "fails": True}
    ended, _, output = run_elastic(tmp_path, "outside", ["localhost", "127.1"], "gradient_dropping", **job)
    assert not ended and "traced for other ranks than Horovod has now" in output, output
