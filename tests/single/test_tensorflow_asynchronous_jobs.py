"""TensorFlow's asynchronous workers and their servers on several ranks: all end well, and the model has learned."""

import json
import pathlib
import sys

import launching
import numpy as np
import pytest
from launching import launch, mpirun

pytestmark = launching.MARKS
SHARED = pathlib.Path(__file__).parent.parent / "shared"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(SHARED)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a file of the digits, so that not every rank loads scikit-learn."""
    digits, path = (
        pytest.importorskip("sklearn.datasets").load_digits(),
        tmp_path_factory.mktemp("digits") / "digits.npz",
    )
    np.savez(path, images=digits.images.reshape(-1, 64).astype(np.float32) / 16, labels=digits.target)
    return path


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (3, ["1", "keras"]),
        pytest.param(4, ["2", "tf_keras", "eager"], marks=pytest.mark.exhaustive),
        pytest.param(2, ["colocated", "keras", "overlap"], marks=pytest.mark.exhaustive),
    ],
)
def test_training_on_digits(ranks, options, data):
    pytest.importorskip(options[1])
    script = [sys.executable, str(SHARED / "dgs_tensorflow_job.py"), str(data)]
    code, output = launch([*mpirun(ranks), *script, *options], QUIET)
    assert code == 0, output
    assert "left early" not in output and "is gone" not in output, output
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    workers = ranks - (0 if options[0] == "colocated" else int(options[0]))
    assert len(found) == workers
    last = max(found, key=lambda result: result["stats"]["all"]["pushes"])
    assert last["stats"]["all"]["pushes"] == 240
    assert last["accuracy"] > 0.8 and last["loss"] < 0.7, output
    for result in found:  # one that ended before the others has a model of fewer pushes
        assert result["accuracy"] > 0.6, output
        stats = result["stats"]
        assert stats["pushes"] == 240 // workers
        assert stats["ratio_up"] > 5.0
        assert stats["non_finite"] == stats["repeated"] == stats["all"]["refused"] == 0
