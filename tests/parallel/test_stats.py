"""stats(): bytes, ratio, density and norms equal numbers calculated by hand."""

import horovod.torch as hvd
import pytest
import torch
from gradients import SCOPES, draw, whole_numbers
from helpers import drive, make_parameters, memory_of

from hvd_sparse import wire
from hvd_sparse.torch import Compression
from hvd_sparse.torch.collectives.horovod import HorovodCollectives

pytestmark = pytest.mark.rank_counts  # on two ranks, bytes received and sent are the same number

SHAPES = {"big": (120, 50), "middle": (2000,), "small": (64,)}
K = {"big": 60, "middle": 20}  # density 0.01
TOKEN, VOTE, PRESENCE = 8, 48, 40  # of a tensor; of a step; of a step


def payload_by_hand(n, k, item):
    """Header, a count for the one block of up to 65,536 elements, runs, values; each aligned, the whole to 8."""
    runs_end = 32 + 2 + 2 * k
    values = -(-runs_end // item) * item
    return -(-(values + item * k) // 8) * 8


@pytest.mark.parametrize("values", ["float32", "float16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bytes_of_single_tensors(dtype, values):
    parameters = make_parameters(SHAPES, dtype)
    compressor = Compression.gradient_dropping(parameters.items(), density=0.01, values=values)
    item, wire_item = dtype.itemsize, {"float32": 4, "float16": 2}[values]
    small = 64 * max(4, item)  # in a message of small tensors, as float32 at least; a token for each of the three
    payload = payload_by_hand(6000, 60, wire_item) + payload_by_hand(2000, 20, wire_item)
    assert payload == sum(wire.payload_size(n, k, value_dtype=values) for n, k in ((6000, 60), (2000, 20)))
    reduced = 3 * TOKEN + small + VOTE + PRESENCE
    check(compressor, parameters, 8064 * item, payload, reduced, (60 + 20 + 64) / 8064)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_of_the_whole_model(dtype):
    """One payload of 80 of 8,000; the small tensor in a separate dense message; a token for each of the three."""
    parameters = make_parameters(SHAPES, dtype)
    compressor = Compression.gradient_dropping(parameters.items(), density=0.01, scope="model")
    reduced = 3 * TOKEN + 64 * max(4, dtype.itemsize) + VOTE + PRESENCE
    check(compressor, parameters, 8064 * dtype.itemsize, payload_by_hand(8000, 80, 4), reduced, (80 + 64) / 8064)


def check(compressor, parameters, dense_bytes, gathered, reduced, density, steps=4):
    """The first step gathers its payloads. The others know the sizes, and sum rows of payloads, one for each rank."""
    sent = [gathered + reduced] + [hvd.size() * gathered + reduced] * (steps - 1)
    received = [(hvd.size() - 1) * gathered + reduced, *sent[1:]]
    before = compressor.stats()
    assert (before["steps"], before["step"]["dense_bytes"], before["total"]["ratio"]) == (0, 0, 1.0)
    for t in range(steps):
        drive(compressor, parameters, draw(SHAPES, t, hvd.rank()))
        stats = compressor.stats()
        assert stats["steps"] == t + 1
        assert stats["step"]["dense_bytes"] == dense_bytes
        assert stats["step"]["payload_bytes"] == sent[t]
        assert stats["step"]["received_bytes"] == received[t]
        assert stats["total"]["received_bytes"] == sum(received[: t + 1])
        assert stats["total"]["payload_bytes"] == sum(sent[: t + 1])
        assert stats["total"]["dense_bytes"] == dense_bytes * (t + 1)
        assert stats["step"]["ratio"] == pytest.approx(dense_bytes / sent[t], rel=1e-12)
        assert stats["total"]["ratio"] == pytest.approx((t + 1) * dense_bytes / sum(sent[: t + 1]), rel=1e-12)
        for part in ("step", "total"):
            assert stats[part]["density"] == pytest.approx(density, rel=1e-12)
            assert all(seconds >= 0.0 for seconds in stats[part]["seconds"].values())
            assert sum(stats[part]["seconds"].values()) > 0.0


@pytest.mark.parametrize("scope", SCOPES)
def test_the_totals_follow_a_warm_up(scope):
    """5 % in the second step: the last step's density, and the mean of both in total."""
    parameters = make_parameters({"big": (100, 60)})
    from hvd_sparse.schedule import WarmUp

    schedule = WarmUp(0.05, steps=1, initial=0.5, factor=0.1)
    compressor = Compression.gradient_dropping(parameters.items(), schedule, scope=scope, dense_fallback=None)
    for t, (last, mean) in enumerate([(0.5, 0.5), (0.05, 0.275)]):
        drive(compressor, parameters, draw({"big": (100, 60)}, t, hvd.rank()))
        stats = compressor.stats()
        assert stats["step"]["density"] == pytest.approx(last)
        assert stats["total"]["density"] == pytest.approx(mean)


@pytest.mark.parametrize("method", ["gradient_dropping", "random_k", "cltk"])
@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_a_hierarchical_exchange_counts_all_that_it_hands_to_horovod(method, ranks_per_host, monkeypatch):
    """Within hosts and between them: the bytes of all inputs, less what this rank keeps of an all-to-all."""
    handed = []

    def noted(name, bytes_of):
        call = getattr(HorovodCollectives, name)

        def wrapper(collectives, title, tensor, *more, **options):
            if title != "weights.digest":  # a check before the first step is none of a step's messages
                handed.append(bytes_of(collectives, tensor, *more))
            return call(collectives, title, tensor, *more, **options)

        monkeypatch.setattr(HorovodCollectives, name, wrapper)

    for name in ("allgather", "allreduce"):
        noted(name, lambda collectives, tensor: tensor.nbytes)
    noted(
        "alltoall", lambda collectives, tensor, sizes, *_: tensor.nbytes - tensor.itemsize * sizes[collectives.rank()]
    )
    shapes = {"big": (120, 50), "middle": (2000,)}
    parameters = make_parameters(shapes)
    hosts = [min(ranks_per_host, hvd.size() - begin) for begin in range(0, hvd.size(), ranks_per_host)]
    exchange = {"exchange": "hierarchical", "ranks_per_host": hosts, "dense_fallback": None, "min_numel": 0}
    compressor = getattr(Compression, method)(parameters.items(), 0.01, **exchange)
    for t in range(3):
        handed.clear()
        drive(compressor, parameters, whole_numbers(shapes, t, hvd.rank()))
        step = compressor.stats()["step"]
        assert step["payload_bytes"] == sum(handed) + 2 * TOKEN
        if max(hosts) == 1:  # nobody's shard is smaller than the whole
            assert step["density"] == pytest.approx(80 / 8000)
        elif min(hosts) > 1:
            assert step["density"] == pytest.approx(40 / 8000, rel=0.1)


@pytest.mark.parametrize("scope", SCOPES)
def test_the_residuals_norm_is_that_of_all_that_waits(scope):
    parameters = make_parameters(SHAPES)
    compressor = Compression.gradient_dropping(parameters.items(), density=0.01, scope=scope)
    assert compressor.stats()["residual_norm"] == 0.0
    drive(compressor, parameters, whole_numbers(SHAPES, 0, hvd.rank()))
    square = sum(float(memory_of(compressor, parameters, name).square().sum()) for name in SHAPES)
    assert compressor.stats()["residual_norm"] == pytest.approx(square**0.5, rel=1e-6)
    assert square > 0.0


@pytest.mark.parametrize("scope", SCOPES)
def test_reset(scope):
    """A compressor is then as if new, on every rank."""
    parameters = make_parameters(SHAPES)
    fresh = Compression.dgc(parameters.items(), density=0.01, scope=scope, seed=3)
    used = Compression.dgc(parameters.items(), density=0.01, scope=scope, seed=3)
    gradients = [whole_numbers(SHAPES, t, hvd.rank()) for t in range(3)]
    for one in gradients:
        drive(used, parameters, one)
    assert used.stats()["residual_norm"] > 0.0
    used.reset()
    stats = used.stats()
    assert (stats["steps"], stats["residual_norm"], stats["total"]["payload_bytes"]) == (0, 0.0, 0)
    assert used.state_dict()["step"] == 0
    for one in gradients:
        expected, found = drive(fresh, parameters, one), drive(used, parameters, one)
        assert all(torch.equal(expected[name], found[name]) for name in SHAPES)
