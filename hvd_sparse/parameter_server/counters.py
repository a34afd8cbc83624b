"""What a worker counts; `summary` makes statistics of it."""

from dataclasses import dataclass


@dataclass
class PushCounters:
    """A worker's counters; bytes include message headers."""

    pushes: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    entries_up: int = 0
    entries_down: int = 0
    repeated: int = 0
    non_finite: int = 0
