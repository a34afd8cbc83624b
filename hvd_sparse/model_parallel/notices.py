"""Notices of failures among all ranks that wait for each other: every rank gets the reason."""

import functools
import json
import sys
from collections.abc import Callable

import numpy as np

from hvd_sparse.library import mpi
from hvd_sparse.mailbox import Mailbox, keep_for_ever, poll

FAILED, LEFT = 101, 102  # tags; those of a pipeline's messages are smaller
GREETING_BYTES = 512  # of what ranks compare, and of an error
SHUTDOWN_TIMEOUT = 5.0  # seconds to send the last message


class PipelineError(RuntimeError):
    """Another rank has failed, or has ended while this one waits for it. The text names the rank and the reason."""


class Notices:
    """Control messages between the ranks of an mpi4py communicator, whose other messages have other tags.

    name: Returns the name of a rank for errors. grace: Seconds to wait for the notice of another rank's failure, after
    this rank has seen its consequences, such as Horovod's error.
    """

    is_hybrid = False  # whether `hybrid` has started this process's run

    def __init__(self, communicator, name: Callable[[int], str] = "stage {}".format, grace: float = 0.0):
        self._communicator, self.name, self._grace = communicator, name, grace
        self._rank, self._size = communicator.Get_rank(), communicator.Get_size()
        self._mailbox = Mailbox(communicator)
        self._failure, self._is_own = "", False
        self._shared: Exception | None = None  # an error that all ranks have raised together
        self._meetings, self._left = 0, {}  # of ranks that have left: how many meetings they came to
        self.process_set = None  # Horovod's, of this rank's stage

    @property
    def failure(self) -> str:
        """The reason why the ranks cannot continue, if this rank knows one; else an empty string."""
        return self._failure

    def heard(self) -> str:
        """Receive the notices of other ranks; return the failure, if there is one."""
        while not self._failure and (found := self._mailbox.look(FAILED)) is not None:
            self._failure = bytes(found[1]).decode(errors="replace")
        while (found := self._mailbox.look(LEFT)) is not None:
            self._left[found[0]] = int(bytes(found[1]))
        return self._failure

    def check(self) -> None:
        """Raise PipelineError if any rank has failed."""
        if self.heard():
            raise PipelineError(self._failure)

    def fail(self, error: BaseException) -> PipelineError | None:
        """Tell every rank why this one fails. If another rank failed before, return the error that says so instead."""
        if error is self._shared:
            return None
        if not self._is_own and poll(lambda: self.heard() or None, self._grace) is not None:
            return PipelineError(self._failure)
        if not self._failure:
            self._failure, self._is_own = f"{self.name(self._rank)} has failed: {type(error).__name__}: {error}", True
            self._tell(FAILED, self._failure)
        return None

    def agree(self, error: Exception | None, settings: dict, timeout: float, what: str) -> None:
        """Raise an error on every rank if one rank has an error, or if settings differ.

        The rank with the error raises it, the others PipelineError. Different settings raise ValueError. TimeoutError:
        a rank did not call this method; `what` says what it has not done. PipelineError: a rank has failed or left.
        """
        mine = "" if error is None else f"{self.name(self._rank)}: {type(error).__name__}: {error}"
        greeting = np.zeros(GREETING_BYTES, np.uint8)
        text = f"{json.dumps({} if mine else settings)}\0{mine}".encode()[:GREETING_BYTES]
        greeting[: len(text)] = np.frombuffer(text, np.uint8)
        everyone = np.zeros((self._size, GREETING_BYTES), np.uint8)
        request = self._communicator.Iallgather(greeting, everyone)
        try:
            wait_for(request, timeout, self._size, what, self)
        except BaseException:  # MPI reads and writes them when the others come
            keep_for_ever(greeting)
            keep_for_ever(everyone)
            raise
        said = [bytes(row).decode(errors="replace").rstrip("\0").partition("\0") for row in everyone]
        if errors := [text for _, _, text in said if text]:
            self._shared = error if error is not None else PipelineError(errors[0])
            raise self._shared
        every = [json.loads(text) for text, _, _ in said]
        for name, first in every[0].items():
            other = next((rank for rank, theirs in enumerate(every) if theirs[name] != first), None)
            if other is not None:
                self._shared = ValueError(
                    f"{name} must be the same on all ranks, got {first!r} on {self.name(0)} and "
                    f"{every[other][name]!r} on {self.name(other)}"
                )
                raise self._shared

    def meet(self, what: str, timeout: float) -> None:
        """Wait until every rank has called this method. Raises PipelineError if one fails or has left; TimeoutError."""
        wait_for(self._communicator.Ibarrier(), timeout, self._size, f"come to {what}", self)
        self._meetings += 1

    def check_left(self, what: str) -> None:
        """Raise PipelineError if a rank has left, unless it has been where this rank waits now."""
        for rank, meetings in self._left.items():
            if meetings <= self._meetings:
                raise PipelineError(
                    f"{self.name(rank)} has ended, while {self.name(self._rank)} waits until all have {what}: every "
                    "rank must take the same number of steps"
                )

    def leave(self, error: BaseException | None) -> None:
        """Tell the other ranks that this rank calls `meet` no more, with the error if there is one."""
        if error is not None:
            self.fail(error)
        if not self._failure:
            self._tell(LEFT, str(self._meetings))

    def close(self) -> None:
        """Finish sending the last message."""
        self._mailbox.close(SHUTDOWN_TIMEOUT)

    def excepthook(self, hook: Callable) -> Callable:
        """Return a hook that shows an uncaught error like `hook`, and then the failure that caused it, if any."""

        def show(kind, error, trace) -> None:
            """Show an error, then the failure that caused it."""
            hook(kind, error, trace)
            if not isinstance(error, PipelineError) and (cause := self.fail(error)) is not None:
                here = self.name(self._rank)
                print(f"hvd_sparse: {here}: this follows from another rank's failure: {cause}", file=sys.stderr)

        return show

    def attach(self, communicator) -> None:
        """Let pipelines on a communicator use these notices."""
        communicator.Set_attr(_key(), self)
        Notices.is_hybrid = True

    @staticmethod
    def attached(communicator) -> "Notices | None":
        """Return the notices that were attached to a communicator; ValueError for the world in a hybrid run."""
        found = communicator.Get_attr(_key())
        if found is None and Notices.is_hybrid and communicator == mpi().COMM_WORLD:
            raise ValueError(
                "communicator must be the one that hybrid() returned, got the world, whose pipelines know neither the "
                "replicas of this run nor its failures: pass communicator= to Pipeline"
            )
        return found

    def _tell(self, tag: int, text: str) -> None:
        for rank in range(self._size):
            if rank != self._rank:
                self._mailbox.post(rank, tag, np.frombuffer(text.encode(), np.uint8))
        self._mailbox.reap()


def wait_for(request, timeout: float, ranks: int, what: str, notices: Notices | None = None) -> None:
    """Wait for a collective request. Raise TimeoutError, which says what not all ranks have done.

    notices: Raise PipelineError, too, if these say that a rank has failed or left.
    """

    def look() -> bool | None:
        """Return True when all ranks have called; None before."""
        if request.Test():
            return True
        if notices is not None:
            notices.check()
            notices.check_left(what)
        return None

    if poll(look, timeout) is None:
        raise TimeoutError(f"not all {ranks} ranks have {what} within {timeout:g} s")


@functools.cache
def _key() -> int:
    return mpi().Comm.Create_keyval(copy_fn=True)  # a duplicate has them, too
