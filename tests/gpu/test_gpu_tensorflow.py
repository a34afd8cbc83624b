"""TensorFlow's operators and compressors on a GPU, in processes of their own: PyTorch may have another CUDA."""

import importlib.util
from pathlib import Path

from gpu_helpers import SMALL, assert_nothing_wrong, need, run_horovod

from hvd_sparse.library import has_cuda


def compare(what, ranks):
    """Run tensorflow_job.py; return the result of each rank. Leave the test out if TensorFlow cannot run here."""
    need(not SMALL, "it has no small form")
    need(importlib.util.find_spec("tensorflow") is not None, "TensorFlow is not installed")
    horovod = importlib.util.find_spec("horovod")
    libraries = [] if horovod is None else list(Path(horovod.origin).parent.glob("tensorflow/mpi_lib*.so"))
    need(bool(libraries), "there is no Horovod with TensorFlow")
    need(has_cuda("tensorflow"), "the operators of TensorFlow were built without CUDA")
    results = run_horovod("tensorflow_job.py", what, ranks)
    need(None not in results, "TensorFlow sees no GPU")
    return results


def test_operators_of_tensorflow_are_those_of_the_cpu():
    assert_nothing_wrong(compare("ops", ranks=1), 370)


def test_training_with_tensorflow_is_that_of_the_cpu():
    assert_nothing_wrong(compare("parity", ranks=2), 20)
