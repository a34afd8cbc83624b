"""A server that a debugger or a paused machine stops does not count its workers as dead."""

import time

import numpy as np

from hvd_sparse.parameter_server import METHODS, ParameterLayout, Server, Worker
from hvd_sparse.parameter_server.connection import PAUSE, serve
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


def test_workers_outlive_a_pause_of_their_server():
    method = METHODS["gd_async"](density=0.1, min_numel=0)
    layout = ParameterLayout(SHAPES, method.min_numel)
    start = np.zeros(layout.numel, np.float32)
    worker = Worker(
        0, layout, method, {name: np.zeros(np.prod(shape), np.float32) for name, shape in SHAPES.items()}, 1, 7
    )
    server = Server(layout, layout.shards(1)[0], method, start, 1, silence=0.2)
    serve(server, PausedEnd(worker, 2 * PAUSE), [0], timeout=5.0)
    assert server.departures == {0: ""} and server.statistics.pushes == 2 and server.statistics.refused == 0
