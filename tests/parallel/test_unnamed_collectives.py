"""A collective of the user's, without a name, between backward and the optimizer's step.

Horovod names it after the number of calls before it, so that ranks which have made different numbers wait for ever.
"""

import gc
import time
import weakref
from contextlib import nullcontext

import horovod.torch as hvd
import pytest
import torch
from helpers import assert_ranks_agree, backward, distributed, everywhere, make_parameters

from hvd_sparse.torch import Compression, compression, hierarchical, presence

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


def make(variant, prefix="", shapes=SHAPES, **more):
    method, settings = VARIANTS[variant]
    parameters = make_parameters({prefix + name: shape for name, shape in shapes.items()})
    settings = {"density": 0.3, "min_numel": 100, "bucket_bytes": 1, "dense_fallback": None, **settings, **more}
    one = getattr(Compression, method)(parameters.items(), **settings)
    return parameters, distributed(parameters, one, lr=0.01), one


def late_backward(parameters, t, used=None):
    """Give all parameters, or those that are used, a gradient; one rank after the other is late."""
    generator = torch.Generator().manual_seed(10 * t + hvd.rank())
    chosen = {name: parameters[name] for name in used or parameters}
    gradients = {name: torch.randn(one.shape, generator=generator).numpy() for name, one in chosen.items()}
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


@pytest.mark.parametrize("variant", VARIANTS)
def test_where_steps_leave_out_layers(variant, ranks_have_made_as_many_calls, monkeypatch):
    """Two heads that are trained in turn: in each step, a gradient that is expected does not come."""
    monkeypatch.setattr(hierarchical, "HOST_BYTES", 1)
    parameters, optimizer, _ = make(variant, shapes={**SHAPES, "head": (100, 80), "other head": (100, 80)})
    for t in range(6):
        optimizer.zero_grad()
        late_backward(parameters, t, [*SHAPES, "head" if t % 2 else "other head"])
        assert ranks_have_made_as_many_calls(), t
        optimizer.step()
    assert_ranks_agree(parameters)


@pytest.mark.parametrize("settings", [{}, {"exchange": "reduce_scatter"}])
def test_where_the_buckets_change(settings, ranks_have_made_as_many_calls):
    """A layer is frozen. Its bucket is another one then, on whose regions the ranks have not agreed; others' they have.

    The gradient of a layer in that bucket comes late on the first rank, whose other bucket is then ready long before.
    """
    shapes = {"large": (600, 100), "first": (50, 100), "second": (50, 100), "frozen": (50, 100)}
    parameters, optimizer, _ = make("gather", shapes=shapes, bucket_bytes=40_000, **settings)
    parameters["first"].register_hook(lambda _: time.sleep(0.05) if hvd.rank() == 0 else None)
    for t in range(7):
        optimizer.zero_grad()
        parameters["frozen"].requires_grad_(t < 4)
        late_backward(parameters, t, ["frozen", "large", "first", "second"])
        assert ranks_have_made_as_many_calls(), t
        optimizer.step()
    assert_ranks_agree(parameters)


def test_of_several_backward_passes_in_a_step(ranks_have_made_as_many_calls):
    parameters, optimizer, _ = make("gather")
    for t in range(5):
        optimizer.zero_grad()
        for name in parameters:
            late_backward(parameters, t, [name])
            assert ranks_have_made_as_many_calls(), (t, name)
        optimizer.step()
    assert_ranks_agree(parameters)


@pytest.mark.parametrize("variant", VARIANTS)
def test_within_a_backward_pass_too(variant, ranks_have_made_as_many_calls, monkeypatch):
    """The gradient of `hvd.allgather` is an all-reduce without a name, wherever the layer is."""
    monkeypatch.setattr(hierarchical, "HOST_BYTES", 1)
    parameters, optimizer, _ = make(variant)
    found = []
    parameters["c"].register_hook(lambda _: time.sleep(0.01))  # less than one rank is late
    parameters["b"].register_hook(lambda _: found.append(ranks_have_made_as_many_calls()))
    for t in range(6):
        optimizer.zero_grad()
        late_backward(parameters, t, ["a", "c", "b"])
        optimizer.step()
    assert found == [True] * 6
    assert_ranks_agree(parameters)


def test_where_one_rank_still_has_a_compressor_that_nothing_uses(ranks_have_made_as_many_calls):
    """Python's garbage collector runs at other times on each rank. It ends the overlap for two steps."""
    before, optimizer, unused = make("gather", "unused.")
    late_backward(before, 0)
    optimizer.step()
    if hvd.rank() > 0:
        compression._compressors.discard(unused)
    parameters, optimizer, one = make("gather")
    for t in range(5):
        optimizer.zero_grad()
        late_backward(parameters, t)
        assert ranks_have_made_as_many_calls(), t
        optimizer.step()
        assert one._step.sends_early == (t > 1 or hvd.rank() > 0)
    assert_ranks_agree(parameters)


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


def test_a_dropped_compressor_that_only_one_rank_still_has_begins_nothing(ranks_have_made_as_many_calls):
    """After hvd.init() was called again, the first step of any compressor starts the comparisons of all of them."""
    gc.collect()
    gc.disable()
    try:
        parameters, optimizer, dropped = make("gather", "dropped.")
        late_backward(parameters, 0)
        optimizer.step()
        dropped._check._passed_in = None  # since then
        del parameters, optimizer, dropped
        if hvd.rank() == 1:
            gc.collect()
        parameters, optimizer, _ = make("gather")
        late_backward(parameters, 0)
        optimizer.step()
        assert ranks_have_made_as_many_calls()
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:hvd_sparse. in backward")
@pytest.mark.parametrize("variant", ["gather", "hierarchical"])
def test_a_rank_so_late_that_others_have_waited_in_vain(variant, ranks_have_made_as_many_calls, monkeypatch):
    """It knows all answers at once, but must not send in backward what the others send in their optimizer's step."""
    monkeypatch.setattr(hierarchical, "HOST_BYTES", 1)
    monkeypatch.setattr(compression, "STEPS_AFTER_A_WAIT", 1)
    parameters, optimizer, one = make(variant)
    early = []
    for t in range(7):
        optimizer.zero_grad()
        monkeypatch.setattr(presence, "ANSWER_SECONDS", 0.3 if t == 3 else 60.0)
        if t == 3 and hvd.rank() == 1:
            time.sleep(1.0)
        late_backward(parameters, t)
        early.append(one._step.sends_early)
        assert ranks_have_made_as_many_calls(), t
        optimizer.step()
    assert early == [True, True, True, False, hvd.rank() == 1, True, True]
    assert_ranks_agree(parameters)


def test_backward_waits_for_a_rank_without_gradients_once(ranks_have_made_as_many_calls, monkeypatch):
    """That rank begins its step in its optimizer, after a collective in which the others take part after backward."""
    monkeypatch.setattr(compression, "STEPS_AFTER_A_WAIT", 2)
    parameters, optimizer, one = make("gather")
    for t in range(12):
        optimizer.zero_grad()
        without = t in (2, 3, 6) and hvd.rank() == 0
        monkeypatch.setattr(presence, "ANSWER_SECONDS", 0.1 if t in (2, 3, 6) else 60.0)
        began, waits = time.monotonic(), t in (2, 6) and hvd.rank() > 0
        with pytest.warns(UserWarning) if waits else nullcontext() as warned:
            for name in () if without else parameters:  # a backward pass for each
                late_backward(parameters, t, [name])
        assert time.monotonic() - began < 30.0
        if waits:
            assert [str(each.message).split("In the next ")[1][:2] for each in warned] == ["2 " if t == 2 else "4 "]
        hvd.barrier()
        optimizer.step()
        if hvd.rank() > 0:  # two steps after the first wait in vain, and four after the second
            assert one._step.sends_early == (t in (0, 1, 5, 11)), t
    assert_ranks_agree(parameters)
    assert one.stats()["steps"] == 12
