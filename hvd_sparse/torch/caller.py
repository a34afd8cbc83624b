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
