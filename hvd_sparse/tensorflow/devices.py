"""Where the error feedback of a compressor lives: beside the variables on a GPU, or on the CPU."""

import contextlib
from collections.abc import Iterable

import tensorflow as tf

from hvd_sparse.algorithms import Algorithm
from hvd_sparse.frames import warn
from hvd_sparse.library import why_no_cuda
from hvd_sparse.tensorflow import ops

CPU = "CPU:0"
SELECTIONS = ("tensor", "model")  # whose operators have GPU kernels


def place_buffers(algorithm: Algorithm, variables: Iterable[tf.Variable], warns: bool = False) -> str:
    """Return the device for the error feedback: the GPU of all variables, or the CPU.

    A GPU is chosen if all variables are on it, the operators run there, and every operator of the method has a GPU
    kernel. In a graph of TensorFlow 1, where variables are placed later, it is the CPU. warns: warn if gradients of
    variables on a GPU are compressed on the CPU.
    """
    places = {variable.device for variable in variables}
    if not any(map(_is_gpu, places)) or not tf.compat.v1.executing_eagerly_outside_functions():
        return CPU
    why = _why_not(algorithm, places)
    if why and warns:
        warn(f"hvd_sparse: variables are on a GPU, but their gradients cross to the CPU and back: {why}")
    return CPU if why else places.pop()


def beside(device: str) -> contextlib.AbstractContextManager:
    """Return a context that places operations on large tensors beside buffers on a GPU."""
    return contextlib.nullcontext() if device == CPU else tf.device(device)


def on_cpu(device: str) -> contextlib.AbstractContextManager:
    """Return a context that keeps operations on a few numbers on the CPU, if the buffers are on a GPU.

    TensorFlow would place them on the GPU, where each takes as long as one on a large tensor.
    """
    return contextlib.nullcontext() if device == CPU else tf.device(CPU)


def _is_gpu(device: str) -> bool:
    return bool(device) and tf.DeviceSpec.from_string(device).device_type == "GPU"


def _why_not(algorithm: Algorithm, places: set[str]) -> str:
    """Return why a method cannot work beside variables in these places; an empty string if it can."""
    if algorithm.selection not in SELECTIONS:
        return f"Compression.{algorithm.name} works on the CPU in TensorFlow"
    if algorithm.exchange != "gather":
        return f'exchange="{algorithm.exchange}" works on the CPU in TensorFlow'
    if len(places) > 1:
        return f"they are on several devices, {', '.join(sorted(places))}"
    return why_no_cuda("tensorflow") or _failure(*places)


def _failure(device: str) -> str:
    """Return how an operator fails on a GPU, such as one that it was not compiled for; an empty string if it works."""
    try:
        with tf.init_scope(), tf.device(device):
            ops.all_finite(tf.zeros([1])).numpy()
    except tf.errors.OpError as error:
        return f"the kernels do not run on this GPU: {error.message}"
    return ""
