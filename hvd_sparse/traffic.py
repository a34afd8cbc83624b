"""What `stats()` tells of the traffic, in both frameworks."""

TIMERS = ("compress", "exchange", "decompress")


def report(counters, timers=TIMERS) -> dict:
    """Convert raw counters to an entry of `stats()`; ratio and density are 1.0 if nothing was compressed."""
    dense_bytes, payload_bytes = int(counters["dense_bytes"]), int(counters["payload_bytes"])
    return {
        "dense_bytes": dense_bytes,
        "payload_bytes": payload_bytes,
        "received_bytes": payload_bytes + int(counters["surplus_bytes"]),
        "ratio": dense_bytes / payload_bytes if payload_bytes else 1.0,
        "density": counters["sent"] / counters["elements"] if counters["elements"] else 1.0,
        "seconds": {name: counters[name] for name in timers},
    }
