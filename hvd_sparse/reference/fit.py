"""Thresholds from distributions fitted to magnitudes, in stages (SIDCo: Abdelmoniem et al., 2021): the twin of fit."""

import math
from typing import NamedTuple

import numpy as np

from hvd_sparse.reference.selection import RUN, sampled_runs, tail_moments

FIRST_DENSITY = 0.25  # fraction kept by the first of several stages; the others keep equal fractions
# A fit is rejected if more than this many times the wanted number and more than half of all elements reach its
# threshold.
MOST = 4
SMALLEST_SAMPLE = 1 << 16
EXPECTED = 64  # expected number of the k largest elements in a sample


class Moments(NamedTuple):
    """Count, sum and squares, in float64, of |value| - threshold over the values that reach a threshold."""

    count: float
    sum: float
    squares: float
    logs: float  # over those that are above 0, of which there are `positive`; 0 unless asked for
    positive: float


class Fit(NamedTuple):
    """A fitted threshold, and whether the fit failed."""

    threshold: float
    is_misfit: bool


def sample_for_fit(n: int, k: int, seed: int) -> np.ndarray | None:
    """Return the runs of n elements to use for a fit (`sampled_runs`), if about k should be kept.

    If the last of three stages keeps one in 16, as at density 0.001, the error of the count by sampling is 8 %, which
    is small compared with that of a fit (20 % are tolerated).
    """
    return sampled_runs(n, max(SMALLEST_SAMPLE, EXPECTED * n // k), seed)


def take_sample(values: np.ndarray, k: int, seed: int) -> np.ndarray:
    """Return the values to fit, from float32[n] values of which k should reach the threshold: a sample, or all."""
    runs = sample_for_fit(values.size, k, seed)
    return values if runs is None else values[: values.size // RUN * RUN].reshape(-1, RUN)[runs].reshape(-1)


def fit_tail(values: np.ndarray, k: int, stages: int, distribution: str, seed: int) -> Fit:
    """Fit a threshold that about k of float32[n] values reach, to a sample of them; see `fitted_threshold`."""
    sample, density = take_sample(values, k, seed), k / len(values)
    threshold = fitted_threshold(sample, density, stages, distribution)
    reached = int(tail_moments(sample, threshold)[0])
    return Fit(threshold, is_misfit(sample, reached, density * len(sample)))


def fitted_threshold(values: np.ndarray, density: float, stages: int, distribution: str) -> float:
    """Return the magnitude that about density * n of float32[n] values reach, if they follow the distribution.

    The fit includes zeros, except that of a gamma distribution, in which they cannot occur. The result is at least the
    smallest positive float32, so that zeros never reach it.
    """
    threshold, later = 0.0, "exponential" if distribution == "exponential" else "pareto"
    for stage, part in enumerate(stage_densities(density, stages)):
        kind = distribution if stage == 0 else later
        moments = Moments(*tail_moments(values, threshold, logs=kind == "gamma"))
        if stage > 0 and moments.count < 2:
            break
        threshold += quantile(moments, part, kind)
    return max(threshold, 2.0**-149)


def is_misfit(values: np.ndarray, reached: int, k: float) -> bool:
    """Return whether float32[n] values, of which so many reached a fitted threshold, have no tail that could be fitted.

    None reached it though the largest is no rare one (twice the mean at most, or there are several), or most did. So it
    is with gradients that are all equal. Difference from the paper, which has no such case and would send nothing, or
    everything, for ever: the k largest are sent, equal magnitudes in the order of a hash.
    """
    if reached > 0:
        return reached > MOST * k and 2 * reached > len(values)
    magnitudes = np.abs(values)
    largest = magnitudes.max()
    if largest == 0.0:
        return False
    return largest <= 2.0 * magnitudes.mean(dtype=np.float64) or np.count_nonzero(magnitudes == largest) > 1


def stage_densities(density: float, stages: int) -> list[float]:
    """Return the fraction that each stage keeps of the previous stage's elements. The product is the density."""
    if stages == 1 or density >= FIRST_DENSITY:
        return [density]
    return [FIRST_DENSITY, *[(density / FIRST_DENSITY) ** (1.0 / (stages - 1))] * (stages - 1)]


def quantile(moments: Moments, density: float, distribution: str) -> float:
    """Return the value that a fraction `density` of the distribution exceeds, fitted by the moments of the excess."""
    mean = moments.sum / moments.count if moments.count else 0.0
    if not 0.0 < mean < math.inf:
        return 0.0
    if distribution == "gamma":  # it has no zeros: fitted to the values above 0
        wanted = density * moments.count / moments.positive
        mean, mean_log = moments.sum / moments.positive, moments.logs / moments.positive
        return gamma_quantile(mean, mean_log, wanted) if wanted < 1.0 else 0.0
    if distribution == "pareto":
        return pareto_quantile(mean, moments.squares / moments.count - mean**2, density)
    return -mean * math.log(density)


def gamma_quantile(mean: float, mean_log: float, density: float) -> float:
    """Fit a gamma distribution by Minka's closed form, and take its tail's first term (Corollary 1.2)."""
    s = math.log(mean) - mean_log
    if s <= 0.0:  # a constant
        return mean
    shape = (3.0 - s + math.sqrt((s - 3.0) ** 2 + 24.0 * s)) / (12.0 * s)
    return max(0.0, -mean / shape * (math.log(density) + math.lgamma(shape)))


def pareto_quantile(mean: float, variance: float, density: float) -> float:
    """Fit a generalised Pareto distribution by its two moments (Corollary 1.3)."""
    if variance <= 0.0:  # a constant
        return mean
    ratio = mean**2 / variance
    shape, scale = 0.5 * (1.0 - ratio), 0.5 * mean * (ratio + 1.0)
    if abs(shape) < 1e-9:  # exponential
        return -scale * math.log(density)
    return scale / shape * (density**-shape - 1.0)
