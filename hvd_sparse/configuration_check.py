"""The configuration check: ranks compare their descriptions of models and settings before they exchange payloads."""

import hashlib
import os
import threading
from collections.abc import Iterable, Sequence

from hvd_sparse.checks import some

DIGEST_BYTES = 32


def timeout(text: str) -> float:
    """Return the number of seconds that HVD_SPARSE_TIMEOUT has; ValueError unless it is above 0 and finite."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < threading.TIMEOUT_MAX:
        raise ValueError(f"HVD_SPARSE_TIMEOUT must be a number of seconds above 0, and finite; got {text!r}")
    return seconds


CHECK_SECONDS = timeout(os.environ.get("HVD_SPARSE_TIMEOUT", "600"))  # how long a rank waits for the others


def digest(lines: Iterable[str]) -> bytes:
    """Return 32 bytes that stand for the lines."""
    return hashlib.sha256("\n".join(lines).encode()).digest()


def explain_difference(descriptions: Sequence[Sequence[str]]) -> str:
    """Say how the ranks' descriptions, a list of lines a rank, differ from that of rank 0."""
    reasons = []
    first = set(descriptions[0])
    for rank, lines in enumerate(descriptions):
        here = set(lines)
        only_first = [f"'{line}'" for line in descriptions[0] if line not in here]
        only_here = [f"'{line}'" for line in lines if line not in first]
        if only_first or only_here:
            reasons.append(f"rank {rank} has {some(only_here)} where rank 0 has {some(only_first)}")
    if not reasons:
        reasons.append("the same lines stand in another order")
    return (
        "hvd_sparse: the ranks do not agree on model or settings: " + "; ".join(reasons) + ". Build the same model and "
        "the same compressor on every rank."
    )


def check_failed(seconds: float) -> str:
    """Say what it means if the other ranks have not answered for so long."""
    return (
        "hvd_sparse: the other ranks did not take part in the first exchange of this compressor, or in a call for its "
        f"state, within {seconds:.0f} s (set HVD_SPARSE_TIMEOUT if ranks may be later). Every rank must build its "
        "compressors in the same order, and call reset(), load_state_dict() and state_dict(summed=True) like the others"
    )
