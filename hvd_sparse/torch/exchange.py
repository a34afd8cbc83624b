"""Named, asynchronous collectives on Horovod, unmodified.

Names come from the compressor's ordinal and from fixed bucket numbers, never from the order of calls within a step:
hooks run in another order on every rank.
"""

from collections.abc import Callable, Sequence
from time import monotonic, sleep

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

from hvd_sparse.announcement import BETWEEN_STEPS, refuse_apart
from hvd_sparse.checkpoint import REASON_BYTES, refusal
from hvd_sparse.configuration_check import DIGEST_BYTES, check_failed, digest, explain_difference
from hvd_sparse.members import Members, is_elastic
from hvd_sparse.pieces import MOST_WORDS, WORD_BYTES, Cut, plan_pieces
from hvd_sparse.traffic import Traffic

AGREE_SECONDS = 600
SMALL_BYTES = 1 << 14  # of all ranks' messages of a step: they take less time than the wait for one more collective
STEP_BYTES = 8  # of a step number in the configuration check
MOST_TOLD = 3  # numbers in the sum that begins a step, besides the first: always as many, so that all ranks' match


def incarnation() -> object:
    """Return an object that is another one after each hvd.init(): Horovod's table of the collectives in flight.

    Size and rank do not tell: an elastic job may replace another host, and this rank keeps both. Handles do not tell,
    as Horovod counts them from 0 again.
    """
    return mpi_ops._handle_map


class Pending:
    """A collective under way, or several of them. finish: makes the result of theirs."""

    def __init__(self, *handles, finish: Callable[..., torch.Tensor] = lambda result: result):
        self._handles = handles
        self._finish = finish
        self._result: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """Return the result, waiting for it the first time."""
        if self._result is None:
            self._result = self._finish(*map(hvd.synchronize, self._handles))
        return self._result

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""
        return self._result is not None or all(map(hvd.poll, self._handles))

    def wait_at_most(self, seconds: float) -> torch.Tensor:
        """Return the result; raise RuntimeError if the other ranks have not taken part after so long."""
        deadline = monotonic() + seconds
        while not self.is_done():
            if monotonic() > deadline:
                raise RuntimeError(check_failed(seconds))
            sleep(0.0005)
        return self.wait()


class Exchange(Members):
    """The collectives of one compressor over one process set."""

    def __init__(self, process_set, traffic: Traffic):
        super().__init__(hvd, process_set, "hvd_sparse")
        self.traffic = traffic
        self._announced: Pending | None = None  # that this rank waits for the others between two steps

    def is_alone(self) -> bool:
        """Return whether Horovod runs, with a single rank, and is not elastic."""
        return hvd.is_initialized() and hvd.size() == 1 and not is_elastic()

    def is_first(self) -> bool:
        """Return whether this rank is to speak for all: the set's first, or any before Horovod runs."""
        return not hvd.is_initialized() or (self.can_start() and self.rank() == 0)

    def allgather(self, name: str, payload: torch.Tensor, most_bytes: int | None = None) -> Pending:
        """Start gathering uint8[bytes], a multiple of 8; the result is uint8, what all ranks gave, one after the other.

        most_bytes: what any rank may give at most, the same on all ranks; None if all give as much. It decides in how
        many collectives they do (`hvd_sparse.pieces`).
        """
        ranks, words = self.size(), payload.view(torch.int64)
        cut = plan_pieces(payload.numel() if most_bytes is None else most_bytes, ranks)
        parts = [words] if cut.pieces == 1 else cut_pieces(words, cut)
        names = [f"{self._prefix}.{name}"] if cut.pieces == 1 else _names_of_pieces(f"{self._prefix}.{name}", cut)
        handed = WORD_BYTES * sum(map(torch.numel, parts))
        self.traffic.count(payload_bytes=handed - payload.numel())

        def finish(*gathered: torch.Tensor) -> torch.Tensor:
            """Put the pieces together, and count what came."""
            self.traffic.count(surplus_bytes=WORD_BYTES * sum(map(torch.numel, gathered)) - 2 * handed)
            whole = gathered[0] if cut.pieces == 1 else join_pieces(gathered, ranks, cut)
            return whole.view(torch.uint8)

        return Pending(*map(self._gather, names, parts), finish=finish)

    def alltoall(self, name: str, payload: torch.Tensor, splits: Sequence[int]) -> Pending:
        """Start sending each rank its part of uint8[bytes]; the result is what all ranks sent this one, in their order.

        splits: the bytes for each rank, in their order, multiples of 8. What this rank sends itself is not counted.
        """
        words = [int(size) // WORD_BYTES for size in splits]
        if sum(words) > MOST_WORDS:
            raise ValueError(f"hvd_sparse: a reduce-scatter of {payload.numel()} bytes: use smaller bucket_bytes")
        kept = WORD_BYTES * words[self.rank()]
        handed = payload.numel() - kept
        self.traffic.count(payload_bytes=handed)

        def finish(received: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            """Count what came."""
            self.traffic.count(surplus_bytes=received[0].nbytes - kept - handed)
            return received[0].view(torch.uint8)

        split, name = torch.tensor(words, dtype=torch.int32), f"{self._prefix}.{name}"
        return Pending(
            hvd.alltoall_async(payload.view(torch.int64), split, name=name, process_set=self.process_set), finish=finish
        )

    def alltoall_floats(self, name: str, tensor: torch.Tensor, sizes: Sequence[int], finish: Callable) -> Pending:
        """Start sending each rank its part of a float32 vector, of `sizes`; the result is `finish` of what all sent."""
        kept = sizes[self.rank()]
        self.traffic.count(payload_bytes=4 * (sum(sizes) - kept))
        self.traffic.count(surplus_bytes=4 * ((self.size() - 1) * kept - (sum(sizes) - kept)))
        split, name = torch.tensor(sizes, dtype=torch.int32), f"{self._prefix}.{name}"
        handle = hvd.alltoall_async(tensor, split, name=name, process_set=self.process_set)
        return Pending(handle, finish=lambda received: finish(received[0]))

    def gather_small(self, name: str, payload: torch.Tensor) -> Pending:
        """Start gathering uint8[bytes], a multiple of 8, as many on all ranks; the result is that of `allgather`.

        It is an all-reduce of uint8[ranks, bytes], in which each rank fills its own row and leaves zeros in the others.
        A ring then moves twice the bytes of an all-gather. But a rank in hvd.join() takes part in it, with zeros, so
        that it can be started before it is known whether all ranks take part in the step.
        """
        rows = payload.new_zeros(self.size(), payload.numel())
        rows[self.rank()] = payload
        self.traffic.count(payload_bytes=rows.numel() - payload.numel())
        return Pending(self._sum(name, rows.view(torch.int64)), finish=lambda total: total.view(torch.uint8).view(-1))

    def _gather(self, name: str, tensor: torch.Tensor):
        return hvd.allgather_async(tensor, name=name, process_set=self.process_set)

    def allreduce(self, name: str, tensor: torch.Tensor) -> Pending:
        """Start summing a tensor over the ranks, in place."""
        return Pending(self._sum(name, tensor))

    def _sum(self, name: str, tensor: torch.Tensor):
        name = f"{self._prefix}.{name}"
        return hvd.allreduce_async_(tensor, name=name, op=hvd.Sum, process_set=self.process_set)

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

    def start_check(self, lines: list[str], step: int) -> Pending:
        """Start comparing lines with the other ranks, and tell them this rank's step."""
        content = digest(lines) + step.to_bytes(STEP_BYTES, "little")
        return self.allgather("agree.digest", torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def agree(self, gathered: torch.Tensor, lines: list[str]) -> int:
        """Return the furthest step of any rank, from what `start_check` gathered.

        Raises ValueError on every rank, naming the difference, unless all ranks started with the same lines.
        """
        contents = gathered.view(-1, DIGEST_BYTES + STEP_BYTES)
        digests, steps = contents.split([DIGEST_BYTES, STEP_BYTES], dim=1)
        if bool((digests == digests[0]).all()):
            return int(steps.contiguous().view(torch.int64).max())
        text = torch.frombuffer(bytearray("\n".join(lines).encode()), dtype=torch.uint8)
        length = torch.tensor([text.numel()], dtype=torch.int64)
        lengths = Pending(self._gather(f"{self._prefix}.agree.length", length)).wait()
        texts = Pending(self._gather(f"{self._prefix}.agree.text", text)).wait().split(lengths.tolist())
        raise ValueError(explain_difference([bytes(part.tolist()).decode().split("\n") for part in texts]))

    def announce(self) -> None:
        """Tell the other ranks that this one waits for them between two steps."""
        if self._announced is None:
            own = torch.tensor([BETWEEN_STEPS, *[0.0] * MOST_TOLD], dtype=torch.float64)
            self._announced = self.allreduce("present", own)

    def end_announcement(self) -> None:
        """Wait for an announcement that was given up: its name must be free. RuntimeError if it met a step."""
        if self._announced is not None:
            announced, self._announced = self._announced, None
            refuse_apart(float(announced.wait()[0]), self.size())

    def wait_between_steps(self, pending: Pending, seconds: float) -> torch.Tensor:
        """Return the result of a collective of all ranks; RuntimeError if one of them is in a step instead, or late."""
        deadline = monotonic() + seconds
        while not (pending.is_done() and self._announced.is_done()):
            if self._announced.is_done():
                refuse_apart(float(self._announced.wait()[0]), self.size())
            if monotonic() > deadline:
                raise RuntimeError(check_failed(seconds))
            sleep(0.0005)
        self.end_announcement()
        return pending.wait()

    def refuse_together(self, reason: str) -> None:
        """Raise ValueError on every rank if any of them has a reason not to load its state.

        The ranks of an elastic job speak for themselves: others may be new, or not there yet.
        """
        reasons = [reason]
        if self.can_start() and not is_elastic():
            text = reason.encode()[:REASON_BYTES].ljust(REASON_BYTES)
            gathered = self.allgather("load", torch.frombuffer(bytearray(text), dtype=torch.uint8))
            self.announce()
            rows = self.wait_between_steps(gathered, AGREE_SECONDS).view(-1, REASON_BYTES).tolist()
            reasons = [bytes(row).decode(errors="ignore").rstrip() for row in rows]
        if refusal(reasons):
            raise ValueError(refusal(reasons))


def _names_of_pieces(name: str, cut: Cut) -> list[str]:
    return [f"{name}.piece{piece}" for piece in range(cut.pieces)]


def cut_pieces(words: torch.Tensor, cut: Cut) -> list[torch.Tensor]:
    """Return the pieces of a message, its number of words first; one word of padding where a piece would be empty."""
    parts = list(torch.cat([words.new_tensor([words.numel()]), words]).split(cut.words))
    if len(parts) > cut.pieces:
        raise RuntimeError(f"hvd_sparse: {words.numel()} words do not fit into {cut.pieces} pieces of {cut.words}")
    return parts + [words.new_zeros(1) for _ in range(cut.pieces - len(parts))]


def join_pieces(gathered: Sequence[torch.Tensor], ranks: int, cut: Cut) -> torch.Tensor:
    """Return the messages, one rank's after the other, without their numbers of words and the padding."""
    begins, parts = [0] * cut.pieces, []
    for _ in range(ranks):
        left = 1 + int(gathered[0][begins[0]])
        for piece, words in enumerate(gathered):
            length = min(left, cut.words)
            parts.append(words.narrow(0, begins[piece], length))
            begins[piece] += max(length, 1)
            left -= length
        parts[-cut.pieces] = parts[-cut.pieces][1:]
    return torch.cat(parts)
