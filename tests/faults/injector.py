"""Injects a fault into a job, at a chosen step and phase of a chosen rank. The package itself has no hooks for it.

A phase is a function of the package, which is wrapped from outside. A fault is {"kind", "rank", "step", "phase",
"entry", "seconds"}. `entry` counts the calls of the phase in the step. The optional "told" is a file that receives the
time of the fault. The fault is an argument, or JSON in the variable HVD_SPARSE_FAULT.
"""

import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

VARIABLE = "HVD_SPARSE_FAULT"
PHASES = {  # module, class or nothing, functions
    "compress": ("hvd_sparse.torch.compression", "SparseCompressor", "compress"),
    "select": ("hvd_sparse.torch.step", "Step", "_start"),
    "exchange": ("hvd_sparse.torch.exchange", "Exchange", "allgather allgather_small"),
    "wait": ("hvd_sparse.torch.exchange", "Pending", "wait"),
    "decompress": ("hvd_sparse.torch.compression", "SparseCompressor", "decompress"),
    "checkpoint": ("hvd_sparse.torch.compressor", "", "gather_state"),
    "file": ("os", "", "replace"),
    "push": ("hvd_sparse.parameter_server.worker", "Worker", "push"),
    "update": ("hvd_sparse.parameter_server.server", "Server", "_push"),
    "stage send": ("hvd_sparse.model_parallel.channel", "Channel", "send"),
    "stage receive": ("hvd_sparse.model_parallel.channel", "Channel", "receive"),
}

GRAPH_PHASES = {  # the same, and the position of the tensor, or of the dict of tensors, with which the phase begins
    "compress": ("hvd_sparse.tensorflow.step", "Step", "build", 1),
    "exchange": ("hvd_sparse.tensorflow.exchange", "Exchange", "allgather", 2),
    "decompress": ("hvd_sparse.tensorflow.compression", "SparseCompressor", "decompress", 1),
}


class Injected(Exception):
    """What a fault of kind "raise" raises."""


class Injector:
    """One fault, once.

    Args:
        fault: What is to happen; None: nothing.
        rank: Of this process.
    """

    def __init__(self, fault: dict | None, rank: int):
        self.fault = fault if fault and fault["rank"] == rank else None
        self.step, self._entries = 0, 0
        if self.fault and self.fault["phase"] in PHASES:
            self._wrap(*PHASES[self.fault["phase"]])

    @classmethod
    def from_environment(cls, rank: int) -> "Injector":
        """Return the injector of the fault that the environment names."""
        return cls(json.loads(os.environ.get(VARIABLE, "null")), rank)

    def begin(self, step: int) -> None:
        """Say which step begins."""
        self.step, self._entries = step, 0

    def enter(self, phase: str, arguments: tuple = ()) -> None:
        """Say that a phase begins; what is to happen in it happens."""
        fault = self.fault
        if fault is None or fault["phase"] != phase or fault["step"] != self.step:
            return
        self._entries += 1
        if self._entries <= fault["entry"]:
            return
        self.fault = None
        self._happen(fault, arguments)

    def _happen(self, fault: dict, arguments: tuple) -> None:
        kind = fault["kind"]
        if "told" in fault:
            Path(fault["told"]).write_text(str(time.time()))
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            command = f"sleep {fault['seconds']}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", command], start_new_session=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "delay":
            time.sleep(fault["seconds"])
        elif kind == "raise":
            raise Injected(f"in {fault['phase']}, step {fault['step']}")
        elif kind == "leave":
            sys.exit(0)
        elif kind == "corrupt":
            payload = next(one for one in arguments if getattr(one, "ndim", 0) == 1 and len(one) > 1)
            payload[fault["bit"] // 8 % len(payload)] ^= 1 << fault["bit"] % 8
        else:
            raise ValueError(f"no fault is named {kind!r}")

    def _wrap(self, module: str, owner: str, names: str) -> None:
        place = importlib.import_module(module)
        place = getattr(place, owner) if owner else place
        for name in names.split():
            setattr(place, name, self._wrapped(getattr(place, name), self.fault["phase"]))

    def _wrapped(self, original, phase: str):
        @functools.wraps(original)
        def wrapped(*arguments, **named):
            """Let the fault happen first, but not in what is no part of a step: the comparison of settings."""
            if not any(isinstance(one, str) and one.startswith("configuration.") for one in arguments):
                self.enter(phase, arguments)
            return original(*arguments, **named)

        return wrapped


class GraphInjector(Injector):
    """The same for TensorFlow, whose graphs call Python no more than once: the tensor passes through the fault."""

    def _wrap(self, *_) -> None:
        phase = self.fault["phase"]
        if phase not in GRAPH_PHASES:
            super()._wrap(*PHASES[phase])
            return
        module, owner, name, position = GRAPH_PHASES[phase]
        place = getattr(importlib.import_module(module), owner)
        setattr(place, name, self._passing(getattr(place, name), phase, position))

    def _passing(self, original, phase: str, position: int):
        import tensorflow as tf

        def happen(array):
            """Let the fault happen when the graph gets here; return the array, or what the fault made of it."""
            array = array.copy()
            self.enter(phase, (array,))
            return array

        def through(tensor):
            """Return the tensor behind the fault."""
            return tf.ensure_shape(tf.numpy_function(happen, [tensor], tensor.dtype), tensor.shape)

        @functools.wraps(original)
        def wrapped(*arguments):
            given = arguments[position]
            passed = {name: through(one) for name, one in given.items()} if isinstance(given, dict) else through(given)
            return original(*arguments[:position], passed, *arguments[position + 1 :])

        return wrapped
