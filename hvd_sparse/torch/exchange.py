"""Named, asynchronous collectives on Horovod, unmodified.

Names come from the compressor's ordinal and from fixed bucket numbers, never from the order of calls within a step:
hooks run in another order on every rank.
"""

import os
from collections.abc import Callable
from time import monotonic, sleep

import horovod.torch as hvd
import torch

from hvd_sparse.agreement import DIGEST_BYTES, agree_failed, digest, explain_difference
from hvd_sparse.checkpoint import REASON_BYTES, refusal
from hvd_sparse.members import Members
from hvd_sparse.traffic import Traffic

AGREE_SECONDS = 600


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

    def is_lost(self) -> bool:
        """Return whether Horovod no longer knows it, since it was shut down in between."""
        try:
            self.is_done()
        except ValueError:
            return True
        return False

    def wait_at_most(self, seconds: float) -> None:
        """Raise RuntimeError if the other ranks have not taken part after so long."""
        deadline = monotonic() + seconds
        while not self.is_done():
            if monotonic() > deadline:
                raise RuntimeError(agree_failed(seconds))
            sleep(0.0005)


class Exchange(Members):
    """The collectives of one compressor over one process set."""

    def __init__(self, process_set, traffic: Traffic):
        super().__init__(hvd, process_set, "hvd_sparse")
        self.traffic = traffic

    def is_alone(self) -> bool:
        """Return whether Horovod runs, with a single rank, and is not elastic."""
        elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
        return hvd.is_initialized() and hvd.size() == 1 and not elastic

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
        return hvd.is_initialized() and self.process_set.process_set_id is not None and self.process_set.included()

    def start_agreement(self, lines: list[str]) -> Pending:
        """Start comparing lines with the other ranks."""
        own = torch.frombuffer(bytearray(digest(lines)), dtype=torch.uint8)
        return self.allgather("agree.digest", own)

    def agree(self, agreement: Pending, lines: list[str]) -> None:
        """Raise ValueError on every rank, naming the difference, unless all ranks started with the same lines."""
        agreement.wait_at_most(AGREE_SECONDS)
        digests = agreement.wait().view(-1, DIGEST_BYTES)
        if bool((digests == digests[0]).all()):
            return
        text = torch.frombuffer(bytearray("\n".join(lines).encode()), dtype=torch.uint8)
        length = torch.tensor([text.numel()], dtype=torch.int64)
        lengths = Pending(hvd.allgather_async(length, f"{self._prefix}.agree.length", self.process_set)).wait()
        texts = self.allgather("agree.text", text).wait().split(lengths.tolist())
        raise ValueError(explain_difference([bytes(part.tolist()).decode().split("\n") for part in texts]))

    def refuse_together(self, reason: str) -> None:
        """Raise ValueError on every rank if any of them has a reason not to load its state.

        The ranks of an elastic job speak for themselves: others may be new, or not there yet.
        """
        reasons = [reason]
        if self.can_start() and os.environ.get("HOROVOD_ELASTIC") != "1":
            text = reason.encode()[:REASON_BYTES].ljust(REASON_BYTES)
            gathered = self.allgather("load", torch.frombuffer(bytearray(text), dtype=torch.uint8))
            gathered.wait_at_most(AGREE_SECONDS)
            rows = gathered.wait().view(-1, REASON_BYTES).tolist()
            reasons = [bytes(row).decode(errors="ignore").rstrip() for row in rows]
        if refusal(reasons):
            raise ValueError(refusal(reasons))
