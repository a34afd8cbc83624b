"""Timing of sparse and dense steps, at first and at intervals, to choose the faster."""

import math
import statistics
from collections import deque

SETTLE = 3  # steps before anything is timed: buffers are made, and Horovod learns the names
TIMED = 5  # steps of a trial
CLEARLY = 2.0  # times as slow: a trial ends at once
SHARE = 0.01  # of the training time that trials may cost, once both ways are known
LEAST_BETWEEN = 200  # steps between two trials


class Trials:
    """The choice at one density, from the seconds of steps: the same on all ranks, as all are told the same seconds.

    First payloads are timed, then dense, and the faster is taken. Then the slower is tried again after so many steps
    that trials cost a hundredth of the time. The first step after a change of ways is not counted. Seconds are those
    from the beginning of a step to that of the next one, and come when later steps have begun already.
    """

    def __init__(self):
        self.is_dense = False  # how the next step is to be sent
        self._seconds = {way: deque(maxlen=TIMED) for way in (False, True)}  # by is_dense
        self._to_try = [True]  # after the trial that runs
        self._tried: bool | None = False  # the trial that runs; None: none does
        self._to_skip = SETTLE
        self._left = 0  # steps until the next trial
        self._noted = 0  # steps of the trial that runs

    def seconds(self, is_dense: bool) -> float | None:
        """Return the median of the steps that were timed this way; None before any was."""
        timed = self._seconds[is_dense]
        return statistics.median(timed) if timed else None

    def note(self, is_dense: bool, seconds: float) -> None:
        """Take the seconds of a step, the mean of all ranks."""
        if self._tried is None:
            if is_dense == self.is_dense:
                self._seconds[is_dense].append(seconds)
                self._left -= 1
            if self._left <= 0:
                self._begin(not self.is_dense)
        elif is_dense == self._tried:
            self._note_of_trial(seconds)

    def _begin(self, way: bool) -> None:
        self._seconds[way].clear()
        self.is_dense = self._tried = way
        self._to_skip, self._noted = 1, 0

    def _note_of_trial(self, seconds: float) -> None:
        way, other = self._tried, self.seconds(not self._tried)
        self._noted += 1
        has_lost = other is not None and seconds > CLEARLY * other
        if self._to_skip > 0 and not has_lost:
            self._to_skip -= 1
            return
        self._seconds[way].append(seconds)
        if has_lost or len(self._seconds[way]) == TIMED:
            self._conclude()

    def _conclude(self) -> None:
        if self._to_try:
            self._begin(self._to_try.pop())
            return
        self.is_dense = self.seconds(True) < self.seconds(False)
        self._tried = None
        faster, slower = self.seconds(self.is_dense), self.seconds(not self.is_dense)
        cost = (slower - faster) * (self._noted + 1)  # a step was under way when the last one's seconds came
        self._left = max(LEAST_BETWEEN, math.ceil(cost / (SHARE * faster)) if faster > 0.0 else 0)
