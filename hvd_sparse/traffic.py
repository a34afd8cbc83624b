"""Traffic statistics: bytes, elements and seconds, of the last step and in total."""

from collections import defaultdict
from time import perf_counter

TIMERS = ("compress", "exchange", "decompress")


class Traffic:
    """Counters of one compressor on this rank.

    dense_bytes: what Horovod alone would have been handed. payload_bytes: what every collective of a step was handed
    (payloads, tensors sent dense, tokens, votes). surplus_bytes: how much more came from the other ranks; an
    allreduce brings as much as it was handed. elements and sent: gradient elements, and how many of them were sent.
    seconds: in compress, waiting for the exchange, in decompress.
    """

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        """Count from zero."""
        self.steps = 0
        self._step = defaultdict(float)
        self._total = defaultdict(float)
        self._last = defaultdict(float)
        self._inner_seconds = 0.0

    def count(self, **counts: int) -> None:
        """Add to the counters, by name, of the step under way."""
        for name, count in counts.items():
            self._step[name] += count

    @property
    def sent(self) -> int:
        """The elements sent in the step under way."""
        return int(self._step["sent"])

    def timed(self, name: str) -> "Timed":
        """Return what, used with `with`, adds the time of a block to one of TIMERS."""
        return Timed(self, name)

    def end_step(self) -> None:
        """Close the step under way."""
        for name, value in self._step.items():
            self._total[name] += value
        self._last = self._step
        self._step = defaultdict(float)
        self.steps += 1

    def drop_step(self) -> None:
        """Forget a step that was given up."""
        self._step = defaultdict(float)

    def summary(self) -> dict:
        """Return {"steps": int, "step": last step, "total": all}, the two with bytes, ratio, density, seconds."""
        return {"steps": self.steps, "step": report(self._last), "total": report(self._total)}


class Timed:
    """A timed block: its time counts without that of the timed blocks inside it.

    A generator in its place takes longer than what is timed with every gradient.
    """

    __slots__ = ("_name", "_outer_seconds", "_start", "_traffic")

    def __init__(self, traffic: Traffic, name: str):
        self._traffic = traffic
        self._name = name

    def __enter__(self) -> None:
        traffic = self._traffic
        self._outer_seconds, traffic._inner_seconds = traffic._inner_seconds, 0.0
        self._start = perf_counter()

    def __exit__(self, *raised) -> None:
        traffic, elapsed = self._traffic, perf_counter() - self._start
        traffic._step[self._name] += elapsed - traffic._inner_seconds
        traffic._inner_seconds = self._outer_seconds + elapsed


def report(counters) -> dict:
    """Turn raw counters into what `stats()` shows; ratio and density are 1.0 where nothing was compressed."""
    dense_bytes, payload_bytes = int(counters["dense_bytes"]), int(counters["payload_bytes"])
    return {
        "dense_bytes": dense_bytes,
        "payload_bytes": payload_bytes,
        "received_bytes": payload_bytes + int(counters["surplus_bytes"]),
        "ratio": dense_bytes / payload_bytes if payload_bytes else 1.0,
        "density": counters["sent"] / counters["elements"] if counters["elements"] else 1.0,
        "seconds": {name: counters[name] for name in TIMERS},
    }
