"""The statistics of an asynchronous run, as a session returns them."""

from collections import Counter

import numpy as np

from hvd_sparse.parameter_server.connection import Connection
from hvd_sparse.parameter_server.server import first_reasons
from hvd_sparse.parameter_server.worker import Worker
from hvd_sparse.traffic import FeedbackStats, RunStats, SessionStats, StepStats, report


def summary(connection: Connection, last: Counter, servers: list[dict], seconds: float) -> SessionStats:
    """Return `stats()` of a worker's session. last: see `own_stats`. servers: their descriptions."""
    worker, traffic = connection.worker, connection.worker.traffic
    dense, elements = traffic.pushes * worker.dense_bytes, traffic.pushes * worker.layout.numel
    model = _model_bytes(worker)
    return {
        **own_stats(connection, last),
        "pushes": traffic.pushes,
        "bytes_up": traffic.bytes_up,
        "bytes_down": traffic.bytes_down,
        "bytes_model": model,
        "ratio_up": _ratio(dense, traffic.bytes_up),
        "ratio_down": _ratio(dense, traffic.bytes_down - model),
        "density_up": traffic.entries_up / elements if elements else 1.0,
        "density_down": traffic.entries_down / elements if elements else 1.0,
        "repeated": traffic.repeated,
        "non_finite": traffic.non_finite,
        "seconds": seconds,
        "seconds_waiting": connection.waited,
        "all": of_all_workers(servers),
    }


def own_stats(connection: Connection, last: Counter) -> FeedbackStats:
    """Return the part of a worker's statistics that compressors have too, for which no server is asked.

    last: what the last push, and the answer that it waited for, have added to the counts.
    """
    worker, every = connection.worker, connection.counts()
    every["bytes_down"] -= _model_bytes(worker)
    return {
        "steps": worker.traffic.pushes,
        "step": _report(worker, last),
        "total": _report(worker, every),
        "residual_norm": float(np.linalg.norm(worker.residual)),
    }


def of_all_workers(servers: list[dict]) -> RunStats:
    """Return the entry "all" of `stats()`, from the descriptions of all servers."""
    first = servers[0]  # all servers receive the same pushes
    longest = max(server["seconds"] for server in servers)
    return {
        "pushes": first["pushes"],
        "updates_per_second": first["pushes"] / longest,
        "staleness": {int(stale): count for stale, count in first["staleness"].items()},
        "server_bytes": sum(server["memory_bytes"] for server in servers),
        "bytes_in": sum(server["bytes_in"] for server in servers),
        "bytes_out": sum(server["bytes_out"] for server in servers),
        "refused": sum(server["refused"] for server in servers),
        "repeated": sum(server["repeated"] for server in servers),
        "departures": first_reasons({int(rank): why for rank, why in one["departures"].items()} for one in servers),
    }


def _report(worker: Worker, counts: Counter) -> StepStats:
    """Convert counts to an entry of `stats()`; without a push, what the start has sent does not count."""
    pushes = counts["pushes"]
    sent = counts["bytes_up"] if pushes else 0
    counters = Counter(dense_bytes=pushes * worker.dense_bytes, elements=pushes * worker.layout.numel)
    counters.update(payload_bytes=sent, surplus_bytes=counts["bytes_down"] - sent)
    counters.update(sent=counts["entries_up"], exchange=counts["waited"])
    return report(counters, ("exchange",))


def _model_bytes(worker: Worker) -> int:
    """Return the bytes of the whole model in the first answer."""
    return min(worker.dense_bytes, worker.traffic.bytes_down)


def _ratio(dense: int, size: int) -> float:
    """Return how many times fewer bytes than dense ones these are; 1.0 before there are any."""
    return dense / size if dense and size else 1.0
