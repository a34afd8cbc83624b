"""The NumPy twin of SIDCo's fits equals SciPy's distributions, and the expected count reaches the threshold."""

import numpy as np
import pytest
from scipy import stats

from hvd_sparse.reference import fit
from hvd_sparse.threshold import STAGE_TOLERANCE, StageSearch

N = 400_000


def draw(distribution, seed=0):
    rng = np.random.default_rng(seed)
    return (distribution.rvs(size=N, random_state=rng) * rng.choice([-1.0, 1.0], N)).astype(np.float32)


def reached(values, threshold):
    return np.count_nonzero(np.abs(values) >= threshold) / len(values)


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_what_is_distributed_so_is_met(density, stages):
    """Within four deviations of sampling, and a tenth for the error of the moments."""
    tolerance = 0.1 + 4.0 / np.sqrt(density * N)
    for name, distribution in (("exponential", stats.expon(scale=0.3)), ("pareto", stats.genpareto(0.05, scale=2.0))):
        values = draw(distribution)
        found = reached(values, fit.fitted_threshold(values, density, stages, name))
        assert found / density == pytest.approx(1.0, abs=tolerance), name


def moments_of(excess):
    """Return the moments in float64."""
    positive = excess[excess > 0.0]
    return fit.Moments(excess.size, excess.sum(), (excess**2).sum(), np.log(positive).sum(), positive.size)


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
def test_quantiles_are_scipys(density):
    excess = stats.expon.rvs(size=1000, random_state=np.random.default_rng(1))
    expected = stats.expon(scale=excess.mean()).isf(density)
    assert fit.quantile(moments_of(excess), density, "exponential") == pytest.approx(expected, rel=1e-12)
    ratio = excess.mean() ** 2 / excess.var()
    pareto = stats.genpareto((1 - ratio) / 2, scale=excess.mean() * (ratio + 1) / 2)
    assert fit.quantile(moments_of(excess), density, "pareto") == pytest.approx(pareto.isf(density), rel=1e-9)
    assert pareto.mean() == pytest.approx(excess.mean()) and pareto.var() == pytest.approx(excess.var())


def test_gamma_is_fitted_and_its_tail_bounded():
    """Minka's shape is that of the data; the tail's first term is near the quantile for shapes up to 1."""
    for shape in (0.5, 0.8, 1.0):
        excess = stats.gamma(shape, scale=3.0).rvs(size=N, random_state=np.random.default_rng(2))
        found = fit.quantile(moments_of(excess), 0.001, "gamma")
        assert found == pytest.approx(stats.gamma(shape, scale=3.0).isf(0.001), rel=0.35)
        assert 0.0003 < np.mean(excess >= found) < 0.003


@pytest.mark.parametrize("zeros", [0.3, 0.5, 0.9])
def test_gamma_is_fitted_to_values_above_zero(zeros):
    """ReLUs leave zeros, which have no logarithm: counted among the values, they would make the shape meaningless."""
    generator = np.random.default_rng(3)
    values = draw(stats.gamma(0.8))
    values[generator.random(values.size) < zeros] = 0.0
    assert 0.0003 < reached(values, fit.fitted_threshold(values, 0.001, 1, "gamma")) < 0.003
    assert fit.fitted_threshold(values, 1.1 - zeros, 1, "gamma") == 2.0**-149  # more than are above zero


def test_more_stages_follow_a_heavy_tail():
    """An exponential fitted to a heavy tail at once sends far too much; four stages come nearer."""
    values = draw(stats.genpareto(0.3))
    one, four = (reached(values, fit.fitted_threshold(values, 0.001, stages, "exponential")) for stages in (1, 4))
    assert one > 5 * 0.001
    assert 0.0005 < four < 0.6 * one


@pytest.mark.parametrize("distribution", ["exponential", "gamma", "pareto"])
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize(
    "values",
    [np.zeros(9), np.ones(9), np.ones(1), np.arange(9.0), np.float32([0, 0, 1e-40]), np.float32([1e30, 1e-30])],
)
def test_odd_values_give_a_positive_finite_threshold(values, stages, distribution):
    threshold = fit.fitted_threshold(np.asarray(values, np.float32), 0.1, stages, distribution)
    assert 2.0**-149 <= threshold < np.inf


@pytest.mark.parametrize(
    ("density", "stages", "expected"),
    [
        (0.01, 1, [0.01]),
        (0.01, 2, [0.25, 0.04]),
        (0.01, 3, [0.25, 0.2, 0.2]),
        (0.25, 4, [0.25]),
        (0.9, 4, [0.9]),
        (0.2, 3, [0.25, 0.8**0.5, 0.8**0.5]),
    ],
)
def test_stages_share_the_density(density, stages, expected):
    assert fit.stage_densities(density, stages) == pytest.approx(expected)


def test_more_stages_follow_a_light_tail():
    """An exponential fitted to a light tail at once lets nearly nothing through; more stages come near."""
    values = draw(stats.halfnorm)
    one, four = (reached(values, fit.fitted_threshold(values, 0.01, stages, "exponential")) for stages in (1, 4))
    assert one < 0.1 * 0.01 and 0.005 < four < 0.015


def adapt(stages, *achieved, density=0.01):
    for mean in achieved:
        stages = stages.adapted(mean, density)
    return stages.count, stages.direction


def test_stages_adapt_by_what_was_sent():
    assert adapt(StageSearch(3), 0.79) == (4, 1) and adapt(StageSearch(3), 1.21) == (2, 1)
    assert [adapt(StageSearch(3), mean) for mean in (0.81, 1.0, 1.19)] == [(3, 1)] * 3


def test_stages_turn_round_when_it_got_worse():
    assert adapt(StageSearch(3), 0.5, 0.6) == (5, 1)
    assert adapt(StageSearch(3), 0.5, 0.4) == (3, -1)
    assert adapt(StageSearch(3), 0.5, 0.4, 0.5) == (2, -1)
    assert adapt(StageSearch(3), 1.5, 1.6) == (3, -1)


def test_stages_turn_round_at_their_bounds():
    """log2 of the density is the most that halve it; a tail that one stage is too few for is not stuck there."""
    assert adapt(StageSearch(1), 5.0) == (1, -1) and adapt(StageSearch(1), 5.0, 5.0) == (2, -1)
    assert adapt(StageSearch(7), 0.1) == (7, -1)
    assert adapt(StageSearch(3), 0.1, density=0.9) == (1, -1)


@pytest.mark.parametrize("distribution", [stats.halfnorm, stats.uniform, stats.genpareto(0.3), stats.expon])
def test_stages_find_a_number_that_serves(distribution):
    """From one stage on, on fixed data of a light, a bounded, a heavy and an exponential tail."""
    values, stages, density = draw(distribution), StageSearch(1), 0.01
    for _ in range(30):
        achieved = reached(values, fit.fitted_threshold(values, density, stages.count, "exponential")) / density
        if abs(achieved - 1.0) <= STAGE_TOLERANCE:
            return
        stages = stages.adapted(achieved, density)
    assert achieved == pytest.approx(1.0, abs=0.6)


@pytest.mark.parametrize("distribution", ["exponential", "gamma", "pareto"])
def test_a_sample_of_a_large_tensor_is_enough(distribution):
    """Runs of elements next to each other, one in 15: within the error that the number of them has."""
    n, k = 1_000_000, 1000
    values = np.random.default_rng(3).laplace(size=n).astype(np.float32)
    sample, runs = fit.take_sample(values, k, 0), fit.sample_for_fit(n, k, 0)
    assert sample.size == 1 << 16 and (np.diff(runs) > 0).all()
    whole, found = (fit.fitted_threshold(part, k / n, 3, distribution) for part in (values, sample))
    assert reached(values, found) / reached(values, whole) == pytest.approx(1.0, abs=0.15)
    assert fit.fit_tail(values, k, 3, distribution, 0) == (found, False)
    assert fit.sample_for_fit(1 << 16, 10, 0) is None and fit.sample_for_fit(n, 1, 0) is None
