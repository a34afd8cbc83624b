"""The performance model agrees with collectives simulated message by message, and with the paper's figures."""

import functools
import math

import pytest

from hvd_sparse.algorithms import Settings
from hvd_sparse.performance_model import (
    MOST_RANKS,
    Method,
    Network,
    Profile,
    break_even,
    dense,
    favours_scattered,
    gathered,
    largest_world_size,
    payload_bytes,
    scattered,
    shared,
)
from hvd_sparse.wire import payload_size, top_k_count

GIGABIT = Network(1e9, 5e-5)


def play(network, world_size, rounds):
    """Return the seconds of rounds in which every rank sends one message of the given size at the same time."""
    clock = [0.0] * world_size
    for size in rounds:
        done = [at + network.latency + 8 * size / network.bandwidth for at in clock]
        clock = [max(done[rank], done[rank - 1]) for rank in range(world_size)]  # sent, and received
    return max(clock)


@pytest.mark.parametrize("world_size", [2, 3, 7, 64])
def test_a_ring_all_reduce_is_its_messages(world_size):
    size = 1e7
    rounds = [size / world_size] * (2 * (world_size - 1))  # reduce-scatter, then all-gather, of a part each
    assert GIGABIT.all_reduce(size, world_size) == pytest.approx(play(GIGABIT, world_size, rounds))


@pytest.mark.parametrize("world_size", [2, 4, 16, 64])
def test_an_all_gather_by_doubling_is_its_messages(world_size):
    size = 12_345
    rounds = [size * 2**step for step in range(int(math.log2(world_size)))]
    assert GIGABIT.all_gather(size, world_size) == pytest.approx(play(GIGABIT, world_size, rounds))


@pytest.mark.parametrize("world_size", [2, 5, 64])
def test_an_all_to_all_is_its_messages(world_size):
    size = 1e6
    rounds = [size / world_size] * (world_size - 1)
    assert GIGABIT.all_to_all(size, world_size) == pytest.approx(play(GIGABIT, world_size, rounds))


def test_a_reduce_scatter_does_not_grow_with_the_ranks():
    """Payloads of 600 kB: 2 (N - 1) / N of it in seconds of bytes, and headers; a gather takes N - 1 times as long."""
    network, profile = Network(1e9, 0.0), Profile([10_000_000], compute=0.1)
    size = payload_bytes(profile.numels, 0.01)
    for world_size in (2, 8, 64):
        found = scattered(0.01)(network, profile, world_size)
        part = (world_size - 1) / world_size
        assert found == pytest.approx(8e-9 * 2 * part * (size + 32 * world_size))
        assert gathered(0.01)(network, profile, world_size) == pytest.approx(8e-9 * (world_size - 1) * size)


def test_decoding_may_not_grow_with_the_ranks():
    gather = Profile([1000], compute=0.1, decode=0.001)
    scatter = Profile([1000], compute=0.1, decode=0.001, decoded=2.0)
    assert gather.step(0.0, 64) == pytest.approx(0.164)
    assert scatter.step(0.0, 64) == pytest.approx(0.102)


def test_one_rank_exchanges_nothing():
    profile = Profile([1000], compute=0.25, compress=1.0, decode=1.0, wait=1.0)
    assert Method("dgc", gathered(0.01), profile).step(GIGABIT, 1) == 0.25
    assert GIGABIT.all_reduce(1e9, 1) == GIGABIT.all_gather(1e9, 1) == 0.0


def test_a_step_is_its_parts():
    """100 ms of compute, 60 of them overlap; 4 MB on 4 ranks: 48 ms of bytes and 0.3 of latency are hidden."""
    numels = [1_000_000]
    hidden = Profile(numels, compute=0.1, overlap=0.06, compress=0.003, decode=0.001, wait=0.002)
    assert Method("", dense(), hidden).step(GIGABIT, 4) == pytest.approx(0.1 + 0.003 + 4 * 0.001 + 0.002)
    bare = Profile(numels, compute=0.1, overlap=0.01)
    exchange = 2 * 4e6 * 8 / 1e9 * 3 / 4 + 6 * 5e-5
    assert Method("", dense(), bare).step(GIGABIT, 4) == pytest.approx(0.1 + exchange - 0.01)
    half = 2 * 2e6 * 8 / 1e9 * 3 / 4 + 6 * 5e-5
    assert Method("", dense(2), bare).step(GIGABIT, 4) == pytest.approx(0.1 + half - 0.01)


def test_payloads_are_those_of_the_wire():
    numels = [1_000_000, 5000, 30]
    expected = sum(payload_size(n, top_k_count(n, 0.01)) for n in numels)
    assert payload_bytes(numels, 0.01) == expected
    profile = Profile(numels, compute=0.0)
    assert gathered(0.01)(GIGABIT, profile, 8) == pytest.approx(3 * 5e-5 + 7 * expected * 8e-9)
    n, k = sum(numels), top_k_count(sum(numels), 0.01)
    indices = payload_size(n, k // 8, "run_length", "none")
    values = 14 * 5e-5 + 2 * 4 * k * 7 / 8 * 8e-9
    assert shared(0.01)(GIGABIT, profile, 8) == pytest.approx(3 * 5e-5 + 7 * indices * 8e-9 + values)


def methods(compress=0.02, decode=0.001):
    numels = [37_800_000]
    return (
        Method("dgc", gathered(0.001), Profile(numels, 0.2, compress=compress, decode=decode, wait=0.003)),
        Method("dense", dense(), Profile(numels, 0.2, wait=0.001)),
    )


def test_break_even_is_where_both_take_as_long():
    dgc, plain = methods()
    bandwidth = break_even(dgc, plain, GIGABIT, 4)
    at = Network(bandwidth, GIGABIT.latency)
    assert dgc.step(at, 4) == pytest.approx(plain.step(at, 4), rel=1e-3)
    assert dgc.step(Network(bandwidth / 2), 4) < plain.step(Network(bandwidth / 2), 4)
    assert dgc.step(Network(bandwidth * 2), 4) > plain.step(Network(bandwidth * 2), 4)
    assert break_even(plain, dgc, GIGABIT, 4) == bandwidth
    assert break_even(*methods(compress=0.0, decode=-1.0), GIGABIT, 4) is None, "always faster"


def test_break_even_where_both_are_hidden_behind_backward():
    """Half the bytes, no work: dense, 4 MB on 4 ranks take 48 ms at 1 Gbit/s, and the hidden 60 ms at 0.8."""
    profile = Profile(numels=(10**6,), compute=0.1, overlap=0.06)
    whole, half = (
        Method(name, lambda network, profile, ranks, factor=factor: factor * network.all_reduce(4e6, ranks), profile)
        for name, factor in (("whole", 1.0), ("half", 0.5))
    )
    network = Network(25e9, latency=0.0)
    assert break_even(half, whole, network, 4) == pytest.approx(0.8e9, rel=0.01)


def test_the_largest_world_size_is_the_last_that_wins():
    dgc, plain = methods()
    found = largest_world_size(dgc, plain, GIGABIT)
    assert 2 < found < MOST_RANKS
    assert dgc.step(GIGABIT, found) < plain.step(GIGABIT, found)
    assert dgc.step(GIGABIT, found + 1) >= plain.step(GIGABIT, found + 1)
    assert largest_world_size(plain, dgc, Network(1e6)) is not None, "from some number of ranks on"
    assert largest_world_size(*methods(compress=1e9), GIGABIT) is None
    assert largest_world_size(*methods(compress=0.0, decode=-1.0), GIGABIT) == MOST_RANKS


def test_speedup_counts_all_ranks():
    dgc, _ = methods()
    assert dgc.speedup(GIGABIT, 1) == 1.0
    assert dgc.speedup(GIGABIT, 4) == pytest.approx(4 * 0.2 / dgc.step(GIGABIT, 4))


@pytest.mark.parametrize(("arguments", "name"), [((0.0, 0.0), "bandwidth"), ((1e9, -1.0), "latency")])
def test_networks_that_cannot_be_are_refused(arguments, name):
    with pytest.raises(ValueError, match=name):
        Network(*arguments)


@pytest.mark.parametrize(
    ("numels", "density", "world_size", "expected"),
    [
        ((25_557_032,), 0.01, 8, True),  # 1.5 MB each: 86 ms gathered, 22 in two parts
        ((25_557_032,), 0.01, 5, True),  # 49 and 20 ms
        ((25_557_032,), 0.01, 4, False),  # half at most: 37 and 18, and the second collective's cycle
        ((25_557_032,), 0.0001, 8, False),  # 15 kB each
        ((25_557_032,), 0.0003, 64, True),  # 46 kB: 23 ms, and 4 of which most is latency
        ((1000,) * 20, 0.01, 8, False),
        ((25_557_032,), 0.01, 1, False),
        ((), 0.01, 8, False),
    ],
)
def test_a_reduce_scatter_is_favoured_where_it_takes_half_the_time(numels, density, world_size, expected):
    assert favours_scattered(numels, density, world_size) is expected
    if expected:
        one, other = (make(density)(GIGABIT, Profile(numels, 0.0), world_size) for make in (scattered, gathered))
        assert one + 0.001 <= other / 2


@pytest.mark.parametrize("scope", ["tensor", "model"])
def test_auto_is_decided_by_the_tensors_that_are_compressed(scope):
    """In every way to write the same model: small tensors count for nothing, whatever the scope."""
    make = functools.partial(Settings.dgc, None, density=0.01, exchange="auto", scope=scope, min_numel=1000)
    assert not make().scatters(8, [999] * 100_000)
    assert make().scatters(8, [999, 25_000_000]) and not make().scatters(4, [999, 25_000_000])
    assert make(exchange="reduce_scatter").scatters(2, []) and not make(exchange="reduce_scatter").scatters(1, [])
    assert not make(exchange="gather").scatters(64, [25_000_000])
