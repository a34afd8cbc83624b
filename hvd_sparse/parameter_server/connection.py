"""The loops of a server and of a worker, which pass messages between MPI and the state machines."""

import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from hvd_sparse.parameter_server import protocol
from hvd_sparse.parameter_server.protocol import Kind, Message, Reason
from hvd_sparse.parameter_server.server import Server
from hvd_sparse.parameter_server.transport import Endpoint
from hvd_sparse.parameter_server.worker import ServerRefused, Worker

TICK = 0.25  # seconds between two looks at what is not a message
CLOSE_SECONDS = 5.0  # for the last messages: only workers that failed have not received theirs


def serve(
    server: Server, end: Endpoint, ranks: list[int], timeout: float, failure: Callable[[], str] = lambda: ""
) -> None:
    """Serve until all workers, `ranks`, have come and left; tell them if this ends otherwise.

    Raises TimeoutError when no worker is there, and some have not come within `timeout` seconds; RuntimeError when
    `failure` says that there was one on this rank.
    """
    limit = timeout if server.silence is None else min(timeout, server.silence)
    most = max(TICK, limit / 4.0)  # seconds between two looks that count as silence: as long as between heartbeats
    last = looked = time.monotonic()
    try:
        while not server.is_finished:
            if why := failure():
                raise RuntimeError(why)
            item = end.receive(TICK)
            before, looked = looked, time.monotonic()
            if (pause := looked - before - most) > 0.0:  # this process was stopped or busy, and did not listen
                server.excuse(pause)
                last += pause
            heard = end.arriving(limit)
            for worker in heard if item is None else {*heard, item[0]}:
                server.hear(worker)
            for worker in server.tick():
                print(f"hvd_sparse: worker {worker} is gone: {server.departures[worker]}", file=sys.stderr)
            if item is None:
                if not server.is_occupied and time.monotonic() - last > timeout:
                    missing = sorted({*ranks} - {*server.departures, *server.refused})
                    raise TimeoutError(f"workers {missing} have not joined for {timeout:g} seconds")
                continue
            source, data = item
            for rank, answer in server.handle(data, source):
                end.send(rank, answer)
            last = time.monotonic()
        end.close(CLOSE_SECONDS)
    except BaseException as error:
        tell_failure(end, ranks, error)
        raise


def tell_failure(end: Endpoint, ranks: Iterable[int], error: BaseException) -> None:
    """Tell ranks why this server has stopped."""
    text = protocol.as_body(f"the server has stopped: {described(error)}")
    for rank in ranks:
        end.send(rank, protocol.encode(Message(Kind.REFUSED, reason=Reason.WRONG, body=text)))
    end.close(TICK)


def described(error: BaseException) -> str:
    """Return an error's type and text."""
    return f"{type(error).__name__}: {error}"


class Connection:
    """A worker and its end of the wire. ranks: those that serve. timeout: seconds to wait for an answer."""

    def __init__(self, worker: Worker, end: Endpoint, ranks: list[int], timeout: float):
        self.worker, self.waited = worker, 0.0
        self._end, self._ranks, self._timeout = end, ranks, timeout
        self._refusal: ServerRefused | None = None

    def counts(self) -> Counter:
        """Return the worker's counters so far, and the seconds of waiting as "waited"."""
        return Counter(vars(self.worker.traffic), waited=self.waited)

    def join(self) -> None:
        """Say hello, and wait for the parameters."""
        self._send(self.worker.hello())
        self.wait()

    def push(self, gradients, lr, weight_decay) -> None:
        """Push an update; `wait` waits for the answer."""
        self._send(self.worker.push(gradients, lr, weight_decay))

    def wait(self) -> None:
        """Wait for the answer to the last message, and apply it.

        Raises TimeoutError if there is none, ServerRefused if the servers do not want this worker.
        """
        if self._refusal is not None:
            raise self._refusal
        start = time.monotonic()
        try:
            while self.worker.is_waiting:
                server, data = self._receive(start)
                self._send(self.worker.receive(server, data))
        except ServerRefused as error:
            self._refusal = error
            raise
        finally:
            self.waited += time.monotonic() - start

    def ask(self, what: str) -> list[tuple[dict, dict[str, np.ndarray]]]:
        """Return each server's answer to a question; see `Server.state`."""
        self.wait()
        self._send(self.worker.ask(what))
        self.wait()
        answers, self.worker.answers = self.worker.answers, {}  # the worker does not keep a model
        return [answers[server] for server in range(len(self.worker.shards))]

    def share(self, buffers: np.ndarray) -> None:
        """Send buffers, float32, to the server that averages them."""
        self._send(self.worker.share(buffers))

    def leave(self, why: str = "") -> None:
        """Say good-bye, after the last answer if all is well."""
        if not why:
            self.wait()
            if self.worker.traffic.pushes == 0:
                text = "left without a push: only a step of session.optimizer(...) trains"
                print(f"hvd_sparse: worker {self.worker.number} {text}", file=sys.stderr)
        self._send(self.worker.leave(why))
        self._end.close(self._timeout if not why else TICK)

    def _send(self, messages) -> None:
        for server, data in messages.items():
            self._end.send(server, data)

    def _receive(self, start: float) -> tuple[int, np.ndarray]:
        item = self._end.receive(max(0.0, start + self._timeout - time.monotonic()))
        if item is None:
            raise TimeoutError(
                f"no answer from the servers, ranks {self._ranks}, within {self._timeout:g} seconds: have they "
                "stopped, or not called serve()? To wait longer: connect(timeout=...)"
            )
        return item


class Heartbeat:
    """A thread that says every `seconds` that this worker lives, while it computes."""

    def __init__(self, worker: Worker, end: Endpoint, seconds: float):
        self._worker, self._end, self._seconds = worker, end, seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="hvd_sparse heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stopped.wait(self._seconds):
            for server, data in self._worker.alive().items():
                self._end.send(server, data)
        self._end.close(TICK)


class interrupted_by_sigterm:
    """Make SIGTERM, which mpirun sends first, raise KeyboardInterrupt. Does nothing outside the main thread."""

    def __enter__(self):
        self._old = None
        if threading.current_thread() is threading.main_thread():
            self._old = signal.signal(signal.SIGTERM, signal.default_int_handler)

    def __exit__(self, *_):
        if self._old is not None:
            signal.signal(signal.SIGTERM, self._old)
