"""The configuration check: ranks compare their descriptions of models and settings before they exchange payloads."""

import hashlib
from collections.abc import Iterable, Sequence

AGREE_SECONDS = 600  # how long a rank waits for the others in a check
DIGEST_BYTES = 32


def digest(lines: Iterable[str]) -> bytes:
    """Return 32 bytes that stand for the lines."""
    return hashlib.sha256("\n".join(lines).encode()).digest()


def explain_difference(descriptions: Sequence[Sequence[str]]) -> str:
    """Say how the ranks' descriptions, a list of lines a rank, differ from that of rank 0."""
    reasons = []
    for rank, lines in enumerate(descriptions):
        only_first = [line for line in descriptions[0] if line not in lines]
        only_here = [line for line in lines if line not in descriptions[0]]
        if only_first or only_here:
            reasons.append(f"rank {rank} has {_some(only_here)} where rank 0 has {_some(only_first)}")
    if not reasons:
        reasons.append("the same lines stand in another order")
    return (
        "hvd_sparse: the ranks do not agree on model or settings: " + "; ".join(reasons) + ". Build the same model and "
        "the same compression on every rank."
    )


def check_failed(seconds: float) -> str:
    """Say what it means if the other ranks have not answered for so long."""
    return (
        "hvd_sparse: the other ranks did not take part in the first exchange of this compression, or in loading its "
        f"state, within {seconds:.0f} s. Every rank must build its compressions in the same order, and call reset() or "
        "load_state_dict() like the others"
    )


def _some(lines: list[str], most: int = 3) -> str:
    if not lines:
        return "nothing"
    shown = ", ".join(f"'{line}'" for line in lines[:most])
    return shown + (f" and {len(lines) - most} more" if len(lines) > most else "")
