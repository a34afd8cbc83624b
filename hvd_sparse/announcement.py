"""Announcement of a rank that waits for the others between two steps, in the presence sum that starts a step.

Ranks that check presence before they send payloads see the announcement, and all ranks raise at once. In a step whose
payloads go into one all-reduce they do not check it first, and wait until the announcing rank, which raises, ends.
"""

MOST_RANKS = 4096
STEP_MODULUS = 1 << 20  # ranks compare the remainders of their step numbers, whose squares add up exactly in float64
BETWEEN_STEPS = float(MOST_RANKS**2)  # added to the float64 sum by a rank that waits between two steps


def check_all_between_steps(total: float, world_size: int) -> None:
    """Raise RuntimeError unless all ranks wait for each other between two steps."""
    if total // BETWEEN_STEPS < world_size:
        raise RuntimeError(ranks_apart(int(total // BETWEEN_STEPS), world_size))


def ranks_apart(waiting: int, world_size: int) -> str:
    """Return the error message for `waiting` ranks that wait between two steps while the others are in a step."""
    return f"hvd_sparse: {waiting} of {world_size} {RANKS_APART}"


RANKS_APART = (
    "ranks called load_state_dict(), reset() or state_dict(summed=True), while others have begun a step. Call these on "
    "every rank, between optimizer steps. If all ranks call them, because of an error that some had before the first "
    "gradient: end the step on every rank first, in PyTorch with optimizer.synchronize()"
)
