"""The choices of `dense_fallback="measured"` in simulated jobs, in which each way takes given seconds."""

import itertools
import random
from collections import deque

import pytest

from hvd_sparse.trials import LEAST_BETWEEN, SETTLING_STEPS, TIMED_STEPS, TRIAL_SHARE, Trials

FIRST, STEPS = 30, 20_000  # steps of the first trials at most; of a long job


def play(trials, steps, payloads, dense, seed=0):
    """Yield (is_dense, seconds) of each step; its seconds are told when the next step has begun already.

    payloads, dense: functions of the step's number. 10 % of noise, and every 50th step takes as long as ten.
    """
    noise, under_way = random.Random(seed), deque()
    for number in range(steps):
        is_dense = trials.is_dense
        seconds = (dense if is_dense else payloads)(number) * noise.uniform(0.95, 1.05)
        if number % 50 == 49:
            seconds *= 10
        yield is_dense, seconds
        under_way.append((is_dense, seconds))
        if len(under_way) > 1:
            trials.note(*under_way.popleft())


@pytest.mark.parametrize("slower", [1.2, 1.9, 2.5, 30.0])
@pytest.mark.parametrize("dense_wins", [False, True])
def test_the_faster_way_is_taken(slower, dense_wins):
    ways = (lambda _: slower), (lambda _: 1.0)
    steps = list(play(Trials(), STEPS, *(ways if dense_wins else ways[::-1])))
    lost = [number for number, (is_dense, _) in enumerate(steps) if is_dense != dense_wins]
    assert any(is_dense != dense_wins for is_dense, _ in steps[:FIRST]), "both are tried"
    later = [number for number in lost if number >= FIRST]
    assert later, "and the slower is tried again"
    assert len(later) * (slower - 1.0) <= 1.5 * TRIAL_SHARE * STEPS


@pytest.mark.parametrize("slower", [2.5, 30.0])
def test_a_way_that_loses_clearly_is_given_up_early(slower):
    """A step that is not counted, two that lose, and the one that had begun when that was told."""
    steps = list(play(Trials(), 49, lambda _: 1.0, lambda _: slower))
    assert sum(is_dense for is_dense, _ in steps) == 4


@pytest.mark.parametrize("outlier", [1.0, 5.0, 50.0, 10_000.0])
@pytest.mark.parametrize("place", [0, 1, 2, 4])
def test_one_slow_step_decides_no_trial(place, outlier):
    """The first dense step allocates buffers, and validation may come in between: dense steps are twice as fast."""
    seen, durations = [], iter([0.5] * place + [outlier] + [0.5] * 500)
    for is_dense, _ in play(Trials(), 400, lambda _: 1.0, lambda _: next(durations)):
        seen.append(is_dense)
    assert all(seen[30:200]), seen[:60]


def test_a_trial_of_ways_that_are_close_has_as_many_steps_of_both():
    """The first step of a trial is not counted, and one more begins before the last one's seconds are told."""
    steps = list(play(Trials(), 40, lambda _: 1.0, lambda _: 1.1))
    ways = [is_dense for is_dense, _ in steps]
    first = SETTLING_STEPS + TIMED_STEPS + 1
    dense = TIMED_STEPS + 2
    assert ways == [False] * first + [True] * dense + [False] * (40 - first - dense)


@pytest.mark.parametrize("dense_first", [False, True])
def test_it_changes_when_the_network_does(dense_first):
    change = 1000

    def early(number):
        return 1.0 if number < change else 1.5

    def late(number):
        return 1.5 if number < change else 1.0

    ways = (late, early) if dense_first else (early, late)
    ways = [is_dense for is_dense, _ in play(Trials(), 4000, *ways)]
    assert ways[change - 20 : change].count(dense_first) >= 19
    assert ways[2000:].count(not dense_first) > 0.95 * 2000


def test_seconds_are_medians_of_what_was_timed():
    trials = Trials()
    assert trials.seconds(False) is None and trials.seconds(True) is None
    for _ in play(trials, 60, lambda _: 2.0, lambda _: 3.0):
        pass
    assert 1.9 <= trials.seconds(False) <= 2.1 and 2.85 <= trials.seconds(True) <= 3.15
    assert not trials.is_dense


def test_trials_are_not_close_to_each_other():
    ways = [is_dense for is_dense, _ in play(Trials(), 2000, lambda _: 1.0, lambda _: 1.02)]
    starts = [number for number in range(1, 2000) if ways[number] != ways[number - 1] and ways[number]]
    assert min(b - a for a, b in itertools.pairwise(starts)) >= LEAST_BETWEEN


@pytest.mark.parametrize("place", [1, 2])
def test_a_pause_in_a_trial_that_ends_early_does_not_delay_the_next(place):
    """Payloads take 0.1 s, dense steps 0.3 s: a trial of 4 steps costs 0.8 s, a hundredth of 800 steps."""
    durations = iter([600.0 if number == place else 0.3 for number in range(100)])
    ways = [is_dense for is_dense, _ in play(Trials(), 2000, lambda _: 0.1, lambda _: next(durations))]
    starts = [number for number in range(1, 2000) if ways[number] and not ways[number - 1]]
    assert len(starts) >= 2 and 600 <= starts[1] - starts[0] <= 1000
