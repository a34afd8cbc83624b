"""The functions that are running in this thread: Horovod tells a compressor neither parameter nor optimizer."""

import sys
from collections.abc import Iterator
from types import FrameType


def frames(depth: int = 30) -> Iterator[FrameType]:
    """Yield the frames of the calling functions, at most so many, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(depth):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
