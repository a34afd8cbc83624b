"""The presence check: an all-reduce at the start of a step tells whether all ranks take part in it.

If one rank is in hvd.join() while the others submit an all-gather, Horovod's background thread on that rank dies, and
the others wait forever. So this package submits an all-gather only once it knows that all ranks take part. An
all-reduce of ones tells this; except in the smallest models, its result arrives before the first bucket is full.
Process groups of PyTorch need no check: all ranks take part, or all wait. Where a model may leave out parameters, the
sum still tells whether any rank has a frozen one.

A rank that waits for the others between two steps announces this in the same all-reduce: `hvd_sparse.announcement`.

Horovod names a user's collective without a name after the number of calls before it. Such a collective may stand
between backward and the optimizer's step, or within the backward pass, as in the gradient of `hvd.allgather`. So what
is sent before the optimizer's step must be sent at the same place on all ranks, or nowhere: when the gradient that
completes it arrives, each rank waits for the others' answers. The same sum decides: payloads are sent early only if
every rank has added 1. A rank that is so late that others may have waited in vain adds 0.
"""

from collections.abc import Sequence

import torch

from hvd_sparse.announcement import BETWEEN_STEPS, MOST_RANKS, ranks_apart
from hvd_sparse.timeouts import TIMEOUT_SECONDS
from hvd_sparse.torch.exchange import FURTHER_NUMBERS, Exchange, Pending

ANSWER_SECONDS = min(60.0, TIMEOUT_SECONDS)  # for the answers of all ranks, in a backward pass


def is_late(seconds: float) -> bool:
    """Return whether others may have waited in vain for a rank that has sent nothing for some seconds.

    Others can begin a step only when this rank has sent its last message of the step before.
    """
    return seconds > 0.9 * ANSWER_SECONDS


class Presence:
    """The all-reduce that starts a step: presence, frozen parameters, early messages, and numbers of the codec.

    Where process groups are used, all parameters take part, and the codec has no numbers, no all-reduce is needed:
    `pending` then holds this rank's own numbers.

    Args:
        exchange: That of the compressor.
        freezes: Whether this rank has a frozen parameter.
        sends_early: Whether this rank can send messages that need all ranks before the optimizer's step.
        region_numbers: Those of the codec.
    """

    def __init__(
        self, exchange: Exchange, freezes: bool, sends_early: bool = True, region_numbers: Sequence[float] = ()
    ):
        exchange.end_announcement()
        self._may_miss = exchange.collectives.may_join  # if not, all ranks take part in all steps
        is_asked = self._may_miss or exchange.collectives.may_leave_out() or bool(region_numbers)
        frozen = MOST_RANKS * (freezes and is_asked)  # what one rank alone knows starts no collective
        further = [float(sends_early), *region_numbers]
        numbers = [1.0 + frozen, *further, *[0.0] * (FURTHER_NUMBERS - len(further))]
        own = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self.pending = exchange.ask_presence(own) if is_asked else Pending(finish=lambda: own)
        self._sums: list[float] | None = None
        self.has_waited_in_vain = False

    def may_gather(self) -> bool:
        """Wait for the others' answers; return whether messages that need all ranks are sent before `finish`.

        Once, for ANSWER_SECONDS at most: a rank without gradients answers only in its optimizer's step, and may wait
        for the others before that.
        """
        if not self._may_miss:
            return True
        if not self.has_waited_in_vain:
            self.has_waited_in_vain = not self.pending.is_done_in_time(ANSWER_SECONDS)
        if self.has_waited_in_vain:
            return False
        first, early, *_ = self._all_sums()
        return early == int(first) % MOST_RANKS

    def sums(self) -> list[float]:
        """Return the sums over ranks of the codec's numbers; waits for the all-reduce."""
        return self._all_sums()[2:]

    def anywhere_frozen(self) -> bool:
        """Return whether any rank has a frozen parameter; waits for the all-reduce.

        Each rank with a frozen parameter adds MOST_RANKS to the sum.
        """
        return self._all_sums()[0] % BETWEEN_STEPS >= MOST_RANKS

    def check(self, world_size: int) -> None:
        """Wait for the all-reduce; raise RuntimeError, on the ranks that take part, unless all ranks do."""
        if not self._may_miss:
            return
        total = int(self._all_sums()[0])
        if total >= BETWEEN_STEPS:
            raise RuntimeError(ranks_apart(int(total // BETWEEN_STEPS), world_size))
        present = total % MOST_RANKS
        if present < world_size:
            raise RuntimeError(
                f"hvd_sparse does not work with hvd.join(): {world_size - present} of {world_size} ranks have joined. "
                "Horovod cannot gather from them. Give every rank as many steps: drop or repeat the last batches"
            )

    def _all_sums(self) -> list[float]:
        if self._sums is None:
            self._sums = self.pending.wait().tolist()
        return self._sums
