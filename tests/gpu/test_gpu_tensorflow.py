"""TensorFlow's operators and compressors on a GPU, in processes of their own: PyTorch may have another CUDA."""

import importlib.util

from gpu_helpers import SMALL, assert_nothing_wrong, need, run_horovod

from hvd_sparse.library import has_cuda


def compare(what, ranks):
    """Run tensorflow_job.py; return the result of each rank. Leave the test out if TensorFlow cannot run here."""
    need(not SMALL, "it has no small form")
    for module in ("tensorflow", "horovod"):
        need(importlib.util.find_spec(module) is not None, f"{module} is not installed")
    need(has_cuda("tensorflow"), "the operators of TensorFlow were built without CUDA")
    results = run_horovod("tensorflow_job.py", what, ranks)
    need(None not in results, "TensorFlow sees no GPU")
    return results


def test_operators_of_tensorflow_are_those_of_the_cpu():
    assert_nothing_wrong(compare("ops", ranks=1), 800)


def test_training_with_tensorflow_is_that_of_the_cpu():
    assert_nothing_wrong(compare("parity", ranks=2), 20)
