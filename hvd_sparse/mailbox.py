"""Messages between two ranks by MPI, without collectives and without waiting in MPI.

In most implementations, MPI's blocking receive keeps a core busy. So an idle rank polls, and sleeps between polls.
"""

import threading
import time
from collections.abc import Callable

import numpy as np

from hvd_sparse.library import mpi

SHORTEST_NAP, LONGEST_NAP = 2e-5, 2e-3  # seconds: an idle rank polls at these intervals, which limit latency and load

BACKGROUND_NAP = 1e-4  # seconds

MOST_BYTES = 2**31 - 1  # of an MPI message, whose counts are C ints; longer messages are sent in pieces of this size
_posting = threading.Lock()  # keeps the pieces of a message together, with no other message of this process in between


class DamagedMessage(ValueError):
    """Received bytes are not a valid message. The sender may send it again."""


def poll(look: Callable, timeout: float):
    """Call `look` until it returns something other than None, and return this; None after `timeout` seconds."""
    end, nap = time.monotonic() + timeout, SHORTEST_NAP
    while (found := look()) is None and time.monotonic() < end:
        time.sleep(nap)
        nap = min(1.5 * nap, LONGEST_NAP)
    return found


class Mailbox:
    """Sends and receives the messages of a rank on an mpi4py communicator, without blocking.

    background: a thread makes progress with long messages, which otherwise move only while their sender calls MPI. This
    needs MPI_THREAD_MULTIPLE.
    """

    def __init__(self, communicator, background: bool = False):
        self._mpi = mpi()
        self._communicator, self._status = communicator, self._mpi.Status()
        self._pending: list = []  # (request, data): data must live until the request is done
        self._begun: dict[tuple[int, int], list[np.ndarray]] = {}  # pieces of messages that are still to be completed
        self._lock, self._posted, self._closed = threading.Lock(), threading.Event(), False
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
            self._posted.set()

    def look(self, tag: int, source: int | None = None) -> tuple[int, np.ndarray] | None:
        """Return the sender and the bytes of the first complete message with a tag; None if there is none.

        source: Only consider messages of this rank.
        """
        wanted = self._mpi.ANY_SOURCE if source is None else source
        while (message := self._communicator.Improbe(wanted, tag, self._status)) is not None:
            rank, data = self._status.Get_source(), np.empty(self._status.Get_count(self._mpi.BYTE), np.uint8)
            message.Recv([data, self._mpi.BYTE])
            if data.size == MOST_BYTES:
                self._begun.setdefault((rank, tag), []).append(data)
                continue
            begun = self._begun.pop((rank, tag), [])
            return rank, np.concatenate([*begun, data]) if begun else data
        self.reap()
        return None

    def reap(self) -> bool:
        """Free the messages that have been sent; return whether none is left."""
        with self._lock:
            self._pending = [(request, data) for request, data in self._pending if not request.Test()]
            return not self._pending

    def close(self, timeout: float) -> None:
        """Wait for unsent messages, at most `timeout` seconds; drop those that no rank receives."""
        self._closed = True
        self._posted.set()
        poll(lambda: self.reap() or None, timeout)
        with self._lock:
            for request, _ in self._pending:
                request.Cancel()
                request.Free()
            self._pending.clear()

    def _progress(self) -> None:
        while not self._closed:
            self._posted.wait()
            self._posted.clear()
            while not self._closed and not self.reap():
                time.sleep(BACKGROUND_NAP)
