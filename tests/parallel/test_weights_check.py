"""Before the first step, ranks whose weights differ are warned."""

import warnings

import horovod.torch as hvd
import pytest
import torch
from gradients import SHAPES, draw
from helpers import distributed, make_parameters, step

from hvd_sparse.torch import Compression
from hvd_sparse.torch.weights_check import SPAN

LAST = hvd.size() - 1
pytestmark = pytest.mark.skipif(hvd.size() == 1, reason="one rank's weights are those of all")


def told(parameters, steps=2, frozen=None):
    """Return the warnings of the first steps. frozen: a parameter that this rank freezes."""
    compression = Compression.gradient_dropping(parameters.items(), 0.05, min_numel=100)
    optimizer = distributed(parameters, compression)
    if frozen is not None:
        parameters[frozen].requires_grad_(False)  # once Horovod has its hooks, which are those of all ranks
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(steps):
            step(optimizer, parameters, draw({name: one.shape for name, one in parameters.items()}, t, hvd.rank()))
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_the_first_parameter_that_differs_is_named(dtype):
    """Of two that do: one element of the last rank's is another one."""
    parameters = make_parameters(dtype=dtype)
    second, last = list(SHAPES)[1], list(SHAPES)[-1]
    if hvd.rank() == LAST:
        for name in (last, second):
            parameters[name].data.view(-1)[-1] *= 2.0
    found = told(parameters)
    assert len(found) == (hvd.rank() == 0)
    assert all(f"differ before the first step, the first ones in {second}: each rank" in one for one in found)


@pytest.mark.parametrize("case", ["equal", "channels last", "frozen", "frozen on one rank", "broadcast"])
def test_equal_weights_are_no_reason_to_warn(case):
    shapes = {"kernel": (8, 4, 3, 3), "frozen": (500,)}
    parameters = make_parameters(shapes)
    if case == "channels last":
        kernel = parameters["kernel"].detach()
        layout = torch.channels_last if hvd.rank() == 0 else torch.contiguous_format
        parameters["kernel"] = torch.nn.Parameter(kernel.contiguous(memory_format=layout))
    if case in ("frozen", "frozen on one rank", "broadcast"):
        parameters["frozen"].data.add_(hvd.rank())
    freezes = case == "frozen" or (case == "frozen on one rank" and hvd.rank() > 0)
    if case == "broadcast":
        hvd.broadcast_parameters(parameters, root_rank=0)
    assert not told(parameters, frozen="frozen" if freezes else None)


def test_a_large_parameter_that_differs_at_its_end():
    parameters = {"large": torch.nn.Parameter(torch.zeros(SPAN + 5))}
    if hvd.rank() == LAST:
        parameters["large"].data[-1] = 1.0
    assert len(told(parameters, steps=1)) == (hvd.rank() == 0)
