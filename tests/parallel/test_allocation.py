"""After the first steps, a step allocates almost no memory."""

import horovod.torch as hvd
import pytest
import torch

from hvd_sparse.torch import Compression


def allocated_by_a_step(compression, parameters) -> int:
    """Return the bytes that tensors were given in one step, whether they were let go of or not."""
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        compressed = [compression.compress(parameter.grad) for parameter in parameters]
        for parameter, (token, context) in zip(parameters, compressed, strict=True):
            handle = hvd.allreduce_async_(token, name=f"allocation.{context.name}")
            parameter.grad = compression.decompress(hvd.synchronize(handle), context)
    return sum(max(0, event.self_cpu_memory_usage) for event in profile.events())


@pytest.mark.parametrize("scope", ["tensor", "model"])
def test_a_settled_step_allocates_under_a_twentieth_of_the_gradient(scope):
    torch.manual_seed(hvd.rank())
    named = [(f"p{i}", torch.nn.Parameter(torch.zeros(100_000))) for i in range(5)]
    parameters = [parameter for _, parameter in named]
    compression = Compression.dgc(named, density=0.001, momentum=0.9, scope=scope)
    steps = [allocated_by_a_step(compression, parameters) for _ in range(4)]
    assert steps[0] > 2 * 4 * 500_000  # residual and velocity: what is allocated is seen
    assert steps[-1] < 0.05 * 4 * 500_000, steps
