"""Asynchronous training with dual-way sparsification (DGS): servers, workers and their messages, without any framework.

Training scripts import `hvd_sparse.torch.asynchronous` or `hvd_sparse.tensorflow.asynchronous`.
"""

from hvd_sparse.parameter_server.layout import ParameterLayout
from hvd_sparse.parameter_server.methods import (
    ASGD,
    DGS,
    METHODS,
    MSGD,
    DCTAsync,
    DGCAsync,
    GradientDroppingAsync,
    Method,
)
from hvd_sparse.parameter_server.server import Server
from hvd_sparse.parameter_server.simulation import Simulation, by_speed, in_turn
from hvd_sparse.parameter_server.transport import InProcessNetwork, MPIEndpoint
from hvd_sparse.parameter_server.worker import ServerRefused, Worker

__all__ = [
    "ASGD",
    "DGS",
    "METHODS",
    "MSGD",
    "DCTAsync",
    "DGCAsync",
    "GradientDroppingAsync",
    "InProcessNetwork",
    "MPIEndpoint",
    "Method",
    "ParameterLayout",
    "Server",
    "ServerRefused",
    "Simulation",
    "Worker",
    "by_speed",
    "in_turn",
]
