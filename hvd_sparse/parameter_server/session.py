"""One rank of an asynchronous run over MPI. A rank is a worker, a server, or both. Frameworks derive from `Session`."""

import atexit
import json
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from hvd_sparse.checkpoint import atomic_file
from hvd_sparse.library import mpi
from hvd_sparse.parameter_server import protocol
from hvd_sparse.parameter_server.connection import Connection, Heartbeat, interrupted_by_sigterm, serve
from hvd_sparse.parameter_server.layout import ParameterLayout
from hvd_sparse.parameter_server.methods import METHODS, Method
from hvd_sparse.parameter_server.protocol import Kind, Message
from hvd_sparse.parameter_server.server import Server
from hvd_sparse.parameter_server.transport import MPIEndpoint, next_session
from hvd_sparse.parameter_server.worker import Worker

COLOCATED = "colocated"
TIMEOUT, SILENCE = 600.0, 120.0  # seconds
SHARE_EVERY = 10  # steps between two sends of buffers, whose bytes are a few per cent of a push
_open: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # this process's sessions, by communicator


class Placement(NamedTuple):
    """The ranks of the workers and of the servers. A rank may be in both lists."""

    workers: list[int]
    servers: list[int]


def place(ranks: int, servers: int | str) -> Placement:
    """Assign roles to ranks. The last `servers` ranks are servers; with "colocated", every rank is worker and server.

    Raises:
        ValueError: No rank would train, or none would serve.
    """
    if servers == COLOCATED:
        return Placement(list(range(ranks)), list(range(ranks)))
    if isinstance(servers, bool) or not isinstance(servers, int) or not 1 <= servers < ranks:
        raise ValueError(
            f"servers must be {COLOCATED!r} or a number from 1 to one less than the {ranks} ranks, got {servers!r}: "
            "with one server and two workers start three ranks, mpirun -np 3"
        )
    return Placement(list(range(ranks - servers)), list(range(ranks - servers, ranks)))


class Session:
    """One rank's part in an asynchronous run, which starts from the first server's parameters and buffers.

    Args:
        parameters: {name: float32 array}.
        method: The settings of a method, such as `DGS()`.
        buffers: {name: float32 array} of tensors that are not trained, such as batch statistics.
        servers: Number of servers, which are the last ranks; or "colocated": every rank trains and serves.
        overlap: Apply the answer to a push at the next push. Communication overlaps computation, one step staler.
        restore: Path of a file written by `save`, whose parameters and buffers replace those of the first server.
        timeout: Seconds to wait for an answer, or for a worker to join.
        silence: Seconds without a message after which a worker counts as dead; None: never.
        communicator: An mpi4py communicator; None: COMM_WORLD.

    Raises:
        TypeError: `method` is not a method.
        ValueError: `servers`, the number of workers, or the model in `restore` is wrong.
        RuntimeError: A session is open on this communicator, or MPI lacks MPI_THREAD_MULTIPLE.
    """

    def __init__(
        self,
        parameters: Mapping[str, np.ndarray],
        method: Method,
        buffers: Mapping[str, np.ndarray] | None = None,
        *,
        servers: int | str = 1,
        overlap: bool = False,
        restore: str | None = None,
        timeout: float = TIMEOUT,
        silence: float | None = SILENCE,
        communicator=None,
    ):
        if not isinstance(method, Method):
            raise TypeError(f"method must be one of {', '.join(sorted(METHODS))}, such as DGS(); got {method!r}")
        self.communicator = communicator or mpi().COMM_WORLD
        self.rank, self.method, self.overlap = self.communicator.Get_rank(), method, overlap
        self.placement = place(self.communicator.Get_size(), servers)
        self.layout = ParameterLayout({name: np.shape(array) for name, array in parameters.items()}, method.min_numel)
        self._timeout, self._silence, self._started = timeout, silence, time.monotonic()
        self._server: Server | None = None
        self._connection: Connection | None = None
        self._heartbeat: Heartbeat | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None  # raised by the server's thread
        self._failed = ""  # the error, if this rank failed to join
        self._check()
        if _open.setdefault(self.communicator.py2f(), self) is not self:
            raise RuntimeError(
                "a session is open on this communicator, and would get this one's messages: close() it, or pass another"
            )
        self._number = next_session(self.communicator)
        if self.is_server:
            try:
                self._server = self._make_server(parameters, flattened(buffers), restore)
            except BaseException:
                self._release()
                raise
            if self.is_worker:
                self._start_thread()

    @property
    def is_server(self) -> bool:
        """Whether this rank is a server."""
        return self.rank in self.placement.servers

    @property
    def is_worker(self) -> bool:
        """Whether this rank is a worker."""
        return self.rank in self.placement.workers

    @property
    def worker(self) -> Worker:
        """This rank's worker. Raises RuntimeError on a rank that is not a worker or has left."""
        return self._connected().worker

    def serve(self) -> dict[int, str]:
        """Serve until all workers have left. On Ctrl-C or SIGTERM, the server tells the workers and stops.

        A co-located rank serves in a separate thread, so this method returns at once.

        Returns:
            {worker's rank: reason for leaving}. The reason is an empty string if the worker ended without an error.

        Raises:
            RuntimeError: This rank is not a server.
        """
        if self._server is None:
            raise RuntimeError(f"rank {self.rank} is a worker: only ranks {self.placement.servers} serve")
        if self._thread is None:
            try:
                with interrupted_by_sigterm():
                    serve(self._server, self._endpoint(True), self.placement.workers, self._timeout)
            finally:
                self._release()
            self._report()
        return dict(self._server.departures)

    def join(self, parameters: dict[str, np.ndarray]) -> None:
        """Join as a worker. Answers update `parameters`, {name: float32[n]}, in place."""
        incarnation = time.time_ns() % 2**31  # differs if this rank is started again
        worker = Worker(self.rank, self.layout, self.method, parameters, len(self.placement.servers), incarnation)
        connection = Connection(worker, self._endpoint(False), self.placement.servers, self._timeout)
        if self._silence is not None:  # while other servers are still to come, too
            self._heartbeat = Heartbeat(worker, self._endpoint(False), self.placement.servers, self._silence / 4.0)
        try:
            connection.join()
        except BaseException as error:
            self._stop_heartbeat()
            self._failed = f"{type(error).__name__}: {error}"
            connection.leave(self._failed)  # some servers may have accepted this worker
            if self._thread is not None:
                self._thread.join()
            self._release()
            raise
        self._connection = connection
        atexit.register(self.close)

    def exchange(self, gradients, lr, weight_decay=None) -> None:
        """Push an update, and apply the answer to this push; with `overlap`, the answer to the previous push."""
        if self._failure is not None:
            raise RuntimeError(f"the server on this rank has stopped: {self._failure}") from self._failure
        connection = self._connected()
        if self.overlap:
            self.synchronize()
        connection.push(gradients, lr, weight_decay)
        if not self.overlap:
            self.synchronize()

    def synchronize(self) -> None:
        """Wait for the answer to the last push and apply it. Only needed with `overlap`."""
        connection = self._connected()
        connection.wait()
        changed, connection.worker.changed = connection.worker.changed, set()
        self.updated(changed)

    def updated(self, names: set[str]) -> None:
        """Handle changed parameters. Frameworks that must copy parameters override this method."""

    def share(self, buffers: np.ndarray) -> None:
        """Send this worker's buffers, float32[n], to the first server, which averages the workers' buffers."""
        self._connected().share(buffers)

    def state(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return the servers' current parameters.

        Returns:
            {name: float32 array}, and the average of the workers' buffers, float32[n].
        """
        answers = self._answers("state")
        flat = np.concatenate([arrays["parameters"] for _, arrays in answers])
        return {name: part.copy() for name, part in self.layout.split(flat).items()}, answers[0][1]["buffers"]

    def averages(self) -> np.ndarray:
        """Return the average of the workers' buffers, float32[n]; before the first send, the first server's buffers."""
        return self._answers("buffers")[0][1]["buffers"]

    def save(self, path: str) -> None:
        """Write the servers' parameters, the averaged buffers and the settings to a file for `connect(restore=)`.

        Args:
            path: Path of the file, in NumPy's .npz format. If the process is killed during the write, the file has
                either the old or the new model.
        """
        parameters, buffers = self.state()
        arrays = {f"parameter/{name}": array for name, array in parameters.items()}
        settings = {"method": self.method.describe(), "statistics": self.stats()}
        with atomic_file(path) as file:
            np.savez(file, buffers=buffers, settings=np.array(json.dumps(settings)), **arrays)

    def stats(self) -> dict:
        """Return statistics of this worker and of all servers.

        Returns:
            Bytes in both directions, the compression ratios, the number of pushes, the staleness, updates per second,
            and the servers' memory in bytes. The entry "all" covers all workers.
        """
        descriptions = [description for description, _ in self._answers("statistics")]
        return summary(self.worker, self._connection.waited, descriptions, time.monotonic() - self._started)

    def close(self) -> None:
        """Leave the run, after the last answer. A second call does nothing.

        If an error was raised, servers receive it as the reason. If the last answer does not come, the error of
        `synchronize` is raised.
        """
        error = sys.exc_info()[1] or getattr(sys, "last_value", None) or self._failure
        last = None
        if self._connection is not None and not error:
            try:
                self.synchronize()
            except Exception as caught:
                error = last = caught
        connection, self._connection = self._connection, None
        self._stop_heartbeat()
        if connection is not None:
            connection.leave(f"{type(error).__name__}: {error}" if error else "")
        atexit.unregister(self.close)
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
            self._report()
        self._release()
        if last is not None:
            raise last

    def _stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _release(self) -> None:
        """Allow another session on this communicator."""
        if _open.get(self.communicator.py2f()) is self:
            del _open[self.communicator.py2f()]

    def _report(self) -> None:
        for worker, why in self._server.departures.items():
            if why:
                print(f"hvd_sparse: worker {worker} left early: {why}", file=sys.stderr)

    def _answers(self, what: str) -> list[tuple[dict, dict[str, np.ndarray]]]:
        self.synchronize()
        return self._connected().ask(what)

    def _connected(self) -> Connection:
        if self._connection is None:
            what = "has left the run" if self.is_worker else "is a server: call serve() on it"
            raise RuntimeError(f"rank {self.rank} {what}; only workers that have joined train")
        return self._connection

    def _check(self) -> None:
        if self.method.most_workers is not None and len(self.placement.workers) > self.method.most_workers:
            most = self.method.most_workers
            raise ValueError(f"{self.method.name} has at most {most} worker, got {len(self.placement.workers)}")
        needs_threads = self._silence is not None or self.is_worker == self.is_server
        if needs_threads and mpi().Query_thread() != mpi().THREAD_MULTIPLE:
            raise RuntimeError(
                "this MPI was started without MPI_THREAD_MULTIPLE, which heartbeats and co-located servers need: "
                "connect before other libraries start MPI, or pass silence=None and servers=1"
            )

    def _endpoint(self, is_server: bool) -> MPIEndpoint:
        return MPIEndpoint(self.communicator, is_server, self._number)

    def _make_server(self, parameters, buffers: np.ndarray, restore: str | None) -> Server:
        number = self.placement.servers.index(self.rank)
        if restore is not None:
            flat, buffers = restored(restore, self.layout)
        else:
            flat = self.layout.flatten(parameters)
            flat = flat if number == 0 else self._first_parameters(flat)
        shard = self.layout.shards(len(self.placement.servers))[number]
        others = len(self.placement.servers) - 1 if number == 0 and restore is None else 0
        workers = len(self.placement.workers)
        server = Server(self.layout, shard, self.method, flat, workers, self._silence, others)
        if number == 0:
            server.buffers = buffers
        return server

    def _first_parameters(self, ours: np.ndarray) -> np.ndarray:
        """Return the first server's initial parameters. Users load a pretrained model there.

        If the first server has another model, return `ours`. One of the two servers then refuses every worker, with the
        reason.
        """
        first, end = self.placement.servers[0], self._endpoint(False)
        end.send(first, protocol.encode(Message(Kind.ASK, self.rank, body=protocol.as_body("start"))))
        item = end.receive(self._timeout)
        if item is None:
            raise TimeoutError(f"rank {first} has not sent its parameters within {self._timeout:g} seconds")
        message = protocol.decode(item[1])
        if message.kind != Kind.STATE:
            raise RuntimeError(
                f"rank {first} has not sent its parameters; restore= must be equal on all: {message.text}"
            )
        description, arrays = protocol.decode_state(message.body)
        return arrays["parameters"] if description["layout"] == self.layout.digest() else ours

    def _start_thread(self) -> None:
        def run() -> None:
            """Serve; store an exception for the main thread."""
            try:
                serve(self._server, self._endpoint(True), self.placement.workers, self._timeout, lambda: self._failed)
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=run, name="hvd_sparse server", daemon=True)
        self._thread.start()


def flattened(buffers: Mapping[str, np.ndarray] | None) -> np.ndarray:
    """Return the concatenated buffers, float32[n]."""
    return np.concatenate([np.empty(0, np.float32), *(array.reshape(-1) for array in (buffers or {}).values())])


def restored(path: str, layout: ParameterLayout) -> tuple[np.ndarray, np.ndarray]:
    """Return the flat parameters and buffers of a file that `save` wrote. Raise ValueError if the model differs."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name.removeprefix("parameter/"): file[name] for name in file.files if name.startswith("parameter/")}
        differing = {name for name in {*arrays, *layout.names} if np.shape(arrays.get(name)) != layout.shapes.get(name)}
        if differing:
            raise ValueError(f"{path} is of another model: {sorted(differing)} are missing there or here, or differ")
        return layout.flatten(arrays), file["buffers"]


def summary(worker: Worker, waited: float, servers: list[dict], seconds: float) -> dict:
    """Combine a worker's traffic with the statistics of all servers."""
    traffic, staleness = worker.traffic, {}
    for server in servers[:1]:  # all servers receive the same pushes
        staleness = {int(stale): count for stale, count in server["staleness"].items()}
    dense = traffic.pushes * worker.dense_bytes
    longest = max(server["seconds"] for server in servers)
    return {
        "pushes": traffic.pushes,
        "bytes_up": traffic.bytes_up,
        "bytes_down": traffic.bytes_down,
        "ratio_up": dense / max(1, traffic.bytes_up),
        "ratio_down": dense / max(1, traffic.bytes_down - worker.dense_bytes),
        "density_up": traffic.entries_up / max(1, traffic.pushes * worker.layout.numel),
        "density_down": traffic.entries_down / max(1, traffic.pushes * worker.layout.numel),
        "repeated": traffic.repeated,
        "non_finite": traffic.non_finite,
        "seconds": seconds,
        "seconds_waiting": waited,
        "all": {
            "pushes": servers[0]["pushes"],
            "updates_per_second": servers[0]["pushes"] / longest,
            "staleness": staleness,
            "server_bytes": sum(server["memory_bytes"] for server in servers),
            "bytes_in": sum(server["bytes_in"] for server in servers),
            "bytes_out": sum(server["bytes_out"] for server in servers),
            "refused": sum(server["refused"] for server in servers),
            "repeated": sum(server["repeated"] for server in servers),
            "departures": {int(k): v for server in servers for k, v in server["departures"].items()},
        },
    }
