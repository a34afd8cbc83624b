"""A checkpoint continues a run bit for bit. Summed over the ranks, it can be loaded by any number of ranks."""

import io
import warnings

import horovod.torch as hvd
import pytest
import torch
from gradients import SCOPES, SHAPES, draw, shuffled, whole_numbers
from helpers import (
    assert_ranks_agree,
    backward,
    distributed,
    drive,
    fingerprint,
    make_parameters,
    memory_of,
    step,
    total,
)

from hvd_sparse.schedule import WarmUp
from hvd_sparse.torch import Compression

MAKERS = {
    "gradient_dropping": lambda named, scope: Compression.gradient_dropping(named, 0.05, scope=scope, min_numel=100),
    "dgc_warming_up": lambda named, scope: Compression.dgc(
        named, 0.02, warmup=WarmUp(0.02, steps=8), nesterov=True, scope=scope, min_numel=100, seed=9
    ),
}


def through_a_file(state):
    """Save and load, without pickled code."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@pytest.mark.rank_counts
@pytest.mark.skipif(hvd.size() == 1, reason="Horovod compresses nothing with one process")
@pytest.mark.parametrize("exchange", [{}, {"exchange": "hierarchical", "ranks_per_host": 1}], ids=["gather", "hosts"])
def test_steps_beyond_what_float64_adds_exactly(exchange):
    """With three ranks, the squares of this step number do not add up to three times one of them."""
    parameters = make_parameters()
    compression = Compression.gradient_dropping(parameters.items(), 0.05, dense_fallback=None, **exchange)
    compression.load_state_dict({**compression.state_dict(), "step": 100_000_001})
    step(distributed(parameters, compression), parameters, draw(SHAPES, 0, hvd.rank()))
    assert compression.state_dict()["step"] == 100_000_002


WRAPPED = {
    "dct": lambda named: Compression.dct(named, 0.05, min_numel=100),
    "dgc": lambda named: Compression.dgc(named, 0.05, exchange="reduce_scatter", min_numel=100),
}
FRONT = "_orig_mod.module."


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("method", WRAPPED)
def test_a_state_is_loaded_though_the_model_is_wrapped(method, turned):
    """In DistributedDataParallel or torch.compile: all names get a path in front, or lose it. Training goes on."""
    here, there = ("", FRONT)[::-1] if turned else ("", FRONT)
    parameters, others = ({at + name: one for name, one in make_parameters().items()} for at in (here, there))
    compression, other = (WRAPPED[method](named.items()) for named in (parameters, others))
    for t in range(3):
        drive(compression, parameters, {here + name: one for name, one in draw(SHAPES, t, hvd.rank()).items()})
    for summed in (True, False):
        state = through_a_file(compression.state_dict(summed=summed))
        other.load_state_dict(state)
        again = other.state_dict(summed=summed)["memory"]
        for name in SHAPES:
            for kind, buffer in state["memory"][here + name].items():
                assert torch.equal(buffer, again[there + name][kind]), name
    gradients = draw(SHAPES, 3, hvd.rank())
    expected = drive(compression, parameters, {here + name: one for name, one in gradients.items()})
    found = drive(other, others, {there + name: one for name, one in gradients.items()})
    assert all(torch.equal(expected[here + name], found[there + name]) for name in SHAPES)


def test_a_state_with_one_name_that_is_not_there_is_refused():
    state = Compression.dgc(make_parameters().items(), 0.05).state_dict(summed=True)
    others = {FRONT + name.replace("scale", "size"): one for name, one in make_parameters().items()}
    all_ranks = "rank 0" if hvd.size() == 1 else "ranks 0, 1" if hvd.size() == 2 else f"ranks 0 to {hvd.size() - 1}"
    with pytest.raises(ValueError, match=f"^{all_ranks}: the state belongs to other parameters: only the state"):
        Compression.dgc(others.items(), 0.05).load_state_dict(state)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("method", MAKERS)
def test_a_resumed_run_is_the_uninterrupted_one(method, scope):
    """Whole numbers tie often: what is sent then depends on the step, which must be restored too."""

    def run(parameters, compression, steps):
        optimizer = distributed(parameters, compression)
        for t in steps:
            step(optimizer, parameters, whole_numbers(SHAPES, t, hvd.rank(), most=2), shuffled(SHAPES, t, hvd.rank()))

    parameters = make_parameters()
    compression = MAKERS[method](parameters.items(), scope)
    run(parameters, compression, range(5))
    saved = through_a_file({"model": {n: p.detach() for n, p in parameters.items()}, "ours": compression.state_dict()})
    optimizer_goes_on = make_parameters()
    for name, parameter in optimizer_goes_on.items():
        parameter.data.copy_(saved["model"][name])
    resumed = MAKERS[method](optimizer_goes_on.items(), scope)
    resumed.load_state_dict(saved["ours"])
    whole = make_parameters()
    uninterrupted = MAKERS[method](whole.items(), scope)
    run(whole, uninterrupted, range(12))
    run(optimizer_goes_on, resumed, range(5, 12))
    assert torch.equal(fingerprint(whole), fingerprint(optimizer_goes_on))
    for name in SHAPES:
        for kind in ("residual", "velocity"):
            expected = memory_of(uninterrupted, whole, name, kind)
            assert torch.equal(expected, memory_of(resumed, optimizer_goes_on, name, kind)), (name, kind)
    assert resumed.state_dict()["step"] == 12
    assert_ranks_agree(optimizer_goes_on)


@pytest.mark.skipif(hvd.size() == 1, reason="Horovod compresses nothing with one process")
def test_a_state_within_a_step_is_warned_of():
    """What has been compressed is in it, and would count again with the batch."""
    parameters = make_parameters()
    compression = Compression.gradient_dropping(parameters.items(), 0.05, min_numel=100)
    optimizer = distributed(parameters, compression)
    step(optimizer, parameters, draw(SHAPES, 0, hvd.rank()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compression.state_dict()
    backward(parameters, draw(SHAPES, 1, hvd.rank()))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        compression.state_dict()
    optimizer.step()
    told = [one for one in found if "state_dict() between backward and optimizer.step()" in str(one.message)]
    assert len(told) == (hvd.rank() == 0)


@pytest.mark.skipif(hvd.size() == 1, reason="Horovod compresses nothing with one process")
@pytest.mark.parametrize("exchange", [{}, {"exchange": "hierarchical", "ranks_per_host": 1}], ids=["gather", "hosts"])
@pytest.mark.parametrize("call", ["summed", "load", "reset"])
def test_calls_within_a_step_that_all_ranks_make(call, exchange):
    """A sum is complete, and the step goes on; what has dropped the step says so when its gradients are asked for."""
    parameters = make_parameters()
    compression = Compression.gradient_dropping(parameters.items(), 0.05, min_numel=100, **exchange)
    optimizer = distributed(parameters, compression, op=hvd.Sum)
    for t in range(3):
        step(optimizer, parameters, whole_numbers(SHAPES, t, hvd.rank()))
    state = compression.state_dict()
    backward(parameters, whole_numbers(SHAPES, 3, hvd.rank()))
    if call == "summed":
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            compression.state_dict(summed=True)
        assert ["between backward" in str(one.message) for one in found] == [True] * (hvd.rank() == 0)
        optimizer.step()
        assert compression.state_dict()["step"] == 4
        assert_ranks_agree(parameters)
        return
    compression.load_state_dict(state) if call == "load" else compression.reset()
    with pytest.raises(RuntimeError, match=r"was compressed before reset\(\) or load_state_dict\(\)"):
        optimizer.step()


@pytest.mark.skipif(hvd.size() == 1, reason="Horovod compresses nothing with one process")
def test_a_state_loaded_in_inference_mode_can_be_trained_from():
    states = []
    for mode in (False, True):
        parameters = make_parameters()
        compression = Compression.gradient_dropping(parameters.items(), 0.05, min_numel=100)
        optimizer = distributed(parameters, compression)
        if states:
            with torch.inference_mode(mode):
                compression.load_state_dict(states[0])
        step(optimizer, parameters, draw(SHAPES, 0, hvd.rank()))
        states.append(through_a_file(compression.state_dict()))
    assert states[1]["step"] == 2


@pytest.mark.parametrize("scope", SCOPES)
def test_a_state_is_a_copy(scope):
    """Steps after it do not change it, and loading it does not tie it to the compressor."""
    parameters = make_parameters()
    compression = MAKERS["gradient_dropping"](parameters.items(), scope)
    drive(compression, parameters, draw(SHAPES, 0, hvd.rank()))
    state = compression.state_dict()
    kept = state["memory"]["body.weight"]["residual"].clone()
    for _ in range(2):
        compression.load_state_dict(state)
        drive(compression, parameters, draw(SHAPES, 1, hvd.rank()))
        assert torch.equal(state["memory"]["body.weight"]["residual"], kept)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("method", MAKERS)
def test_loading_discards_what_was_there(method, scope):
    """Back to an earlier state of the same compressor: the same steps give the same results."""
    parameters = make_parameters()
    compression = MAKERS[method](parameters.items(), scope)
    empty = compression.state_dict()
    drive(compression, parameters, draw(SHAPES, 0, hvd.rank()))
    state = compression.state_dict()
    first = [drive(compression, parameters, draw(SHAPES, t, hvd.rank())) for t in (1, 2)]
    compression.load_state_dict(state)
    second = [drive(compression, parameters, draw(SHAPES, t, hvd.rank())) for t in (1, 2)]
    assert all(torch.equal(a[name], b[name]) for a, b in zip(first, second, strict=True) for name in SHAPES)
    compression.load_state_dict(empty)
    assert compression.stats()["residual_norm"] == 0.0 and compression.state_dict()["step"] == 0


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("method", MAKERS)
def test_a_summed_state_is_shared_out(method, scope, monkeypatch):
    """The same on every rank; loaded, the ranks' memories add up to it again: no gradient is lost."""
    monkeypatch.setattr("hvd_sparse.torch.state.SPAN", 500)
    parameters = make_parameters()
    compression = MAKERS[method](parameters.items(), scope)
    for t in range(4):
        drive(compression, parameters, draw(SHAPES, t, hvd.rank()))
    kinds = compression.state_dict()["memory"]["body.weight"].keys()
    before = {(n, k): total(memory_of(compression, parameters, n, k)) for n in SHAPES for k in kinds}
    state = through_a_file(compression.state_dict(summed=True))
    assert_ranks_agree({f"{n}.{k}": state["memory"][n][k] for n in SHAPES for k in kinds})
    new = MAKERS[method](parameters.items(), scope)
    new.load_state_dict(state)
    for (name, kind), expected in before.items():
        saved = state["memory"][name][kind].double()
        assert torch.equal(saved, expected.float().double())  # added in float64, rounded once
        assert torch.equal(total(memory_of(new, parameters, name, kind)), saved)
    assert any(bool(value.any()) for value in before.values())
    assert new.state_dict()["step"] == 4
    drive(new, parameters, draw(SHAPES, 4, hvd.rank()))


@pytest.mark.skipif(hvd.size() < 2, reason="another number of ranks needs a process set of a part of the job")
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=["sum", "average"])
@pytest.mark.parametrize("scope", SCOPES)
def test_fewer_ranks_continue_from_a_summed_state(scope, op):
    """As after the loss of a worker: the remaining ranks take over its residual. A per-rank state raises an error.

    What is pending changes the weights as much as before: by the sum of residuals, or their mean.
    """
    parameters = make_parameters()
    compression = MAKERS["gradient_dropping"](parameters.items(), scope)
    for t in range(3):
        drive(compression, parameters, whole_numbers(SHAPES, t, hvd.rank()), op)
    expected = total(memory_of(compression, parameters, "body.weight"))
    own, summed = compression.state_dict(), compression.state_dict(summed=True)
    left = hvd.add_process_set(list(range(hvd.size() - 1)))
    try:
        if left.included():
            fewer = Compression.gradient_dropping(
                parameters.items(), 0.05, scope=scope, min_numel=100, process_set=left
            )
            with pytest.raises(ValueError, match=f"{hvd.size()} ranks, and there are {left.size()} now"):
                fewer.load_state_dict(own)
            fewer.load_state_dict(summed)
            found = total(memory_of(fewer, parameters, "body.weight"), left)
            if op == hvd.Average:
                expected, found = expected / hvd.size(), found / left.size()
            torch.testing.assert_close(found, expected, rtol=1e-7, atol=0.0)
            assert fewer.state_dict()["averages"] == (op == hvd.Average)
            drive(fewer, parameters, whole_numbers(SHAPES, 3, hvd.rank()), op, process_set=left)
    finally:
        assert hvd.remove_process_set(left)


@pytest.mark.rank_counts
@pytest.mark.skipif(hvd.size() < 2, reason="a rank can only be outside where there are two of them")
@pytest.mark.parametrize("summed", [False, True], ids=["own", "summed"])
def test_a_rank_outside_the_process_set_has_no_state(summed):
    parameters, first = make_parameters(), hvd.add_process_set([0])
    try:
        compression = Compression.gradient_dropping(parameters.items(), process_set=first)
        state = Compression.gradient_dropping(make_parameters().items()).state_dict(summed=summed)
        if first.included():
            compression.state_dict(summed=summed)
        else:
            for call in (lambda: compression.state_dict(summed=summed), lambda: compression.load_state_dict(state)):
                with pytest.raises(RuntimeError, match="this rank is not in the process_set"):
                    call()
    finally:
        assert hvd.remove_process_set(first)


@pytest.mark.rank_counts
@pytest.mark.skipif(hvd.size() < 3, reason="a process set that is not all ranks, of two at least, needs three ranks")
def test_a_process_set_that_horovod_has_forgotten_is_no_longer_exchanged_in():
    """So it is after hvd.shutdown(), or when a rank has ended. The state can still be saved."""
    parameters, pair = make_parameters(), hvd.add_process_set([0, 1])
    if pair.included():
        compression = Compression.gradient_dropping(parameters.items(), process_set=pair)
        drive(compression, parameters, draw(SHAPES, 0, hvd.rank()), process_set=pair)
    assert hvd.remove_process_set(pair)
    if hvd.rank() > 1:
        return
    pair.process_set_id = 2**20  # which Horovod does not know
    assert compression.state_dict()["ranks"] == 2
    compression.reset()
    with pytest.raises(RuntimeError, match="Horovod does not have the process_set \\(any more\\)"):
        drive(compression, parameters, draw(SHAPES, 1, hvd.rank()), process_set=pair)


def wrong_states():
    named = make_parameters()
    good = Compression.gradient_dropping(named.items(), 0.05, min_numel=100)
    drive(good, named, draw(SHAPES, 0, hvd.rank()))
    state = good.state_dict()
    memory = state["memory"]
    short = {**memory, "body.weight": {"residual": torch.zeros(3)}}
    velocity = {**memory, "body.weight": {"velocity": torch.zeros(600)}}
    return {
        "nothing": (None, "state"),
        "empty": ({}, "state"),
        "another version": ({**state, "version": 99}, "version"),
        "another model": ({**state, "memory": {**memory, "extra": {}}}, "other parameters.*extra"),
        "a parameter short": ({**state, "memory": {"scale": {}}}, "other parameters"),
        "another shape": ({**state, "memory": short}, "body.weight.*600 elements"),
        "another method": ({**state, "memory": velocity}, "another method.*velocity"),
        "another number of ranks": ({**state, "ranks": hvd.size() + 3}, f"{hvd.size() + 3} ranks"),
        "another rank": ({**state, "rank": 7}, f"that of rank 7, and this is rank {hvd.rank()}"),
        "another shard": ({**state, "shard": 1}, "that of shard 1, and this is shard None"),
    }


@pytest.mark.parametrize("scope", SCOPES)
def test_a_wrong_state_is_refused_and_changes_nothing(scope):
    parameters = make_parameters()
    compression = MAKERS["gradient_dropping"](parameters.items(), scope)
    drive(compression, parameters, draw(SHAPES, 0, hvd.rank()))
    before = memory_of(compression, parameters, "body.weight")
    for title, (state, message) in wrong_states().items():
        with pytest.raises(ValueError, match=message):
            compression.load_state_dict(state)
        assert torch.equal(before, memory_of(compression, parameters, "body.weight")), title
        assert compression.state_dict()["step"] == 1
    drive(compression, parameters, draw(SHAPES, 1, hvd.rank()))


@pytest.mark.parametrize("key", ["memory", "summed", "step", "ranks"])
def test_a_state_that_lacks_a_part_is_refused_clearly(key):
    parameters = make_parameters()
    compression = MAKERS["gradient_dropping"](parameters.items(), "tensor")
    broken = {name: value for name, value in compression.state_dict().items() if name != key}
    with pytest.raises(ValueError, match=key):
        compression.load_state_dict(broken)


def test_each_rank_of_an_elastic_job_refuses_its_own_state(monkeypatch):
    compression = MAKERS["gradient_dropping"](make_parameters().items(), "tensor")
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(ValueError, match=r"^the state must be what state_dict"):  # not "rank 0: the"
        compression.load_state_dict({**compression.state_dict(), "version": 99})


@pytest.mark.parametrize("number", [-1, 2.5, "7", None])
def test_a_state_with_an_impossible_step_is_refused_clearly(number):
    parameters = make_parameters()
    compression = MAKERS["gradient_dropping"](parameters.items(), "tensor")
    with pytest.raises((ValueError, TypeError), match="step"):
        compression.load_state_dict({**compression.state_dict(), "step": number})
