"""Parameters in `dense` are sent dense whatever their size, while others are compressed."""

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from gradients import draw, whole_numbers
from helpers import (
    assert_alive,
    assert_ranks_agree,
    backward,
    distributed,
    drive,
    make_parameters,
    memory_of,
    step,
    total,
)
from test_conservation import Ledger

from hvd_sparse.algorithms import top_k
from hvd_sparse.torch import Compression
from hvd_sparse.torch.dense_bucket import MOST_TOGETHER

SHAPES = {"embedding": (140, 120), "body": (150, 150), "head": (20, 25), "bias": (20,)}
DENSE = ("embedding", "head")  # "bias" is below min_numel, "body" is compressed
BELOW = 140 * 120 + 1  # the min_numel below which these two are
HIERARCHICAL = {"exchange": "hierarchical", "ranks_per_host": 2, "dense_fallback": None}
WAYS = {
    "dgc": ("dgc", {"momentum": 0.5}),
    "dgc, model": ("dgc", {"momentum": 0.5, "scope": "model"}),
    "dgc, reduce-scatter": ("dgc", {"momentum": 0.5, "exchange": "reduce_scatter"}),
    "dgc, completed": ("dgc", {"momentum": 0.5, "exchange": "reduce_scatter", "complete": True, "scope": "model"}),
    "dgc, hierarchical": ("dgc", {"momentum": 0.5, **HIERARCHICAL}),
    "dgc, hosts of one": ("dgc", {"momentum": 0.5, **HIERARCHICAL, "ranks_per_host": 1, "scope": "model"}),
    "samomentum": ("samomentum", {"momentum": 0.5}),
}
CLIPPED = {"momentum": 0.5, "nesterov": True, "weight_decay": 0.125, "clip_norm": 9.0}
OTHERS = {
    "dgc, clipped": ("dgc", CLIPPED),
    "dgc, all clipped": ("dgc", {**CLIPPED, "scope": "model", "clip_scope": "model"}),
    "dgc, hierarchical, clipped": ("dgc", {**CLIPPED, **HIERARCHICAL}),
    "gradient_dropping": ("gradient_dropping", {"values": "int2"}),
    "topk": ("topk", {}),
    "topk, hierarchical": ("topk", {**HIERARCHICAL, "between_hosts": "reduce_scatter"}),
    "dct": ("dct", {}),
    "sidco": ("sidco", {}),
    "hard_threshold": ("hard_threshold", {"value": 60.0}),
    "micro": ("micro", {}),
    "micro, hierarchical": ("micro", HIERARCHICAL),
    "cltk": ("cltk", {}),
    "random_k": ("random_k", {}),
}
EVERY = {**WAYS, **OTHERS}
ROUNDING = {"rtol": 0.0, "atol": 0.0} if hvd.size() < 3 else {"rtol": 1e-6, "atol": 1e-5}  # of sums and of 1 / 3
several = pytest.mark.skipif(hvd.size() < 2, reason="needs two ranks that differ")


def build(way, parameters, **settings):
    method, own = EVERY[way]
    if own.get("exchange") == "hierarchical" and hvd.size() == 1:
        pytest.skip("hosts of several ranks need several ranks")
    density = {} if method == "hard_threshold" else {"density": 0.02}
    return getattr(Compression, method)(parameters.items(), **{"min_numel": 100, **density, **own, **settings})


@pytest.mark.rank_counts
@pytest.mark.parametrize("way", WAYS)
def test_they_follow_momentum_sgd_while_others_are_sparse(way):
    """Momentum SGD in NumPy on the mean of all ranks' gradients, float32. Momentum 0.5 of whole numbers is exact."""
    assert np.prod(SHAPES["embedding"]) > MOST_TOGETHER, "one of them is not in the message of small tensors"
    parameters = make_parameters(SHAPES)
    compression = build(way, parameters, dense=DENSE)
    optimizer = distributed(parameters, compression, lr=0.25)
    weights = {name: parameters[name].detach().numpy().copy() for name in (*DENSE, "bias")}
    velocity = {name: np.zeros(SHAPES[name], np.float32) for name in weights}
    for t in range(5):
        step(optimizer, parameters, whole_numbers(SHAPES, t, hvd.rank()))
        everyone = [whole_numbers(SHAPES, t, rank) for rank in range(hvd.size())]
        for name in weights:
            mean = sum(one[name] for one in everyone).astype(np.float32) / np.float32(hvd.size())
            velocity[name] = np.float32(0.5) * velocity[name] + mean
            weights[name] -= np.float32(0.25) * velocity[name]
            np.testing.assert_allclose(parameters[name].detach().numpy(), weights[name], **ROUNDING, err_msg=name)
        assert 0 < int(parameters["body"].grad.count_nonzero()) <= hvd.size() * round(0.02 * 22_500) + 1
    sent = round(compression.stats()["step"]["density"] * sum(np.prod(shape) for shape in SHAPES.values()))
    assert 16_800 + 520 <= sent < 16_800 + 520 + 2 * round(0.02 * 22_500)  # some ranks of hosts have no shard
    assert_ranks_agree(parameters)


@pytest.mark.parametrize("way", EVERY)
def test_it_is_all_the_same_as_below_min_numel(way):
    """Results, buffers, bytes, and the choice between payloads and dense steps."""
    found = []
    for settings in ({"dense": DENSE}, {"min_numel": BELOW}):
        parameters = make_parameters(SHAPES)
        compression = build(way, parameters, **settings)
        results = [drive(compression, parameters, whole_numbers(SHAPES, t, hvd.rank())) for t in range(4)]
        stats = compression.stats()
        del stats["step"]["seconds"], stats["total"]["seconds"]
        found.append((results, compression.state_dict()["memory"], stats))
    (results, memory, stats), (others, other_memory, other_stats) = found
    for one, other in zip(results, others, strict=True):
        assert torch.equal(one["body"], other["body"])
        for name in SHAPES:
            torch.testing.assert_close(one[name], other[name], **ROUNDING)
    assert {name: sorted(buffers) for name, buffers in memory.items()} == {
        name: sorted(buffers) for name, buffers in other_memory.items()
    }
    assert all(
        torch.equal(buffer, other_memory[name][kind])
        for name, buffers in memory.items()
        for kind, buffer in buffers.items()
    )
    assert stats["residual_norm"] == pytest.approx(other_stats["residual_norm"], rel=1e-12)
    assert stats | {"residual_norm": 0.0} == other_stats | {"residual_norm": 0.0}


@pytest.mark.rank_counts
@pytest.mark.parametrize("way", EVERY)
def test_all_parameters_may_be_dense(way):
    """With whole numbers, and without momentum, results are the exact sums."""
    own = EVERY[way][1]
    plain = {"clip_norm": None, "clip_scope": "tensor", "weight_decay": 0.0, "nesterov": False, "momentum": 0.0}
    parameters = make_parameters(SHAPES)
    settings = {name: value for name, value in plain.items() if name in own}
    compression = build(way, parameters, dense=lambda name, parameter: True, **settings)
    for t in range(3):
        gradients = whole_numbers(SHAPES, t, hvd.rank())
        results = drive(compression, parameters, gradients)
        for name in SHAPES:
            assert torch.equal(results[name].double(), total(gradients[name])), name
    stats = compression.stats()
    assert stats["step"]["density"] == 1.0 and stats["residual_norm"] == 0.0
    compression.load_state_dict(compression.state_dict())


@several
@pytest.mark.rank_counts
@pytest.mark.parametrize("rule", ["bytes", "measured"])
@pytest.mark.parametrize("way", ["dgc", "dgc, model", "dgc, reduce-scatter", "micro"])
def test_the_dense_fallback_sees_only_what_may_be_compressed(way, rule):
    """Its costs are those of a model that lacks the others."""
    told = []
    for names in (SHAPES, ("body",)):
        shapes = {name: SHAPES[name] for name in names}
        parameters = make_parameters(shapes)
        dense = {"dense": DENSE} if names is SHAPES else {}
        compression = build(way, parameters, dense_fallback=rule, **dense)
        drive(compression, parameters, whole_numbers(shapes, 0, hvd.rank()))
        told.append(compression.stats()["dense_fallback"])
    assert told[0] == told[1] and told[0]["payload_bytes"] > 0


@pytest.mark.parametrize("scope", ["tensor", "model"])
def test_an_automatic_exchange_sees_only_what_may_be_compressed(scope, monkeypatch):
    seen = []
    monkeypatch.setattr(top_k, "favours_scattered", lambda selections, *rest: bool(seen.append(selections)))
    parameters = make_parameters(SHAPES)
    compression = Compression.topk(parameters.items(), 0.02, scope=scope, exchange="auto", min_numel=100, dense=DENSE)
    drive(compression, parameters, whole_numbers(SHAPES, 0, hvd.rank()))
    assert set(seen) == {(22_500,)}


@pytest.mark.parametrize("way", ["dgc", "dgc, model", "dgc, hierarchical", "micro"])
def test_a_checkpoint_continues_the_run(way):
    runs = []
    for loads in (False, True):
        parameters = make_parameters(SHAPES)
        compression, results = build(way, parameters, dense=DENSE), []
        for t in range(6):
            if loads and t == 3:
                state = compression.state_dict()
                compression = build(way, parameters, dense=list(DENSE))
                compression.load_state_dict(state)
            results.append(drive(compression, parameters, whole_numbers(SHAPES, t, hvd.rank())))
        runs.append(results)
    for one, other in zip(*runs, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in SHAPES)


@pytest.mark.parametrize("exchange", ["gather", "hierarchical"])
def test_residuals_of_a_checkpoint_are_sent_with_the_dense_tensor(exchange):
    """Whatever was compressed before a run is continued with `dense` is delivered: nothing is lost."""
    settings = {"min_numel": 100, **(HIERARCHICAL if exchange == "hierarchical" else {})}
    if exchange == "hierarchical" and hvd.size() == 1:
        pytest.skip("hosts of several ranks need several ranks")
    parameters = make_parameters(SHAPES)
    ledger, summed = Ledger(parameters), exchange == "hierarchical"
    compression = Compression.gradient_dropping(parameters.items(), 0.02, **settings)
    for t in range(4):
        if t == 3:
            state = compression.state_dict(summed=summed)
            assert state["memory"]["head"]["residual"].any()
            compression = Compression.gradient_dropping(parameters.items(), 0.02, dense=DENSE, **settings)
            compression.load_state_dict(state)
        gradients = whole_numbers(SHAPES, t, hvd.rank())
        ledger.feed(gradients)
        ledger.receive(drive(compression, parameters, gradients))
    memory = compression.state_dict(summed=True)["memory"]
    assert not any(memory[name]["residual"].any() for name in DENSE)
    for name in SHAPES:
        left = memory[name].get("residual", torch.zeros(parameters[name].numel())).double()
        torch.testing.assert_close(ledger.sent[name] + left, total(ledger.fed[name]), **ROUNDING)


def test_a_function_of_name_and_parameter():
    parameters = make_parameters(SHAPES)
    compression = Compression.topk(parameters.items(), 0.02, dense=lambda name, p: p.shape[0] == 140 or name == "head")
    assert compression.algorithm.dense == DENSE
    drive(compression, parameters, whole_numbers(SHAPES, 0, hvd.rank()))
    assert memory_of(compression, parameters, "embedding").count_nonzero() == 0
    assert memory_of(compression, parameters, "body").count_nonzero() > 0


def test_wrong_names_are_refused():
    with pytest.raises(ValueError, match="dense has 'wte', which no parameter is called; the names are 'embedding'"):
        Compression.micro(make_parameters(SHAPES).items(), dense={"wte"})
    with pytest.raises(TypeError, match="got one of type Parameter"):
        Compression.micro(make_parameters(SHAPES).items(), dense=make_parameters(SHAPES).values())


@several
@pytest.mark.parametrize("way", ["dgc", "dgc, hierarchical"])
def test_ranks_that_differ_are_refused_on_all_ranks(way):
    parameters = make_parameters(SHAPES)
    dense = ["head"] if hvd.rank() == 0 else lambda name, parameter: name in DENSE
    distributed(parameters, build(way, parameters, dense=dense))
    with pytest.raises(ValueError, match=r"rank 1 has 'sent dense: embedding' where rank 0 has nothing"):
        backward(parameters, draw(SHAPES, 0, hvd.rank()))
    assert_alive()
