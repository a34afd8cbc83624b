"""Runs on links without a limit, which runs of the same job are compared with."""

UNLIMITED = "none"  # the rate of a run whose links have no limit
WARM = "warm"  # what a worker prints when the network can be limited
SAME = ("framework", "model", "hosts", "ranks_per_host", "method", "batch_size", "session")


def without_limit(run: dict, runs: list[dict]) -> dict | None:
    """Return the run of the same job without a limit, measured in the same session; None if there is none.

    Two sessions may have had machines of different speeds, so their runs say nothing about the network. A run without
    a session has none in common with another one.
    """
    if not run.get("session"):
        return None
    free = (one for one in runs if one["rate"] == UNLIMITED)
    return next((one for one in free if all(one.get(key) == run.get(key) for key in SAME)), None)
