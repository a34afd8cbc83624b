"""Ranks that share a GPU under Horovod, launched by horovodrun over gloo.

A Horovod that was built with HOROVOD_GPU=CUDA alone copies CUDA tensors to the CPU itself: two ranks can share the GPU.
With HOROVOD_GPU_OPERATIONS=NCCL, one rank takes all of it: NCCL refuses a second one.
"""

import importlib.util

from gpu_helpers import SMALL, assert_nothing_wrong, assert_trained, need, run_horovod


def ranks_of_horovod():
    """Return how many ranks can share a GPU. Leave the test out if Horovod is not there, or not for CUDA."""
    need(importlib.util.find_spec("horovod") is not None, "Horovod is not installed")
    import horovod.torch as hvd

    need(hvd.cuda_built(), "Horovod was built without CUDA: build it with HOROVOD_GPU=CUDA")
    return 1 if hvd.nccl_built() else 2


def run_job(what):
    """Run horovod_job.py; return the result of each rank."""
    return run_horovod("horovod_job.py", what, ranks_of_horovod())


def test_payloads_and_parameters_under_horovod_are_those_of_the_cpu():
    assert_nothing_wrong(run_job("parity"), 6)


def test_eventful_steps_under_horovod_are_those_of_the_cpu():
    assert_nothing_wrong(run_job("events"), 11)


def test_a_thousand_steps_of_a_real_model_under_horovod():
    need(not SMALL, "it has no small form")
    assert_trained(run_job("train"))
