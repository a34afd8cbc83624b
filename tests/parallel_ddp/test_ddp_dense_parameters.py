"""Under DDP, parameters in `dense` are sent dense whatever their size, while others are compressed."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ddp_helpers import ALONE, Balance, Trainer, assert_alive, assert_ranks_agree
from gradients import draw, whole_numbers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_sparse.torch.ddp import Compression
from hvd_sparse.torch.dense_bucket import MOST_TOGETHER

SHAPES = {"embedding": (140, 120), "body": (150, 150), "head": (20, 25), "bias": (20,)}
DENSE = ("embedding", "head")  # "bias" is below min_numel, "body" is compressed
WAYS = {
    "tensor": {},
    "model": {"scope": "model"},
    "reduce-scatter": {"exchange": "reduce_scatter"},
    "hierarchical": {"exchange": "hierarchical", "ranks_per_host": 1, "dense_fallback": None},
}


@pytest.mark.rank_counts
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bucket", [0.00005, 25])
def test_they_follow_momentum_sgd_while_others_are_sparse(way, bucket):
    """Momentum SGD in NumPy on the mean gradient, float32: exact, as gradients are multiples of the world size."""
    assert np.prod(SHAPES["embedding"]) > MOST_TOGETHER, "one of them is not in the message of small tensors"
    settings = {"density": 0.02, "momentum": 0.5, "min_numel": 100, "dense": DENSE, **WAYS[way]}
    trainer, ranks = Trainer("dgc", SHAPES, ddp={"bucket_cap_mb": bucket}, **settings), dist.get_world_size()
    velocity = {name: np.zeros(SHAPES[name], np.float32) for name in (*DENSE, "bias")}
    for t in range(5):
        everyone = [whole_numbers(SHAPES, t, rank) for rank in range(ranks)]
        own = {name: ranks * value for name, value in everyone[dist.get_rank()].items()}
        reduced = trainer.step(own)
        for name in velocity:
            total = sum(one[name] for one in everyone).astype(np.float32)
            velocity[name] = np.float32(0.5) * velocity[name] + total
            np.testing.assert_allclose(reduced[name].numpy(), velocity[name], rtol=1e-6 * (ranks > 2), err_msg=name)
        assert 0 < int(reduced["body"].count_nonzero()) <= ranks * round(0.02 * 22_500)
    assert trainer.compression.stats()["step"]["density"] < 0.5
    assert_ranks_agree(trainer.model)


@pytest.mark.parametrize("method", ["gradient_dropping", "micro", "dct"])
def test_nothing_is_lost_of_a_run_that_goes_on_with_it(method):
    """What was left unsent before is in the first dense tensor."""
    trainer = Trainer(method, SHAPES, density=0.02, min_numel=100)
    balance = Balance(trainer)
    for t in range(3):
        balance.deliver(trainer.step(balance.gradients(t)))
    state, before = trainer.compression.state_dict(), trainer.model.state_dict()
    assert state["memory"]["head"]["residual"].any()
    trainer = balance.trainer = Trainer(
        method, SHAPES, density=0.02, min_numel=100, dense=lambda name, p: name in DENSE
    )
    trainer.model.load_state_dict(before)
    trainer.compression.load_state_dict(state)
    balance.deliver(trainer.step(balance.gradients(3)))
    balance.check()
    assert not any(trainer.buffer(name).any() for name in DENSE)
    assert trainer.buffer("body").any()


def test_a_compressor_that_lacks_a_layer_is_told_of_it():
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 10))
    some = [(name, parameter) for name, parameter in model.named_parameters() if name.startswith("0")]
    with pytest.raises(ValueError, match=r"not built with: 1\.weight, 1\.bias\. .*in its argument dense are not compr"):
        Compression.dgc(some).register(DistributedDataParallel(model))
    with pytest.raises(ValueError, match=r"dense has '1', which no parameter is called; the names are '0\.weight'"):
        Compression.dgc(model.named_parameters(), dense=["1"])
    compression = Compression.dgc(model.named_parameters(), dense=["1.weight", "1.bias"], min_numel=0)
    wrapped = DistributedDataParallel(model)
    compression.register(wrapped)
    wrapped(torch.ones(2, 40)).square().mean().backward()
    assert model[1].weight.grad.count_nonzero() == 300


@ALONE
def test_ranks_that_differ_are_refused_on_all_ranks():
    dense = ["head"] if dist.get_rank() == 0 else DENSE
    trainer = Trainer("dgc", SHAPES, dense=dense)
    with pytest.raises(ValueError, match="rank 1 has 'sent dense: embedding' where rank 0 has nothing"):
        trainer.backward(draw(SHAPES, 0, dist.get_rank()))
    assert_alive()
