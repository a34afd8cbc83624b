"""torch.set_default_dtype changes nothing for parameters whose type is given."""

import horovod.torch as hvd
import pytest
import torch
from gradients import SHAPES, draw
from helpers import distributed, make_parameters, step

from hvd_sparse.torch import Compression

MAKERS = {
    "dgc": lambda named: Compression.dgc(named, 0.05, min_numel=100, momentum=0.9),
    "dgc_scattered": lambda named: Compression.dgc(
        named, 0.05, min_numel=100, exchange="reduce_scatter", complete=True, dense_fallback=None
    ),
    "micro": lambda named: Compression.micro(named, 0.05, min_numel=100),
    "hosts": lambda named: Compression.gradient_dropping(
        named, 0.05, min_numel=100, exchange="hierarchical", ranks_per_host=hvd.size()
    ),
}


@pytest.fixture(params=[torch.float64, torch.float16, torch.bfloat16], ids=str)
def default_dtype(request):
    """Set in the body of a test only: Horovod's and the test's own tensors are float32."""
    yield request.param
    torch.set_default_dtype(torch.float32)


def trained(method, state=None):
    """Return the parameters after three steps, and a state summed over ranks whose values float16 does not hold."""
    parameters = make_parameters()
    compression = MAKERS[method](parameters.items())
    optimizer = distributed(parameters, compression)
    if state is not None:
        compression.load_state_dict(state)
    for t in range(3):
        gradients = {name: 1e5 * values for name, values in draw(SHAPES, t, hvd.rank()).items()}
        step(optimizer, parameters, gradients)
    return parameters, compression.state_dict(summed=True)


@pytest.mark.skipif(hvd.size() == 1, reason="Horovod compresses nothing with one process")
@pytest.mark.parametrize("method", MAKERS)
def test_training_and_summed_states_are_the_same(method, default_dtype):
    _, state = trained(method)
    expected, wanted = trained(method, state)
    torch.set_default_dtype(default_dtype)
    found, got = trained(method, state)
    for name, one in found.items():
        assert torch.equal(one, expected[name])
    for name, buffers in wanted["memory"].items():
        for kind, values in buffers.items():
            assert got["memory"][name][kind].dtype == torch.float32
            assert torch.equal(got["memory"][name][kind], values)
