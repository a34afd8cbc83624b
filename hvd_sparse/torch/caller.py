"""The optimizer of Horovod that calls a compressor: it knows the reduction."""

import sys


def calling_optimizer(compressor, depth: int = 8):
    """Return the Horovod optimizer that called this compressor, at most `depth` frames up; None if none did."""
    frame = sys._getframe(1)
    for _ in range(depth):
        if frame is None:
            return None
        caller = frame.f_locals.get("self")
        if getattr(caller, "_compression", None) is compressor:
            return caller
        frame = frame.f_back
    return None


def reduces_again(optimizer, depth: int = 12) -> bool:
    """Return whether `optimizer.step()` reduces gradients that `optimizer.synchronize()` has reduced already.

    Between the two no hook has called the compressor. After a step that a loss scaler has skipped, hooks have.
    """
    if not getattr(optimizer, "_synchronized", False) or getattr(optimizer, "_handles", None):
        return False
    frame, called = sys._getframe(1), set()
    for _ in range(depth):
        if frame is None:
            break
        if frame.f_locals.get("self") is optimizer:
            called.add(frame.f_code.co_name)
        frame = frame.f_back
    return {"synchronize", "step"} <= called
