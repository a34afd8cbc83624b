"""SIDCo's Algorithm 1 (Abdelmoniem et al., 2021) for one tensor of one rank in float64, with quantiles from SciPy."""

import numpy as np
from scipy import special, stats

FIRST = 0.25  # fraction kept by the first of several stages
WINDOW, TOLERANCE = 5, 0.2


class Sidco:
    """The number of stages, and the counts since its last adaptation."""

    def __init__(self, stages, distribution):
        self.stages, self.distribution = stages, distribution
        self.step_by, self.last, self.counts = 1, None, []

    def threshold(self, magnitudes, density):
        """Return the threshold, and the smallest relative distance of a magnitude from any stage's threshold."""
        parts = [density]
        if self.stages > 1 and density < FIRST:
            parts = [FIRST] + [(density / FIRST) ** (1 / (self.stages - 1))] * (self.stages - 1)
        edge, gap = 0.0, np.inf
        left = np.asarray(magnitudes, np.float64).reshape(-1)
        for number, part in enumerate(parts):
            tail = self.distribution if number == 0 or self.distribution == "exponential" else "pareto"
            edge = edge + excess(left - edge, part, tail)
            gap = min(gap, np.min(np.abs(magnitudes - edge)) / edge)
            left = left[left >= edge]
            if len(left) < 2:
                break
        return edge, gap

    def count(self, sent, k, density):
        """Every five steps, change the number of stages by one if the mean count is a fifth off; undo bad changes."""
        self.counts.append(sent / k)
        if len(self.counts) < WINDOW:
            return
        mean, self.counts = np.mean(self.counts), []
        error = abs(mean - 1)
        if self.last is not None and error > self.last:
            self.step_by = -self.step_by
        self.last = error
        if error > TOLERANCE:
            wanted = self.stages + self.step_by * (1 if mean < 1 else -1)
            if 1 <= wanted <= max(1, np.ceil(np.log2(1 / density))):
                self.stages = wanted
            else:
                self.step_by = -self.step_by


def excess(values, part, tail):
    """Return the value that a fraction `part` of the fitted distribution exceeds (Corollaries 1.1 to 1.3)."""
    mean = values.mean()
    if tail == "exponential":
        return stats.expon.isf(part, scale=mean)
    if tail == "pareto":
        ratio = mean**2 / values.var()
        return stats.genpareto.isf(part, (1 - ratio) / 2, scale=mean * (ratio + 1) / 2)
    s = np.log(mean) - np.log(values[values > 0]).mean()
    shape = (3 - s + np.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    return max(0.0, -mean / shape * (np.log(part) + special.gammaln(shape)))
