"""Thresholds that keep state between steps: cases that a training of a few steps does not reach."""

import pytest

from hvd_sparse.algorithms import Settings
from hvd_sparse.partition import ScaledThreshold
from hvd_sparse.threshold import KeptThreshold

K, N = 10, 1000


def kept(**settings):
    threshold = KeptThreshold(Settings.dct(None, lifespan=100, **settings), 0, 1)
    assert threshold.plan(101, K, N).k == K, "there is none yet"
    return threshold


@pytest.mark.parametrize("settings", [{}, {"band": None}])
def test_a_threshold_below_every_nonzero_residual_is_kept(settings):
    """Fewer than k residuals are nonzero: all of them are sent in each step, until there are too many."""
    threshold = kept(**settings)
    threshold.learn(K, 0.0, 5)
    for step in range(102, 200):
        plan = threshold.plan(step, K, N)
        assert plan.k == 0 and 0.0 < plan.threshold <= 2.0**-149
        threshold.learn(K, plan.threshold, 1)
    assert threshold.plan(200, K, N).k == K, "its turn"
    threshold.learn(K, 0.0, 5)
    threshold.plan(201, K, N)
    threshold.learn(K, 0.0, 5 * K)
    assert threshold.plan(202, K, N).k == (0 if settings else K)


@pytest.mark.parametrize(("count", "renewed"), [(2, True), (3, False), (40, False), (41, True)])
def test_a_higher_threshold_is_renewed_when_the_count_leaves_the_band(count, renewed):
    threshold = kept(band=4.0)
    threshold.learn(K, 1.0, K)
    assert threshold.plan(102, K, N).k == 0
    threshold.learn(K, 1.0, count)
    assert (threshold.plan(103, K, N).k == K) == renewed


def test_a_state_without_a_threshold_takes_one():
    """As in a checkpoint that an older version saved at 0.0."""
    threshold = kept()
    threshold.learn(K, 1.0, K)
    threshold.restore([0.0, float(K)])
    assert threshold.plan(103, K, N).k == K


def test_the_scaled_threshold_rises_again_from_its_lowest_value():
    threshold = ScaledThreshold()
    threshold.restore([1e-321, float(K)])
    threshold.plan(K, 2)
    for _ in range(1000):
        threshold.learn(K, K // 2)
    lowest, _ = threshold.plan(K, 2)
    threshold.learn(K, 1000 * K)
    assert 0.0 < lowest < threshold.plan(K, 2)[0]
