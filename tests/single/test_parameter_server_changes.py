"""A server's answers against passes over all elements in NumPy: what changed by clocks, what differs by mirrors."""

import itertools

import numpy as np
import pytest

from hvd_sparse import reference
from hvd_sparse.parameter_server import METHODS, ParameterLayout
from hvd_sparse.parameter_server import protocol as wire
from hvd_sparse.parameter_server.tracker import ChangeTracker, MirrorTracker
from hvd_sparse.parameter_server.updates import Update, groups_of, piece_segments, rounded, unpack
from hvd_sparse.wire import top_k_count

SHAPES = {"a": (300, 7), "b": (33,), "c": (66_000,), "d": (5,)}
LAYOUT = ParameterLayout(SHAPES, min_numel=20)
NUMEL = LAYOUT.numel
PIECES = LAYOUT.pieces(0, NUMEL)


def updates_of(seed, kinds):
    """Draw updates: of few elements, of none, of an eighth, of all."""
    random = np.random.default_rng(seed)
    sizes = {"few": NUMEL // 100, "none": 0, "many": NUMEL // 8}
    while True:
        kind = random.choice(kinds)
        if kind == "all":
            yield Update(None, random.standard_normal(NUMEL).astype(np.float32))
            continue
        indices = np.sort(random.choice(NUMEL, sizes[kind], replace=False))
        yield Update(indices, random.standard_normal(indices.size).astype(np.float32))


def values_in(tracker, worker, have, method):
    """Return what an answer holds, as its worker reads it."""
    k, encoded = tracker.answer(worker, have)
    message = wire.decode(wire.seal(encoded, wire.Message(wire.Kind.REPLY, worker, k=k, form=tracker.form)))
    return unpack(message, NUMEL, method.coding, method.pull_values, piece_segments(PIECES, 0))


@pytest.mark.parametrize("coding", ["auto", "run_length", "bitmap"])
@pytest.mark.parametrize("kinds", [["few"], ["few", "none"], ["few", "many"], ["few", "few", "few", "all"]], ids=str)
def test_changes_are_those_whose_clock_is_later(kinds, coding):
    """Of workers that come often and one that comes so seldom that the last updates do not reach back to it."""
    method = METHODS["dgs"](coding=coding, min_numel=20)
    parameters = np.random.default_rng(1).standard_normal(NUMEL).astype(np.float32)
    twin, clocks = parameters.copy(), np.zeros(NUMEL, np.int64)
    tracker, have = ChangeTracker(parameters, method), [0] * 5
    for worker in range(5):
        tracker.join(worker)
    for clock, update in zip(range(1, 121), updates_of(0, kinds), strict=False):
        twin[update.at] -= update.values
        clocks[update.at] = clock
        tracker.apply(update, clock)
        worker = 4 if clock % 40 == 0 else clock % 4
        found = values_in(tracker, worker, have[worker], method)
        expected = np.flatnonzero(clocks > have[worker])
        assert (np.arange(NUMEL)[found.at] == expected).all()
        assert found.values.tobytes() == twin[expected].tobytes()
        if clock % 7:  # else the answer gets lost, and the worker asks again
            have[worker] = clock


def test_a_clock_that_no_worker_can_name_is_answered_with_all():
    method = METHODS["dgs"](min_numel=20)
    parameters = np.zeros(NUMEL, np.float32)
    tracker = ChangeTracker(parameters, method)
    tracker.join(0)
    for clock, update in zip(range(1, 4), updates_of(0, ["few"]), strict=False):
        tracker.apply(update, clock)
        assert values_in(tracker, 0, clock - 1, method).indices is not None
    found = values_in(tracker, 0, 0, method)
    assert found.indices is None and found.values.tobytes() == parameters.tobytes()


def test_the_log_keeps_what_some_worker_can_ask_for():
    tracker = ChangeTracker(np.zeros(NUMEL, np.float32), METHODS["dgs"](min_numel=20))
    tracker.join(0)
    for clock, update in zip(range(1, 31), updates_of(0, ["few"]), strict=False):
        tracker.apply(update, clock)
        tracker.answer(0, clock - 1)
    settled = tracker.nbytes
    tracker.join(1)
    for clock, update in zip(range(31, 41), updates_of(0, ["few"]), strict=False):
        tracker.apply(update, clock)
    assert settled < NUMEL  # marks, and two updates
    assert tracker.nbytes >= settled + 8 * 2 * (NUMEL // 100)
    tracker.leave(1)
    tracker.answer(0, 40)
    tracker.apply(update, 41)
    assert tracker.nbytes <= settled


class Scan:
    """Mirrors, and for each answer a pass over all differences."""

    def __init__(self, parameters, method, workers):
        self.method, self.mirrors = method, [parameters.copy() for _ in range(workers)]
        self.groups, self.segments = groups_of(PIECES, 0, method), piece_segments(PIECES, 0)

    def difference(self, parameters, worker):
        with np.errstate(all="ignore"):
            difference = parameters - self.mirrors[worker]
        found = []
        for group in self.groups:
            size = group.end - group.begin
            k = size if size < self.method.min_numel else top_k_count(size, self.method.pull_density)
            found.append(group.begin + reference.select_top_k(difference[group.begin : group.end], k, group.seed)[0])
        indices = np.concatenate(found)
        chosen = Update(indices, difference[indices])
        update = rounded(chosen, self.method, self.method.pull_values, self.segments)
        with np.errstate(all="ignore"):
            self.mirrors[worker][update.at] += update.values
        return update


CASES = [
    {"kinds": ["few"]},
    {"kinds": ["few", "none", "few", "few"], "scope": "model"},
    {"kinds": ["few", "many"]},
    {"kinds": ["few", "few", "few", "few", "all"]},
    {"kinds": ["none", "none", "none", "few"]},  # differences run out
    {"kinds": ["few"], "pull_values": "int1", "level": "min"},
    {"kinds": ["few", "none"], "pull_values": "bfloat16", "scope": "model"},
    {"kinds": ["few"], "pull_density": 0.7},
    {"kinds": ["few"], "huge": True},  # parameters overflow, and infinity less infinity is no number
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_differences_are_those_of_a_pass_over_all(case):
    settings = dict(case)
    kinds, huge = settings.pop("kinds"), settings.pop("huge", False)
    method = METHODS["dgs"](**{"pull_density": 0.02, "min_numel": 20, "seed": 3, **settings})
    parameters = np.random.default_rng(1).standard_normal(NUMEL).astype(np.float32)
    tracker, scan = MirrorTracker(parameters, method, PIECES, 0), Scan(parameters, method, 4)
    for worker in range(4):
        tracker.join(worker)
    with np.errstate(all="ignore"):
        for clock, update in zip(range(1, 101), updates_of(5, kinds), strict=False):
            if huge and clock % 3 == 0:
                update = Update(update.indices, update.values * np.float32(1.5e38))
            elif clock > 60:  # nothing new is learned: what waits is sent
                update = Update(np.empty(0, np.int64), np.empty(0, np.float32))
            tracker.apply(update, clock)
            worker = 3 if clock % 23 == 0 else clock % 3  # one that comes seldom
            expected, found = scan.difference(parameters, worker), tracker.difference(worker)
            assert (np.arange(NUMEL)[found.at] == np.arange(NUMEL)[expected.at]).all()
            assert np.array_equal(found.values, expected.values, equal_nan=True)
            assert np.array_equal(tracker._mirrors[worker], scan.mirrors[worker], equal_nan=True)


def test_settled_answers_need_no_pass_over_all(monkeypatch):
    """A pass is needed where floors were too high: seldom."""
    passes, scan = itertools.count(), MirrorTracker._scan
    monkeypatch.setattr(MirrorTracker, "_scan", lambda *arguments: (next(passes), scan(*arguments))[1])
    method = METHODS["dgs"](pull_density=0.01, min_numel=20)
    tracker = MirrorTracker(np.zeros(NUMEL, np.float32), method, PIECES, 0)
    for worker in range(8):
        tracker.join(worker)
    for clock, update in zip(range(1, 201), updates_of(7, ["few"]), strict=False):
        tracker.apply(update, clock)
        tracker.difference(clock % 8)
    assert next(passes) <= 40  # of 400


@pytest.mark.parametrize("values", ["float16", "bfloat16", "int2", "int1"])
def test_differences_that_run_out_need_no_pass_over_all(monkeypatch, values):
    """All that differ are marked, fewer than k of them."""
    monkeypatch.delattr(MirrorTracker, "_scan")
    method = METHODS["dgs"](pull_density=0.1, pull_values=values, min_numel=20)
    parameters = np.zeros(NUMEL, np.float32)
    tracker = MirrorTracker(parameters, method, PIECES, 0)
    tracker.join(0)
    for clock, update in zip(range(1, 6), updates_of(7, ["few"]), strict=False):
        tracker.apply(Update(update.indices[:50], np.sign(update.values[:50])), clock)
        found = tracker.difference(0)
        assert (found.indices == update.indices[:50]).all()
        assert (tracker._mirrors[0] == parameters).all()


def test_rounded_answers_alone_need_mirrors_only():
    tracker = MirrorTracker(np.zeros(NUMEL, np.float32), METHODS["dgs"](pull_values="float16"), PIECES, 0)
    tracker.join(0)
    for clock, update in zip(range(1, 30), updates_of(0, ["few", "few", "all"]), strict=False):
        tracker.apply(update, clock)
        tracker.answer(0, clock)
        assert tracker.nbytes == 4 * NUMEL


def test_memory_is_that_of_clocks_or_mirrors_and_an_eighth_and_half_of_the_parameters():
    method = METHODS["dgs"](pull_density=0.01, min_numel=20)
    trackers = [ChangeTracker(np.zeros(NUMEL, np.float32), method), MirrorTracker(np.zeros(NUMEL), method, PIECES, 0)]
    trackers[1]._parameters = np.zeros(NUMEL, np.float32)
    for tracker in trackers:
        tracker.join(0)
    for clock, update in zip(range(1, 60), updates_of(0, ["few", "many"]), strict=False):
        for tracker in trackers:
            tracker.apply(update, clock)
    for tracker in trackers:
        assert tracker.nbytes <= 4 * NUMEL * (1 + 1 / 32 + 1 / 8) + 2048
