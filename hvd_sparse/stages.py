"""How many stages a threshold is fitted in (SIDCo: Abdelmoniem et al., 2021, section 2): what adapts from step to step.

The fit itself is native: `csrc/core/fit.h`, and its twin `hvd_sparse.reference.fit`.
"""

import math
from dataclasses import dataclass

ADAPT_STEPS = 5
TOLERANCE = 0.2


@dataclass(frozen=True)
class FitStages:
    """The number of stages of a tensor's fit, and the state of the search for a better number."""

    count: int
    direction: int = 1  # what one stage more does where too few were sent; -1 where it made it worse
    error: float = math.inf  # of the mean of the counts over k, the last time

    def adapted(self, achieved: float, density: float) -> "FitStages":
        """Return the stages to go on with, from the mean of the counts over k (Algorithm 1, Adapt_Stages).

        One more where too few were sent, one less where too many; the other way round from when that made it worse, or
        when the bounds, 1 and log2(1 / density), forbid it: which way is right depends on the tail.
        """
        error = abs(achieved - 1.0)
        direction = -self.direction if error > self.error else self.direction
        if error <= TOLERANCE:
            return FitStages(self.count, direction, error)
        wanted = self.count + (direction if achieved < 1.0 else -direction)
        count = min(max(wanted, 1), max(1, math.ceil(-math.log2(density))))
        return FitStages(count, direction if count == wanted else -direction, error)
