"""A rank that waits for the others between two steps announces it in the sum that begins a step.

Ranks that are in a step see the announcement, and all ranks raise at once; otherwise each would wait for the other.
"""

MOST_RANKS = 4096
BETWEEN_STEPS = float(MOST_RANKS**2)  # in the sum, float64, of a rank that waits for the others between two steps


def refuse_apart(total: float, ranks: int) -> None:
    """Raise RuntimeError unless all ranks wait for each other between two steps."""
    if total // BETWEEN_STEPS < ranks:
        raise RuntimeError(ranks_apart(int(total // BETWEEN_STEPS), ranks))


def ranks_apart(waiting: int, ranks: int) -> str:
    """Say what it means if so many ranks wait for the others between two steps, while others are in a step."""
    return f"hvd_sparse: {waiting} of {ranks} {RANKS_APART}"


RANKS_APART = (
    "ranks called load_state_dict() or reset(), while others have begun a step. Call these on every rank, between "
    "optimizer steps"
)
