"""Messages between two ranks by MPI, without collectives and without waiting in MPI.

In most implementations, MPI's blocking receive keeps a core busy. So an idle rank polls, and sleeps between polls.
"""

import collections
import ctypes
import itertools
import threading
import time
from collections.abc import Callable

import numpy as np

from hvd_sparse.finalization import keep_running, let_go
from hvd_sparse.library import mpi

SHORTEST_NAP, LONGEST_NAP = 2e-5, 2e-3  # seconds: an idle rank polls at these intervals, which limit latency and load
BUSY_NAP = 1e-4  # seconds between two polls while a message is on its way, which moves only then,
BUSY_SECONDS = 10.0  # but no longer than this: its sender may be dead, or the network so slow that it does not matter
MOST_BYTES = 2**31 - 1  # of an MPI message, whose counts are C ints; longer messages are sent in pieces of this size
_posting = threading.Lock()  # keeps the pieces of a message together, with no other message of this process in between


class DamagedMessage(ValueError):
    """Received bytes are not a valid message. The sender may send it again."""


def poll(look: Callable, timeout: float, is_busy: Callable[[], bool] = lambda: False):
    """Call `look` until it returns something other than None, and return this; None after `timeout` seconds.

    is_busy: whether to look often, as a message is on its way.
    """
    end, nap = time.monotonic() + timeout, SHORTEST_NAP
    while (found := look()) is None and time.monotonic() < end:
        time.sleep(min(nap, BUSY_NAP) if is_busy() else nap)
        nap = min(1.5 * nap, LONGEST_NAP)
    return found


def keep_for_ever(data: np.ndarray) -> None:
    """Never free an array: MPI still reads or writes it, until MPI_Finalize, which runs after Python has ended.

    MPI cannot take back a message of which a part is on its way.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(data))


class Mailbox:
    """Sends and receives the messages of a rank on an mpi4py communicator, without blocking.

    background: a thread makes progress with long messages, which otherwise move only while their sender calls MPI. This
    needs MPI_THREAD_MULTIPLE.
    """

    def __init__(self, communicator, background: bool = False):
        self._mpi = mpi()
        self._communicator, self._status = communicator, self._mpi.Status()
        self._pending: list = []  # (request, data): data must live until the request is done
        # By rank and tag, requests with the arrays that they fill: all pieces, until a message is complete.
        self._arriving: collections.OrderedDict[tuple[int, int], collections.deque[tuple]] = collections.OrderedDict()
        self._since: dict[tuple[int, int], float] = {}  # when the last of them began, or was complete
        self._busy_until = 0.0
        self._lock, self._posted, self._closed = threading.Lock(), threading.Event(), False
        keep_running(self, self._mpi)
        if background and self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE:
            threading.Thread(target=self._progress, name="hvd_sparse mailbox", daemon=True).start()

    def post(self, rank: int, tag: int, data: np.ndarray) -> None:
        """Start sending bytes, uint8, without waiting. The array must not change afterwards.

        After a piece of MOST_BYTES, another piece follows, which may be empty.
        """
        with _posting:
            requests = [
                (self._communicator.Isend([piece, self._mpi.BYTE], rank, tag), piece)
                for piece in (data[begin : begin + MOST_BYTES] for begin in range(0, data.size + 1, MOST_BYTES))
            ]
        pending = [(request, piece) for request, piece in requests if not request.Test()]
        self.reap()  # `look` does not, as long as it finds messages
        if pending:
            with self._lock:
                self._pending += pending
            self._busy_until = time.monotonic() + BUSY_SECONDS
            self._posted.set()

    def look(self, tag: int, source: int | None = None) -> tuple[int, np.ndarray] | None:
        """Return the sender and the bytes of the first complete message with a tag; None if there is none.

        A long message arrives only while its sender calls MPI; those of other ranks do not wait for it.

        source: Only consider messages of this rank.
        """
        wanted = self._mpi.ANY_SOURCE if source is None else source
        while (message := self._communicator.Improbe(wanted, tag, self._status)) is not None:
            place, data = (self._status.Get_source(), tag), np.empty(self._status.Get_count(self._mpi.BYTE), np.uint8)
            self._arriving.setdefault(place, collections.deque()).append((message.Irecv([data, self._mpi.BYTE]), data))
            self._since[place] = time.monotonic()
            self._busy_until = self._since[place] + BUSY_SECONDS
        for place in [place for place in self._arriving if place[1] == tag and source in (None, place[0])]:
            if (data := self._complete(place)) is not None:
                return place[0], data
        self.reap()
        return None

    def is_busy(self) -> bool:
        """Return whether a message is on its way, in either direction."""
        return bool(self._arriving or self._pending) and time.monotonic() < self._busy_until

    def arriving(self, tag: int, seconds: float) -> set[int]:
        """Return the ranks whose messages with a tag are on their way, and began at most so many seconds ago."""
        now = time.monotonic()
        return {place[0] for place in self._arriving if place[1] == tag and now - self._since[place] <= seconds}

    def is_arriving(self, tag: int, source: int) -> bool:
        """Return whether a message of a rank is on its way, of which `look` has found the beginning."""
        return (source, tag) in self._arriving

    def _complete(self, place: tuple[int, int]) -> np.ndarray | None:
        """Return the first message from a place if all of it is there. The place is then the last to be looked at.

        What is returned is removed last, without a call: a Ctrl-C, which Python handles at calls, loses no message.
        """
        arriving, pieces = self._arriving[place], []
        self._arriving.move_to_end(place)
        for request, data in arriving:
            if request:  # not known to be complete
                if not request.Test():
                    return None
                self._since[place] = time.monotonic()
            pieces.append(data)
            if data.size < MOST_BYTES:
                break
        else:
            return None
        whole = np.concatenate(pieces) if len(pieces) > 1 else data
        others = collections.deque(itertools.islice(arriving, len(pieces), None))
        if others:
            self._arriving[place] = others
        else:
            del self._arriving[place]
        return whole

    def reap(self) -> bool:
        """Free the messages that have been sent; return whether none is left."""
        with self._lock:
            self._pending = [(request, data) for request, data in self._pending if not request.Test()]
            return not self._pending

    def close(self, timeout: float) -> None:
        """Wait for unsent messages, at most `timeout` seconds; give up those that no rank receives."""
        self._closed = True
        self._posted.set()
        poll(lambda: self.reap() or None, timeout, self.is_busy)
        with self._lock:
            given_up = [data for _, data in self._pending]
            self._pending.clear()
        given_up += [data for arriving in self._arriving.values() for _, data in arriving]
        self._arriving.clear()
        for data in given_up:
            keep_for_ever(data)
        let_go(self)

    def _progress(self) -> None:
        while not self._closed:
            self._posted.wait()
            self._posted.clear()
            while not self._closed and not self.reap():
                time.sleep(BUSY_NAP if self.is_busy() else LONGEST_NAP)
