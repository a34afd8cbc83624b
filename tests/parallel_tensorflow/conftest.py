"""A Horovod job for each test session, see tests/shared/job.py.

mpirun -np 3 --oversubscribe python -m pytest -x -q tests/parallel_tensorflow
horovodrun -np 2 --gloo python -m pytest -x -q tests/parallel_tensorflow
"""

import importlib.util
import os

import pytest

os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")  # for the tests of process sets
os.environ.setdefault("HOROVOD_TIMELINE", "DYNAMIC")  # for the test that starts one
if importlib.util.find_spec("tf_keras"):  # TensorFlow before 2.16 has Keras 2 without it
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # what Horovod's Keras optimizer needs
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import horovod.tensorflow as hvd
import leftover_sets
import tensorflow as tf
import tiers
from job import Job

# under Gloo each rank is a separate world of MPI, which pipelines refuse
collect_ignore_glob = ["test_*pipeline*.py"] if os.environ.get("HOROVOD_CONTROLLER") == "gloo" else []


def start():
    """Wait for all ranks."""
    hvd.allreduce(tf.zeros([]), name="together")


@pytest.fixture(autouse=True)
def no_sets_left():
    yield
    leftover_sets.remove(hvd)


def pytest_collection_modifyitems(items):
    """Run each value of a parameter in `make test`, not each pair: tests/parallel does, and here graphs are traced."""
    for item in items:
        item.add_marker(pytest.mark.each_value)


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    # nothing of the plugin is at work in a lone process, and that is tested too
    config.addinivalue_line(
        "filterwarnings",
        "ignore:hvd_sparse. Horovod calls no compressor (with one process|in a process set of one rank)",
    )
    config.pluginmanager.register(Job(hvd, start))
    if not tiers.ALL:  # a fifth of the time; jobs of tests/single, and `make test-all`, train with optimised graphs
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
