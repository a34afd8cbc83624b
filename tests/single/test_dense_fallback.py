"""The rule that sends tensors dense if payloads cost more bytes, compared with bytes counted by hand."""

import dataclasses
import math
import tracemalloc

import pytest

from hvd_sparse.algorithms import Settings
from hvd_sparse.algorithms.base import AtDensity
from hvd_sparse.dense_fallback import DenseFallback, TensorSize
from hvd_sparse.schedule import Constant, Schedule, WarmUp
from hvd_sparse.wire import payload_size

N = 1_000_000
METHODS = ["dgc", "gradient_dropping", "topk", "samomentum", "dct", "sidco", "cltk", "micro", "random_k"]


def rule(world_size, method="dgc", tensors=None, **settings):
    algorithm = getattr(Settings, method)(None, **settings)
    return DenseFallback(algorithm, tensors or {"w": TensorSize((1000, 1000), 4)}, world_size)


def received(world_size, payload):
    """What a rank receives in an all-gather, and in a ring all-reduce of a million float32."""
    return (world_size - 1) * payload, 2 * 4 * N * (world_size - 1) / world_size


@pytest.mark.parametrize("density", [2.0, 0.0, -0.1, float("nan")])
def test_densities_out_of_range_are_refused(density):
    with pytest.raises(ValueError, match=r"the schedule's density"):
        rule(2).choose(0, density)


@pytest.mark.parametrize("fallback", [None, "bytes", "measured"])
def test_before_the_first_step_it_has_the_same_keys(fallback):
    told = DenseFallback.unused(Settings.dgc(None, dense_fallback=fallback))
    nothing = {"is_dense": False, "tensors": 0, "payload_bytes": 0, "dense_bytes": 0}
    timed = {"payload_seconds": None, "dense_seconds": None} if fallback == "measured" else {}
    assert told == {"rule": fallback, **nothing, **timed}
    assert told.keys() == rule(2, dense_fallback=fallback).explain(0, 0.001).keys()


@pytest.mark.parametrize("world_size", range(2, 12))
@pytest.mark.parametrize("density", [0.001, 0.0625, 0.2, 0.25, 0.4, 0.7])
@pytest.mark.parametrize("scope", ["tensor", "model"])
def test_the_cheaper_of_both_is_taken(world_size, density, scope):
    chosen = rule(world_size, warmup=WarmUp(0.001, 100), scope=scope)
    gathered, reduced = received(world_size, payload_size(N, round(density * N)))
    assert chosen.sends_dense(density) == (gathered > reduced)
    told = chosen.explain(0, density)
    assert told["is_dense"] == (gathered > reduced) and told["rule"] == "bytes"
    assert (told["payload_bytes"], told["dense_bytes"]) == (round(gathered), round(reduced))


def test_a_warm_up_begins_dense_on_many_ranks_and_ends_sparse():
    """Runs of 25 % take 1.5 bytes an element of each rank, an all-reduce 8 in all: more from 6 ranks on."""
    schedule = WarmUp(0.001, 100)
    for world_size, begins in ((5, 0.25), (6, 1.0), (64, 1.0)):
        fallback = rule(world_size, warmup=schedule)
        assert [fallback.choose(step, schedule.density(step)) for step in (0, 100)] == [begins, 0.001]


def test_small_tensors_whose_payloads_always_cost_more_are_always_dense():
    tensors = {"small": TensorSize((50,), 4), "large": TensorSize((300, 300), 4)}
    for world_size in (2, 8, 9, 64):
        chosen = rule(world_size, tensors=tensors, min_numel=0, warmup=WarmUp(0.001, 8))
        gathered = world_size * payload_size(50, 1)
        assert chosen.always == ({"small"} if gathered > 2 * 4 * 50 else frozenset())
    assert rule(64, tensors=tensors, min_numel=0, scope="model", warmup=WarmUp(0.001, 8)).always == frozenset()


def test_a_constant_density_that_costs_more_is_dense_for_good():
    assert rule(3, density=0.5).always == {"w"} and rule(2, density=0.5).always == frozenset()
    assert rule(3, density=0.5, scope="model").always == {"w"}


@pytest.mark.parametrize("method", METHODS)
def test_none_never_falls_back_and_a_lone_rank_neither(method):
    for world_size, settings in ((64, {"dense_fallback": None}), (1, {})):
        chosen = rule(world_size, method, density=0.5, **settings)
        assert not chosen.sends_dense(0.5) and chosen.always == frozenset()


@pytest.mark.parametrize(("method", "most"), [("cltk", 0.999), ("random_k", 1.0), ("micro", 0.999)])
def test_shared_indices_do_not_grow_with_ranks(method, most):
    """Their values are summed by an all-reduce: k of n of a dense one, plus indices."""
    for world_size in (2, 64):
        chosen = rule(world_size, method, density=Constant(0.5))
        assert not chosen.sends_dense(0.5), "half the values, and few bytes of indices"
    values = 8 * N * 0.97
    told = rule(8, method, density=0.97).explain(0, 0.97)
    assert told["payload_bytes"] >= math.floor(values * 7 / 8)


def test_a_selection_of_the_users_own_is_charged_the_indices_that_it_names():
    """None if it says nothing, as in random_k: docs/adding-a-method.md has such a method."""

    class Block(AtDensity):
        name = "random_block"
        selection = "block"

    class Told(Block):
        def index_bytes(self, n, k, world_size):
            return n + k + world_size

    settings = {field.name: getattr(Settings.random_k(None), field.name) for field in dataclasses.fields(Block)}
    costs = [
        DenseFallback(kind(**settings), {"w": TensorSize((1000, 1000), 4)}, 8).explain(0, 0.01)["payload_bytes"]
        for kind in (Block, Told)
    ]
    values = 2 * 4 * 10_000
    assert costs == [values * 7 // 8, (values + N + 10_000 + 8) * 7 // 8]


def test_values_of_another_type_count_as_they_are_sent():
    """float16 runs of 25 % take 1 byte an element: 8 ranks' are as many as an all-reduce of float32."""
    cases = ((8, "float32", True), (7, "float16", False), (9, "float16", True), (14, "int1", False))
    for world_size, values, dense in cases:
        chosen = rule(world_size, values=values, warmup=WarmUp(0.001, 9))
        assert chosen.sends_dense(0.25) == dense


def test_gradients_of_16_bits_are_sent_as_float32_and_those_of_64_as_they_are():
    for itemsize, most in ((2, 5), (4, 5), (8, 10)):
        for world_size, dense in ((most, False), (most + 1, True)):
            chosen = rule(world_size, tensors={"w": TensorSize((1000, 1000), itemsize)}, warmup=WarmUp(0.001, 9))
            assert chosen.sends_dense(0.25) == dense


def test_wrong_rules_are_refused():
    with pytest.raises(ValueError, match="dense_fallback must be one of 'bytes', 'measured'; got 'always'"):
        Settings.dgc(None, dense_fallback="always")


class Periodic(Schedule):
    """A step of 25 % among sparse ones, at times that `settled` could be taken for."""

    def density(self, step):
        return 0.25 if step % 1000 == 0 else 0.001

    def describe(self):
        return "periodic"


class Falling(Periodic):
    def density(self, step):
        return [0.25, 0.05, 0.01][step]  # for a run of three steps


@pytest.mark.parametrize("scope", ["tensor", "model"])
def test_a_schedule_of_the_users_own_is_asked_for_its_steps_alone(scope):
    tensors = {f"w{i}": TensorSize((1000, 1000), 4) for i in range(3)}
    fallback = rule(8, "dgc", tensors, density=Periodic(), scope=scope)
    assert fallback.always == frozenset()
    assert fallback.choose(0, 0.25) == 1.0 and fallback.choose(1, 0.001) == 0.001
    rule(8, "dgc", tensors, density=Falling(), exchange="auto", scope=scope).choose(2, 0.01)


class Decaying(Periodic):
    def density(self, step):
        return max(0.001, 0.1 * 0.999**step)


def test_measured_steps_are_compared_while_the_density_changes_in_every_step():
    """Dense steps take 0.01 s, sparse ones 1 s; a step's duration is known when the next but one begins."""
    fallback = rule(2, tensors={"w": TensorSize((1000, 1000), 4)}, density=Decaying(), dense_fallback="measured")
    ways = []
    for step in range(2000):
        if step > 1:
            fallback.note(step - 1, 0.01 if ways[step - 2] else 1.0)
        ways.append(fallback.choose(step, Decaying().density(step)) >= 1.0)
    assert ways.count(True) > 1800
    fallback.reset()
    fresh = rule(2, tensors={"w": TensorSize((1000, 1000), 4)}, density=Decaying(), dense_fallback="measured")
    for step in range(2000, 2500):  # a rank that joins now decides as one that restarts its timing
        density = Decaying().density(step)
        assert fallback.choose(step, density) == fresh.choose(step, density)
        for one in (fallback, fresh):
            one.note(step, 1.0)


STAGES = [0.1, 0.05, 0.02, 0.01, 0.001]


def measured_ways(payload_seconds, dense_seconds, stage_steps=150, last_steps=150):
    """Return whether each step of a warm-up was dense: a list for each stage. Seconds arrive as in a job."""
    fallback = rule(2, tensors={"w": TensorSize((1000, 1000), 4)}, density=Periodic(), dense_fallback="measured")
    ways, seconds = [[] for _ in STAGES], []
    stages = [stage for stage, _ in enumerate(STAGES[:-1]) for _ in range(stage_steps)] + [len(STAGES) - 1] * last_steps
    for step, stage in enumerate(stages):
        if step > 1:
            fallback.note(step - 1, seconds[step - 2])
        ways[stage].append(fallback.choose(step, STAGES[stage]) >= 1.0)
        seconds.append(dense_seconds if ways[stage][-1] else payload_seconds[stage])
    return ways


def test_on_a_slow_network_a_warm_up_tries_dense_steps_once():
    """The next trial of dense steps comes after a hundred times the cost of the first."""
    ways = measured_ways([0.2, 0.18, 0.16, 0.15, 0.14], 9.5)
    assert [sum(stage) for stage in ways] == [4, 0, 0, 0, 0]


def test_payloads_are_timed_in_each_stage_where_dense_steps_were_faster():
    ways = measured_ways([0.5, 0.4, 0.3, 0.2, 0.05], 0.1)
    for stage in ways[:-1]:
        assert 2 <= stage.count(False) <= 15 and all(stage[30:])
    assert not any(ways[-1])


@pytest.mark.parametrize("stage_steps", [1, 2, 5, 8, 11, 14, 17])
@pytest.mark.parametrize("dense_seconds", [0.01, 1.0])
def test_stages_shorter_than_a_trial_end_with_the_faster_way(stage_steps, dense_seconds):
    ways = measured_ways([0.1] * len(STAGES), dense_seconds, stage_steps)
    assert any(map(any, ways)) and not all(map(all, ways))
    assert ways[-1][30:] == [dense_seconds < 0.1] * (150 - 30)


def test_decisions_at_densities_that_never_recur_take_no_memory():
    fallback = rule(2, density=Decaying())
    tracemalloc.start()
    for step in range(3000):
        fallback.choose(step, 0.1 - step * 1e-5)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 50_000


def test_a_method_without_a_density_is_never_sent_dense():
    """A threshold may keep any number of elements: its messages are laid out by a density that it does not have."""
    fallback = rule(1000, "hard_threshold", value=0.1)
    assert fallback.always == frozenset() and fallback.choose(0, 0.01) == 0.01


@pytest.mark.parametrize("world_size", [8, 256, 512])
@pytest.mark.parametrize("warmup", [None, WarmUp(0.001, 100)])
def test_what_is_dense_for_good_does_not_make_the_others_dense(world_size, warmup):
    """A thousand tensors of 1500 whose payloads cost more from 256 ranks on, and one whose payloads always pay."""
    tensors = {f"s{i}": TensorSize((1500,), 4) for i in range(1000)} | {"w": TensorSize((1000, 1000), 4)}
    settings = {"warmup": warmup} if warmup else {"density": 0.001}
    chosen = rule(world_size, tensors=tensors, min_numel=0, **settings)
    small, large = world_size * payload_size(1500, 2), world_size * payload_size(N, 1000)
    assert chosen.always == (set(tensors) - {"w"} if small > 8 * 1500 else frozenset())
    assert chosen.choose(1000, 0.001) == 0.001
    told, factor = chosen.explain(1000, 0.001), (world_size - 1) / world_size
    assert told["payload_bytes"] == round(factor * (large + 1000 * min(small, 8 * 1500)))
    assert told["dense_bytes"] == round(factor * 8 * (N + 1000 * 1500))


def test_where_steps_are_sparse_or_dense_as_a_whole_all_tensors_count():
    """Shards of a hierarchical exchange in TensorFlow."""
    tensors = {f"s{i}": TensorSize((1500,), 4) for i in range(1000)} | {"w": TensorSize((1000, 1000), 4)}
    for world_size, expected in ((256, False), (512, True)):
        chosen = DenseFallback(Settings.dgc(None, density=0.001), tensors, world_size, one_by_one=False)
        gathered = world_size * (1000 * payload_size(1500, 2) + payload_size(N, 1000))
        assert (gathered > 8 * (N + 1000 * 1500)) == expected
        assert chosen.always == frozenset() and chosen.sends_dense(0.001) == expected


@pytest.mark.parametrize(
    ("world_size", "count", "is_dense"),
    [(128, 1000, False), (512, 1000, False), (64, 1, False), (128, 1, True), (128, 2, False)],
)
@pytest.mark.parametrize("warmup", [None, WarmUp(0.01, 100)])
def test_tensors_share_the_headers_of_a_reduce_scatter(world_size, count, is_dense, warmup):
    """Of 1024 elements 10 are sent: a header of 32 bytes, a count of 2, runs of 20, values of 40, twice; dense 8192.

    A message has a header of 32 bytes for each owner, twice: 8192 for 128.
    """
    tensors = {f"s{i}": TensorSize((1024,), 4) for i in range(count)}
    settings = {"warmup": warmup} if warmup else {"density": 0.01}
    chosen = rule(world_size, "gradient_dropping", tensors, exchange="reduce_scatter", **settings)
    assert (2 * (96 * count + 32 * world_size) > 8192 * count) == is_dense
    assert chosen.sends_dense(0.01) == is_dense
    assert chosen.always == (set(tensors) if is_dense and warmup is None else frozenset())
    told, factor = chosen.explain(100, 0.01), (world_size - 1) / world_size
    assert told["is_dense"] == is_dense
    assert told["payload_bytes"] == round(factor * 2 * (96 * count + 32 * world_size))


def test_where_all_tensors_are_dense_for_good_every_step_is_called_dense():
    class Dipping(Periodic):
        settled = 0.5

    chosen = rule(3, density=Dipping())
    assert chosen.always == {"w"}
    assert chosen.explain(1, 0.001)["is_dense"]
