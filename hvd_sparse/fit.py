"""Thresholds from distributions fitted to magnitudes, in stages (SIDCo: Abdelmoniem et al., 2021, section 2)."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hvd_sparse.native import Moments, tail_moments
from hvd_sparse.sampling import sampled_runs

FIRST_DENSITY = 0.25  # what the first of several stages keeps; the others share the rest evenly
ADAPT_STEPS = 5
MOST = 4  # times as many as wanted may reach a threshold, whatever the fit is like
TOLERANCE = 0.2
SMALLEST_SAMPLE = 1 << 16
EXPECTED = 256  # of the k largest, in a sample


class Fit(NamedTuple):
    """A threshold fitted to values, how many reached it over how many should, and whether the fit is of no use."""

    threshold: float
    ratio: float
    is_misfit: bool


def sample_for_fit(n: int, k: int, seed: int) -> np.ndarray | None:
    """Return which runs of n elements to fit to (`hvd_sparse.sampling.sampled_runs`), so that k of n are well met.

    Where the last of three stages keeps one in 16, as at density 0.001, the count is off by 4 % for the sampling.
    """
    return sampled_runs(n, max(SMALLEST_SAMPLE, EXPECTED * n // k), seed)


def fit_tail(values: np.ndarray, density: float, stages: int, distribution: str) -> Fit:
    """Fit to values, float32[m], all of a tensor's or a sample of them, as `fitted_threshold`."""
    threshold = fitted_threshold(values, density, stages, distribution)
    reached = int(tail_moments(values, threshold).count)
    return Fit(threshold, reached / (density * len(values)), is_misfit(values, reached, density * len(values)))


def fitted_threshold(values: np.ndarray, density: float, stages: int, distribution: str) -> float:
    """Return the magnitude that about density * n of float32[n] values reach, if they are distributed so.

    Zeros take part in the fit. At least SMALLEST of float32, so that zeros never reach it.
    """
    threshold, later = 0.0, "exponential" if distribution == "exponential" else "pareto"
    for stage, part in enumerate(stage_densities(density, stages)):
        kind = distribution if stage == 0 else later
        moments = tail_moments(values, threshold, logs=kind == "gamma")
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
    """Return which part of what the stage before left each stage keeps; their product is the density."""
    if stages == 1 or density >= FIRST_DENSITY:
        return [density]
    return [FIRST_DENSITY, *[(density / FIRST_DENSITY) ** (1.0 / (stages - 1))] * (stages - 1)]


def quantile(moments: Moments, density: float, distribution: str) -> float:
    """Return what a part `density` of the distribution exceeds, fitted by the moments of the excess."""
    mean = moments.sum / moments.count if moments.count else 0.0
    if not 0.0 < mean < math.inf:
        return 0.0
    if distribution == "gamma":
        return gamma_quantile(mean, moments.logs / moments.positive, density)
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


@dataclass(frozen=True)
class Stages:
    """How many stages a tensor is fitted in, and where the search for a better number goes."""

    count: int
    direction: int = 1  # what one stage more does where too few were sent; -1 where it made it worse
    error: float = math.inf  # of the mean of the counts over k, the last time

    def adapted(self, achieved: float, density: float) -> "Stages":
        """Return the stages to go on with, from the mean of the counts over k (Algorithm 1, Adapt_Stages).

        One more where too few were sent, one less where too many; the other way round from when that made it worse, or
        when the bounds, 1 and log2(1 / density), forbid it: which way is right depends on the tail.
        """
        error = abs(achieved - 1.0)
        direction = -self.direction if error > self.error else self.direction
        if error <= TOLERANCE:
            return Stages(self.count, direction, error)
        wanted = self.count + (direction if achieved < 1.0 else -direction)
        count = min(max(wanted, 1), max(1, math.ceil(-math.log2(density))))
        return Stages(count, direction if count == wanted else -direction, error)
