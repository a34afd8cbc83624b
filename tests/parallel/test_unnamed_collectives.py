"""A collective of the user's, without a name, between backward and the optimizer's step.

Horovod names it after the number of calls before it, so that ranks which have made different numbers wait for ever.
"""

import time
import weakref

import horovod.torch as hvd
import pytest
import torch
from helpers import assert_ranks_agree, backward, distributed, everywhere, make_parameters

from hvd_sparse.torch import Compression, compression, exchange

SHAPES = {"a": (200, 100), "b": (300, 70), "c": (40,)}
VARIANTS = {
    "gather": ("dgc", {}),
    "joint": ("dgc", {"scope": "model"}),
    "reduce_scatter": ("dgc", {"exchange": "reduce_scatter"}),
    "hierarchical": ("dgc", {"exchange": "hierarchical", "ranks_per_host": 1}),
    "cltk": ("cltk", {}),
    "micro": ("micro", {}),
}

pytestmark = pytest.mark.skipif(hvd.size() < 2, reason="a rank alone waits for nobody")


@pytest.fixture
def ranks_have_made_as_many_calls(monkeypatch):
    """Return a function that tells whether all ranks have since then started as many collectives, as Horovod counts."""

    def calls_so_far():
        handle = hvd.allreduce_async(torch.zeros(1), name="probe")
        hvd.synchronize(handle)
        return handle

    monkeypatch.setattr(compression, "_compressors", weakref.WeakSet())  # some ranks may have those of earlier tests
    before = calls_so_far()
    return lambda: len(set(everywhere(calls_so_far() - before))) == 1


def make(variant, prefix=""):
    method, settings = VARIANTS[variant]
    parameters = make_parameters({prefix + name: shape for name, shape in SHAPES.items()})
    one = getattr(Compression, method)(
        parameters.items(), density=0.3, min_numel=100, bucket_bytes=1, dense_fallback=None, **settings
    )
    return parameters, distributed(parameters, one, lr=0.01), one


def late_backward(parameters, t):
    """Give all parameters a gradient; one rank after the other is late."""
    generator = torch.Generator().manual_seed(10 * t + hvd.rank())
    gradients = {name: torch.randn(one.shape, generator=generator).numpy() for name, one in parameters.items()}
    if hvd.rank() == t % hvd.size():
        time.sleep(0.03)
    backward(parameters, gradients)


@pytest.mark.parametrize("variant", VARIANTS)
def test_after_backward_all_ranks_have_made_as_many_calls(variant, ranks_have_made_as_many_calls):
    parameters, optimizer, one = make(variant)
    for t in range(5):
        optimizer.zero_grad()
        late_backward(parameters, t)
        assert ranks_have_made_as_many_calls(), t
        optimizer.step()
        assert one._step.sends_early
    assert_ranks_agree(parameters)
    assert one.stats()["step"]["payload_bytes"] > 1 << 14  # more than an all-reduce gathers


def test_of_several_compressors_too(ranks_have_made_as_many_calls):
    """Ranks may begin their steps in different orders, so that none waits in backward."""
    trained = [make("gather", prefix) for prefix in ("first.", "second.")]
    for t in range(4):
        for number in (1, 0) if t > 0 and hvd.rank() == 1 else (0, 1):
            trained[number][1].zero_grad()
            late_backward(trained[number][0], t)
        assert ranks_have_made_as_many_calls(), t
        for _, optimizer, _ in trained:
            optimizer.step()
    for parameters, _, one in trained:
        assert not one._step.sends_early
        assert_ranks_agree(parameters)


def test_a_compressor_that_was_reset_and_is_collected_on_one_rank_only(ranks_have_made_as_many_calls):
    """All ranks compare its settings again when it is reset, not when the next compressor takes its first step."""
    *before, one = make("gather", "before.")
    late_backward(before[0], 0)
    before[1].step()
    one.reset()
    if hvd.rank() == 1:
        compression._compressors.discard(one)
    parameters, optimizer, _ = make("gather")
    late_backward(parameters, 0)
    optimizer.step()
    assert ranks_have_made_as_many_calls()


@pytest.mark.usefixtures("ranks_have_made_as_many_calls")
def test_backward_waits_for_a_rank_without_gradients_no_longer_than_allowed(monkeypatch):
    """That rank begins its step in its optimizer, after a collective in which the others take part after backward."""
    parameters, optimizer, one = make("gather")
    for t in range(3):
        optimizer.zero_grad()
        monkeypatch.setattr(exchange, "CHECK_SECONDS", 0.1 if t == 2 else 60.0)
        if t < 2 or hvd.rank() == 0:
            late_backward(parameters, t)
        hvd.barrier()
        optimizer.step()
    assert_ranks_agree(parameters)
    assert one.stats()["steps"] == 3
