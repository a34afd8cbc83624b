"""The statistics of an asynchronous run, as a session returns them."""

from hvd_sparse.parameter_server.server import first_reasons
from hvd_sparse.parameter_server.worker import Worker


def summary(worker: Worker, waited: float, servers: list[dict], seconds: float) -> dict:
    """Combine a worker's traffic with the statistics of all servers."""
    traffic, first = worker.traffic, servers[0]  # all servers receive the same pushes
    departures = first_reasons({int(rank): why for rank, why in one["departures"].items()} for one in servers)
    dense = traffic.pushes * worker.dense_bytes
    model = min(worker.dense_bytes, traffic.bytes_down)  # in the first answer
    longest = max(server["seconds"] for server in servers)
    return {
        "pushes": traffic.pushes,
        "bytes_up": traffic.bytes_up,
        "bytes_down": traffic.bytes_down,
        "bytes_model": model,
        "ratio_up": dense / max(1, traffic.bytes_up),
        "ratio_down": dense / max(1, traffic.bytes_down - model),
        "density_up": traffic.entries_up / max(1, traffic.pushes * worker.layout.numel),
        "density_down": traffic.entries_down / max(1, traffic.pushes * worker.layout.numel),
        "repeated": traffic.repeated,
        "non_finite": traffic.non_finite,
        "seconds": seconds,
        "seconds_waiting": waited,
        "all": {
            "pushes": first["pushes"],
            "updates_per_second": first["pushes"] / longest,
            "staleness": {int(stale): count for stale, count in first["staleness"].items()},
            "server_bytes": sum(server["memory_bytes"] for server in servers),
            "bytes_in": sum(server["bytes_in"] for server in servers),
            "bytes_out": sum(server["bytes_out"] for server in servers),
            "refused": sum(server["refused"] for server in servers),
            "repeated": sum(server["repeated"] for server in servers),
            "departures": departures,
        },
    }
