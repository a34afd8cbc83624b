"""The servers on one rank of an asynchronous run over MPI, and their threads."""

import threading
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from hvd_sparse.parameter_server import protocol
from hvd_sparse.parameter_server.connection import (
    TICK,
    described,
    interrupted_by_sigterm,
    serve,
    tell_failure,
)
from hvd_sparse.parameter_server.layout import ParameterLayout
from hvd_sparse.parameter_server.methods import Method
from hvd_sparse.parameter_server.model_file import flattened, restored
from hvd_sparse.parameter_server.placement import Placement
from hvd_sparse.parameter_server.protocol import Kind, Message
from hvd_sparse.parameter_server.server import Server, report_departures
from hvd_sparse.parameter_server.transport import MPIEndpoint


class LocalServers:
    """The servers on a rank; none on a rank that only trains.

    endpoint: returns a server's end, given the server's number. worker_end: this rank's end for messages from servers;
    None on a rank that needs none. timeout, silence: see `Session`.
    """

    def __init__(
        self,
        rank: int,
        placement: Placement,
        layout: ParameterLayout,
        method: Method,
        endpoint: Callable[[int], MPIEndpoint],
        worker_end: MPIEndpoint | None,
        timeout: float,
        silence: float | None,
    ):
        self.servers: dict[int, Server] = {}  # by number
        self.error: BaseException | None = None  # raised by a server
        self.join_error = ""  # why this rank's worker failed to join, which ends the servers
        self._rank, self._placement, self._layout, self._method = rank, placement, layout, method
        self._endpoint, self._worker_end, self._timeout, self._silence = endpoint, worker_end, timeout, silence
        self._numbers = placement.on(rank)
        self._threads: list[threading.Thread] = []

    def make(self, parameters: Mapping[str, np.ndarray], buffers: Mapping | None, restore: str | None) -> None:
        """Make the servers. If this fails, tell the workers, and other servers that wait for the first one, why."""
        try:
            self._make(parameters, flattened(buffers), restore)
        except BaseException as error:
            self.refuse(error)
            if self._worker_end is not None:
                self._worker_end.close(TICK)
            raise

    def _make(self, parameters, buffers: np.ndarray, restore: str | None) -> None:
        """Make the servers; the first server of all has the buffers."""
        layout, is_restored = self._layout, restore is not None
        if 0 not in self._numbers:
            flat, is_restored = self._ask_first(layout.flatten(parameters), restore)
            if self._rank not in self._placement.workers:
                self._worker_end.close(TICK)
        elif restore is not None:
            flat, buffers = restored(restore, layout, buffers)
        else:
            flat = layout.flatten(parameters)
        workers, count = len(self._placement.workers), len(self._placement.servers)
        shards, others = layout.shards(count), len(self._placement.serving_ranks) - 1
        common = dict(workers=workers, servers=count, silence=self._silence, restored=is_restored, refused={})
        self.servers = {
            n: Server(layout, shards[n], self._method, flat, others=0 if n else others, **common) for n in self._numbers
        }
        if 0 in self.servers:
            self.servers[0].buffers = buffers

    def _ask_first(self, ours: np.ndarray, restore: str | None) -> tuple[np.ndarray, bool]:
        """Return the initial parameters of the first server, on another rank, and whether they are from a file.

        If the first server has another model, return `ours`. One of the two then refuses every worker, with the reason.
        """
        servers, end = self._placement.servers, self._worker_end
        end.send(0, protocol.encode(Message(Kind.ASK, self._rank, body=protocol.as_body("start"))))
        item = end.receive(self._timeout)
        if item is None:
            raise TimeoutError(f"rank {servers[0]} has not sent its parameters within {self._timeout:g} seconds")
        message = protocol.decode(item[1])
        if message.kind != Kind.STATE:
            raise RuntimeError(f"rank {servers[item[0]]} cannot serve: {message.text}")
        description, arrays = protocol.decode_state(message.body)
        if restore is not None and not description["restored"]:
            raise ValueError(
                f"restore={restore!r} was given to rank {self._rank}, and none to rank {servers[0]}, which reads it"
            )
        is_same = description["layout"] == self._layout.digest()
        return arrays["parameters"] if is_same else ours, description["restored"]

    def refuse(self, error: BaseException) -> None:
        """Tell the workers, and the servers that wait for the first one, why the servers on this rank do not serve."""
        waiting = self._placement.serving_ranks if 0 in self._numbers else []
        ranks = sorted({*self._placement.workers, *waiting} - {self._rank})
        for number in self._numbers:
            tell_failure(self._endpoint(number), ranks, error)

    def run(self) -> None:
        """Serve until all workers have left, the first server in this thread; raise what a server has raised."""
        first, *others = self._numbers
        with interrupted_by_sigterm():
            self.start(others)
            self._serve(first)
            self.join()
        if self.error is not None:
            raise self.error
        report_departures(self.servers.values())

    def start(self, numbers: Iterable[int]) -> None:
        """Start a thread for each of these servers."""
        for number in numbers:
            thread = threading.Thread(target=self._serve, args=(number,), name="hvd_sparse server", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, number: int) -> None:
        """Run a server. Store an exception for the main thread; it ends the other servers on this rank."""
        try:
            end, ranks = self._endpoint(number), self._placement.workers
            serve(self.servers[number], end, ranks, self._timeout, self._why_stopped)
        except BaseException as error:
            self.error = self.error or error

    def _why_stopped(self) -> str:
        """Return the error that ends the servers on this rank; an empty string if there is none."""
        return self.join_error or (described(self.error) if self.error else "")

    def join(self) -> None:
        """Wait for the threads; on Ctrl-C, they tell the workers and stop."""
        try:
            for thread in self._threads:
                thread.join()
        except KeyboardInterrupt as error:
            self.error = self.error or error
            self.join()

    def close(self) -> None:
        """Wait for the threads, if there are any, and print the workers that left early."""
        if self._threads:
            self.join()
            self._threads.clear()
            report_departures(self.servers.values())

    def raise_error(self) -> None:
        """Raise RuntimeError if a server has stopped."""
        if self.error is not None:
            raise RuntimeError(f"the server on this rank has stopped: {self.error}") from self.error
