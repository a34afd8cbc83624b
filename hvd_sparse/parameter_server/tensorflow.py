"""Asynchronous training for TensorFlow (DGS: Yan et al., 2020): `connect`, a session, and the worker's optimizer.

    session = connect(model, DGS(density=0.01, momentum=0.7))
    if not session.is_worker:                    # with servers="colocated" all ranks are workers
        session.serve()
    else:
        optimizer = session.optimizer(learning_rate=0.1)
        ...                                      # an ordinary loop, with tape.gradient and optimizer.apply_gradients
        session.close()

The model is a Keras 3 model, a built Keras 2 (tf_keras) model, a tf.Module, or a list of variables. Steps run eagerly
or in a `tf.function`; not under jit_compile, nor in Keras' own `fit`.

Each worker has its own buffers: untrained floating-point weights, such as the moving statistics of batch normalisation.
When a worker sends them, the first server moves its average by 1 / workers towards them; `global_variables` returns the
average. Frozen layers do not change.

Unlike float32 parameters of PyTorch on the CPU, variables do not share memory with the worker, which assigns those that
have changed. In both, 16-bit parameters are float32 on the worker.
"""

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from hvd_sparse.checks import check_keys, check_number, checked_integer
from hvd_sparse.parameter_server.methods import (
    ASGD,
    DGS,
    METHODS,
    MSGD,
    DCTAsync,
    DGCAsync,
    GradientDroppingAsync,
    Method,
    checked_method,
)
from hvd_sparse.parameter_server.model_file import flattened, other_buffers
from hvd_sparse.parameter_server.session import SHARE_EVERY, SILENCE, TIMEOUT, Session
from hvd_sparse.parameter_server.tensorflow_feedback import WorkerFeedback
from hvd_sparse.parameter_server.worker import ServerRefused
from hvd_sparse.tensorflow.variables import frozen_variables, trained_and_buffers, unwrapped
from hvd_sparse.weight_decay import WeightDecay, weight_decays

__all__ = [
    "ASGD",
    "DGS",
    "METHODS",
    "MSGD",
    "AsynchronousOptimizer",
    "DCTAsync",
    "DGCAsync",
    "GradientDroppingAsync",
    "Method",
    "ServerRefused",
    "TensorFlowSession",
    "connect",
]

untraced = tf.autograph.experimental.do_not_convert


def connect(
    model: Any,
    method: Method,
    *,
    servers: int | Literal["colocated"] = 1,
    threads: int = 1,
    overlap: bool = False,
    restore: str | None = None,
    timeout: float = TIMEOUT,
    silence: float | None = SILENCE,
    communicator: Any = None,
) -> "TensorFlowSession":
    """Join an asynchronous run with this rank's model; call it on every rank.

    Workers wait until the servers have sent the parameters.

    Args:
        model: A Keras 3 model, a built Keras 2 model, a `tf.Module`, or a list of variables, in the same order on all
            ranks. Paths (Keras 3) or names identify variables, with a number if several have the same name. Variables
            of frozen layers do not change: they must be equal on all ranks. The others train in float32.
        method: `DGS(...)`, `DGCAsync(...)`, `GradientDroppingAsync(...)`, `DCTAsync(...)`, `ASGD()` or `MSGD(...)`, the
            same on all ranks.
        servers: Number of server ranks, the last ones, which do not train; or "colocated": every rank trains, and
            serves a part of the model.
        threads: Number of threads of each rank that serves, up to 16. Each thread serves an equal part of the elements.
        overlap: Apply the answer to a push at the next push, after computing another gradient: faster, and one step
            staler.
        restore: A file that `save` wrote; the servers start from its parameters.
        timeout: Seconds to wait for an answer, or for a worker to join; by default HVD_SPARSE_TIMEOUT of the
            environment, or 600.
        silence: Seconds without a message after which a worker counts as dead; None: never.
        communicator: An mpi4py communicator; None: the world.

    Returns:
        The session: call `optimizer` on a worker (`session.is_worker`), `serve()` on another rank.

    Raises:
        ServerRefused: The ranks differ in model or method.
        ValueError: An argument is out of range.
        TypeError: `method` is none of these, a variable is not floating-point, or an argument has the wrong type.
        TimeoutError: The servers do not answer.
        OSError: The file `restore` cannot be read.
        RuntimeError: A session is open on this communicator, or MPI lacks MPI_THREAD_MULTIPLE.
        ImportError: mpi4py is not installed.
    """
    options = {"servers": servers, "threads": threads, "overlap": overlap, "restore": restore}
    return TensorFlowSession(model, method, timeout=timeout, silence=silence, communicator=communicator, **options)


class TensorFlowSession(Session):
    """A rank's part in a run; see `connect`. `tensors`: {name: tf.Variable}, the trained variables."""

    def __init__(self, model, method: Method, **options):
        self.tensors, self.buffers = trained_and_buffers(model)
        arrays = {name: _as_float32(variable) for name, variable in self.tensors.items()}
        buffers = {name: _as_float32(buffer) for name, buffer in self.buffers.items()}
        self.replaced: set[str] = set()  # variables that have the servers' parameters until the next step
        frozen = map(_as_float32, frozen_variables(model, {**self.tensors, **self.buffers}))
        super().__init__(arrays, checked_method(method, self.tensors.items()), buffers, frozen, **options)
        if self.is_worker:
            self._join({name: array.reshape(-1) for name, array in arrays.items()})

    def _take_model(self) -> None:
        """Take over the servers' parameters and buffers."""
        self.synchronize()
        if self.buffers:
            for name, array in self._split(self._averages()).items():
                self.buffers[name].assign(_like(self.buffers[name], array))

    def optimizer(self, learning_rate, weight_decay: WeightDecay = 0.0) -> "AsynchronousOptimizer":
        """Return the optimizer of a worker.

        Args:
            learning_rate, weight_decay: See `AsynchronousOptimizer`.

        Returns:
            The optimizer; its `apply_gradients` pushes an update.

        Raises:
            TypeError, ValueError, RuntimeError: See `AsynchronousOptimizer`.
        """
        return AsynchronousOptimizer(self, learning_rate, weight_decay)

    def _updated(self, names: set[str]) -> None:
        """Assign what has changed."""
        for name in names:
            self.tensors[name].assign(_like(self.tensors[name], self.worker.parameters[name]))

    def share_buffers(self) -> None:
        """Send this worker's buffers, if they have changed, into the average, as its optimizer does every ten steps.

        Raises:
            RuntimeError: This rank is no worker, or has left the run.
        """
        if self.buffers:
            self._share(flattened({name: _as_float32(buffer) for name, buffer in self.buffers.items()}))

    def global_variables(self) -> dict[str, np.ndarray]:
        """Return the servers' parameters as they are now. A worker sends its buffers first, as by `share_buffers`.

        Returns:
            {name: array} of the variables' types and shapes; of a model, its buffers averaged over workers too.

        Raises:
            TimeoutError: The servers do not answer; likewise the other exceptions of `synchronize`.
        """
        if self.is_worker:
            self.share_buffers()
        arrays, averages = self._state()
        arrays |= self._split(averages)
        return {name: _like({**self.tensors, **self.buffers}[name], array) for name, array in arrays.items()}

    def load_global(self, model=None) -> None:
        """Assign the servers' model as it is now to another model; what is neither trained nor a buffer stays.

        A worker sends its buffers into the average first, as by `share_buffers`.

        Args:
            model: One like the model that was connected, or its variables in the same order. None: this worker's own,
                to evaluate or save it: its parameters come back with the next step, its buffers stay the average.

        Raises:
            ValueError: The variables differ; and the exceptions of `global_variables`.
        """
        arrays = self.global_variables()
        theirs = ours = {**self.tensors, **self.buffers}
        if model is not None:
            tensors, buffers = trained_and_buffers(model)
            theirs = {**tensors, **buffers}
        shapes, others = ([tuple(v.shape) for v in variables.values()] for variables in (ours, theirs))
        if shapes != others:
            raise ValueError(f"model must be like the one that was connected, with shapes {shapes}; got {others}")
        for name, variable in zip(ours, theirs.values(), strict=True):
            variable.assign(arrays[name])
            if variable is self.tensors.get(name):
                self.replaced.add(name)

    def _split(self, averages: np.ndarray) -> dict[str, np.ndarray]:
        """Return the buffers of a flat vector, by name; a buffer that rounds to its average, in float32, as it is."""
        others = other_buffers(averages, {name: _as_float32(buffer) for name, buffer in self.buffers.items()})
        return {name: others.get(name, buffer.numpy()) for name, buffer in self.buffers.items()}


class AsynchronousOptimizer(tf.__internal__.tracking.AutoTrackable):
    """Pushes an update in `apply_gradients`, and takes the servers' answer; made by `TensorFlowSession.optimizer`.

    Momentum is the method's. `iterations`, int64, counts the steps of this worker; the density's schedule goes by it.
    `tf.train.Checkpoint(optimizer=optimizer)` saves iterations and the worker's error feedback; so do `state_dict`
    and `load_state_dict`.

    Args:
        session: The worker's session.
        learning_rate: A number; a variable; a schedule of Keras, called with `iterations`; or any function of them. It
            may be set anew, and is looked up when a step runs, in a `tf.function` too.
        weight_decay: Times the variable, added to its gradient: a number; {name: number}, where variables without a
            number do not decay; or a function of name and variable that returns a number. It may be set anew.

    Raises:
        TypeError, ValueError: The learning rate or a weight decay is no number, below 0, not finite, or of no variable.
        RuntimeError: This rank is no worker, or has left the run.
    """

    def __init__(self, session: TensorFlowSession, learning_rate, weight_decay: WeightDecay):
        self.session = session
        object.__setattr__(self, "_feedback", WorkerFeedback(session))  # not tracked under this name:
        self._track_trackable(self._feedback, name="memory")  # of checkpoints, and of states
        self.iterations = tf.Variable(0, trainable=False, dtype=tf.int64, name="iterations")
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self._names = {id(session.tensors[name]): name for name in session.worker.parameters}

    @property
    def learning_rate(self):
        """What was set."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value) -> None:
        """Set a number of at least 0, a variable, a schedule, or a function of the step."""
        if not callable(value) and not isinstance(unwrapped(value), tf.Variable):
            value = _checked_rate("learning_rate", value)
        self._learning_rate = value

    @property
    def weight_decay(self) -> WeightDecay:
        """What was set."""
        return self._weight_decay

    @weight_decay.setter
    def weight_decay(self, value: WeightDecay) -> None:
        """Set it for all variables; TypeError or ValueError, naming what is wrong."""
        self._decays = weight_decays(value, self.session.tensors.items())
        self._weight_decay = value

    @untraced
    def apply_gradients(self, grads_and_vars: Iterable[tuple]) -> tf.Variable:
        """Push the gradients' update, and apply the servers' answer, or with overlap the one before.

        Args:
            grads_and_vars: Pairs of a gradient, Tensor or IndexedSlices of real numbers, or None, and its variable.
                Elements that are not finite count as zero, see `Session.stats`.

        Returns:
            `iterations`.

        Raises:
            ValueError: A variable was not connected or is there twice, a shape differs, or there is no gradient at all.
            TypeError: A gradient is not of real numbers.
            TimeoutError: The servers do not answer; ServerRefused: they have stopped, or differ from this worker.
            RuntimeError: This rank has left the run, the server on it has stopped, or this is a graph of TF 1.
            tf.errors.OpError: A step within a `tf.function` raised one of these, which it quotes. After ServerRefused
                it is tf.errors.UnknownError, and `TensorFlowSession.close` raises ServerRefused.
        """
        gradients = {}
        for gradient, variable in grads_and_vars:
            name = self._name_of(variable)
            if name in gradients:
                raise ValueError(f"grads_and_vars must have a variable once, got {name} again: add its gradients")
            if gradient is not None:
                gradients[name] = _dense(name, gradient, self.session.tensors[name])
        if not gradients:
            raise ValueError("grads_and_vars must have a gradient, got none: does the loss depend on the variables?")
        names = list(gradients)
        if tf.executing_eagerly():
            self._step(names, *gradients.values())
            return self.iterations
        if not tf.inside_function():
            raise RuntimeError("apply_gradients must be called eagerly or in a tf.function, not in a graph of TF 1")
        handles = [variable.handle for variable in self._touched()]
        # The handles are for the order: what reads or writes these variables before in the graph is done before.
        tf.py_function(lambda *values: self._step(names, *values[len(handles) :]), [*handles, *gradients.values()], [])
        return self.iterations

    def state_dict(self) -> dict:
        """Return the state of this worker.

        Returns:
            {"iterations": int, "method": its name, "memory": {variable: {"residual": float32[n], ...}}}, copies.
        """
        return {
            "iterations": int(self.iterations),
            "method": self.session.method.name,
            "memory": self._feedback.arrays(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Take over what `state_dict` returned.

        Args:
            state: What `state_dict` returned.

        Raises:
            ValueError: It is no such state, of another method or model, or not finite. Nothing has changed then.
        """
        check_keys(state, ("iterations", "memory"))
        iterations = checked_integer("the state's iterations", state["iterations"], 0)
        self._feedback.load(state["memory"], state.get("method"))
        self.iterations.assign(iterations)

    def _step(self, names: list[str], *gradients: tf.Tensor) -> None:
        step, session = int(self.iterations.numpy()), self.session
        lr = dict.fromkeys(session.tensors, self._rate(step))
        session._note(self)
        session.worker.step = step
        session.worker.changed, session.replaced = session.worker.changed | session.replaced, set()
        try:
            session._push({name: g.numpy() for name, g in zip(names, gradients, strict=True)}, lr, self._decays)
        finally:  # a push whose answer is late has been made
            self.iterations.assign(session.worker.step)
        if (step + 1) % SHARE_EVERY == 0:
            session.share_buffers()

    def _rate(self, step: int) -> float:
        rate = self._learning_rate
        if callable(rate):
            rate = rate(tf.constant(step, tf.int64) if hasattr(rate, "get_config") else step)
        return _checked_rate(f"learning_rate, at step {step},", rate)

    def _touched(self) -> list[tf.Variable]:
        """Return the variables that a step reads or writes."""
        rate = unwrapped(self._learning_rate)
        rates = [rate] if isinstance(rate, tf.Variable) else []
        return [self.iterations, *rates, *self.session.tensors.values(), *self.session.buffers.values()]

    def _name_of(self, variable) -> str:
        name = self._names.get(id(unwrapped(variable)))
        if name is None:
            given, known = getattr(variable, "name", variable), ", ".join(self.session.tensors)
            raise ValueError(f"{given!r} is none of the variables that were connected: {known}")
        return name


def _dense(name: str, gradient, variable: tf.Variable) -> tf.Tensor:
    """Return a gradient as float32[n]; TypeError, ValueError if it cannot be that of the variable."""
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else tf.convert_to_tensor(gradient)
    if not values.dtype.is_floating:
        raise TypeError(f"the gradient of {name} must be of real numbers, got {values.dtype.name}")
    values = tf.cast(values, tf.float32)
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.math.unsorted_segment_sum(values, gradient.indices, variable.shape[0])
    if not values.shape.is_compatible_with(variable.shape):
        raise ValueError(f"the gradient of {name} must have shape {variable.shape}, got {values.shape}")
    return tf.reshape(values, [-1])


def _like(variable: tf.Variable, array: np.ndarray) -> np.ndarray:
    """Return a copy in the variable's type and shape; TensorFlow may keep the memory of what it is given."""
    return array.astype(variable.dtype.as_numpy_dtype).reshape(variable.shape)


def _as_float32(variable: tf.Variable) -> np.ndarray:
    """Return a copy of a variable, float32."""
    return np.array(variable.numpy(), np.float32)


def _checked_rate(name: str, value) -> float:
    """Return a number, or a tensor or variable with one, as a float."""
    inner = unwrapped(value)
    number = np.asarray(inner.numpy() if tf.is_tensor(inner) else inner).tolist()
    check_number(name, number, "at least 0 and finite", lambda rate: rate >= 0.0)
    return float(number)
