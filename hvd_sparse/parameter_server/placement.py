"""Which ranks train, and which serve."""

from typing import NamedTuple

from hvd_sparse.parameter_server.layout import ParameterLayout
from hvd_sparse.parameter_server.methods import Method

COLOCATED = "colocated"
MOST_THREADS = 16  # of a rank, each with its own tags


class Placement(NamedTuple):
    """The ranks of the workers, and the rank of each server. A rank may be in both lists.

    A rank that serves in several threads has one server in each: it is in the list once for each thread.
    """

    workers: list[int]
    servers: list[int]

    def on(self, rank: int) -> list[int]:
        """Return the numbers of the servers on a rank."""
        return [number for number, place in enumerate(self.servers) if place == rank]

    def check(self, method: Method, layout: ParameterLayout) -> None:
        """Raise ValueError if a method does not permit so many workers, or if there are more servers than elements."""
        if method.most_workers is not None and len(self.workers) > method.most_workers:
            raise ValueError(f"{method.name} has at most {method.most_workers} worker, got {len(self.workers)}")
        if len(self.servers) > layout.numel:
            raise ValueError(
                f"servers times threads must be at most the model's {layout.numel} elements, got {len(self.servers)}"
            )

    def thread_of(self, number: int) -> int:
        """Return the number of a server among those on its rank."""
        return number - self.servers.index(self.servers[number])


def place(ranks: int, servers: int | str, threads: int = 1) -> Placement:
    """Assign roles to ranks. The last `servers` ranks serve; with "colocated", every rank trains and serves.

    threads: servers on each of these ranks.

    Raises:
        ValueError: No rank would train, none would serve, or there are too many threads.
    """
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MOST_THREADS:
        raise ValueError(f"threads must be a number from 1 to {MOST_THREADS}, got {threads!r}")
    if servers == COLOCATED:
        return Placement(list(range(ranks)), [rank for rank in range(ranks) for _ in range(threads)])
    if isinstance(servers, bool) or not isinstance(servers, int) or not 1 <= servers < ranks:
        raise ValueError(
            f"servers must be {COLOCATED!r} or a number from 1 to one less than the {ranks} ranks, got {servers!r}: "
            "with one server and two workers start three ranks, mpirun -np 3"
        )
    first = ranks - servers
    return Placement(list(range(first)), [rank for rank in range(first, ranks) for _ in range(threads)])
