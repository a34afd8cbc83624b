"""Servers and workers in one process, in a fixed order of arrivals: for tests, and studies of many workers.

The servers, workers and messages are those of an MPI run; only the order is fixed.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from hvd_sparse.checks import check_number, checked_integer
from hvd_sparse.parameter_server.layout import ParameterLayout
from hvd_sparse.parameter_server.methods import Method, checked_method
from hvd_sparse.parameter_server.server import Server
from hvd_sparse.parameter_server.transport import InProcessNetwork
from hvd_sparse.parameter_server.worker import Worker

Gradients = Callable[[int, Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]


def in_turn(workers: int) -> Iterator[int]:
    """Yield workers in turn, for ever: the staleness of each update is the number of other workers."""
    return itertools.cycle(range(workers))


def by_speed(seconds: Sequence[float], seed: int = 0, jitter: float = 0.2) -> Iterator[int]:
    """Yield workers as they finish: a step of worker k takes seconds[k], more or less by up to `jitter` of it."""
    random = np.random.default_rng(seed)

    def step(worker: int) -> float:
        """Return how long the next step of a worker takes."""
        return seconds[worker] * (1.0 + jitter * random.uniform(-1.0, 1.0))

    queue = [(step(worker), worker) for worker in range(len(seconds))]
    heapq.heapify(queue)
    while True:
        time, worker = heapq.heappop(queue)
        yield worker
        heapq.heappush(queue, (time + step(worker), worker))


class Simulation:
    """A run of several workers and servers. `step(worker)` computes, pushes and applies the answer.

    Args:
        method: The settings of a method, such as `DGS()`.
        parameters: {name: float32 array}, the initial ones.
        workers: Number of workers.
        servers: Number of servers, each with an equal part of the elements.
        server_options: Further arguments of `Server`, such as `silence` and `now`. Simulated workers have no heartbeat:
            one whose last message is older than `silence` after another's step is dropped, and joins again with its
            next step.

    Raises:
        TypeError: method is no settings of a method, or a number is no integer.
        ValueError: A number is below 1, or the method has fewer workers at most.
    """

    def __init__(
        self, method: Method, parameters: Mapping[str, np.ndarray], workers: int, servers: int = 1, **server_options
    ):
        method = checked_method(method, parameters.items())
        workers, servers = checked_integer("workers", workers, 1), checked_integer("servers", servers, 1)
        if method.most_workers is not None and workers > method.most_workers:
            raise ValueError(f"{method.name} has at most {method.most_workers} worker, got workers = {workers}")
        self.method = method
        shapes = {name: np.shape(array) for name, array in parameters.items()}
        self.layout = ParameterLayout(shapes, method.min_numel, dense=method.dense)
        self._flat = self.layout.flatten(parameters)
        self.network = InProcessNetwork()
        self._server_ends = [self.network.endpoint(rank, is_server=True) for rank in range(servers)]
        self._worker_ends = [self.network.endpoint(rank, is_server=False) for rank in range(workers)]
        self.servers = [
            Server(self.layout, shard, method, self._flat, workers, servers=servers, **server_options)
            for shard in self.layout.shards(servers)
        ]
        self.workers: list[Worker | None] = [None] * workers
        for number in range(workers):
            self.join(number)

    def join(self, number: int, incarnation: int | None = None) -> Worker:
        """Start or restart a worker, and let it join.

        Args:
            number: The worker, from 0.
            incarnation: Of the worker; None: one after its last.

        Returns:
            The worker, whose parameters are now the servers'.
        """
        if incarnation is None:
            incarnation = 0 if self.workers[number] is None else self.workers[number].incarnation + 1
        copies = {name: array.reshape(-1).copy() for name, array in self.layout.split(self._flat).items()}
        worker = Worker(number, self.layout, self.method, copies, len(self.servers), incarnation)
        self.workers[number] = worker
        self._send(number, worker.hello())
        self.deliver()
        return worker

    def step(self, number: int, gradients: Gradients, lr: float, weight_decay: float = 0.0) -> None:
        """Let a worker do a step: compute gradients, push, and apply the answers.

        Args:
            number: The worker, from 0.
            gradients: A function of the worker's number and its parameters, {name: float32 array}, that returns
                gradients, {name: array}; tensors without a gradient may be missing.
            lr: The learning rate, at least 0.
            weight_decay: Coefficient of the parameters that are added to their gradients, at least 0.

        Raises:
            TypeError: The number is no integer, or the learning rate or weight decay is no number.
            ValueError: There is no such worker, a rate is below 0 or not finite, or a gradient is of no parameter or of
                another size.
            ServerRefused: A server refuses the worker.
        """
        for name, rate in (("lr", lr), ("weight_decay", weight_decay)):
            check_number(name, rate, "finite and at least 0", lambda value: value >= 0.0)
        worker = self.workers[checked_integer("number", number, 0, len(self.workers) - 1)]
        shaped = {name: array.reshape(self.layout.shapes[name]) for name, array in worker.parameters.items()}
        found = {
            name: np.ascontiguousarray(array, np.float32).reshape(-1)
            for name, array in gradients(number, shaped).items()
        }
        for name, array in found.items():
            size = worker.parameters[name].size if name in worker.parameters else None
            if array.size != size:
                expected = f"must have {size} elements, got {array.size}" if size else "is of no parameter of the model"
                raise ValueError(f"the gradient {name!r} {expected}: the parameters are {', '.join(self.layout.names)}")
        rates, decays = dict.fromkeys(self.layout.names, lr), dict.fromkeys(self.layout.names, weight_decay)
        self._send(number, worker.push(found, rates, decays))
        self.deliver()

    def run(self, arrivals: Iterator[int], steps: int, gradients: Gradients, lr, weight_decay: float = 0.0) -> None:
        """Let workers do steps in the order of their arrivals.

        Args:
            arrivals: Yields the number of the worker whose turn it is, such as `in_turn` and `by_speed`.
            steps: Number of steps of all workers together.
            gradients: As in `step`.
            lr: The learning rate, or a function of the number of steps done.
            weight_decay: As in `step`.
        """
        for done, number in enumerate(itertools.islice(arrivals, steps)):
            self.step(number, gradients, lr(done) if callable(lr) else lr, weight_decay)

    def parameters(self) -> dict[str, np.ndarray]:
        """Return the servers' parameters: views of a copy, by name."""
        return self.layout.split(np.concatenate([server.parameters for server in self.servers]))

    def deliver(self) -> None:
        """Deliver messages until there are none; then drop workers that have been silent for too long."""
        while self._deliver_once():
            pass
        for server in self.servers:
            server.tick()

    def _deliver_once(self) -> bool:
        moved = False
        for server, end in zip(self.servers, self._server_ends, strict=True):
            while (item := end.receive()) is not None:
                source, data = item
                for rank, answer in server.handle(data, source):
                    end.send(rank, answer)
                moved = True
        for number, end in enumerate(self._worker_ends):
            while (item := end.receive()) is not None:
                rank, data = item
                self._send(number, self.workers[number].receive(rank, data))
                moved = True
        return moved

    def _send(self, number: int, messages: Mapping[int, np.ndarray]) -> None:
        for server, data in messages.items():
            self._worker_ends[number].send(server, data)
