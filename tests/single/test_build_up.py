"""The gradient build-up of each method on eight ranks, as in MiCRO's Table I."""

import json
import sys
from pathlib import Path

import launching
import numpy as np
import pytest
from build_up_job import METHODS, STEPS, K, N
from launching import launch, mpirun

pytestmark = [*launching.MARKS, pytest.mark.exhaustive]
SHARED = Path(__file__).parent.parent / "shared"


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    """Return {method: (union of each step, counts of each step and rank)}."""
    file = tmp_path_factory.mktemp("build_up") / "counts.json"
    code, output = launch([*mpirun(8), sys.executable, str(SHARED / "build_up_job.py"), str(file)], {})
    assert code == 0, output
    results = json.loads(file.read_text())
    assert set(results) == set(METHODS)
    return {method: (np.array(rows)[:, 0], np.array(rows)[:, 1:]) for method, rows in results.items()}


@pytest.mark.parametrize("method", ["topk", "dgc"])
def test_exact_selections_build_up(counts, method):
    """Eight ranks choose 1 % each; if independent, 1 - 0.99^8 of all elements are chosen by one at least."""
    union, chosen = counts[method]
    assert chosen.shape == (STEPS, 8) and (chosen == K).all()
    independent = N * (1 - (1 - K / N) ** 8)
    assert np.abs(union / independent - 1).max() < 0.05
    assert union.min() > 7 * K


def test_the_leaders_selection_does_not_build_up(counts):
    """Rank step % 8 chooses k, the others none."""
    union, chosen = counts["cltk"]
    assert (union == K).all() and (chosen.sum(1) == K).all()
    assert (chosen.argmax(1) == np.arange(STEPS) % 8).all()


def test_partitions_do_not_build_up(counts):
    """The union is the sum of the counts, none of which is another's, within 10 % of k from the first step."""
    union, chosen = counts["micro"]
    assert (union == chosen.sum(1)).all()
    assert np.abs(union / K - 1).max() <= 0.1
    assert (chosen > 0).all()


def test_a_constant_overshoots(counts):
    """It fits the first gradient; the residual that grows behind it makes ever more reach it."""
    union, chosen = counts["hard_threshold"]
    assert np.abs(chosen[0] / K - 1).max() < 0.3
    assert chosen[-1].min() > 3 * K
    assert union[-1] > 15 * K
