"""How long a rank waits for the others, unless an argument says otherwise."""

import os
import threading


def timeout(text: str) -> float:
    """Return the number of seconds that HVD_SPARSE_TIMEOUT has; ValueError unless it is above 0 and finite."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < threading.TIMEOUT_MAX:
        raise ValueError(f"HVD_SPARSE_TIMEOUT must be a number of seconds above 0, and finite; got {text!r}")
    return seconds


TIMEOUT_SECONDS = timeout(os.environ.get("HVD_SPARSE_TIMEOUT", "600"))
