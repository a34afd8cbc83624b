"""What each worker has, and so what an answer must hold: by when elements changed, or by a mirror of each worker.

The paper keeps v_k, what was sent to worker k, for every worker: N times the parameters (section 5.6.2). Unless answers
are incomplete (secondary compression) or rounded, v_k = M at the worker's last visit (Equation 4): then the time of an
element's last change says whether the worker has it, one number for all workers, and the answer holds the parameter
itself. So every worker's parameters are the server's, bit for bit, and an answer may be sent twice.
"""

import collections
import itertools

import numpy as np

from hvd_sparse import native_changes
from hvd_sparse.parameter_server.layout import Piece
from hvd_sparse.parameter_server.methods import Method
from hvd_sparse.parameter_server.protocol import Form
from hvd_sparse.parameter_server.updates import Update, difference, groups_of, rounded, segments_of

NO_CLOCK = 2**32 - 1
RECENT = 8  # the last updates are kept that have no more than 1/8 of the elements together


class ChangeTracker:
    """Keeps when each element changed last: float32 answers that hold all that changed."""

    form = Form.VALUES

    def __init__(self, parameters: np.ndarray):
        self._parameters = parameters
        self._changed = np.zeros(parameters.size, np.uint32)
        self._all_changed = 0  # when all did: a dense update is not worth a pass over memory
        self._recent: collections.deque[np.ndarray] = collections.deque()  # what the last updates changed, in order
        self._noted = 0  # elements in these, and the clock of the last
        self._last = 0

    @property
    def nbytes(self) -> int:
        """The bytes that tracking takes."""
        return self._changed.nbytes + sum(indices.nbytes for indices in self._recent)

    def join(self, worker: int) -> None:
        """There is nothing to keep of a worker."""

    def leave(self, worker: int) -> None:
        """There is nothing to forget."""

    def apply(self, update: Update, clock: int) -> None:
        """Subtract an update from the parameters, and note what changed."""
        if clock >= NO_CLOCK:
            raise OverflowError(f"a server counts up to {NO_CLOCK} pushes: save its state, and start anew from that")
        if update.indices is None:
            self._parameters -= update.values
            self._all_changed = clock
            self._recent.clear()
            self._noted = 0
        else:
            native_changes.apply_update(self._parameters, self._changed, update.indices, update.values, clock)
            self._recent.append(update.indices)
            self._noted += update.indices.size
        self._last = clock
        while self._noted * RECENT > self._parameters.size:
            self._noted -= self._recent.popleft().size

    def difference(self, worker: int, have: int) -> Update:
        """Return the values of what changed after the clock `have`, all of them."""
        if have < self._all_changed:
            return Update(None, self._parameters)
        missing = self._last - have
        if missing <= len(self._recent):  # costs as much as these updates do, not as all elements
            parts = list(itertools.islice(self._recent, len(self._recent) - missing, None))
            counts = np.array([part.size for part in parts], np.int64)
            indices = native_changes.unite(np.concatenate([np.empty(0, np.int64), *parts]), counts)
        else:
            indices = native_changes.changed_after(self._changed, have)
        return Update(indices, self._parameters[indices])


class MirrorTracker:
    """Keeps for each worker what it has, w_k: answers are the largest differences, rounded to their wire type.

    M - v_k of the paper is the parameters minus w_k, and keeps what was not sent. A worker adds a difference as the
    mirror does, in float32: both stay equal bit for bit.
    """

    form = Form.DIFFERENCES

    def __init__(self, parameters: np.ndarray, method: Method, pieces: list[Piece], begin: int):
        self._parameters, self._method = parameters, method
        self._mirrors: dict[int, np.ndarray] = {}
        self._groups = groups_of(pieces, begin, method)
        self._density = method.pull_density or 1.0
        self._segments = segments_of(pieces, begin)

    @property
    def nbytes(self) -> int:
        """The bytes that tracking takes."""
        return sum(mirror.nbytes for mirror in self._mirrors.values())

    def join(self, worker: int) -> None:
        """A worker has been given all parameters."""
        self._mirrors[worker] = self._parameters.copy()

    def leave(self, worker: int) -> None:
        """Forget a worker."""
        self._mirrors.pop(worker, None)

    def apply(self, update: Update, clock: int) -> None:
        """Subtract an update from the parameters: changes show in these."""
        self._parameters[update.at] -= update.values

    def difference(self, worker: int, have: int) -> Update:
        """Return the differences to send, and take them as sent."""
        mirror = self._mirrors[worker]
        chosen = difference(self._parameters, mirror, self._groups, self._density)
        update = rounded(chosen, self._method, self._method.pull_values, self._segments)
        mirror[update.at] += update.values
        return update
