"""Hybrid runs of TensorFlow on MPI: replicas agree bit for bit, and the training equals dense in one process."""

import json
import os
import sys

import launching
import numpy as np
import pytest
from launching import launch, mpirun

from hvd_sparse.model_parallel import ProcessGrid

pytestmark = launching.MARKS
JOB = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "shared", "hybrid_tensorflow_job.py")


def run(ranks, *options):
    code, output = launch([*mpirun(ranks), sys.executable, JOB, *map(str, options)], {"TF_CPP_MIN_LOG_LEVEL": "2"})
    assert code == 0, output
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    ("ranks", "stages", "order", "micro_batches"),
    [
        pytest.param(4, 2, "pipeline", 3, marks=pytest.mark.exhaustive),
        pytest.param(4, 2, "replica", 1, marks=pytest.mark.exhaustive),
        pytest.param(2, 1, "pipeline", 3, marks=pytest.mark.exhaustive),
    ],
)
def test_without_sparsity_it_is_training_on_one_process(ranks, stages, order, micro_batches):
    found = run(ranks, "--stages", stages, "--order", order, "--micro-batches", micro_batches)
    grids = [ProcessGrid(rank, ranks, stages, order) for rank in range(ranks)]
    assert [(one["stage"], one["replica"]) for one in found] == [(one.stage, one.replica) for one in grids]
    for one in found:
        assert one["difference"] < 1e-5
    mean = np.mean([one["losses"] for one in found if one["stage"] == 0], axis=0)
    assert mean == pytest.approx(found[0]["expected"], rel=1e-4)
    assert len({one["parameters"] for one in found}) == stages


@pytest.mark.exhaustive
def test_sparse_on_every_link_learns_and_replicas_agree():
    found = run(4, "--stages", 2, "--density", 0.25, "--compression", "dct")
    for stage in range(2):
        of_stage = [one for one in found if one["stage"] == stage]
        assert len({one["parameters"] for one in of_stage}) == 1
        losses = np.mean([one["losses"] for one in of_stage], axis=0)
        assert losses[-5:].mean() < 0.9 * losses[:5].mean()
        assert of_stage[0]["dp_ratio"] > 2.0
