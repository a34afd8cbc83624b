"""Timing of sparse and dense steps, initially and at intervals, to choose the faster way."""

import math
import statistics
from collections import deque
from collections.abc import Iterable

SETTLING_STEPS = 3  # first steps, which are not timed: buffers are allocated, and Horovod negotiates the names
TIMED_STEPS = 5  # timed steps of a trial
EARLY_END_FACTOR = 2.0  # a trial ends early if all of its steps are slower by more than this factor,
EARLY_END_STEPS = 2  # and if there are at least so many
TRIAL_SHARE = 0.01  # fraction of the training time for trials, once both ways have been timed
LEAST_BETWEEN = 200  # minimum number of steps between two trials


class Trials:
    """The choice at one density, from step durations. All ranks choose the same, as they get the same mean durations.

    First payloads are timed, then dense steps, and the faster way is chosen. The slower way is tried again at such
    intervals that trials cost a hundredth of the time. The first step after a change is not counted. A duration is the
    time from the beginning of a step to that of the next one; it arrives after later steps have begun.
    """

    def __init__(self, dense_seconds: Iterable[float] = ()):
        """dense_seconds: durations of dense steps at another density. If there are any, only payloads are timed."""
        self.is_dense = False  # whether the next step is sent dense
        timed = {False: (), True: dense_seconds}  # by is_dense
        self._seconds = {way: deque(seconds, maxlen=TIMED_STEPS) for way, seconds in timed.items()}
        self._to_try = [] if self._seconds[True] else [True]  # ways to try after the current trial
        self._tried: bool | None = False  # the way in the current trial; None: no trial
        self._to_skip = SETTLING_STEPS
        self._left = 0  # steps until the next trial
        self._noted = 0  # steps of the current trial

    def seconds(self, is_dense: bool) -> float | None:
        """Return the median duration of the steps timed this way; None if there are none."""
        timed = self._seconds[is_dense]
        return statistics.median(timed) if timed else None

    def at_other_density(self) -> "Trials":
        """Return the trials after a change of density, on which the duration of a dense step does not depend."""
        is_known = not self._tried and not self._to_try  # dense steps are neither being timed nor still to be timed
        return Trials(self._seconds[True] if is_known else ())

    def note(self, is_dense: bool, seconds: float) -> None:
        """Record the duration of a step: the mean over ranks."""
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
        own, other = self._seconds[self._tried], self.seconds(not self._tried)
        self._noted += 1
        if self._to_skip > 0:
            self._to_skip -= 1
            return
        own.append(seconds)
        has_lost = other is not None and len(own) >= EARLY_END_STEPS and min(own) > EARLY_END_FACTOR * other
        if has_lost or len(own) == TIMED_STEPS:
            self._conclude()

    def _conclude(self) -> None:
        if self._to_try:
            self._begin(self._to_try.pop())
            return
        self.is_dense = self.seconds(True) < self.seconds(False)
        self._tried = None
        faster, slower = self.seconds(self.is_dense), self.seconds(not self.is_dense)
        if len(self._seconds[not self.is_dense]) < TIMED_STEPS:  # it has lost early: one of so few may contain a pause
            slower = min(self._seconds[not self.is_dense])
        cost = (slower - faster) * (self._noted + 1)  # plus the step that ran before the last duration arrived
        self._left = max(LEAST_BETWEEN, math.ceil(cost / (TRIAL_SHARE * faster)) if faster > 0.0 else 0)
