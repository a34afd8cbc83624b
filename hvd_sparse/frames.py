"""The functions that are running in this thread: Horovod tells a compressor neither parameter nor optimizer."""

import sys
import warnings
from types import FrameType

TRAINERS = {"lightning", "pytorch_lightning", "accelerate", "transformers"}
LIBRARIES = {"hvd_sparse", "horovod", "torch", "tensorflow", "keras", "tf_keras", *TRAINERS}  # around a user's line


def frames(depth: int = 30) -> list[FrameType]:
    """Return the frames of the functions around the caller of this one, at most so many, the innermost first.

    The caller's own frame is left out: it would refer to itself, and keep alive what the others refer to, such as
    gradients, until Python's garbage collector runs.
    """
    found: list[FrameType] = []
    frame = sys._getframe(1).f_back
    while frame is not None and len(found) < depth:
        found.append(frame)
        frame = frame.f_back
    return found


def local(frame: FrameType, name: str):
    """Return a local variable of a running function, None if it has none of that name.

    Up to Python 3.12, a frame copies all its variables when one is read, and the copies live as long as the function
    runs: so no other frame is asked.
    """
    code = frame.f_code
    if name in code.co_varnames or name in code.co_cellvars or name in code.co_freevars:
        return frame.f_locals.get(name)
    return None


def warn(message: str) -> None:
    """Give a UserWarning at the innermost line that a user wrote."""
    around = frames(100)  # a traced function of TensorFlow has many
    levels = (level for level, frame in enumerate(around) if _is_users(frame))
    warnings.warn(message, stacklevel=2 + next(levels, len(around) - 1))


def _is_users(frame: FrameType) -> bool:
    """Return whether a function is not this package's, Horovod's, a framework's, or one that TensorFlow generated."""
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return package not in LIBRARIES and "__autograph_generated_file" not in frame.f_code.co_filename
