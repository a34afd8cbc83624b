"""What each worker has, and so what an answer must hold: by when elements changed, or by a mirror of each worker.

The paper keeps v_k, what was sent to worker k, for every worker: N times the parameters (section 5.6.2). Unless answers
are incomplete (secondary compression) or rounded, v_k = M at the worker's last visit (Equation 4): then the time of an
element's last change says whether the worker has it, one number for all workers, and the answer holds the parameter
itself. So every worker's parameters are the server's, bit for bit, and an answer may be sent twice.
"""

import numpy as np

from hvd_sparse.parameter_server.layout import Piece
from hvd_sparse.parameter_server.methods import Method
from hvd_sparse.parameter_server.protocol import Form
from hvd_sparse.parameter_server.updates import Update, groups_of, rounded, segments_of, select

NO_CLOCK = 2**32 - 1


class ChangeTracker:
    """Keeps when each element changed last: float32 answers that hold all that changed."""

    form = Form.VALUES

    def __init__(self, parameters: np.ndarray):
        self._parameters = parameters
        self._changed = np.zeros(parameters.size, np.uint32)
        self._all_changed = 0  # when all did: a dense update is not worth a pass over memory

    @property
    def nbytes(self) -> int:
        """The bytes that tracking takes."""
        return self._changed.nbytes

    def join(self, worker: int) -> None:
        """There is nothing to keep of a worker."""

    def leave(self, worker: int) -> None:
        """There is nothing to forget."""

    def note(self, update: Update, clock: int) -> None:
        """Note that elements changed."""
        if clock >= NO_CLOCK:
            raise OverflowError(f"a server counts up to {NO_CLOCK} pushes: save its state, and start anew from that")
        if update.indices is None:
            self._all_changed = clock
        else:
            self._changed[update.indices] = clock

    def difference(self, worker: int, have: int) -> Update:
        """Return the values of what changed after the clock `have`, all of them."""
        if have < self._all_changed:
            return Update(None, self._parameters)
        indices = np.flatnonzero(self._changed > have)
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

    def note(self, update: Update, clock: int) -> None:
        """Changes show in the parameters."""

    def difference(self, worker: int, have: int) -> Update:
        """Return the differences to send, and take them as sent."""
        mirror = self._mirrors[worker]
        difference = self._parameters - mirror
        chosen = Update(select(difference, self._groups, self._density), difference)
        chosen = Update(chosen.indices, difference[chosen.at])
        update = rounded(chosen, self._method, self._method.pull_values, self._segments)
        mirror[update.at] += update.values
        return update
