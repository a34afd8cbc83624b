"""Every script of the documentation that trains with TensorFlow and Horovod runs unchanged."""

from importlib.metadata import version

import horovod.tensorflow as hvd
import numpy as np
import pytest
from documented import scripts_of
from tf_helpers import assert_ranks_agree, several

SCRIPTS = scripts_of("tensorflow")


@several
@pytest.mark.parametrize("script", SCRIPTS)
def test_runs_and_compresses(script):
    if "\nimport keras\n" in SCRIPTS[script] and int(version("keras").split(".")[0]) < 3:
        pytest.skip("the script is for Keras 3")
    inputs = np.random.default_rng(hvd.rank()).normal(size=(3, 16, 64)).astype(np.float32)
    names = {"batches": [(one, (one[:, 0] > 0).astype(int)) for one in inputs]}
    exec(compile(SCRIPTS[script], script, "exec"), names)
    assert names["compression"].stats()["steps"] > 0
    weights = names["model"].trainable_variables if "model" in names else names["weights"]
    assert_ranks_agree({str(number): weight.numpy() for number, weight in enumerate(weights)})
