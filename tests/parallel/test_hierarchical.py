"""Hierarchical exchange: the ranks of a host act like a single rank with the sum of their gradients."""

import functools

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from gradients import SCOPES, SHAPES, draw, shuffled, whole_numbers
from helpers import assert_ranks_agree, backward, distributed, drive, make_parameters, step, total
from oracle import CLEAR_GAP, Method, train

from hvd_sparse.torch import Compression, hierarchical
from hvd_sparse.torch.dense_bucket import MOST_TOGETHER

pytestmark = [
    pytest.mark.rank_counts,
    pytest.mark.skipif(hvd.size() == 1, reason="hosts of several ranks need several ranks"),
]

IN_PAIRS = {"exchange": "hierarchical", "ranks_per_host": 2, "dense_fallback": None}
LAYOUTS = {2: [1, 2], 3: [1, 2, [1, 2], [2, 1], 3], 4: [1, 2, [3, 1], 4]}.get(hvd.size(), [1, 2])


def hosts_of(layout):
    """Return the ranks of each host."""
    sizes = layout
    if isinstance(layout, int):
        sizes = [layout] * (hvd.size() // layout) + [hvd.size() % layout] * (hvd.size() % layout > 0)
    ends = np.cumsum(sizes)
    return [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]


def whole(compressor, name, kind="residual"):
    """Return the sum over all ranks of a buffer, float64[n]: shards lie side by side, hosts are added."""
    return compressor.state_dict(summed=True)["memory"][name][kind].double()


class Ledger:
    def __init__(self):
        self.fed = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.out = {name: np.zeros(shape) for name, shape in SHAPES.items()}

    def feed(self, gradients):
        for name, gradient in gradients.items():
            self.fed[name] += total(gradient).numpy()

    def receive(self, reduced):
        for name, result in reduced.items():
            self.out[name] += result.detach().double().numpy()

    def run(self, compressor, parameters, steps=8):
        """Take steps whose gradients arrive in different orders on different ranks; all ranks must agree."""
        for t in range(steps):
            gradients = whole_numbers(SHAPES, t, hvd.rank(), most=200)
            self.feed(gradients)
            reduced = drive(compressor, parameters, gradients, order=shuffled(gradients, t, hvd.rank()))
            assert_ranks_agree(reduced)
            self.receive(reduced)

    def check(self, compressor, tolerance=0.0):
        for name, shape in SHAPES.items():
            left = whole(compressor, name).numpy().reshape(shape)
            np.testing.assert_allclose(self.out[name] + left, self.fed[name], rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("values", ["float32", "bfloat16", "int1"])
@pytest.mark.each_value
def test_nothing_is_lost(values, scope, layout):
    parameters = make_parameters()
    settings = {"exchange": "hierarchical", "ranks_per_host": layout, "dense_fallback": None, "values": values}
    compressor = Compression.gradient_dropping(parameters.items(), 0.05, min_numel=100, scope=scope, **settings)
    ledger = Ledger()
    ledger.run(compressor, parameters)
    ledger.check(compressor, 1.0 if values == "int1" else 0.0)
    kept = {name: own["residual"].numel() for name, own in compressor.state_dict()["memory"].items() if own}
    if not isinstance(layout, list):
        assert kept.get("head.weight", 0) <= -(-500 // min(map(len, hosts_of(layout))))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("complete", [False, True])
def test_a_reduce_scatter_between_hosts_loses_nothing(complete, scope, layout):
    parameters = make_parameters()
    settings = {"ranks_per_host": layout, "between_hosts": "reduce_scatter", "dense_fallback": None, "scope": scope}
    compressor = Compression.gradient_dropping(
        parameters.items(), 0.05, min_numel=100, exchange="hierarchical", complete=complete, **settings
    )
    ledger = Ledger()
    ledger.run(compressor, parameters)
    ledger.check(compressor)


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("method", ["dgc", "samomentum", "gradient_dropping", "topk"])
def test_between_hosts_of_one_rank_it_is_the_flat_reduce_scatter(method, complete):
    between = {"exchange": "hierarchical", "ranks_per_host": 1, "between_hosts": "reduce_scatter"}
    results = []
    for exchange in ({"exchange": "reduce_scatter"}, between):
        parameters = make_parameters()
        settings = {"min_numel": 100, "dense_fallback": None, "complete": complete}
        compressor = getattr(Compression, method)(parameters.items(), 0.05, **settings, **exchange)
        results.append([drive(compressor, parameters, draw(SHAPES, t, hvd.rank())) for t in range(6)])
    for flat, hosted in zip(*results, strict=True):
        assert all(torch.equal(flat[name], hosted[name]) for name in SHAPES)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("method", ["dgc", "samomentum", "gradient_dropping"])
def test_it_is_the_method_with_a_rank_for_each_host(method, layout):
    """For a tensor that is not divided (one rank per host), or whose shards are separate tensors."""
    hosts = hosts_of(layout)
    shards = min(map(len, hosts))
    cut = [480 * shard // shards for shard in range(shards + 1)]
    settings = {"density": 0.05, "min_numel": 0}
    settings |= {} if method == "gradient_dropping" else {"momentum": 0.8}

    def of_host(step, host, seed):
        total = sum(draw({"w": (480,)}, step, rank, seed)["w"].astype(np.float32) for rank in hosts[host])
        return {f"w{shard}": total[cut[shard] : cut[shard + 1]].astype(np.float64) for shard in range(shards)}

    start = {f"w{shard}": np.zeros(cut[shard + 1] - cut[shard]) for shard in range(shards)}
    for seed in range(20):
        oracle = Method(samomentum=method == "samomentum", **settings)
        expected = train(oracle, start, functools.partial(of_host, seed=seed), len(hosts), 30, 0.1, average=False)
        if expected.gap > 10 * CLEAR_GAP:
            break
    parameters = {"w": torch.nn.Parameter(torch.zeros(480))}
    exchange = {"exchange": "hierarchical", "ranks_per_host": layout, "dense_fallback": None}
    compression = getattr(Compression, method)(parameters.items(), **settings, **exchange)
    optimizer = distributed(parameters, compression, 0.1, op=hvd.Sum)
    for t in range(30):
        step(optimizer, parameters, draw({"w": (480,)}, t, hvd.rank(), seed))
    found = parameters["w"].detach().double().numpy()
    for shard in range(shards):
        wanted = expected.parameters[f"w{shard}"]
        np.testing.assert_allclose(found[cut[shard] : cut[shard + 1]], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_message_for_each_tensor_gives_the_same(layout, monkeypatch):
    def trained():
        parameters = make_parameters()
        exchange = {"exchange": "hierarchical", "ranks_per_host": layout, "dense_fallback": None}
        compressor = Compression.dgc(parameters.items(), 0.05, min_numel=0, **exchange)
        results = []
        for t in range(6):
            gradients = draw(SHAPES, t, hvd.rank())
            parameters["head.weight"].requires_grad_(t != 3 or hvd.rank() > 0)
            if t == 4:
                del gradients["body.weight"]
            order = shuffled(gradients, t, hvd.rank())
            results.append(drive(compressor, parameters, gradients, order=order))
        return results

    expected = trained()
    monkeypatch.setattr(hierarchical, "HOST_BYTES", 1)
    for t, (found, wanted) in enumerate(zip(trained(), expected, strict=True)):
        for name in wanted:
            assert torch.equal(found[name], wanted[name]), (t, name)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("method", ["micro", "cltk", "random_k", "topk"])
def test_the_other_methods_lose_nothing(method, layout):
    parameters = make_parameters()
    exchange = {"exchange": "hierarchical", "ranks_per_host": layout, "dense_fallback": None}
    compressor = getattr(Compression, method)(parameters.items(), 0.05, min_numel=100, **exchange)
    ledger = Ledger()
    for t in range(6):
        gradients = whole_numbers(SHAPES, t, hvd.rank())
        ledger.feed(gradients)
        reduced = drive(compressor, parameters, gradients)
        assert_ranks_agree(reduced)
        ledger.receive(reduced)
    ledger.check(compressor, 1e-3)  # an all-reduce of float32 sums


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_at_density_one_it_is_horovod(layout):
    parameters = make_parameters()
    exchange = {"exchange": "hierarchical", "ranks_per_host": layout}
    compressor = Compression.dgc(parameters.items(), density=1.0, momentum=0.0, min_numel=0, **exchange)
    for t in range(3):
        reduced = drive(compressor, parameters, whole_numbers(SHAPES, t, hvd.rank()))
        for name in SHAPES:
            expected = sum(whole_numbers(SHAPES, t, rank)[name] for rank in range(hvd.size()))
            np.testing.assert_array_equal(reduced[name].numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
@pytest.mark.parametrize("between", ["gather", "reduce_scatter"])
@pytest.mark.parametrize("summed", [False, True])
def test_training_goes_on_from_a_checkpoint(summed, between, layout):
    """From each rank's own state bit for bit; from a summed one also where hosts are others: nothing is lost."""
    exchange = {"exchange": "hierarchical", "ranks_per_host": layout, "between_hosts": between, "dense_fallback": None}
    make = functools.partial(Compression.dgc, density=0.05, min_numel=100, **exchange)
    parameters = make_parameters()
    first = make(parameters.items())
    for t in range(5):
        drive(first, parameters, draw(SHAPES, t, hvd.rank()))
    saved = first.state_dict(summed=summed)
    others = make_parameters()
    second = make(others.items()) if not summed else make(others.items(), ranks_per_host=1)
    second.load_state_dict(saved)
    for name in SHAPES:
        for kind in ("residual", "velocity"):
            found, wanted = whole(second, name, kind), whole(first, name, kind)
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    if not summed:
        for t in range(5, 9):
            gradients = draw(SHAPES, t, hvd.rank())
            results = [drive(one, own, gradients) for one, own in ((first, parameters), (second, others))]
            assert all(torch.equal(results[0][name], results[1][name]) for name in SHAPES)


@pytest.mark.parametrize("bad", ["head.weight", "body.bias"])
@pytest.mark.parametrize("method", ["gradient_dropping", "dgc"])
def test_a_step_that_is_not_finite_is_skipped_on_all_hosts(method, bad):
    parameters = make_parameters()
    clips = {"scope": "model", "clip_norm": 5.0, "clip_scope": "model"} if method == "dgc" else {}
    compressor = getattr(Compression, method)(parameters.items(), 0.05, min_numel=100, **IN_PAIRS, **clips)
    ledger = Ledger()
    for t in range(4):
        gradients = {name: np.array(value) for name, value in whole_numbers(SHAPES, t, hvd.rank()).items()}
        ledger.feed(gradients)
        if t == 2 and hvd.rank() == hvd.size() - 1:
            gradients[bad][7] = np.nan
        reduced = drive(compressor, parameters, gradients)
        assert all(bool(torch.isnan(result).all()) == (t == 2) for result in reduced.values())
        if t != 2:
            ledger.receive(reduced)
    for name in ("body.weight", "head.weight") if method == "gradient_dropping" else ():  # what was finite is kept
        lost = ledger.fed[name] - ledger.out[name] - whole(compressor, name).numpy().reshape(SHAPES[name])
        assert not np.delete(lost, 7 if name == bad else [], axis=0).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_16_bits(dtype):
    parameters = make_parameters(dtype=dtype)
    compressor = Compression.gradient_dropping(parameters.items(), 0.05, min_numel=100, **IN_PAIRS)
    ledger = Ledger()
    for t in range(6):
        gradients = whole_numbers(SHAPES, t, hvd.rank(), most=100)
        ledger.feed(gradients)
        ledger.receive(drive(compressor, parameters, gradients))
    for name in ("body.weight", "head.weight"):
        left = whole(compressor, name).numpy().reshape(SHAPES[name])
        np.testing.assert_allclose(ledger.out[name] + left, ledger.fed[name], rtol=0, atol=1e-2)


@pytest.mark.parametrize("exchange", [{}, {"exchange": "hierarchical", "ranks_per_host": 1}], ids=["", "hierarchical"])
@pytest.mark.parametrize("method", ["topk", "gradient_dropping"])  # all dense tensors in one message, or the tiny ones
def test_the_mean_of_small_tensors_of_16_bits_may_need_a_larger_sum(method, exchange):
    """So it may for one below min_numel that does not share the message of the tiny ones."""
    shapes = {"tiny": (5,), "small": (MOST_TOGETHER + 1,), "large": (MOST_TOGETHER + 2,)}
    parameters = make_parameters(shapes, torch.float16)
    compression = getattr(Compression, method)(parameters.items(), 0.01, min_numel=MOST_TOGETHER + 2, **exchange)
    gradients = {name: np.full(shape, 1.0 if name == "large" else 40000.0) for name, shape in shapes.items()}
    reduced = drive(compression, parameters, gradients, op=hvd.Average)
    for name in ("tiny", "small"):
        assert bool((reduced[name] == 40000.0).all())


def test_missing_frozen_and_late_gradients():
    parameters = make_parameters()
    compressor = Compression.gradient_dropping(parameters.items(), 0.05, min_numel=100, **IN_PAIRS)
    ledger = Ledger()
    for t in range(8):
        parameters["head.weight"].requires_grad_(not (t in (4, 5) and hvd.rank() == 0))
        gradients = whole_numbers(SHAPES, t, hvd.rank())
        if t in (2, 6):
            del gradients["body.weight"]
        fed = {name: g if parameters[name].requires_grad else np.zeros_like(g) for name, g in gradients.items()}
        ledger.feed(fed)
        reduced = drive(compressor, parameters, gradients)
        assert_ranks_agree(reduced)
        ledger.receive(reduced)
    parameters["head.weight"].requires_grad_(True)
    ledger.check(compressor)


def test_the_optimizers_options():
    for options in ({"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}, {"backward_passes_per_step": 2}, {}):
        results = []
        for exchange in ({}, {"exchange": "hierarchical", "ranks_per_host": 1}):
            parameters = make_parameters()
            compression = Compression.dgc(
                parameters.items(),
                0.05,
                min_numel=100,
                clip_norm=5.0,
                weight_decay=0.01,
                dense_fallback=None,
                **exchange,
            )
            optimizer = distributed(parameters, compression, 0.1, **options)
            for t in range(4):
                optimizer.zero_grad()
                for _ in range(options.get("backward_passes_per_step", 1)):
                    backward(parameters, draw(SHAPES, t, hvd.rank()))
                optimizer.step()
            assert_ranks_agree(parameters)
            results.append(parameters)
        for name in SHAPES:
            torch.testing.assert_close(results[0][name], results[1][name], rtol=1e-5, atol=1e-6)


SMALL_FIRST = ["scale", "body.bias", "body.weight", "head.weight"]
CLIPPED = {"density": 0.05, "scope": "model", "momentum": 0.9, "min_numel": 100}


def clipped(parameters, **exchange):
    settings = {**CLIPPED, "clip_norm": 5.0, "clip_scope": "model", "dense_fallback": None, **exchange}
    return distributed(parameters, Compression.dgc(parameters.items(), **settings), op=hvd.Sum)


@pytest.mark.parametrize("order", [SMALL_FIRST, SMALL_FIRST[::-1], None], ids=["small first", "small last", "shuffled"])
def test_small_tensors_are_clipped_by_the_whole_gradients_norm(order):
    results = []
    for exchange in ({}, {"exchange": "hierarchical", "ranks_per_host": 1}):
        parameters, seen = make_parameters(), []
        optimizer = clipped(parameters, **exchange)
        for t in range(6):
            parameters["body.bias"].requires_grad_(t not in (2, 3))  # then a gradient that no rank expects
            step(optimizer, parameters, draw(SHAPES, t, hvd.rank()), order or shuffled(SHAPES, t, hvd.rank()))
            seen.append({name: parameter.grad.clone() for name, parameter in parameters.items()})
        assert_ranks_agree(parameters)
        results.append(seen)
    for flat, hosted in zip(*results, strict=True):
        for name in SHAPES:
            torch.testing.assert_close(hosted[name], flat[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_rank_clips_its_whole_gradient_before_its_host_sums(layout):
    """DGC, Appendix C. Under Sum, the bound is clip_norm / sqrt(world size)."""
    hosts = hosts_of(layout)
    shards = min(map(len, hosts))

    def shard(j, tensors):
        cut = {name: slice(value.size * j // shards, value.size * (j + 1) // shards) for name, value in tensors.items()}
        return {name: v.reshape(-1)[cut[name]] if v.size >= 100 else v for name, v in tensors.items()}

    def of_host(t, host, j, seed):
        sums = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        for drawn in (draw(SHAPES, t, rank, seed) for rank in hosts[host]):
            norm = np.linalg.norm(np.concatenate([value.reshape(-1) for value in drawn.values()]))
            for name, value in drawn.items():
                sums[name] += value * min(1.0, 5.0 / hvd.size() ** 0.5 / norm)
        return shard(j, sums)

    parameters = make_parameters()
    start = {name: parameter.detach().double().numpy() for name, parameter in parameters.items()}
    for seed in range(20):
        given = [functools.partial(of_host, j=j, seed=seed) for j in range(shards)]
        columns = [
            train(Method(**CLIPPED), shard(j, start), one, len(hosts), 8, 0.1, average=False)
            for j, one in enumerate(given)
        ]
        if min(column.gap for column in columns) > 10 * CLEAR_GAP:
            break
    optimizer = clipped(parameters, exchange="hierarchical", ranks_per_host=layout)
    for t in range(8):
        step(optimizer, parameters, draw(SHAPES, t, hvd.rank(), seed), SMALL_FIRST)
    for j, column in enumerate(columns):
        found = shard(j, {name: parameter.detach().double().numpy() for name, parameter in parameters.items()})
        for name, wanted in column.parameters.items():
            np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-5, err_msg=name)


def test_what_is_refused():
    named = make_parameters()
    with pytest.raises(ValueError, match="ranks_per_host is for"):
        Compression.dgc(named.items(), ranks_per_host=2)
    with pytest.raises(ValueError, match="ranks_per_host must be an integer"):
        Compression.dgc(named.items(), exchange="hierarchical", ranks_per_host=0)
    with pytest.raises(ValueError, match=r"between_hosts must be one of .*; got 'ring'"):
        Compression.dgc(named.items(), exchange="hierarchical", between_hosts="ring")
    with pytest.raises(ValueError, match="between_hosts is for"):
        Compression.dgc(named.items(), exchange="reduce_scatter", between_hosts="gather")
    compressor = Compression.dgc(named.items(), exchange="hierarchical", ranks_per_host=[hvd.size() + 1])
    with pytest.raises(ValueError, match="must add up to"):
        drive(compressor, named, draw(SHAPES, 0, hvd.rank()))
    hvd.barrier()
