"""The configuration check: ranks compare their descriptions of models and settings before they exchange payloads."""

import hashlib
from collections.abc import Iterable, Sequence

from hvd_sparse.checks import some
from hvd_sparse.timeouts import TIMEOUT_SECONDS

DIGEST_BYTES = 32
CHECK_FAILED = (
    "hvd_sparse: the other ranks did not take part in the first exchange of this compressor, or in a call for its "
    f"state, within {TIMEOUT_SECONDS:.0f} s (set HVD_SPARSE_TIMEOUT if ranks may be later). Every rank must build its "
    "compressors in the same order, and call reset(), load_state_dict() and state_dict(summed=True) like the others"
)


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
