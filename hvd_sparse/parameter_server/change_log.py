"""A log of the indices that recent updates changed, so that an answer's cost depends only on the changes.

An index takes two bytes.
"""

import collections
import itertools

import numpy as np

from hvd_sparse import native_changes
from hvd_sparse.native_changes import Changed

PART = 4  # the log has at most 1/4 as many indices as there are elements,
MOST = 1024  # and at most this number of updates


class ChangeLog:
    """The most recent updates of n elements, with consecutive clocks."""

    def __init__(self, n: int):
        self._n, self._entries, self._clock = n, 0, 0
        self._updates: collections.deque[Changed] = collections.deque()

    @property
    def nbytes(self) -> int:
        """The size of the log in bytes."""
        return sum(counts.nbytes + places.nbytes for counts, places in self._updates)

    def append(self, changed: Changed, clock: int) -> None:
        """Add an update, and remove the oldest ones beyond the limits."""
        self._updates.append(changed)
        self._entries += changed.places.size
        self._clock = clock
        while self._entries * PART > self._n or len(self._updates) > MOST:
            self._entries -= self._updates.popleft().places.size

    def clear(self, clock: int) -> None:
        """Remove all updates up to a clock."""
        self._updates.clear()
        self._entries, self._clock = 0, clock

    def covers(self, clock: int) -> bool:
        """Return whether the log has all updates after a clock."""
        return self._clock - clock <= len(self._updates)

    def mark(self, clock: int, marks: np.ndarray) -> int:
        """Mark the elements that changed after a clock, which the log must cover; return the number of marks."""
        first = len(self._updates) - (self._clock - clock)
        return native_changes.mark_updates(list(itertools.islice(self._updates, first, None)), self._n, marks)
