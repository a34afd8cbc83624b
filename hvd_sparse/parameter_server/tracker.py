"""Tracking of each worker's parameters: by what changed since its last answer, or by a mirror for each worker.

The paper stores v_k, the updates sent to worker k, for every worker: N times the parameters (section 5.6.2). Unless
answers are incomplete (secondary compression) or rounded, v_k = M at the worker's last visit (Equation 4). Then the
updates since that visit, a log for all workers, tell which values the worker does not have, and the answer contains the
parameters themselves. So every worker's parameters equal the server's, bit for bit, and an answer may be sent twice.
"""

from dataclasses import dataclass

import numpy as np

from hvd_sparse import native_changes
from hvd_sparse.native_changes import MOST_CLOCK, make_marks
from hvd_sparse.parameter_server import protocol
from hvd_sparse.parameter_server.change_log import ChangeLog
from hvd_sparse.parameter_server.layout import Piece
from hvd_sparse.parameter_server.methods import Method
from hvd_sparse.parameter_server.protocol import Form
from hvd_sparse.parameter_server.updates import Update, groups_of, pack, piece_segments, rounded
from hvd_sparse.threshold import SMALLEST
from hvd_sparse.wire import payload_size

PART = 2  # a log has at most n/2 indices,
PART_BESIDE_CLOCKS = 4  # or n/4 if there is also an array of n elements


class ChangeTracker:
    """Finds what changed after a clock in a log of updates; answers are float32 and contain all changes.

    A worker names the clock of its last answer, or of the one before if it repeats a push. An update that no worker can
    ask for any more is removed from the log. If a slow worker makes the log too long, its oldest updates move to an
    array of clocks: the clock of each element's last change.
    """

    form = Form.VALUES

    def __init__(self, parameters: np.ndarray, method: Method):
        self._parameters, self._coding = parameters, method.coding
        self._all_changed = 0  # the clock of the last dense update, which spares a pass over memory
        self._log = ChangeLog(parameters.size)
        self._seen: dict[int, int] = {}  # the clock that each worker has named
        self._forgotten = 0  # the clock of the last update that is in neither log nor clocks
        self._clocks: np.ndarray | None = None  # of the updates that left the log, allocated at the first one
        self._marks: np.ndarray | None = None  # scratch buffer, allocated at the first sparse answer

    @property
    def nbytes(self) -> int:
        """The memory of the tracker in bytes."""
        return self._log.nbytes + sum(array.nbytes for array in (self._clocks, self._marks) if array is not None)

    def join(self, worker: int) -> None:
        """Add a worker that has received all parameters now, or before if it is known already."""
        self._seen.setdefault(worker, self._log.clock)

    def leave(self, worker: int) -> None:
        """Forget a worker."""
        self._seen.pop(worker, None)

    def apply(self, update: Update, clock: int) -> None:
        """Subtract an update from the parameters, and record the changed elements."""
        if clock >= MOST_CLOCK:
            raise OverflowError(f"a server counts up to {MOST_CLOCK} pushes: save its state, and restart from it")
        if update.indices is None:
            self._parameters -= update.values
            self._all_changed = clock
            self._log.clear(clock)
        else:
            changed = native_changes.apply_update(self._parameters, update.indices, update.values)
            self._log.append(changed, clock)
            self._shorten()

    def _shorten(self) -> None:
        """Remove from the log the updates that no worker can ask for; move those beyond its limit to the clocks."""
        last = min(self._seen.values(), default=self._log.clock)
        self._forgotten = max(self._forgotten, last)
        self._log.forget(last)
        for changed, clock in self._log.remove_beyond(PART if self._clocks is None else PART_BESIDE_CLOCKS):
            if self._clocks is None:
                self._clocks = np.zeros(self._parameters.size, np.uint32)
            native_changes.set_clocks(changed, self._clocks, clock)

    def answer(self, worker: int, have: int) -> tuple[int, np.ndarray]:
        """Return k and a frame with a payload: the values of all elements that changed after the clock `have`."""
        self._seen[worker] = have
        n = self._parameters.size
        k = n if have < self._all_changed else self._mark(have)
        if k == 0:
            return 0, protocol.frame(0)
        if k == n:
            encoded = protocol.frame(4 * n)
            encoded[protocol.HEADER_BYTES :] = self._parameters.view(np.uint8)
        else:
            encoded = protocol.frame(payload_size(n, k, self._coding))
            body = encoded[protocol.HEADER_BYTES :]
            native_changes.pack_marked(self._marks, self._parameters, k, self._coding, body)
        return k, encoded

    def _mark(self, have: int) -> int:
        """Mark the elements that changed after a clock; return their number: n if the clock is too old to know."""
        if self._marks is None:
            self._marks = make_marks(self._parameters.size)
        if self._log.covers(have):
            self._marks.fill(0)
        elif have < self._forgotten:
            return self._parameters.size
        else:
            native_changes.mark_changed_after(self._clocks, have, self._marks)
        return self._log.mark(have, self._marks)


@dataclass
class Marking:
    """Marks of the elements that may differ most from a worker's: in each group, all differences above a floor.

    floors: the floor of each group; None: unknown. marks: None until the first answer. clock: all changes up to this
    clock are marked.
    """

    floors: list[float | None]
    clock: int
    marks: np.ndarray | None = None


class MirrorTracker:
    """Stores a mirror w_k of each worker's parameters; answers are the largest differences, rounded to their wire type.

    The paper's M - v_k is the parameters minus w_k, and contains all unsent updates. A worker adds a difference in
    float32, as the mirror does, so that both stay equal bit for bit. The selection reads only marked elements; it needs
    a pass over all elements only if fewer than k marked ones reach their floor.
    """

    form = Form.DIFFERENCES

    def __init__(self, parameters: np.ndarray, method: Method, pieces: list[Piece], begin: int):
        self._parameters, self._method = parameters, method
        self._mirrors: dict[int, np.ndarray] = {}
        self._markings: dict[int, Marking] = {}
        self._groups = groups_of(pieces, begin, method)
        self._density = method.pull_density or 1.0
        self._segments = piece_segments(pieces, begin)
        self._log = ChangeLog(parameters.size)

    @property
    def nbytes(self) -> int:
        """The memory of the tracker in bytes."""
        marks = [marking.marks for marking in self._markings.values() if marking.marks is not None]
        return sum(array.nbytes for array in [*self._mirrors.values(), *marks]) + self._log.nbytes

    def join(self, worker: int) -> None:
        """Add a worker that has received all parameters; if these are finite, no difference reaches any floor."""
        self._mirrors[worker] = self._parameters.copy()
        floor = SMALLEST if np.isfinite(self._parameters).all() else None
        self._markings[worker] = Marking([floor] * len(self._groups), self._log.clock)

    def leave(self, worker: int) -> None:
        """Forget a worker."""
        self._mirrors.pop(worker, None)
        self._markings.pop(worker, None)

    def apply(self, update: Update, clock: int) -> None:
        """Subtract an update from the parameters, and record the changed elements."""
        if update.indices is None:
            self._parameters -= update.values
            self._log.clear(clock)
            return
        changed = native_changes.apply_update(self._parameters, update.indices, update.values)
        if self._density >= 1.0:  # `difference` reads no log
            self._log.clear(clock)
        else:
            self._log.append(changed, clock)
            self._log.forget(min((marking.clock for marking in self._markings.values()), default=clock))
            self._log.remove_beyond(PART_BESIDE_CLOCKS)

    def answer(self, worker: int, have: int) -> tuple[int, np.ndarray]:
        """Return k and a frame with a payload of the differences to send; the mirror then counts them as sent."""
        update = self.difference(worker)
        n, method = self._parameters.size, self._method
        k, body = pack(update, n, method.coding, method.pull_values, self._segments)
        encoded = protocol.frame(body.size)
        encoded[protocol.HEADER_BYTES :] = body
        return k, encoded

    def difference(self, worker: int) -> Update:
        """Return the differences to send, and add them to the mirror."""
        mirror, values = self._mirrors[worker], self._method.pull_values
        if self._density >= 1.0:
            whole = Update(None, native_changes.subtract(self._parameters, mirror))
            update = rounded(whole, self._method, values, self._segments)
            mirror[update.at] += update.values
            return update
        marks, floors = self._marked(worker), self._markings[worker].floors
        found = [self._largest(worker, number) for number in range(len(self._groups))]
        chosen = Update(*(np.concatenate(parts) for parts in zip(*found, strict=True)))
        update = rounded(chosen, self._method, values, self._segments)
        for group, floor in zip(self._groups, floors, strict=True):
            first, last = np.searchsorted(update.indices, (group.begin, group.end))
            sent = (update.indices[first:last], update.values[first:last], floor or SMALLEST)
            native_changes.add_marked(mirror, self._parameters, marks, *sent)
        return update

    def _marked(self, worker: int) -> np.ndarray:
        """Mark the elements that changed since the last answer to a worker; return its marks."""
        marking = self._markings[worker]
        if marking.marks is None:
            marking.marks = make_marks(self._parameters.size)
        if self._log.covers(marking.clock):
            self._log.mark(marking.clock, marking.marks)
        else:
            marking.floors[:] = [None] * len(marking.floors)
        marking.clock = self._log.clock
        return marking.marks

    def _largest(self, worker: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ascending indices and values of a group's k largest differences; fewer if the others are zero."""
        group = self._groups[number]
        k, floor = group.count(self._density), self._markings[worker].floors[number]
        if k == group.end - group.begin:
            part = slice(group.begin, group.end)
            values = native_changes.subtract(self._parameters[part], self._mirrors[worker][part])
            return np.arange(group.begin, group.end), values
        if floor is not None:
            found = self._select_marked(worker, number, k)
            if found.reaching >= k or (floor == SMALLEST and not found.has_nan):  # zeros are not sent
                return group.begin + found.indices, found.values
        return self._scan(worker, number, k)

    def _scan(self, worker: int, number: int, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return what `_largest` returns, by a pass over the group, and mark 2k elements for later answers."""
        group, marking = self._groups[number], self._markings[worker]
        parts = [vector[group.begin : group.end] for vector in (self._parameters, self._mirrors[worker])]
        select, twice = native_changes.select_top_k_of_difference, min(2 * k, group.end - group.begin)
        indices, values, (threshold, _) = select(*parts, twice, group.seed, 0.5 * (marking.floors[number] or 0.0))
        above = np.abs(values) > threshold  # unselected elements may equal the threshold
        native_changes.set_marks(marking.marks, group.begin + indices[above])
        if np.count_nonzero(above) >= k:
            marking.floors[number] = float(np.nextafter(np.float32(threshold), np.float32(np.inf)))
            found = self._select_marked(worker, number, k)
            return group.begin + found.indices, found.values
        is_marked = threshold == 0.0 and all(np.isfinite(part).all() for part in parts)  # all nonzero ones are
        marking.floors[number] = SMALLEST if is_marked else None
        indices, values, _ = select(*parts, k, group.seed, threshold)
        return group.begin + indices, values

    def _select_marked(self, worker: int, number: int, k: int) -> native_changes.Marked:
        """Select among marked elements, and store the resulting floor."""
        group, marking = self._groups[number], self._markings[worker]
        where = (self._parameters, self._mirrors[worker], marking.marks)
        found = native_changes.select_marked(*where, k, (group.begin, group.end), group.seed, marking.floors[number])
        marking.floors[number] = found.floor
        return found
