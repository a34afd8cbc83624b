"""What `stats()` tells of the traffic, in both frameworks."""

from collections.abc import Mapping, Sequence
from typing import TypedDict, cast

TIMERS = ("compress", "exchange", "decompress")


class Seconds(TypedDict, total=False):
    """Seconds of a rank's work and waiting. Compressors in TensorFlow and pipelines have none, sessions `exchange`."""

    compress: float
    exchange: float
    decompress: float


class StepStats(TypedDict):
    """Figures of the last step, or of all steps."""

    dense_bytes: int
    payload_bytes: int
    received_bytes: int
    ratio: float
    density: float
    seconds: Seconds


class Stats(TypedDict):
    """What the `stats()` of compressors, sessions and pipelines has in common."""

    steps: int
    step: StepStats
    total: StepStats


class _Fallback(TypedDict):
    rule: str | None
    is_dense: bool
    tensors: int
    payload_bytes: int
    dense_bytes: int


class DenseFallbackStats(_Fallback, total=False):
    """The choice between payloads and dense gradients in the last step; the seconds are there with "measured"."""

    payload_seconds: float | None
    dense_seconds: float | None


class FeedbackStats(Stats):
    """`stats()` of what has error feedback: with the L2 norm of the residuals."""

    residual_norm: float


class CompressionStats(FeedbackStats):
    """`stats()` of a compressor."""

    skipped: int
    dense_fallback: DenseFallbackStats


class RunStats(TypedDict):
    """The part of an asynchronous session's `stats()` that is of all workers."""

    pushes: int
    updates_per_second: float
    staleness: dict[int, int]
    server_bytes: int
    bytes_in: int
    bytes_out: int
    refused: int
    repeated: int
    departures: dict[int, str]


class SessionStats(FeedbackStats):
    """`stats()` of an asynchronous session, on a worker."""

    pushes: int
    bytes_up: int
    bytes_down: int
    bytes_model: int
    ratio_up: float
    ratio_down: float
    density_up: float
    density_down: float
    repeated: int
    non_finite: int
    seconds: float
    seconds_waiting: float
    all: RunStats


class DirectionStats(TypedDict):
    """Messages of a pipeline's stage in one direction."""

    messages: int
    dense_bytes: int
    payload_bytes: int
    sent_bytes: int
    ratio: float
    density: float


class BoundaryStats(TypedDict):
    """`stats()` of a `ThresholdBoundary`."""

    occupancy: float
    mean_occupancy: float
    threshold: float
    batches: int


class StageStats(Stats):
    """`stats()` of a pipeline's stage, without those of its boundaries."""

    forward: DirectionStats
    backward: DirectionStats
    evaluation: DirectionStats
    targets_bytes: int
    occupancy: float


class PipelineStats(StageStats):
    """`stats()` of a pipeline's stage."""

    boundaries: dict[str, BoundaryStats]


def report(counters: Mapping[str, float], timers: Sequence[str] = TIMERS) -> StepStats:
    """Convert raw counters to an entry of `stats()`; ratio and density are 1.0 if nothing was compressed."""
    dense_bytes, payload_bytes = int(counters["dense_bytes"]), int(counters["payload_bytes"])
    return {
        "dense_bytes": dense_bytes,
        "payload_bytes": payload_bytes,
        "received_bytes": payload_bytes + int(counters["surplus_bytes"]),
        "ratio": dense_bytes / payload_bytes if payload_bytes else 1.0,
        "density": counters["sent"] / counters["elements"] if counters["elements"] else 1.0,
        "seconds": cast(Seconds, {name: counters[name] for name in timers}),
    }
