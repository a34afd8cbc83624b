"""What calls a compressor: a backward pass, or the optimizer of Horovod, which knows the reduction."""

from types import FrameType

import torch
from torch.amp.grad_scaler import GradScaler

from hvd_sparse.frames import frames, local


def calling_optimizer(compressor):
    """Return the Horovod optimizer that called this compressor; None if none did."""
    callers = (local(frame, "self") for frame in frames(12))
    return next((caller for caller in callers if getattr(caller, "_compression", None) is compressor), None)


def reduces_again(optimizer) -> bool:
    """Return whether `optimizer.step()` reduces gradients that `optimizer.synchronize()` has reduced already.

    Between the two no hook has called the compressor. After a step that a loss scaler has skipped, hooks have.
    """
    if not getattr(optimizer, "_synchronized", False) or getattr(optimizer, "_handles", None):
        return False
    return all(_running(name, optimizer) for name in ("synchronize", "step"))


def runs_closure(optimizer) -> bool:
    """Return whether `optimizer.step(closure)` is reducing gradients: it will run the closure after that.

    With `skip_synchronize()` it reduces nothing, and a closure may call `synchronize` itself.
    """
    if not getattr(optimizer, "_should_synchronize", False):
        return False
    return any(local(frame, "closure") is not None for frame in _running("step", optimizer))


def runs_backward() -> bool:
    """Return whether a backward pass is running in this thread."""
    return torch._C._current_graph_task_id() >= 0


def stepping_scaler() -> GradScaler | None:
    """Return the scaler whose `step` is running in this thread, or None: it unscales before the optimizer's step."""
    scalers = (local(frame, "self") for frame in frames() if frame.f_code.co_name == "step")
    return next((scaler for scaler in scalers if isinstance(scaler, GradScaler) and scaler.is_enabled()), None)


def _running(name: str, optimizer) -> list[FrameType]:
    """Return the frames in which the optimizer's method of this name is running in this thread."""
    return [frame for frame in frames() if frame.f_code.co_name == name and local(frame, "self") is optimizer]
