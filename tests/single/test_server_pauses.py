"""Which workers a server counts as dead, when a debugger or a paused machine stops it, and when it is busy."""

import time

import numpy as np
import pytest

from hvd_sparse.parameter_server import METHODS, ParameterLayout, Server, Worker, connection
from hvd_sparse.parameter_server.connection import TICK, serve
from hvd_sparse.parameter_server.transport import Endpoint

SHAPES = {"a": (23, 7), "b": (11,)}


class PausedEnd(Endpoint):
    """A server's end of the wire: a worker joins; the process stops; only then are the worker's messages read."""

    def __init__(self, worker, pause):
        self.worker, self.pause, self.steps, self.answers = worker, pause, 0, []

    def receive(self, seconds):
        self.steps += 1
        gradients = {name: np.ones(part.size, np.float32) for name, part in self.worker.parameters.items()}
        if self.steps == 1:
            return 0, self.worker.hello()[0]
        if self.steps == 2:
            time.sleep(self.pause)
        if self.steps in (2, 3):
            return 0, self.worker.push(gradients, dict.fromkeys(SHAPES, 0.1))[0]
        if self.steps == 4:
            return 0, self.worker.leave()[0]
        time.sleep(seconds)
        return None

    def send(self, rank, data):
        self.answers.append(data)
        self.worker.receive(0, data)

    def close(self, seconds):
        pass


def worker_of(layout, method, number=0):
    parameters = {name: np.zeros(np.prod(shape), np.float32) for name, shape in SHAPES.items()}
    return Worker(number, layout, method, parameters, 1, 7)


def test_workers_outlive_a_pause_of_their_server():
    method = METHODS["gd_async"](density=0.1, min_numel=0)
    layout = ParameterLayout(SHAPES, method.min_numel)
    start = np.zeros(layout.numel, np.float32)
    worker = worker_of(layout, method)
    server = Server(layout, layout.shards(1)[0], method, start, 1, silence=0.2)
    serve(server, PausedEnd(worker, 4 * TICK), [0], timeout=5.0)
    assert server.departures == {0: ""} and server.statistics.pushes == 2 and server.statistics.refused == 0


class ScriptedEnd(Endpoint):
    """A server's end, with the messages that a generator yields: a worker's number and bytes; None: there is none."""

    def __init__(self, workers, messages):
        self.workers, self.messages = workers, messages

    def receive(self, seconds):
        item = next(self.messages)
        if item is None:
            connection.time.sleep(seconds)
        return item

    def send(self, rank, data):
        self.workers[rank].receive(0, data)

    def close(self, seconds):
        pass


class Clock:
    """A clock that only `sleep` advances, in place of the module `time`."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def serve_two(monkeypatch, silence, seconds_of, messages, clock=time):
    """Serve two workers that send `messages(server, workers)`; push number n, from 1, takes seconds_of(n)."""
    monkeypatch.setattr(connection, "time", clock)
    monkeypatch.setattr(connection, "TICK", 0.02)
    method = METHODS["asgd"]()
    layout = ParameterLayout(SHAPES, method.min_numel)
    workers = [worker_of(layout, method, number) for number in range(2)]
    start, options = np.zeros(layout.numel, np.float32), {"silence": silence, "now": clock.monotonic}
    server = Server(layout, layout.shards(1)[0], method, start, 2, **options)
    apply = server._apply
    monkeypatch.setattr(
        server, "_apply", lambda update: (clock.sleep(seconds_of(server.statistics.pushes)), apply(update))
    )
    serve(server, ScriptedEnd(workers, messages(server, workers)), [0, 1], timeout=600.0)
    return server


def push(worker):
    gradients = {name: np.ones(part.size, np.float32) for name, part in worker.parameters.items()}
    return worker.number, worker.push(gradients, dict.fromkeys(SHAPES, 0.1))[0]


def test_a_busy_server_notices_a_dead_worker(monkeypatch):
    """What it takes to handle messages is no pause: worker 1 dies after it has joined."""

    def messages(server, workers):
        yield from ((worker.number, worker.hello()[0]) for worker in workers)
        while not server.departures and server.statistics.pushes < 40:
            yield push(workers[0])
        yield 0, workers[0].leave()[0]
        while True:
            yield None

    server = serve_two(monkeypatch, 0.5, lambda number: 0.1, messages)
    assert server.departures == {0: "", 1: "no sign of life for 0.5 seconds"}
    assert server.statistics.pushes < 40


@pytest.mark.parametrize("frozen", ["receive", "handle"])
@pytest.mark.parametrize("silence", [2.0, 120.0])
def test_workers_outlive_a_freeze_of_the_whole_job(monkeypatch, silence, frozen):
    """The server then handles what came before it, and hears of the other worker a tenth of `silence` later."""
    clock = Clock()

    def messages(server, workers):
        yield from ((worker.number, worker.hello()[0]) for worker in workers)
        yield from [None] * round(silence / 4.0 / connection.TICK)
        yield push(workers[0])
        clock.sleep(3.0 * silence if frozen == "receive" else 0.0)
        yield push(workers[0])
        yield from [None] * round(silence / 10.0 / connection.TICK)
        yield push(workers[1])
        for worker in workers:
            yield worker.number, worker.leave()[0]

    seconds = 3.0 * silence if frozen == "handle" else 0.0
    server = serve_two(monkeypatch, silence, lambda number: seconds * (number == 2), messages, clock)
    assert server.departures == {0: "", 1: ""}
    assert server.statistics.pushes == 3 and server.statistics.refused == 0


def test_a_worker_whose_push_waits_for_a_busy_server_lives(monkeypatch):
    """A push takes longer than `silence`. MPI may show the other worker's, which came meanwhile, at the second look."""

    def messages(server, workers):
        yield from ((worker.number, worker.hello()[0]) for worker in workers)
        for number in (0, 0, 1):
            yield push(workers[number])
        for worker in workers:
            yield worker.number, worker.leave()[0]

    server = serve_two(monkeypatch, 0.5, lambda number: 1.0 if number == 1 else 0.0, messages)
    assert server.departures == {0: "", 1: ""}
    assert server.statistics.pushes == 3 and server.statistics.refused == 0
