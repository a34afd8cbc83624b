"""Traffic statistics: bytes, elements and seconds, of the last step and in total."""

from collections import defaultdict
from collections.abc import Collection
from time import perf_counter

from hvd_sparse.traffic import Stats, report


class Traffic:
    """Counters of one compressor on this rank.

    dense_bytes: the bytes that Horovod alone would have sent. payload_bytes: the input bytes of all collectives of a
    step (payloads, dense tensors, tokens, votes). surplus_bytes: the bytes received minus payload_bytes; zero for an
    all-reduce. elements, sent: the number of gradient elements, and how many of them were sent. seconds: the time in
    compress, waiting for the exchange, and in decompress.
    """

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.steps = 0
        self._step = defaultdict(float)
        self._total = defaultdict(float)
        self._last = defaultdict(float)
        self._inner_seconds = 0.0

    def count(self, **counts: float) -> None:
        """Add to the counters of the current step, by name."""
        for name, count in counts.items():
            self._step[name] += count

    def count_gradients(self, arrivals: Collection, token_bytes: int) -> None:
        """Count the gradients of a step, the bytes that Horovod alone would have sent for them, and their tokens."""
        gradients = [arrival.gradient for arrival in arrivals]
        self.count(
            elements=sum(gradient.numel() for gradient in gradients),
            dense_bytes=sum(gradient.nbytes for gradient in gradients),
            payload_bytes=sum(arrival.carries_token for arrival in arrivals) * token_bytes,
        )

    def timed(self, name: str) -> "Timed":
        """Return a context manager that adds the time of its block to one of TIMERS."""
        return Timed(self, name)

    def end_step(self) -> None:
        """Close the current step."""
        for name, value in self._step.items():
            self._total[name] += value
        self._last = self._step
        self._step = defaultdict(float)
        self.steps += 1

    @property
    def skipped(self) -> int:
        """The number of steps that were skipped, as a gradient was not finite."""
        return int(self._total["skipped"])

    def drop_step(self) -> None:
        """Discard the counts of an unfinished step."""
        self._step = defaultdict(float)

    def summary(self) -> Stats:
        """Return {"steps": int, "step": last step, "total": all steps}; the latter two are results of `report`."""
        return {"steps": self.steps, "step": report(self._last), "total": report(self._total)}


class PartOfStep(Traffic):
    """The counters of a step within a step: bytes, elements sent and seconds are those of the whole."""

    def __init__(self, whole: Traffic):
        super().__init__()
        self._whole = whole

    def count(self, **counts: float) -> None:
        """Add to the counters of the whole step."""
        self._whole.count(**counts)

    def count_gradients(self, arrivals: Collection, token_bytes: int) -> None:
        """Count nothing: the whole step counts its gradients."""

    def timed(self, name: str) -> "Timed":
        """Return `Traffic.timed` of the whole."""
        return self._whole.timed(name)


class Timed:
    """A timed block; the time of nested timed blocks is not counted again.

    It is a class because a generator-based context manager would take longer than the timed work of each gradient.
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
