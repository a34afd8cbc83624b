"""Where the error feedback of a compressor lives: beside the variables on a GPU, or on the CPU."""

import contextlib
from collections.abc import Iterable

import tensorflow as tf

from hvd_sparse.algorithms import Algorithm
from hvd_sparse.library import has_cuda

CPU = "CPU:0"
SELECTIONS = ("tensor", "model")  # whose operators have GPU kernels


def place_buffers(algorithm: Algorithm, variables: Iterable[tf.Variable]) -> str:
    """Return the device for the error feedback: the GPU of all variables, or the CPU.

    A GPU is chosen if all variables are on the same one, the operators were built for CUDA, and every operator of the
    method has a GPU kernel: exactly k elements, exchanged by an all-gather. The buckets of a graph of TensorFlow 1,
    whose variables are placed later, are on the CPU.
    """
    places = {variable.device for variable in variables}
    device = places.pop() if len(places) == 1 else ""
    is_on_gpu = bool(device) and tf.DeviceSpec.from_string(device).device_type == "GPU"
    runs_there = algorithm.selection in SELECTIONS and algorithm.exchange == "gather"
    if is_on_gpu and runs_there and tf.compat.v1.executing_eagerly_outside_functions() and has_cuda("tensorflow"):
        return device
    return CPU


def beside(device: str) -> contextlib.AbstractContextManager:
    """Return a context that places operations on large tensors beside buffers on a GPU."""
    return contextlib.nullcontext() if device == CPU else tf.device(device)


def on_host(device: str) -> contextlib.AbstractContextManager:
    """Return a context that keeps operations on a few numbers on the CPU, if the buffers are on a GPU.

    TensorFlow would place them on the GPU, where each takes as long as one on a large tensor.
    """
    return contextlib.nullcontext() if device == CPU else tf.device(CPU)
