"""The indices that the last updates changed, two bytes each: an answer's time depends only on its changes."""

import collections
import itertools

import numpy as np

from hvd_sparse import native_changes
from hvd_sparse.native_changes import Changed

PART = 4  # the updates that are kept have no more than 1/4 of the elements together,
MOST = 1024  # and are no more than these


class ChangeLog:
    """The last updates of n elements, each with a clock, one more than the one before."""

    def __init__(self, n: int):
        self._n, self._entries, self._clock = n, 0, 0
        self._updates: collections.deque[Changed] = collections.deque()

    @property
    def nbytes(self) -> int:
        """The bytes that the log takes."""
        return sum(counts.nbytes + places.nbytes for counts, places in self._updates)

    def append(self, changed: Changed, clock: int) -> None:
        """Add an update, and forget the oldest."""
        self._updates.append(changed)
        self._entries += changed.places.size
        self._clock = clock
        while self._entries * PART > self._n or len(self._updates) > MOST:
            self._entries -= self._updates.popleft().places.size

    def clear(self, clock: int) -> None:
        """Forget all updates up to a clock."""
        self._updates.clear()
        self._entries, self._clock = 0, clock

    def covers(self, clock: int) -> bool:
        """Whether all updates after a clock are here."""
        return self._clock - clock <= len(self._updates)

    def mark(self, clock: int, marks: np.ndarray) -> int:
        """Mark what changed after a clock that the log covers; return how many marks there are."""
        first = len(self._updates) - (self._clock - clock)
        return native_changes.mark_updates(list(itertools.islice(self._updates, first, None)), self._n, marks)
