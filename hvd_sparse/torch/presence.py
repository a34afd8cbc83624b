"""The check that all ranks take part in a step: a sum over ranks, started with the step.

An all-gather that meets a rank in hvd.join() kills Horovod's background thread there, and the others wait for ever: it
must not be submitted before it is known that all ranks take part. A sum of ones tells; it is there before a bucket
fills, but in the smallest of models. Process groups of PyTorch need none: all ranks take part, or all wait.

A rank that waits for the others between two steps announces that in the same sum: `hvd_sparse.announcement`.
"""

from collections.abc import Sequence

import torch

from hvd_sparse.announcement import BETWEEN_STEPS, MOST_RANKS, ranks_apart
from hvd_sparse.torch.exchange import MOST_TOLD, Exchange, Pending


class Presence:
    """What the ranks tell each other when a step begins."""

    def __init__(self, exchange: Exchange, freezes: bool, told: Sequence[float] = ()):
        exchange.end_announcement()
        numbers = [1.0 + MOST_RANKS * freezes, *told, *[0.0] * (MOST_TOLD - len(told))]
        own = torch.tensor(numbers, dtype=torch.float64)
        self._may_miss = exchange.collectives.may_join  # otherwise all ranks take part in every step, and freeze alike
        is_asked = self._may_miss or bool(told)
        self.bytes = own.nbytes if is_asked else 0
        self.pending = exchange.allreduce("present", own) if is_asked else Pending(finish=lambda: own)

    def is_known(self) -> bool:
        """Return whether it is known who takes part: all ranks have answered, or all always do."""
        return not self._may_miss or self.pending.is_done()

    def sums(self) -> list[float]:
        """Return the sums of what the ranks told besides; waits for them."""
        return self.pending.wait()[1:].tolist()

    def anywhere_frozen(self) -> bool:
        """Return whether any rank has a parameter that does not train at present; waits for the ranks.

        A multiple of MOST_RANKS in the sum says so.
        """
        return self.pending.wait()[0] % BETWEEN_STEPS >= MOST_RANKS

    def check(self, ranks: int) -> None:
        """Wait for the ranks; RuntimeError on those that take part unless all of them do."""
        if not self._may_miss:
            return
        total = int(self.pending.wait()[0])
        if total >= BETWEEN_STEPS:
            raise RuntimeError(ranks_apart(int(total // BETWEEN_STEPS), ranks))
        present = total % MOST_RANKS
        if present < ranks:
            raise RuntimeError(
                f"hvd_sparse does not work with hvd.join(): {ranks - present} of {ranks} ranks have joined. "
                "Horovod cannot gather from them. Give every rank as many steps: drop or repeat the last batches"
            )
