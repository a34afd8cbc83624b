"""Named, asynchronous collectives on Horovod, unmodified.

Names come from the compressor's ordinal and from fixed bucket numbers, never from the order of calls within a step:
hooks run in another order on every rank.
"""

from collections.abc import Callable
from time import monotonic, sleep

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

from hvd_sparse.agreement import DIGEST_BYTES, agree_failed, digest, explain_difference
from hvd_sparse.members import Members, is_elastic
from hvd_sparse.traffic import Traffic

AGREE_SECONDS = 600
STEP_BYTES = 8  # of a step number in the configuration check


def incarnation() -> object:
    """Return an object that is another one after each hvd.init(): Horovod's table of the collectives in flight.

    Size and rank do not tell: an elastic job may replace another host, and this rank keeps both. Handles do not tell,
    as Horovod counts them from 0 again.
    """
    return mpi_ops._handle_map


class Pending:
    """A collective under way."""

    def __init__(self, handle, count: Callable[[torch.Tensor], None] | None = None):
        self._handle = handle
        self._count = count
        self._result: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """Return the result, waiting for it the first time."""
        if self._result is None:
            self._result = hvd.synchronize(self._handle)
            if self._count is not None:
                self._count(self._result)
        return self._result

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""
        return self._result is not None or hvd.poll(self._handle)

    def wait_at_most(self, seconds: float) -> torch.Tensor:
        """Return the result; raise RuntimeError if the other ranks have not taken part after so long."""
        deadline = monotonic() + seconds
        while not self.is_done():
            if monotonic() > deadline:
                raise RuntimeError(agree_failed(seconds))
            sleep(0.0005)
        return self.wait()


class Exchange(Members):
    """The collectives of one compressor over one process set."""

    def __init__(self, process_set, traffic: Traffic):
        super().__init__(hvd, process_set, "hvd_sparse")
        self.traffic = traffic

    def is_alone(self) -> bool:
        """Return whether Horovod runs, with a single rank, and is not elastic."""
        return hvd.is_initialized() and hvd.size() == 1 and not is_elastic()

    def is_first(self) -> bool:
        """Return whether this rank is to speak for all: the set's first, or any before Horovod runs."""
        return not hvd.is_initialized() or (self.can_start() and self.rank() == 0)

    def allgather(self, name: str, payload: torch.Tensor) -> Pending:
        """Start gathering uint8[bytes]; the result is uint8, what all ranks gave, one after the other."""
        handle = hvd.allgather_async(payload, name=f"{self._prefix}.{name}", process_set=self.process_set)
        own = payload.numel()
        return Pending(handle, lambda gathered: self.traffic.count(surplus_bytes=gathered.numel() - 2 * own))

    def allreduce(self, name: str, tensor: torch.Tensor) -> Pending:
        """Start summing a tensor over the ranks, in place."""
        return Pending(
            hvd.allreduce_async_(tensor, name=f"{self._prefix}.{name}", op=hvd.Sum, process_set=self.process_set)
        )

    def can_start(self) -> bool:
        """Return whether Horovod runs, and this rank takes part."""
        process_set = self.process_set
        if not hvd.is_initialized() or process_set.process_set_id is None or not process_set.included():
            return False
        try:
            process_set.size()
        except ValueError:  # Horovod was started anew, without this process set
            return False
        return True

    def start_agreement(self, lines: list[str], step: int) -> Pending:
        """Start comparing lines with the other ranks, and tell them this rank's step."""
        content = digest(lines) + step.to_bytes(STEP_BYTES, "little")
        return self.allgather("agree.digest", torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def agree(self, gathered: torch.Tensor, lines: list[str]) -> int:
        """Return the furthest step of any rank, from what `start_agreement` gathered.

        Raises ValueError on every rank, naming the difference, unless all ranks started with the same lines.
        """
        contents = gathered.view(-1, DIGEST_BYTES + STEP_BYTES)
        digests, steps = contents.split([DIGEST_BYTES, STEP_BYTES], dim=1)
        if bool((digests == digests[0]).all()):
            return int(steps.contiguous().view(torch.int64).max())
        text = torch.frombuffer(bytearray("\n".join(lines).encode()), dtype=torch.uint8)
        length = torch.tensor([text.numel()], dtype=torch.int64)
        lengths = Pending(hvd.allgather_async(length, f"{self._prefix}.agree.length", self.process_set)).wait()
        texts = self.allgather("agree.text", text).wait().split(lengths.tolist())
        raise ValueError(explain_difference([bytes(part.tolist()).decode().split("\n") for part in texts]))
