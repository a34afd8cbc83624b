"""Hybrid runs in which one of four ranks fails: each other rank raises an error with the reason, soon."""

import os
import re
import sys

import launching
import pytest
from launching import launch, mpirun

pytestmark = launching.MARKS
JOB = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "shared", "hybrid_failure_job.py")
REASON = r"stage 1 of replica 0 \(rank 1\) has failed: ArithmeticError: out of luck"

REFUSED = (
    "micro_batches must be the same on all ranks, got 2 on stage 0 of replica 0 (rank 0) and 3 on stage 1 of replica 0 "
    "(rank 1)"
)


def run(*arguments):
    """Return the error of each rank that raised one, and the whole output."""
    code, output = launch([*mpirun(4), sys.executable, JOB, *map(str, arguments)], {"TF_CPP_MIN_LOG_LEVEL": "3"})
    assert code != 0, output
    refused = re.findall(r"rank \d refuses (.*)", output)
    assert refused == [REFUSED] * 4, output
    return {int(rank): raised for rank, raised in re.findall(r"rank (\d) raises (.*)", output)}, output


@pytest.mark.exhaustive
@pytest.mark.parametrize(("framework", "where"), [("torch", "before"), ("tensorflow", "between")])
def test_every_rank_raises_the_reason(framework, where):
    raised, output = run(framework, where, 1)
    assert raised.pop(1) == "ArithmeticError: out of luck", output
    assert sorted(raised) == [0, 2, 3], output
    for text in raised.values():
        assert re.match(f"PipelineError: {REASON}", text), output


@pytest.mark.exhaustive
def test_a_rank_that_waits_in_horovod_shows_the_reason_below_horovods_error():
    raised, output = run("torch", "between", 1)
    assert sorted(raised) == [0, 1, 2, 3], output
    for rank in (0, 2, 3):
        shown = rf"stage {rank % 2} of replica {rank // 2} \(rank {rank}\): this follows from another rank's failure: "
        assert re.match(f"PipelineError: {REASON}", raised[rank]) or re.search(shown + REASON, output), output


@pytest.mark.exhaustive
def test_a_rank_that_ends_early_is_named():
    raised, output = run("torch", "leave", 1)
    assert sorted(raised) == [0, 2, 3], output
    for text in raised.values():
        assert re.search(r"PipelineError: .*stage 1( of replica 0 \(rank 1\))? has ended, while stage", text), output
