"""Thresholds from distributions fitted to magnitudes, in stages (SIDCo: Abdelmoniem et al., 2021, section 2)."""

import math

import numpy as np

FIRST_DENSITY = 0.25  # what a stage keeps, but for the last
MOST_STAGES = 10
ADAPT_STEPS = 5
TOLERANCE = 0.2


def fitted_threshold(values: np.ndarray, density: float, stages: int, distribution: str) -> float:
    """Return the magnitude that about density * n of float32[n] values reach, if they are distributed so.

    Zeros take part in the fit. At least SMALLEST of float32, so that zeros never reach it.
    """
    magnitudes = np.abs(values).astype(np.float64)
    threshold, left = 0.0, density
    for stage in range(stages):
        is_last = stage == stages - 1 or left >= FIRST_DENSITY
        part = left if is_last else FIRST_DENSITY
        later = "exponential" if distribution == "exponential" else "pareto"
        threshold += quantile(magnitudes - threshold, part, distribution if stage == 0 else later)
        left /= part
        magnitudes = magnitudes[magnitudes >= threshold]
        if is_last or magnitudes.size < 2:
            break
    return max(threshold, 2.0**-149)


def quantile(excess: np.ndarray, density: float, distribution: str) -> float:
    """Return what a part `density` of the distribution exceeds, fitted to excess >= 0, float64[n], by its moments."""
    mean = float(excess.mean())
    if mean <= 0.0:
        return 0.0
    if distribution == "gamma":
        return gamma_quantile(excess, mean, density)
    if distribution == "pareto":
        return pareto_quantile(mean, float(excess.var()), density)
    return -mean * math.log(density)


def gamma_quantile(excess: np.ndarray, mean: float, density: float) -> float:
    """Fit a gamma distribution by Minka's closed form, and take its tail's first term (Corollary 1.2)."""
    s = math.log(mean) - float(np.log(excess[excess > 0.0]).mean())
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


def adapted_stages(stages: int, achieved: float) -> int:
    """Return the stages to go on with, from the mean of the counts over k (Algorithm 1, Adapt_Stages)."""
    if achieved > 1.0 + TOLERANCE:
        stages += 1
    elif achieved < 1.0 - TOLERANCE:
        stages -= 1
    return min(max(stages, 1), MOST_STAGES)
