"""Pipelines on MPI with two to four ranks: the losses equal those of one process, and failures never cause a hang."""

import os
import re
import sys
import time

import launching
import pytest
import torch
from launching import launch, mpirun
from pipeline_job import SIZES, STEPS, batch
from pipeline_oracle import Oracle, OracleMask, make_stages

pytestmark = launching.MARKS
JOB = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "shared", "pipeline_job.py")


def run(ranks, what="nothing", who=0):
    start = time.monotonic()
    code, output = launch([*mpirun(ranks), sys.executable, JOB, what, str(who)])
    return code, output, time.monotonic() - start


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.exhaustive) for ranks in (2, 4))])
def test_the_losses_are_those_of_the_network_that_is_not_split(ranks):
    stages = make_stages([*SIZES[:ranks], SIZES[-1]])
    masks = [OracleMask(1.0) for _ in stages[1:]]
    oracle = Oracle(stages, masks, torch.nn.functional.cross_entropy, micro_batches=2, lr=0.1)
    expected = [oracle.step(*(tensor.numpy() for tensor in batch(step))) for step in range(STEPS)]
    code, output, _ = run(ranks)
    assert code == 0, output
    found = re.findall(r"losses of rank \d: (.*)", output)
    assert len(found) == ranks
    for line in found:
        assert [float(loss) for loss in line.split()] == expected


@pytest.mark.parametrize(
    ("what", "who", "words"),
    [
        pytest.param("raise", 0, "ArithmeticError: this rank has had enough", marks=pytest.mark.exhaustive),
        ("raise", 1, "ArithmeticError: this rank has had enough"),
        pytest.param("raise", 2, "ArithmeticError: this rank has had enough", marks=pytest.mark.exhaustive),
        pytest.param("exit", 0, "stage 0 has ended, while stage", marks=pytest.mark.exhaustive),
        pytest.param("exit", 2, "stage 2 has ended, while stage", marks=pytest.mark.exhaustive),
        pytest.param("cast", 1, "failed: RuntimeError", marks=pytest.mark.exhaustive),
        pytest.param("kill", 1, "signal 9|Killed", marks=pytest.mark.exhaustive),
        ("sleep", 1, "has waited 3 s for"),
        pytest.param("never", 0, "not all 3 ranks have built their Pipeline within 3 s", marks=pytest.mark.exhaustive),
    ],
)
def test_nobody_waits_for_ever(what, who, words):
    code, output, seconds = run(3, what, who)
    assert code != 0, output
    assert re.search(words, output), output
    assert "losses of rank" not in output
    assert seconds < 120.0
