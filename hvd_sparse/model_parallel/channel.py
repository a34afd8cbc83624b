"""A stage's connection to the others: messages by MPI, and notices of failures, so that no stage waits forever."""

import atexit
import sys

import numpy as np

from hvd_sparse.library import mpi
from hvd_sparse.mailbox import Mailbox, poll
from hvd_sparse.model_parallel.notices import SHUTDOWN_TIMEOUT, Notices, PipelineError, wait_for

ENDED = 1  # tag of a stage's last message; others are kinds of messages


class Channel:
    """A stage's connection to its pipeline. The ranks of the mpi4py communicator are the stages.

    The channel duplicates the communicator, so that other messages do not mix with its own.

    timeout: seconds to wait for any message. Raises TimeoutError unless every rank of the communicator builds its
    channel.
    """

    def __init__(self, communicator, timeout: float):
        self.stage, self.stages = communicator.Get_rank(), communicator.Get_size()
        self._timeout, self._ended = timeout, set()
        self._everyone = Notices.attached(communicator)  # for all replicas
        self._communicator, request = communicator.Idup()
        wait_for(request, timeout, self.stages, "built their Pipeline", self._everyone)
        self._mailbox = Mailbox(self._communicator, background=True)
        self._notices = self._everyone or Notices(self._communicator)
        self.is_open = True
        atexit.register(self._close_at_exit)

    def agree(self, error: Exception | None, settings: dict) -> None:
        """Raise an error on every rank if one rank has an error or if settings differ; see `Notices.agree`.

        The channel is then closed, because at exit there is no one to notify.
        """
        try:
            self._notices.agree(error, settings, self._timeout, "built their Pipeline")
        except BaseException:
            self._release()
            raise

    def send(self, stage: int, kind: int, data: np.ndarray) -> None:
        """Start sending to a stage, without waiting."""
        self._mailbox.post(stage, ENDED + kind, data)

    def receive(self, stage: int, kind: int, what: str) -> np.ndarray:
        """Wait for a message of a stage and return its bytes.

        what: describes the message in errors. Raises PipelineError if a rank fails meanwhile or the stage has ended,
        and TimeoutError.
        """
        found = poll(lambda: self._look(stage, kind, what), self._timeout, self._mailbox.is_busy)
        if found is None:
            raise TimeoutError(
                f"stage {self.stage} has waited {self._timeout:.0f} s for {what} from stage {stage}: has it "
                "stopped, or does it take fewer steps? To wait longer: Pipeline(timeout=...)"
            )
        return found[1]

    def progress(self) -> None:
        """Let MPI make progress with messages that are being sent."""
        self._mailbox.reap()

    def check(self) -> None:
        """Raise PipelineError if a rank has failed."""
        self._notices.check()

    def meet(self, what: str) -> None:
        """Wait for all replicas if there are several, so that no rank waits in Horovod for a failed one."""
        if self._everyone is not None:
            self._everyone.meet(what, self._timeout)

    def fail(self, error: BaseException) -> PipelineError | None:
        """Tell every rank why this one fails. If another rank failed before, return the error that says so instead."""
        return self._notices.fail(error)

    @property
    def process_set(self):
        """Horovod's process set of the replicas of this stage; None unless the run is hybrid."""
        return None if self._everyone is None else self._everyone.process_set

    @property
    def failure(self) -> str:
        """The reason why the pipeline cannot continue; empty while it can."""
        return self._notices.failure

    def close(self) -> None:
        """Tell the other stages that this one has ended."""
        if not self.is_open:
            return
        if not self.failure:
            for stage in range(self.stages):
                if stage != self.stage:
                    self._mailbox.post(stage, ENDED, np.empty(0, np.uint8))
        self._release()

    def _close_at_exit(self) -> None:
        if mpi().Is_finalized():  # by Horovod, if it was started before mpi4py
            return
        error = getattr(sys, "last_value", None)  # the error that ends the interpreter
        if error is not None and self.is_open:
            self.fail(error)
        self.close()

    def _release(self) -> None:
        """Finish sending the last messages: a stage that computes takes them when it is ready for them."""
        self.is_open = False
        atexit.unregister(self._close_at_exit)
        poll(lambda: self._is_done() or None, self._timeout, self._mailbox.is_busy)
        self._mailbox.close(SHUTDOWN_TIMEOUT)
        if self._everyone is None:
            self._notices.close()

    def _look(self, stage: int, kind: int, what: str) -> tuple[int, np.ndarray] | None:
        """Return a stage's message if it has arrived. Raise PipelineError if a rank failed, or if none will arrive."""
        found = self._mailbox.look(ENDED + kind, stage)
        if found is not None:
            return found
        self.check()
        if stage not in self._have_ended():
            return None
        found = self._mailbox.look(ENDED + kind, stage)  # sent before its last message
        if found is None and not self._mailbox.is_arriving(ENDED + kind, stage):
            raise PipelineError(
                f"stage {stage} has ended, while stage {self.stage} waits for {what}: every stage must take the same "
                "number of steps"
            )
        return found

    def _have_ended(self) -> set[int]:
        """Return the stages that have said that they have ended."""
        while (ended := self._mailbox.look(ENDED)) is not None:
            self._ended.add(ended[0])
        return self._ended

    def _is_done(self) -> bool:
        """Return whether all messages have arrived, or those that have not will never be received."""
        return self._mailbox.reap() or bool(self._notices.heard()) or len(self._have_ended()) == self.stages - 1
