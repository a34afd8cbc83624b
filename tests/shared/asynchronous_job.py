"""Shared code of the jobs of test_asynchronous_jobs.py: all workers of a run train a linear regression in NumPy.

Each rank of a job writes to its own file, so that lines of several ranks do not mix.
"""

import os
import sys

import numpy as np

from hvd_sparse.parameter_server import DGS
from hvd_sparse.parameter_server.session import Session

SHAPES = {"weight": (20, 5), "bias": (5,)}
LR, NOISE = 0.02, 0.1


def open_console(rank):
    """Redirect this process's output to its rank's file."""
    console = os.open(f"{os.environ['JOB_OUTPUT']}/{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(console, 1), os.dup2(console, 2)
    sys.stdout.reconfigure(line_buffering=True)


if "OMPI_COMM_WORLD_RANK" in os.environ:
    from mpi4py import MPI

    RANK, RANKS = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    open_console(RANK)


def numbers(seed, shapes=SHAPES):
    """Return an array of normally distributed numbers."""
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def dgs(**settings):
    """Return the method that most jobs use."""
    return DGS(**{"density": 0.1, "momentum": 0.5, "min_numel": 32, **settings})


def predict(theta, x):
    """Return the model's predictions."""
    return x @ theta["weight"] + theta["bias"]


def gradients(theta, random):
    """Return the gradient of the mean squared error on a random batch."""
    x = random.standard_normal((32, 20)).astype(np.float32)
    error = predict(theta, x) - predict(numbers(1000), x) - NOISE * random.standard_normal((32, 5)).astype(np.float32)
    return {"weight": 2 * x.T @ error / 32, "bias": 2 * error.mean(0)}


def loss_of(theta):
    """Return the mean squared error on other data without noise."""
    x = np.random.default_rng(7).standard_normal((2000, 20)).astype(np.float32)
    return float(((predict(theta, x) - predict(numbers(1000), x)) ** 2).mean())


class Job(Session):
    """A rank that trains. Its parameters, in `theta`, start with different numbers on each rank."""

    def __init__(self, method=None, shapes=SHAPES, **options):
        self.theta = numbers(RANK, shapes)
        super().__init__(self.theta, method or dgs(), **{"timeout": 30.0, "silence": None, **options})
        if self.is_worker:
            self._join({name: array.reshape(-1) for name, array in self.theta.items()})
            self.random = np.random.default_rng(100 + RANK)

    def train(self, steps, before=lambda step: None):
        """Take steps; call `before` before each step."""
        for step in range(steps):
            before(step)
            found = {name: array.reshape(-1) for name, array in gradients(self.theta, self.random).items()}
            self._push(found, dict.fromkeys(SHAPES, LR))
        self.synchronize()


def run(steps=60, before=lambda step: None, **options):
    """Train on workers, which print the loss of the servers' parameters; serve on servers."""
    session = Job(**options)
    if session.is_worker:
        with session:
            session.train(steps, before)
            print(f"loss {loss_of(session._state()[0]):.4f} rank {RANK}")
            print("stats", session.stats())
    else:
        print("departures", sorted(session.serve().items()))
    print("ended", RANK)
