"""Which ranks train, and which serve."""

from typing import Literal, NamedTuple

from hvd_sparse.checks import checked_integer
from hvd_sparse.parameter_server.layout import ParameterLayout
from hvd_sparse.parameter_server.methods import Method

Servers = int | Literal["colocated"]
COLOCATED = "colocated"
MOST_THREADS = 16  # of a rank, each with its own tags


class Placement(NamedTuple):
    """The ranks of the workers, and the rank of each server. A rank may be in both lists.

    A rank that serves in several threads has one server in each: it is in the list once for each thread.
    """

    workers: list[int]
    servers: list[int]

    @property
    def serving_ranks(self) -> list[int]:
        """The ranks that serve, each once."""
        return sorted(set(self.servers))

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


def place(ranks: int, servers: Servers, threads: int = 1) -> Placement:
    """Assign roles to ranks. The last `servers` ranks serve; with "colocated", every rank trains and serves.

    threads: servers on each of these ranks.

    Raises:
        TypeError: `threads` or `servers` is of another type.
        ValueError: No rank would train, none would serve, or there are too many threads.
    """
    threads = checked_integer("threads", threads, 1, MOST_THREADS)
    if isinstance(servers, str) and servers == COLOCATED:
        return Placement(list(range(ranks)), [rank for rank in range(ranks) for _ in range(threads)])
    number = checked_integer(f"servers, if not {COLOCATED!r},", servers)
    if not 1 <= number < ranks:
        raise ValueError(
            f"servers must be {COLOCATED!r} or a number from 1 to one less than the {ranks} ranks, got {number}: "
            "with one server and two workers start three ranks, mpirun -np 3"
        )
    first = ranks - number
    return Placement(list(range(first)), [rank for rank in range(first, ranks) for _ in range(threads)])
