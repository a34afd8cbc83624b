"""A log of the indices that recent updates changed, so that the cost of an answer depends only on the changes.

An index takes two bytes.
"""

import collections
import itertools

import numpy as np

from hvd_sparse import native_changes
from hvd_sparse.native_changes import Changed

MOST = 1024  # updates in a log


class ChangeLog:
    """The most recent updates of n elements, with consecutive clocks."""

    def __init__(self, n: int):
        self._n, self._entries, self.clock = n, 0, 0
        self._updates: collections.deque[Changed] = collections.deque()

    @property
    def nbytes(self) -> int:
        """The size of the log in bytes."""
        return sum(counts.nbytes + places.nbytes for counts, places in self._updates)

    def append(self, changed: Changed, clock: int) -> None:
        """Add an update."""
        self._updates.append(changed)
        self._entries += changed.places.size
        self.clock = clock

    def clear(self, clock: int) -> None:
        """Remove all updates up to a clock."""
        self._updates.clear()
        self._entries, self.clock = 0, clock

    def forget(self, clock: int) -> None:
        """Remove the updates up to a clock."""
        while self._updates and self._oldest <= clock:
            self._remove_oldest()

    def remove_beyond(self, part: int) -> list[tuple[Changed, int]]:
        """Remove the oldest updates until at most n/part indices and MOST updates are left; return them with clocks."""
        removed = []
        while self._entries * part > self._n or len(self._updates) > MOST:
            oldest = self._oldest
            removed.append((self._remove_oldest(), oldest))
        return removed

    def covers(self, clock: int) -> bool:
        """Return whether the log has all updates after a clock."""
        return clock + 1 >= self._oldest

    def mark(self, clock: int, marks: np.ndarray) -> int:
        """Mark the elements that updates in the log changed after a clock; return the number of marks."""
        first = max(0, clock + 1 - self._oldest)
        return native_changes.mark_updates(list(itertools.islice(self._updates, first, None)), self._n, marks)

    @property
    def _oldest(self) -> int:
        """The clock of the oldest update in the log, or of the next one."""
        return self.clock + 1 - len(self._updates)

    def _remove_oldest(self) -> Changed:
        oldest = self._updates.popleft()
        self._entries -= oldest.places.size
        return oldest
