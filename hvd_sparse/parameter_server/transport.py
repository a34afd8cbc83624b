"""Transport of messages between ranks: by MPI, or in one process in an order that the caller decides.

MPI is used without collective operations, so that nobody waits for a rank that comes late.
"""

import abc
import collections
import functools

import numpy as np

from hvd_sparse.library import mpi
from hvd_sparse.mailbox import Mailbox, poll
from hvd_sparse.parameter_server.placement import MOST_THREADS, Placement

TO_SERVERS, TO_WORKERS = 7311, 7312  # tags of the first thread in the first session: a rank may be both
MOST_SESSIONS = 750  # then tags repeat; MPI promises tags up to 32767


class Endpoint(abc.ABC):
    """One end of the wire: of a server, which talks to workers by their ranks, or of a worker, to servers by number."""

    @abc.abstractmethod
    def send(self, peer: int, data: np.ndarray) -> None:
        """Send bytes, uint8, to a worker or a server, without waiting; they must not change any more."""

    @abc.abstractmethod
    def receive(self, timeout: float) -> tuple[int, np.ndarray] | None:
        """Return the worker or server that a message is of, and its bytes; None if none comes in `timeout` seconds."""

    def arriving(self, seconds: float) -> set[int]:
        """Return whose messages are on their way, and have moved within so many seconds."""
        return set()

    @abc.abstractmethod
    def close(self, timeout: float) -> None:
        """Wait until what was sent is on its way, at most `timeout` seconds."""


class MPIEndpoint(Endpoint):
    """An end on an mpi4py communicator.

    session: the number of the session, see `next_session`. number: the server that this is an end of; None: a worker.
    Messages to and from different servers on a rank, and of different sessions, have different tags. background: see
    `Mailbox`.
    """

    def __init__(
        self, communicator, placement: Placement, session: int, number: int | None = None, background: bool = False
    ):
        self._mailbox, self._servers, self._number = Mailbox(communicator, background), placement.servers, number
        self._threads = [placement.thread_of(server) for server in range(len(placement.servers))]
        self._shift = 2 * MOST_THREADS * (session % MOST_SESSIONS)

    def send(self, peer: int, data: np.ndarray) -> None:
        """Send without waiting."""
        if self._number is not None:
            self._mailbox.post(peer, self._tag(TO_WORKERS, self._threads[self._number]), data)
        else:
            self._mailbox.post(self._servers[peer], self._tag(TO_SERVERS, self._threads[peer]), data)

    def receive(self, timeout: float) -> tuple[int, np.ndarray] | None:
        """Look for a message now and then."""
        return poll(self._look, timeout, self._mailbox.is_busy)

    def arriving(self, seconds: float) -> set[int]:
        """Return the workers whose messages to this server are on their way."""
        if self._number is None:
            return set()
        return self._mailbox.arriving(self._tag(TO_SERVERS, self._threads[self._number]), seconds)

    def _look(self) -> tuple[int, np.ndarray] | None:
        if self._number is not None:
            return self._mailbox.look(self._tag(TO_SERVERS, self._threads[self._number]))
        for thread in range(max(self._threads) + 1):
            if item := self._mailbox.look(self._tag(TO_WORKERS, thread)):
                rank, data = item
                if rank not in self._servers:
                    ranks = ", ".join(map(str, dict.fromkeys(self._servers)))
                    raise ValueError(f"connect(servers=...) differs: rank {rank} serves there, here ranks {ranks} do")
                return self._servers.index(rank) + thread, data
        return None

    def _tag(self, first: int, thread: int) -> int:
        return first + self._shift + 2 * thread

    def close(self, timeout: float) -> None:
        """Wait for what was sent; what nobody takes any more is given up."""
        self._mailbox.close(timeout)


def next_session(communicator) -> int:
    """Return how many sessions this rank has opened on a communicator before.

    A rank that is ahead of the others sends the next session's messages while they are still in this one.
    """
    number = communicator.Get_attr(_key()) or 0
    communicator.Set_attr(_key(), number + 1)
    return number


@functools.cache
def _key() -> int:
    return mpi().Comm.Create_keyval()


class InProcessNetwork:
    """Ends of all ranks in one process; messages are delivered when they are received, in the order they were sent."""

    def __init__(self):
        self._queues: dict[tuple[int, bool], collections.deque] = collections.defaultdict(collections.deque)

    def endpoint(self, rank: int, is_server: bool) -> "InProcessEndpoint":
        """Return an end of a rank."""
        return InProcessEndpoint(self._queues, rank, is_server)


class InProcessEndpoint(Endpoint):
    """An end on an `InProcessNetwork`. If set, `damage` gets every message sent, and returns those that arrive."""

    def __init__(self, queues, rank: int, is_server: bool):
        self._queues, self._rank, self._is_server = queues, rank, is_server
        self.damage = None

    def send(self, rank: int, data: np.ndarray) -> None:
        """Put a copy into the other end's queue."""
        arriving = [data.copy()] if self.damage is None else self.damage(data)
        self._queues[rank, not self._is_server].extend((self._rank, message) for message in arriving)

    def receive(self, timeout: float = 0.0) -> tuple[int, np.ndarray] | None:
        """Return the first message of the queue; there is nothing to wait for."""
        queue = self._queues[self._rank, self._is_server]
        return queue.popleft() if queue else None

    def close(self, timeout: float) -> None:
        """There is nothing to wait for."""


def require_threads() -> None:
    """Raise RuntimeError unless several threads may call MPI."""
    if mpi().Query_thread() != mpi().THREAD_MULTIPLE:
        raise RuntimeError(
            "this MPI was started without MPI_THREAD_MULTIPLE, which heartbeats and co-located servers need: "
            "connect before other libraries start MPI, or pass silence=None, servers=1 and threads=1"
        )
