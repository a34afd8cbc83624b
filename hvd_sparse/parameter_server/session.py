"""One rank of an asynchronous run over MPI. A rank is a worker, a server, or both. Frameworks derive from `Session`."""

import atexit
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import cast

import numpy as np

from hvd_sparse.checks import check_bool, check_seconds
from hvd_sparse.finalization import is_end
from hvd_sparse.frames import warn
from hvd_sparse.library import checked_communicator
from hvd_sparse.log import Logged
from hvd_sparse.parameter_server.connection import Connection, Heartbeat, described
from hvd_sparse.parameter_server.layout import ParameterLayout
from hvd_sparse.parameter_server.methods import Method, checked_method
from hvd_sparse.parameter_server.model_file import write_model
from hvd_sparse.parameter_server.placement import Servers, place
from hvd_sparse.parameter_server.server import departures
from hvd_sparse.parameter_server.serving import LocalServers
from hvd_sparse.parameter_server.summary import of_all_workers, own_stats, summary
from hvd_sparse.parameter_server.transport import MPIEndpoint, next_session, require_threads
from hvd_sparse.parameter_server.worker import Worker
from hvd_sparse.timeouts import TIMEOUT_SECONDS
from hvd_sparse.traffic import SessionStats
from hvd_sparse.turns_check import TurnsCheck

TIMEOUT, SILENCE = TIMEOUT_SECONDS, 120.0
SHARE_EVERY = 10  # steps between two sends of buffers, whose bytes are a few per cent of a push
_open: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # this process's sessions, by communicator


class Session(Logged):
    """One rank's part in an asynchronous run, which starts from the first server's parameters and buffers.

    Args:
        parameters: {name: float32 array}.
        method: The settings of a method, such as `DGS()`.
        buffers: {name: float32 array} of tensors that are not trained, such as batch statistics.
        frozen: Arrays of the parameters that do not change: they are not sent, and must be equal on all ranks.
        servers: Number of ranks that serve, the last ones; or "colocated": every rank trains and serves.
        threads: Number of threads in which each of these ranks serves, each with its own shard.
        overlap: Apply the answer to a push at the next push. Communication overlaps computation, one step staler.
        restore: Path of a file of `save`, which the first server reads: the run starts from its parameters and buffers.
        timeout: Seconds to wait for an answer, or for a worker to join; by default HVD_SPARSE_TIMEOUT, or 600.
        silence: Seconds without a message after which a worker counts as dead; None: never.
        communicator: An mpi4py communicator; None: COMM_WORLD.

    Raises:
        TypeError: `method` is not a method, or another argument has the wrong type.
        ValueError: An argument is out of range, or the model in `restore` is another one.
        OSError: The file `restore` cannot be read.
        RuntimeError: A session is open on this communicator, or MPI lacks MPI_THREAD_MULTIPLE.
    """

    def __init__(
        self,
        parameters: Mapping[str, np.ndarray],
        method: Method,
        buffers: Mapping[str, np.ndarray] | None = None,
        frozen: Iterable[np.ndarray] = (),
        *,
        servers: Servers = 1,
        threads: int = 1,
        overlap: bool = False,
        restore: str | None = None,
        timeout: float = TIMEOUT,
        silence: float | None = SILENCE,
        communicator=None,
    ):
        method = checked_method(method, parameters.items())
        check_bool("overlap", overlap)
        check_seconds("timeout", timeout)
        if silence is not None:
            check_seconds("silence", silence)
        self.communicator = checked_communicator(communicator)
        self._rank, self.method, self.overlap = self.communicator.Get_rank(), method, overlap
        self.placement = place(self.communicator.Get_size(), servers, threads)
        shapes = {name: np.shape(array) for name, array in parameters.items()}
        self.layout = ParameterLayout(shapes, method.min_numel, frozen, method.dense)
        self._timeout, self._silence, self._started = timeout, silence, time.monotonic()
        self._restores, self._has_served = restore is not None, False
        self._is_awaited = self.is_server and not self.is_worker  # workers wait for `serve`
        self._connection: Connection | None = None
        self._counts: Counter = Counter()  # a worker's, when its last push had ended, or it had joined
        self._last: Counter = Counter()  # what that push had added to them
        self._heartbeat: Heartbeat | None = None
        self._optimizers = TurnsCheck()
        self._shared: np.ndarray | None = None  # the buffers that were last sent
        self._non_finite = sum(array.size - int(np.isfinite(array).sum()) for array in (buffers or {}).values())
        self._before = sys.exc_info()[1]  # is handled here, and no reason to leave
        self.placement.check(method, self.layout)
        if silence is not None or self.is_worker == self.is_server or len(self.placement.on(self.rank)) > 1:
            require_threads()
        if _open.setdefault(self.communicator.py2f(), self) is not self:
            raise RuntimeError(
                "a session is open on this communicator, and would get this one's messages: close() it, or pass another"
            )
        self._endpoint = partial(MPIEndpoint, self.communicator, self.placement, next_session(self.communicator))
        # A rank has one end for messages from servers, as they arrive only once. The first server does not need any.
        asks = self.is_worker or self.rank != self.placement.servers[0]
        self._worker_end = self._endpoint(background=True) if asks else None
        self._local = LocalServers(
            self.rank, self.placement, self.layout, method, self._endpoint, self._worker_end, timeout, silence
        )
        if self.is_server:
            try:
                self._local.make(parameters, buffers, restore)
            except BaseException:
                self._release()
                raise
            if self.is_worker:
                self._local.start(self._local.servers)
            else:
                atexit.register(self._close_at_exit)

    def __repr__(self) -> str:
        roles = {"worker": self.is_worker, "server": self.is_server}
        role = " and ".join(name for name, has in roles.items() if has)
        return f"<{type(self).__name__}, rank {self.rank} of {self.communicator.Get_size()}, {role}: {self.method}>"

    @property
    def rank(self) -> int:
        """This rank on the session's communicator. Workers come first: a worker's rank is its number among them."""
        return self._rank

    @property
    def workers(self) -> int:
        """Number of ranks that train."""
        return len(self.placement.workers)

    @property
    def servers(self) -> int:
        """Number of ranks that serve; with servers="colocated", all of them."""
        return len(self.placement.serving_ranks)

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

        A co-located rank serves in a separate thread, so this method returns at once. Afterwards the only rank that
        serves can `save` the model, also if this method has raised.

        Returns:
            {worker's rank: reason for leaving}. The reason is an empty string if the worker ended without an error.

        Raises:
            KeyboardInterrupt: Ctrl-C or SIGTERM.
            TimeoutError: Some workers have not joined, and the others have left, for `timeout` seconds.
            RuntimeError: This rank is not a server, or has left the run.
        """
        if not self.is_server:
            raise RuntimeError(f"rank {self.rank} is a worker: only ranks {self.placement.serving_ranks} serve")
        if not self.is_worker:
            if not (self._is_awaited or self._has_served):
                raise RuntimeError(f"rank {self.rank} has left the run: call serve() before close()")
            self._is_awaited = False
            atexit.unregister(self._close_at_exit)
            try:
                self._local.run()
            finally:
                self._has_served = True
                self._release()
        return departures(self._local.servers.values())

    def _join(self, parameters: dict[str, np.ndarray]) -> None:
        """Join as a worker. Answers update `parameters`, {name: float32[n]}, in place."""
        incarnation = time.time_ns() % 2**31  # differs if this rank is started again
        servers = len(self.placement.servers)
        worker = Worker(self.rank, self.layout, self.method, parameters, servers, incarnation, self._restores)
        connection = Connection(worker, self._worker_end, self.placement.serving_ranks, self._timeout)
        if self._silence is not None:  # while other servers are still to come, too
            self._heartbeat = Heartbeat(worker, self._endpoint(), self._silence / 4.0)
        try:
            connection.join()
        except BaseException as error:
            self._stop_heartbeat()
            self._local.join_error = described(error)
            connection.leave(self._local.join_error)  # some servers may have accepted this worker
            self._local.join()
            self._release()
            raise
        self._connection = connection
        atexit.register(self._close_at_exit)
        try:
            self._take_model()
        except BaseException as error:
            self._close(error)
            raise
        self._counts = connection.counts()

    def _push(self, gradients, lr, weight_decay=None) -> None:
        """Push an update, and apply the answer to this push; with `overlap`, the answer to the previous push."""
        self._local.raise_error()
        connection = self._connected()
        self.synchronize()  # without overlap, too: after a TimeoutError an answer is missing
        connection.push(gradients, lr, weight_decay)
        if not self.overlap:
            self.synchronize()
        before, self._counts = self._counts, connection.counts()
        self._last = self._counts.copy()
        self._last.subtract(before)
        self._report(lambda: own_stats(connection, self._last), connection.worker.step)

    def synchronize(self) -> None:
        """Wait for the answer to the last push and apply it. Only needed with `overlap`.

        Raises:
            TimeoutError: The servers do not answer.
            ServerRefused: The servers have stopped, or differ from this worker.
            RuntimeError: This rank is no worker, or has left the run.
        """
        connection = self._connected()
        connection.wait()
        changed, connection.worker.changed = connection.worker.changed, set()
        if changed:
            self._updated(changed)

    def _take_model(self) -> None:
        """Take over the servers' model, after joining. Frameworks that have buffers override this method."""
        self.synchronize()

    def _updated(self, names: set[str]) -> None:
        """Handle changed parameters. Frameworks that must copy parameters override this method."""

    def share_buffers(self) -> None:
        """Send this worker's buffers into the average. Frameworks that have buffers override this method."""

    def _share(self, buffers: np.ndarray) -> None:
        """Send this worker's buffers, float32[n], to the first server, which averages the workers' buffers.

        Buffers that are as they were last sent are not sent again.
        """
        connection = self._connected()
        if self._shared is not None and np.array_equal(self._shared, buffers, equal_nan=True):
            return
        damaged = buffers.size - int(np.isfinite(buffers).sum())
        if damaged > self._non_finite:
            warn(
                f"hvd_sparse: {damaged - self._non_finite} elements of the model's buffers have become NaN or infinity "
                "on this worker, as after a batch with NaN: the servers' average leaves them out"
            )
            self._non_finite = damaged
        connection.share(buffers)
        self._shared = buffers.copy()

    def _note(self, optimizer) -> None:
        """Warn once if several optimizers of this session step in turn."""
        if self._optimizers.note_use(optimizer):
            warn(
                "hvd_sparse: several optimizers of one session step in turn: each step pushes all parameters of the "
                "session, also those of the other optimizers, and counts as a step of the schedule. Use one optimizer "
                "with a group for each, or one session per model"
            )

    def _state(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return the servers' parameters, {name: float32 array}, and the average of all buffers, float32[n].

        All of them are views, after `serve` of the server's own arrays.
        """
        answers = self._answers("state")
        parts = [arrays["parameters"] for _, arrays in answers]
        flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return self.layout.split(flat), answers[0][1]["buffers"]

    def _averages(self) -> np.ndarray:
        """Return the average of the workers' buffers, float32[n]; before the first send, the first server's buffers."""
        return self._answers("buffers")[0][1]["buffers"]

    def save(self, path: str) -> None:
        """Write the servers' parameters, the averaged buffers and the settings to a file for `connect(restore=)`.

        A worker sends its own buffers into the average first. Call it on a worker; or, for the final model, on the only
        rank that serves, after `serve`, also if it raised.

        Args:
            path: Path of the file, in NumPy's .npz format. If the write is interrupted, it has the old or new model.

        Raises:
            TimeoutError: The servers do not answer; likewise the other exceptions of `synchronize`.
        """
        if self._connection is not None:
            self.share_buffers()
        write_model(path, *self._state(), {"method": self.method.describe(), "statistics": self.stats()})

    def stats(self) -> SessionStats:
        """Return statistics of this worker and of all servers; after `serve`, on the only serving rank, "all" alone.

        Returns:
            Of this worker, as of a compressor: "steps", "step", "total" and "residual_norm". What it pushes counts as
            payload, the answers as received, in "total" without the whole model in the first one; "step" has all
            since the push before, with `overlap` the answer to that one; seconds has "exchange", the waiting. Also
            "pushes"; "bytes_up", "bytes_down", and of these "bytes_model", the whole model; "ratio_up", "ratio_down",
            dense bytes over these without the model; "density_up", "density_down"; "repeated" messages; "non_finite"
            gradients; "seconds", and of these "seconds_waiting". "all", of all workers: "pushes", "updates_per_second",
            "staleness" as {updates of others: number of pushes}, "server_bytes" of memory, "bytes_in", "bytes_out",
            "refused" and "repeated" messages, "departures" as {rank: reason}.

        Raises:
            TimeoutError: The servers do not answer; likewise the other exceptions of `synchronize`.
        """
        descriptions = [description for description, _ in self._answers("statistics")]
        if self._has_served:
            return cast(SessionStats, {"all": of_all_workers(descriptions)})
        return summary(self._connected(), self._last, descriptions, time.monotonic() - self._started)

    def close(self) -> None:
        """Leave the run, after the last answer, with this worker's buffers sent. A second call does nothing.

        While an exception is raised or handled, but for the `SystemExit` of a `sys.exit()` without an error, the end of
        a generator and `StopIteration`, servers receive it as the reason, and no answer is awaited. A `with` block has
        those that leave it alone. A server that has not called `serve` tells the workers that it will not.

        Raises:
            TimeoutError: The last answer did not come.
            ServerRefused: The servers have stopped.
            RuntimeError: The server on this rank has stopped.
        """
        error = sys.exc_info()[1]
        has_ended = error is self._before or is_end(error) or isinstance(error, StopIteration)
        self._close(None if has_ended else error)

    def _close_at_exit(self) -> None:
        self._close(getattr(sys, "last_value", None))  # the error that ends the interpreter

    def _close(self, raised: BaseException | None) -> None:
        """Leave the run. raised: the error because of which this rank leaves."""
        error, last = raised or self._local.error, None
        if self._is_awaited:
            self._is_awaited = False
            self._local.refuse(error or RuntimeError(f"rank {self.rank} has ended without serve()"))
        if self._connection is not None and not error:
            try:
                self.synchronize()
                self.share_buffers()
            except Exception as caught:
                error = last = caught
        connection, self._connection = self._connection, None
        self._stop_heartbeat()
        if connection is not None:
            connection.leave(described(error) if error else "")
        atexit.unregister(self._close_at_exit)
        self._local.close()
        self._release()
        if last is not None:
            raise last
        if raised is None and connection is not None:
            self._local.raise_error()

    def _stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._close(None if is_end(error) else error)

    def _release(self) -> None:
        """Allow another session on this communicator."""
        if _open.get(self.communicator.py2f()) is self:
            del _open[self.communicator.py2f()]

    def _answers(self, what: str) -> list[tuple[dict, dict[str, np.ndarray]]]:
        if self._has_served:
            if len(self._local.servers) < len(self.placement.servers):
                raise RuntimeError(f"rank {self.rank} has only a part of the model: save on a worker, or use servers=1")
            return [server.state() for server in self._local.servers.values()]
        self.synchronize()
        return self._connected().ask(what)

    def _connected(self) -> Connection:
        if self._connection is None:
            left = "has left the run; take stats() and state_dict() before close()"
            served = "has served: only workers train, before they close"
            serves = "is a server: call serve() on it; only workers that have joined train"
            what = left if self.is_worker else served if self._has_served else serves
            raise RuntimeError(f"rank {self.rank} {what}")
        return self._connection
