"""Thresholds with a memory of their own."""

from dataclasses import dataclass

LOWEST_MARGIN = 0.5
HIGHEST_MARGIN = 0.998


@dataclass
class ThresholdHint:
    """Last step's threshold, taken slightly low, as the guess at this step's: it makes one pass over the data enough.

    Error feedback piles the residual up just under the threshold, so the margin has to be small, and it adapts: a
    miss (fewer than k elements reached the hint, the data were read again) lowers it, a crowd raises it. The selection
    itself is exact whatever the hint, so this is no state that a checkpoint needs.
    """

    threshold: float = 0.0
    margin: float = 0.98
    k: int = 0

    def value(self, k: int) -> float:
        """Return the hint for a selection of k elements, 0.0 where there is none."""
        if k != self.k:  # another density: last step's threshold says little
            return 0.0
        return self.threshold * self.margin

    def update(self, k: int, threshold: float, passed: int) -> None:
        """Learn from a selection: its threshold, and how many elements reached the hint."""
        if self.value(k) > 0.0:
            if passed < k:
                self.margin = max(LOWEST_MARGIN, 1.0 - 2.0 * (1.0 - self.margin))
            elif passed > k + k // 4 + 16:
                self.margin = min(HIGHEST_MARGIN, 1.0 - 0.9 * (1.0 - self.margin))
        self.threshold = threshold
        self.k = k
