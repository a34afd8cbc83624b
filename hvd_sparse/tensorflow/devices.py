"""Where the error feedback of a compressor lives: beside the variables on a GPU, or on the CPU."""

import contextlib
from collections.abc import Iterable

import tensorflow as tf

from hvd_sparse.algorithms import Algorithm
from hvd_sparse.frames import warn
from hvd_sparse.library import why_no_gpu

CPU = "CPU:0"
SELECTIONS = ("tensor", "model")  # whose operators have GPU kernels


def place_buffers(algorithm: Algorithm, variables: Iterable[tf.Variable], warns: bool = False) -> str:
    """Return the device for the error feedback: the GPU of all variables, or the CPU.

    A GPU is chosen if all variables are on the same one, the operators were built for it, and every operator of the
    method has a GPU kernel. In a graph of TensorFlow 1, where variables are placed later, it is the CPU. warns: warn if
    gradients of variables on a GPU are compressed on the CPU.
    """
    places = {variable.device for variable in variables}
    device = places.pop() if len(places) == 1 else ""
    if not _is_gpu(device) or not tf.compat.v1.executing_eagerly_outside_functions():
        return CPU
    why = _why_not(algorithm, device)
    if why and warns:
        warn(f"hvd_sparse: the variables are on a GPU, but their gradients cross to the CPU and back: {why}")
    return CPU if why else device


def beside(device: str) -> contextlib.AbstractContextManager:
    """Return a context that places operations on large tensors beside buffers on a GPU."""
    return contextlib.nullcontext() if device == CPU else tf.device(device)


def on_host(device: str) -> contextlib.AbstractContextManager:
    """Return a context that keeps operations on a few numbers on the CPU, if the buffers are on a GPU.

    TensorFlow would place them on the GPU, where each takes as long as one on a large tensor.
    """
    return contextlib.nullcontext() if device == CPU else tf.device(CPU)


def _is_gpu(device: str) -> bool:
    return bool(device) and tf.DeviceSpec.from_string(device).device_type == "GPU"


def _why_not(algorithm: Algorithm, device: str) -> str:
    """Return why a method cannot work on a GPU; an empty string if it can."""
    if algorithm.selection not in SELECTIONS:
        return f"Compression.{algorithm.name} works on the CPU in TensorFlow"
    if algorithm.exchange != "gather":
        return f'exchange="{algorithm.exchange}" works on the CPU in TensorFlow'
    return why_no_gpu("tensorflow", _capability(device))


def _capability(device: str) -> tuple[int, int] | None:
    """Return the compute capability of a GPU; None if TensorFlow does not tell."""
    visible = tf.config.get_visible_devices("GPU")
    if not visible:
        return None
    index = tf.DeviceSpec.from_string(device).device_index
    gpu = visible[index] if index < len(visible) else visible[0]  # a GPU may be split into several logical ones
    return tf.config.experimental.get_device_details(gpu).get("compute_capability")
