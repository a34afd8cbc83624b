"""Announcement of a rank that waits for the others between two steps, in the presence sum that starts a step.

Ranks that check presence before they send payloads see the announcement, and all ranks raise at once. In a step whose
payloads go into one all-reduce they do not check it first, and wait until the announcing rank, which raises, ends.
"""

from collections.abc import Sequence

MOST_RANKS = 1 << 16  # more than there ever are: the sum of presence counts ranks modulo this number
STEP_MODULUS = 1 << 18  # ranks compare the remainders of their step numbers, whose squares add up exactly in float64
BETWEEN_STEPS = float(MOST_RANKS**2)  # added to the float64 sum by a rank that waits between two steps
REASON_BYTES = 512  # of the message in which a rank says why it waits for the others
WAITS = {  # why a rank waits between two steps, and in which call
    "start": "the first step",
    "step": "load_state_dict(), reset() or a new step, with a step under way",
    "load": "load_state_dict()",
    "sum": "state_dict(summed=True)",
}


def reason_message(why: str, text: str = "") -> bytes:
    """Return the message of a rank that waits for the others. why: a key of WAITS."""
    return f"{why} {text}".encode()[:REASON_BYTES].ljust(REASON_BYTES)


def texts_of(messages: Sequence[bytes], why: str) -> list[str]:
    """Return the texts in all ranks' messages; RuntimeError unless all ranks wait in the same call."""
    answers = [message.decode(errors="ignore").rstrip().partition(" ") for message in messages]
    reasons = [reason for reason, _, _ in answers]
    if set(reasons) != {why}:
        first = {reason: reasons.index(reason) for reason in reasons}
        calls = "; ".join(f"rank {rank} is in {WAITS.get(reason, reason)}" for reason, rank in first.items())
        raise RuntimeError(
            f"hvd_sparse: the ranks wait for each other in different calls: {calls}. Make the same calls on every rank "
            "between optimizer steps. After an error within a step, first end it on every rank, in PyTorch with "
            "optimizer.synchronize()"
        )
    return [text for _, _, text in answers]


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
