"""torch.set_default_device changes nothing for parameters that are somewhere else.

The device here is "meta", whose tensors have no values: reading one that should have been on the CPU fails.
"""

import horovod.torch as hvd
import pytest
import torch
from gradients import SHAPES, draw
from helpers import backward, distributed, make_parameters

from hvd_sparse.torch import Compression

FROZEN = sorted(SHAPES)[-1]
MAKERS = {
    "dgc": lambda named: Compression.dgc(named, 0.05, min_numel=100, weight_decay={FROZEN: 0.1}),
    "measured": lambda named: Compression.dgc(named, 0.05, min_numel=100, dense_fallback="measured"),
    "scattered": lambda named: Compression.dgc(
        named, 0.05, min_numel=0, scope="model", exchange="reduce_scatter", complete=True, dense_fallback=None
    ),
    "hosts": lambda named: Compression.gradient_dropping(
        named, 0.05, min_numel=100, exchange="hierarchical", ranks_per_host=hvd.size()
    ),
    "alone": lambda named: Compression.topk(
        named, 0.05, min_numel=100, exchange="hierarchical", ranks_per_host=1, between_hosts="reduce_scatter"
    ),
    "int1": lambda named: Compression.gradient_dropping(named, 0.05, min_numel=100, values="int1"),
    **{
        make.__name__: lambda named, make=make: make(named, 0.05, min_numel=100)
        for make in (
            Compression.micro,
            Compression.cltk,
            Compression.random_k,
            Compression.dct,
            Compression.sidco,
            Compression.samomentum,
        )
    },
    "hard_threshold": lambda named: Compression.hard_threshold(named, 0.05, min_numel=100),
}


def trained(method, device):
    """Return the parameters after five steps, of which two are with a frozen one, and two after a state was loaded."""
    parameters = make_parameters()
    with torch.device(device):
        compression = MAKERS[method](parameters.items())
    optimizer = distributed(parameters, compression)
    for t in range(5):
        parameters[FROZEN].requires_grad_(t not in (1, 4))
        optimizer.zero_grad()
        backward(parameters, draw(SHAPES, t, hvd.rank()))
        with torch.device(device):
            optimizer.step()
            if t == 2:
                state, together = compression.state_dict(), compression.state_dict(summed=True)
                compression.load_state_dict(together)
                compression.reset()
                compression.load_state_dict(state)
    return parameters, together


@pytest.mark.skipif(hvd.size() == 1, reason="Horovod compresses nothing with one process")
@pytest.mark.parametrize("method", MAKERS)
def test_training_and_states_are_the_same(method):
    expected, wanted = trained(method, "cpu")
    found, got = trained(method, "meta")
    for name, one in found.items():
        assert one.device.type == "cpu"
        assert torch.equal(one, expected[name]), name
    for name, buffers in wanted["memory"].items():
        for kind, values in buffers.items():
            assert torch.equal(got["memory"][name][kind], values)
