"""Thresholds that keep state between steps: cases that a training of a few steps does not reach."""

import itertools

import numpy as np
import pytest
from turns import Ages, Alternating

from hvd_sparse.algorithms import Settings
from hvd_sparse.parameter_server import DCTAsync, Simulation
from hvd_sparse.partition import ScaledThreshold
from hvd_sparse.threshold import KeptThreshold, Turns

K, N = 10, 1000


def kept(**settings):
    threshold = KeptThreshold(Settings.dct(None, lifespan=100, **settings), 0, 1)
    assert threshold.plan(129, K, N).k == K, "there is none yet"
    return threshold


@pytest.mark.parametrize("settings", [{}, {"band": None}])
def test_a_threshold_below_every_nonzero_residual_is_kept(settings):
    """Fewer than k residuals are nonzero: all of them are sent in each step, until there are too many."""
    threshold = kept(**settings)
    threshold.learn(K, 0.0, 5)
    for step in range(130, 228):
        plan = threshold.plan(step, K, N)
        assert plan.k == 0 and 0.0 < plan.threshold <= 2.0**-149
        threshold.learn(K, plan.threshold, 1)
    assert threshold.plan(228, K, N).k == K, "its turn"
    threshold.learn(K, 0.0, 5)
    threshold.plan(229, K, N)
    threshold.learn(K, 0.0, 5 * K)
    assert threshold.plan(230, K, N).k == (0 if settings else K)


@pytest.mark.parametrize(("count", "renewed"), [(2, True), (3, False), (40, False), (41, True)])
def test_a_higher_threshold_is_renewed_when_the_count_leaves_the_band(count, renewed):
    threshold = kept(band=4.0)
    threshold.learn(K, 1.0, K)
    assert threshold.plan(130, K, N).k == 0
    threshold.learn(K, 1.0, count)
    assert (threshold.plan(131, K, N).k == K) == renewed


@pytest.mark.parametrize("lifespan", [8, 50])
@pytest.mark.parametrize("band", [None, 4.0])
def test_a_turn_in_a_drained_step_is_made_up_for(lifespan, band):
    """In the next step that is not drained: here one in four is, and the next turns are a life-span away."""
    settings = Settings.dct(None, lifespan=lifespan, drain=4, band=band)
    turns, made_up = Turns(settings, 3), 0
    for position in range(3):
        threshold, is_due = KeptThreshold(settings, position, 3), True  # there is none at first
        for step in range(20 * lifespan):
            drains, is_due = turns.drains(step, position), is_due or turns.refreshes(step, position)
            plan = threshold.plan(step, K, N)
            assert plan.k == (K if is_due and not drains else 0)
            made_up += plan.k > 0 and not turns.refreshes(step, position)
            threshold.learn(K, 1.0, N if drains else K)
            assert threshold.numbers()[0] == (0.0 if is_due and drains else 1.0)
            threshold.restore(threshold.numbers())
            is_due = is_due and drains
    assert made_up >= 10


def test_a_turn_in_a_step_that_does_not_use_the_threshold_is_made_up_for():
    settings = Settings.dct(None, lifespan=8, band=None)
    turns, threshold = Turns(settings, 3), KeptThreshold(settings, 1, 3)
    turn = next(step for step in range(64, 80) if turns.refreshes(step, 1))
    for step in range(turn):
        threshold.plan(step, K, N)
        threshold.learn(K, 1.0, K)
    threshold.miss(turn)
    threshold.restore(threshold.numbers())
    threshold.miss(turn + 1)
    assert threshold.plan(turn + 2, K, N).k == K
    threshold.learn(K, 1.0, K)
    threshold.miss(turn + 3)
    assert threshold.plan(turn + 4, K, N).k == 0


def test_a_turn_in_a_dense_push_is_made_up_for():
    method = DCTAsync(density=Alternating(), lifespan=8, band=None, min_numel=100)
    shapes, random = {"one": (2000,), "other": (1500,)}, np.random.default_rng(0)
    ages = {name: Ages() for name in shapes}
    simulation = Simulation(method, {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, 1)
    for _ in range(80):
        gradients = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        simulation.step(0, lambda *_, now=gradients: now, 0.1)
        for name in shapes:
            ages[name].note(name, float(simulation.workers[0]._kept[name].state[0]))
    assert all(6 <= own.oldest <= 10 for own in ages.values())


def test_a_state_without_a_threshold_takes_one():
    """As in a checkpoint that an older version saved at 0.0."""
    threshold = kept()
    threshold.learn(K, 1.0, K)
    threshold.restore([0.0, float(K)])
    assert threshold.plan(131, K, N).k == K


def test_the_scaled_threshold_rises_again_from_its_lowest_value():
    threshold = ScaledThreshold()
    threshold.restore([1e-321, float(K)])
    threshold.plan(K, 2)
    for _ in range(1000):
        threshold.learn(K, K // 2)
    lowest, _ = threshold.plan(K, 2)
    threshold.learn(K, 1000 * K)
    assert 0.0 < lowest < threshold.plan(K, 2)[0]


@pytest.mark.parametrize("lifespan", [1, 2, 3, 50, 100, 1000, 1024, 1500])
@pytest.mark.parametrize("count", [1, 7, 40])
def test_no_threshold_is_used_for_longer_than_its_life_span(lifespan, count):
    """Nor twice in a step: in each life-span, of 1, 2, 4, ... steps up to the setting, every tensor has one turn."""
    turns = Turns(Settings.dct(None, lifespan=lifespan), count)
    last_begin, spans = 0, [1]
    while last_begin < 3 * lifespan + 10:
        last_begin += spans[-1]
        spans.append(min(last_begin, lifespan))
    for position in range(0, count, 6):
        steps = [step for step in range(last_begin) if turns.refreshes(step, position)]
        assert len(steps) == len(spans) - 1
        assert max(after - before for before, after in itertools.pairwise(steps)) <= lifespan
