"""The exchanges of a compressor: messages, sums and settings, over the collectives of Horovod or PyTorch.

The names of collectives derive from fixed bucket numbers, never from the order of calls within a step.
"""

from collections.abc import Callable, Sequence
from time import monotonic, sleep

import torch

from hvd_sparse.announcement import (
    BETWEEN_STEPS,
    REASON_BYTES,
    check_all_between_steps,
    ranks_apart,
    reason_message,
    texts_of,
)
from hvd_sparse.checkpoint import refusal
from hvd_sparse.configuration_check import CHECK_FAILED, DIGEST_BYTES, digest, explain_difference
from hvd_sparse.pieces import MOST_WORDS, WORD_BYTES, Pieces, plan_pieces
from hvd_sparse.timeouts import TIMEOUT_SECONDS
from hvd_sparse.torch.collectives import Collectives, Handle
from hvd_sparse.torch.traffic import Traffic

SMALL_BYTES = 1 << 14  # payloads of all ranks: up to here an all-reduce gathers them, which need not wait for `present`
STEP_BYTES = 8  # size of a step number in the configuration check
FURTHER_NUMBERS = 4  # after the first in the presence sum: a fixed count, so that all ranks' tensors match


class Pending:
    """One or several collectives in flight; `finish` computes the result from their results."""

    def __init__(self, *handles: Handle, finish: Callable[..., torch.Tensor] = lambda result: result):
        self._handles = handles
        self._finish = finish
        self._result: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """Return the result; the first call waits for it."""
        if self._result is None:
            self._result = self._finish(*[handle.wait() for handle in self._handles])
        return self._result

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""
        return self._result is not None or all(handle.is_done() for handle in self._handles)

    def is_done_in_time(self, seconds: float) -> bool:
        """Wait for the result for at most some seconds; return whether it is there."""
        deadline = monotonic() + seconds
        while not self.is_done() and monotonic() < deadline:
            sleep(0.0005)
        return self.is_done()

    def wait_in_time(self, meanwhile: Callable[[], bool] = lambda: True) -> torch.Tensor:
        """Return the result; raise RuntimeError if the other ranks have not taken part within TIMEOUT_SECONDS.

        meanwhile: called again and again until it returns True, which the result waits for; it may raise an error.
        """
        deadline = monotonic() + TIMEOUT_SECONDS
        while not all([meanwhile(), self.is_done()]):  # both are asked each time, so that both make progress
            if monotonic() > deadline:
                raise RuntimeError(CHECK_FAILED)
            sleep(0.0005)
        return self.wait()


class Exchange:
    """Sends one compressor's tensors to the other ranks, and counts the bytes."""

    def __init__(self, collectives: Collectives, traffic: Traffic):
        self.collectives = collectives
        self.traffic = traffic
        self._asked: Pending | None = None  # the presence check of a step, until its result is read
        self._announced: Pending | None = None  # this rank waits for the others between two steps
        self._open_in: object | None = None  # the incarnation of the backend in which both began

    def size(self) -> int:
        """Return the world size; raise RuntimeError before Horovod or PyTorch's process group is initialised."""
        return self.collectives.size()

    def rank(self) -> int:
        """Return this process's rank."""
        return self.collectives.rank()

    def allgather(self, name: str, payload: torch.Tensor, most_bytes: int | None = None) -> Pending:
        """Start an all-gather of uint8[bytes], a multiple of 8; the result is uint8, all payloads in rank order.

        most_bytes: the upper bound of a rank's payload, the same on all ranks; None if all payloads have one size. It
        determines the number of collectives (`hvd_sparse.pieces`).
        """
        world_size, words = self.size(), payload.view(torch.int64)
        cut = plan_pieces(payload.numel() if most_bytes is None else most_bytes, world_size)
        parts = [words] if cut.pieces == 1 else cut_pieces(words, cut)
        names = [name] if cut.pieces == 1 else _names_of_pieces(name, cut)
        allgather = self.collectives.allgather if most_bytes is None else self.collectives.allgather_varying
        sent_bytes = WORD_BYTES * sum(map(torch.numel, parts))
        self.traffic.count(payload_bytes=sent_bytes)

        def finish(*gathered: torch.Tensor) -> torch.Tensor:
            """Join the pieces, and count the received bytes."""
            self.traffic.count(surplus_bytes=WORD_BYTES * sum(map(torch.numel, gathered)) - 2 * sent_bytes)
            whole = gathered[0] if cut.pieces == 1 else join_pieces(gathered, world_size, cut)
            return whole.view(torch.uint8)

        return Pending(*map(allgather, names, parts), finish=finish)

    def alltoall(self, name: str, payload: torch.Tensor, splits: Sequence[int]) -> Pending:
        """Start an all-to-all of uint8[bytes]; the result is the parts that all ranks sent to this one, in rank order.

        splits: the bytes for each rank, in rank order, multiples of 8. The part for this rank itself is not counted.
        """
        words = [int(size) // WORD_BYTES for size in splits]
        if sum(words) > MOST_WORDS:
            raise ValueError(f"hvd_sparse: a reduce-scatter of {payload.numel()} bytes: use smaller bucket_bytes")
        kept = WORD_BYTES * words[self.rank()]
        sent_bytes = payload.numel() - kept
        self.traffic.count(payload_bytes=sent_bytes)

        def finish(received: torch.Tensor) -> torch.Tensor:
            """Count the received bytes."""
            self.traffic.count(surplus_bytes=received.nbytes - kept - sent_bytes)
            return received.view(torch.uint8)

        return Pending(self.collectives.alltoall(name, payload.view(torch.int64), words), finish=finish)

    def alltoall_floats(self, name: str, tensor: torch.Tensor, sizes: Sequence[int], finish: Callable) -> Pending:
        """Start an all-to-all of a float32 vector, split by `sizes`; the result is `finish(received)`."""
        kept = sizes[self.rank()]
        self.traffic.count(payload_bytes=4 * (sum(sizes) - kept))
        self.traffic.count(surplus_bytes=4 * ((self.size() - 1) * kept - (sum(sizes) - kept)))
        return Pending(self.collectives.alltoall(name, tensor, sizes, expected=kept), finish=finish)

    def allgather_small(self, name: str, payload: torch.Tensor) -> Pending:
        """Start gathering uint8[bytes], a multiple of 8 and equal on all ranks; the result is that of `allgather`.

        The collective is an all-reduce of uint8[ranks, bytes]: each rank fills its own row and leaves zeros in the
        others. A ring all-reduce moves twice the bytes of an all-gather. But a rank in hvd.join() takes part in an
        all-reduce, with zeros, so it can start before the presence check is complete.
        """
        rows = payload.new_zeros(self.size(), payload.numel())
        rows[self.rank()] = payload
        self.traffic.count(payload_bytes=rows.numel())
        handle = self.collectives.allreduce(name, rows.view(torch.int64))
        return Pending(handle, finish=lambda total: total.view(torch.uint8).view(-1))

    def allreduce(self, name: str, tensor: torch.Tensor, counted: bool = True) -> Pending:
        """Start an all-reduce (sum) of a tensor, in place. counted: whether its bytes are counted here."""
        if counted:
            self.traffic.count(payload_bytes=tensor.nbytes)
        return Pending(self.collectives.allreduce(name, tensor))

    def start_check(self, lines: list[str], step: int) -> Pending:
        """Start comparing configuration lines and step numbers across ranks."""
        content = digest(lines) + step.to_bytes(STEP_BYTES, "little")
        return self.allgather("configuration.digest", torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def finish_check(self, gathered: torch.Tensor, lines: list[str]) -> int:
        """Return the largest step of any rank, from the result of `start_check`.

        Raises ValueError on every rank, naming the difference, unless all ranks have the same lines.
        """
        contents = gathered.view(-1, DIGEST_BYTES + STEP_BYTES)
        digests, steps = contents.split([DIGEST_BYTES, STEP_BYTES], dim=1)
        if bool((digests == digests[0]).all()):
            return int(steps.contiguous().view(torch.int64).max())
        text = torch.frombuffer(bytearray("\n".join(lines).encode()), dtype=torch.uint8)
        length = torch.tensor([text.numel()], dtype=torch.int64, device="cpu")
        lengths = self.collectives.allgather("configuration.length", length).wait()
        texts = self.collectives.allgather_varying("configuration.text", text).wait().split(lengths.tolist())
        raise ValueError(explain_difference([bytes(part.tolist()).decode().split("\n") for part in texts]))

    def ask_presence(self, own: torch.Tensor) -> Pending:
        """Start the all-reduce that begins a step (`hvd_sparse.torch.presence`)."""

        def read(total: torch.Tensor) -> torch.Tensor:
            """Free the name of the collective, as its result is there."""
            self._asked = None
            return total

        self._forget_lost()
        self.traffic.count(payload_bytes=own.nbytes)
        self._asked = Pending(self.collectives.allreduce("present", own), finish=read)
        return self._asked

    def announce(self) -> None:
        """Announce that this rank waits for the others between two steps, where ranks may call hvd.join().

        If a step is under way, this waits for its presence check, whose name must be free; RuntimeError if other ranks
        have not begun that step.
        """
        self._forget_lost()
        if self._announced is None and self.collectives.may_join:
            if self._asked is not None:
                between = int(self._asked.wait_in_time()[0] // BETWEEN_STEPS)
                if between > 0:
                    raise RuntimeError(ranks_apart(between, self.size()))
            own = torch.tensor([BETWEEN_STEPS, *[0.0] * FURTHER_NUMBERS], dtype=torch.float64, device="cpu")
            self._announced = self.allreduce("present", own, counted=False)

    def end_announcement(self) -> None:
        """Wait for the open announcement, as its name must be free; RuntimeError if other ranks were in a step."""
        self._forget_lost()
        if self._announced is not None:
            announced, self._announced = self._announced, None
            check_all_between_steps(float(announced.wait()[0]), self.size())

    def _forget_lost(self) -> None:
        """Forget what was in flight when the backend was shut down: no rank will answer it."""
        now = self.collectives.incarnation()
        if self._open_in is not now:
            self._asked, self._announced, self._open_in = None, None, now

    def wait_between_steps(self, pending: Pending) -> torch.Tensor:
        """Return the result of a collective; RuntimeError if a rank is in a step instead, or does not come in time."""
        result = pending.wait_in_time(self._have_all_announced)
        self.end_announcement()
        return result

    def _have_all_announced(self) -> bool:
        """Return whether the open announcement, if any, is complete; RuntimeError if other ranks are in a step."""
        if self._announced is None or not self._announced.is_done():
            return self._announced is None
        check_all_between_steps(float(self._announced.wait()[0]), self.size())
        return True

    def refuse_together(self, reason: str) -> None:
        """Raise ValueError on every rank if any of them has a reason not to load its state.

        In an elastic job, each rank raises for itself only: other ranks may be new, or not have started yet.
        """
        reasons = self.meet("load", reason)
        message = reason if reasons is None else refusal(reasons)
        if message:
            raise ValueError(message)

    def meet(self, why: str, text: str = "") -> list[str] | None:
        """Return the texts of all ranks, which meet between two steps; RuntimeError if a rank does something else.

        why: a key of WAITS. In an elastic job, where other ranks may be new, or not have started yet, they do not meet,
        and the result is None.
        """
        if not self.collectives.can_start() or self.collectives.is_elastic():
            return None
        own = torch.frombuffer(bytearray(reason_message(why, text)), dtype=torch.uint8)
        gathered = self.allgather("between", own)
        self.announce()
        rows = self.wait_between_steps(gathered).view(-1, REASON_BYTES).tolist()
        return texts_of([bytes(row) for row in rows], why)


def _names_of_pieces(name: str, cut: Pieces) -> list[str]:
    return [f"{name}.piece{piece}" for piece in range(cut.pieces)]


def cut_pieces(words: torch.Tensor, cut: Pieces) -> list[torch.Tensor]:
    """Return the pieces of a message, prefixed with its number of words; an empty piece has one word of padding."""
    parts = list(torch.cat([words.new_tensor([words.numel()]), words]).split(cut.words))
    if len(parts) > cut.pieces:
        raise RuntimeError(f"hvd_sparse: {words.numel()} words do not fit into {cut.pieces} pieces of {cut.words}")
    return parts + [words.new_zeros(1) for _ in range(cut.pieces - len(parts))]


def join_pieces(gathered: Sequence[torch.Tensor], world_size: int, cut: Pieces) -> torch.Tensor:
    """Return the ranks' messages, concatenated in rank order, without the numbers of words and the padding."""
    begins, parts = [0] * cut.pieces, []
    for _ in range(world_size):
        left = 1 + int(gathered[0][begins[0]])
        for piece, words in enumerate(gathered):
            length = min(left, cut.words)
            parts.append(words.narrow(0, begins[piece], length))
            begins[piece] += max(length, 1)
            left -= length
        parts[-cut.pieces] = parts[-cut.pieces][1:]
    return torch.cat(parts)
