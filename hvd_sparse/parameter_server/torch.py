"""Asynchronous training for PyTorch (DGS: Yan et al., 2020): `connect`, a session, and the worker's optimizer.

    session = connect(model, DGS(density=0.01, momentum=0.7))
    if not session.is_worker:                    # with servers="colocated" all ranks are workers
        session.serve()
    else:
        optimizer = session.optimizer(lr=0.1)
        ...                                      # an ordinary loop
        session.close()

Each worker has its own buffers, such as the running statistics of batch normalisation. When a worker sends them, the
first server moves its average by 1 / workers towards them; `global_state_dict` returns the average. Integer buffers,
such as batch counts, and buffers that appear or change their size after `connect` come from the worker that calls it.
"""

import copy
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

from hvd_sparse.checks import check_keys, check_number, checked_integer
from hvd_sparse.frames import warn
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
from hvd_sparse.parameter_server.worker import ServerRefused
from hvd_sparse.torch.parameters import NamedParameters, named

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
    "TorchSession",
    "connect",
]


def connect(
    model: NamedParameters,
    method: Method,
    *,
    servers: int | Literal["colocated"] = 1,
    threads: int = 1,
    overlap: bool = False,
    restore: str | None = None,
    timeout: float = TIMEOUT,
    silence: float | None = SILENCE,
    communicator: Any = None,
) -> "TorchSession":
    """Join an asynchronous run with this rank's model; call it on every rank.

    Workers wait until the servers have sent the parameters.

    Args:
        model: A module, or its named parameters. Parameters that need no gradient do not change: they must be equal on
            all ranks. The others train in float32, whatever their type.
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
        TypeError: `method` is none of these, or another argument has the wrong type.
        TimeoutError: The servers do not answer.
        OSError: The file `restore` cannot be read.
        RuntimeError: A session is open on this communicator, or MPI lacks MPI_THREAD_MULTIPLE.
        ImportError: mpi4py is not installed.
    """
    options = {"servers": servers, "threads": threads, "overlap": overlap, "restore": restore}
    return TorchSession(model, method, timeout=timeout, silence=silence, communicator=communicator, **options)


class TorchSession(Session):
    """A rank's part in a run; see `connect`."""

    def __init__(self, model: NamedParameters, method: Method, **options):
        self.model = model if isinstance(model, torch.nn.Module) else None
        parameters = named(model, "model")
        self.tensors = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._frozen = {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}
        self._has_warned = False
        self._versions: dict[str, int] = {}  # PyTorch's counts of changes, as far as they are the session's
        names = {id(parameter): name for name, parameter in self.tensors.items()}
        for name, parameter in self.tensors.items():
            if names[id(parameter)] != name:
                raise ValueError(f"{name} and {names[id(parameter)]} are one parameter: give it under one name")
            if not parameter.is_floating_point():
                raise ValueError(f"parameters must be of real numbers, got {name} of {parameter.dtype}")
        arrays = _as_arrays(self.tensors)
        self._sent = _as_arrays(self._buffers())  # the buffers that are averaged, as they were last sent
        method = checked_method(method, self.tensors.items())
        super().__init__(arrays, method, self._sent, map(_as_float32, self._frozen.values()), **options)
        if self.is_worker:
            self._join({name: array.reshape(-1) for name, array in arrays.items()})

    def _take_model(self) -> None:
        """Take over the servers' parameters and buffers."""
        self.synchronize()
        self._versions = {name: parameter._version for name, parameter in self.tensors.items()}
        if self._sent:
            averages = self._split(self._averages())
            with torch.no_grad():
                for name, buffer in self._averaged().items():
                    buffer.copy_(averages[name])
            self._sent |= _as_arrays(self._averaged())

    def optimizer(self, params=None, *, lr: float, weight_decay: float = 0.0) -> "AsynchronousOptimizer":
        """Return the optimizer of a worker.

        Args:
            params: Parameters or parameter groups, as in `torch.optim`; None: all parameters of the session.
            lr: Learning rate, at least 0.
            weight_decay: Coefficient of weight decay, at least 0.

        Returns:
            The optimizer; its `step` pushes an update.

        Raises:
            TypeError: A value is not a number.
            ValueError: A value is below 0 or not finite, or a parameter is not in the session.
            RuntimeError: This rank is no worker, or has left the run.
        """
        return AsynchronousOptimizer(self, params, lr, weight_decay)

    def _updated(self, names: set[str]) -> None:
        """Copy changed values into the parameters that do not share memory with the worker."""
        unchanged = {name for name, version in self._versions.items() if version == self.tensors[name]._version}
        with torch.no_grad():
            for name in names:
                parameter, array = self.tensors[name], self.worker.parameters[name]
                if parameter.data_ptr() != array.ctypes.data:
                    parameter.copy_(torch.from_numpy(array).view(parameter.shape))
                else:  # autograd then refuses a backward pass through what was computed before the change
                    torch.autograd.graph.increment_version(parameter)
        self._versions |= {name: self.tensors[name]._version for name in unchanged | names}  # views share their counts

    def _check_parameters(self) -> None:
        """Raise ValueError if a parameter trains in vain; warn, once, if one was changed unseen by the servers."""
        unfrozen = [name for name, parameter in self._frozen.items() if parameter.grad is not None]
        if unfrozen:
            raise ValueError(
                f"{', '.join(unfrozen[:3])} did not require gradients at connect(), and the servers do not train them: "
                "set requires_grad before connect(), or close this session and open another"
            )
        changed = [name for name, parameter in self.tensors.items() if parameter._version != self._versions[name]]
        if changed and not self._has_warned:
            self._has_warned = True
            warn(
                f"hvd_sparse: {', '.join(changed[:3])} changed outside the session, as by load_state_dict, clamp_ or "
                "Embedding(max_norm=...). The servers do not get such changes: load before connect(), or pass restore="
            )

    def share_buffers(self) -> None:
        """Send this worker's floating-point buffers into the average, as its optimizer does every ten steps.

        These are the buffers that the model had at `connect`, without those of `persistent=False`. One that is gone or
        has another size since is sent as it was before. Nothing is sent if none has changed since they were last sent.

        Raises:
            RuntimeError: This rank is no worker, or has left the run.
        """
        if self._sent:
            self._sent |= _as_arrays(self._averaged())
            self._share(flattened(self._sent))

    def global_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the servers' current model, for a checkpoint or for evaluation in another model.

        A worker sends its own buffers into the average first, as `share_buffers` does.
        Do not load it into the model that trains: until `close`, its parameters must be those that servers sent.

        Returns:
            For a module, a `state_dict` with buffers averaged over workers; for named parameters, the parameters.
            Buffers that have appeared or changed their size since `connect` are those of this rank.

        Raises:
            TimeoutError: The servers do not answer; likewise the other exceptions of `synchronize`.
        """
        if self.is_worker:
            self.share_buffers()
        arrays, averages = self._state()
        tensors = {
            name: torch.tensor(array, dtype=self.tensors[name].dtype, device="cpu") for name, array in arrays.items()
        }
        if self.model is None:
            return tensors
        tensors |= self._split(averages)
        by_tensor = {id(tensor): tensors[name] for name, tensor in {**self.tensors, **self._averaged()}.items()}
        whole = self.model.state_dict(keep_vars=True)  # a shared parameter has several names there
        return {name: by_tensor[id(value)] if id(value) in by_tensor else _copy(value) for name, value in whole.items()}

    def _split(self, averages: np.ndarray) -> dict[str, torch.Tensor]:
        """Return the averaged buffers of a flat vector, by name, of their types and shapes.

        A buffer that rounds to its average, in float32, is returned as it is.
        """
        found = {name: _copy(buffer).cpu() for name, buffer in self._averaged().items()}
        for name, part in other_buffers(averages, self._sent | _as_arrays(found)).items():
            if name in found:
                found[name].copy_(torch.from_numpy(part.copy()).view(found[name].shape))
        return found

    def _averaged(self) -> dict[str, torch.Tensor]:
        """Return the buffers that are averaged: those that the model had at connect and that still have their size."""
        sizes = {name: array.size for name, array in self._sent.items()}
        return {name: buffer for name, buffer in self._buffers().items() if sizes.get(name) == buffer.numel()}

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return the floating-point buffers that are in the model's `state_dict` now; not persistent=False."""
        if self.model is None:
            return {}
        saved = {id(tensor) for tensor in self.model.state_dict(keep_vars=True).values()}
        found = self.model.named_buffers()
        return {name: buffer for name, buffer in found if buffer.is_floating_point() and id(buffer) in saved}


class AsynchronousOptimizer(torch.optim.Optimizer):
    """Pushes an update in `step`, and applies the servers' answer; made by `TorchSession.optimizer`.

    Learning-rate schedulers and `torch.amp.GradScaler` work as usual: a skipped step is not pushed. Groups have lr and
    weight_decay, which may change from step to step; the method has the momentum. `state_dict` has the worker's
    memory (residual, velocity, thresholds), method and step. Gradients of any type and device are converted to float32
    on the CPU; elements that are not finite count as zero, see `TorchSession.stats`.

    Args:
        session: The worker's session.
        params: Parameters or parameter groups, as in `torch.optim`; None: all parameters of the session.
        lr: Learning rate, at least 0.
        weight_decay: Coefficient of weight decay, at least 0.

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is below 0 or not finite, or a parameter is not in the session.
        RuntimeError: This rank is no worker, or has left the run.
    """

    def __init__(self, session: TorchSession, params, lr: float, weight_decay: float):
        _check_group({"lr": lr, "weight_decay": weight_decay})
        self.session = session
        self._names = {id(parameter): name for name, parameter in session.tensors.items()}
        super().__init__(
            list(session.tensors.values()) if params is None else params, {"lr": lr, "weight_decay": weight_decay}
        )

    def add_param_group(self, param_group: dict) -> None:
        """Add a group of parameters, as `torch.optim.Optimizer` does.

        Args:
            param_group: A dict with "params", and if they differ from the optimizer's "lr" and "weight_decay".

        Raises:
            ValueError: A parameter was not connected, or is in another group.
        """
        super().add_param_group(param_group)
        strange = [tuple(p.shape) for p in self.param_groups[-1]["params"] if id(p) not in self._names]
        if strange:
            del self.param_groups[-1]
            raise ValueError(f"params must be among those that were connected; of others, the shapes are {strange}")
        self._expose()

    @torch.compiler.disable
    def step(self, closure: Callable | None = None):
        """Push the gradients' update, and apply the servers' answer, or with overlap the previous answer.

        Args:
            closure: None, or a function that computes the gradients anew and returns the loss.

        Returns:
            What `closure` returns; None without one.

        Raises:
            TypeError: A group's learning rate or weight decay is not a number.
            ValueError: A group's learning rate or weight decay is below 0 or not finite, or a parameter that was
                frozen at `connect` has a gradient.
            TimeoutError: The servers do not answer.
            ServerRefused: The servers have stopped, or differ from this worker.
            RuntimeError: This rank has left the run, or the server on it has stopped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.session._check_parameters()
        gradients, lr, weight_decay = {}, dict.fromkeys(self.session.tensors, 0.0), {}
        for group in self.param_groups:
            _check_group(group)
            for parameter in group["params"]:
                name = self._names[id(parameter)]
                lr[name], weight_decay[name] = float(group["lr"]), float(group["weight_decay"])
                if parameter.grad is not None:
                    gradients[name] = _as_float32(parameter.grad).reshape(-1)
        self.session._note(self)
        self.session._push(gradients, lr, weight_decay)
        if self.session.worker.step % SHARE_EVERY == 0:
            self.session.share_buffers()
        return loss

    def state_dict(self) -> dict:
        """Return the state of this worker.

        Returns:
            {"param_groups": ..., "state": ..., "step": int, "method": its name}. The state of a parameter has its
            residual, float32[n], and if the method has them velocity and threshold; these are views: copy them to keep
            them during training.
        """
        worker = self.session.worker
        return {**super().state_dict(), "step": worker.step, "method": worker.method.name}

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore parameter groups and this worker's error feedback.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            TypeError: Its step is no integer.
            ValueError: It is no such state, of another method or model, or not finite.

            If it raises, nothing has changed.
        """
        check_keys(state_dict, ("param_groups", "state"))
        step = checked_integer("the state's step", state_dict.get("step", 0), 0)
        worker, names = self.session.worker, [self._names[id(parameter)] for parameter in self._parameters()]
        kept = [state_dict["state"].get(i, {}) for group in state_dict["param_groups"] for i in group["params"]]
        arrays = {}
        for name, memory in zip(names, kept, strict=False):
            nothing = {kind: np.zeros_like(part) for kind, part in worker.feedback_of(name).items()}
            arrays[name] = {kind: tensor.detach().cpu().numpy() for kind, tensor in memory.items()} or nothing
        worker.check_feedback(arrays, state_dict.get("method"))
        super().load_state_dict(state_dict)  # which checks the number of parameters
        worker.load_feedback(arrays)
        worker.step = step
        self._expose()

    def _expose(self) -> None:
        """Show the worker's error feedback as the state of the parameters, in place."""
        worker = self.session.worker
        for parameter in self._parameters():
            feedback = worker.feedback_of(self._names[id(parameter)])
            self.state[parameter] = {kind: torch.from_numpy(array) for kind, array in feedback.items()}

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


def _check_group(group: dict) -> None:
    """Raise TypeError unless learning rate and weight decay are numbers, ValueError unless finite and at least 0."""
    for name in ("lr", "weight_decay"):
        value = group[name].item() if isinstance(group[name], torch.Tensor) else group[name]
        check_number(name, value, "finite and at least 0", lambda number: number >= 0.0)


def _copy(value: Any) -> Any:
    """Return a copy of an entry of a `state_dict`, which may be any object (`torch.nn.Module.get_extra_state`)."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _as_arrays(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return tensors as `_as_float32` does."""
    return {name: _as_float32(tensor) for name, tensor in tensors.items()}


def _as_float32(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as float32 on the CPU, in row-major order: its own memory where it is that already."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    return tensor.to("cpu", torch.float32).contiguous().numpy()
