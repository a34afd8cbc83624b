"""Shared code of the elastic jobs and of the scenarios that start them."""

import json
import os
import time
from pathlib import Path

import numpy as np

RANKS, NUMEL = 4, 3000


def gradient_of(pid: int, batch: int) -> np.ndarray:
    """Return a process's gradient of a batch, small whole numbers."""
    return np.random.default_rng([pid, batch]).integers(-2, 3, NUMEL)


class Place:
    """A folder in which the processes of a job write down what happens.

    Args:
        folder: Has the files `hosts`, which the discovery script prints, and `events`.
        hvd: Knows rank and world size.
    """

    def __init__(self, folder: Path, hvd):
        self.folder, self._hvd = folder, hvd

    def say(self, what: str, state) -> None:
        """Write a line to the process that started this job."""
        told = {"what": what, "time": time.time(), "size": self._hvd.size(), "batch": state.batch}
        told |= {"kills": state.kills, "pid": os.getpid()}
        with open(self.folder / "events", "a") as file:
            file.write(json.dumps(told) + "\n")

    def replace_hosts(self) -> None:
        """Have the discovery script name as many hosts more as have failed."""
        hosts = (self.folder / "hosts").read_text().split()
        more = [f"127.{'0' * (len(hosts) + number)}1:1" for number in range(RANKS - self._hvd.size())]
        (self.folder / "next").write_text("\n".join([*hosts, *more]) + "\n")
        (self.folder / "next").rename(self.folder / "hosts")


def put_in(events: list[dict], last: int) -> np.ndarray:
    """Return the sum of all gradients that commits hold, float64[NUMEL]; `last`: the batch of the last one.

    Every process has told of each world that it began. What a world did after the batch at which the next one begins
    was undone.
    """
    worlds: dict[tuple[int, int], tuple[int, set[int]]] = {}  # in the order in which they began
    for one in (one for one in events if one["what"] == "begin"):
        worlds.setdefault((one["kills"], one["size"]), (one["batch"], set()))[1].add(one["pid"])
    begun = list(worlds.values())
    ends = [begin for begin, _ in begun[1:]] + [last]
    total = np.zeros(NUMEL)
    for (begin, pids), end in zip(begun, ends, strict=True):
        for batch in range(begin + 1, end + 1):
            total += sum(gradient_of(pid, batch) for pid in pids)
    return total
