"""A stage's connection to the others: messages by MPI, and notices of failures, so that nobody waits for ever."""

import atexit
import sys

import numpy as np

from hvd_sparse.mailbox import Mailbox, poll
from hvd_sparse.model_parallel.notices import SHUTDOWN_TIMEOUT, Notices, PipelineError, wait_for

ENDED = 1  # tag of a stage's last message; others are kinds of messages


class Channel:
    """This stage's end of a pipeline on a communicator of mpi4py, whose ranks are the stages.

    Has a communicator of its own, so that other messages cannot be mixed up with its. timeout: seconds to wait for any
    message. Raises TimeoutError unless every rank of the communicator builds its own.
    """

    def __init__(self, communicator, timeout: float):
        self.stage, self.stages = communicator.Get_rank(), communicator.Get_size()
        self._timeout, self._ended = timeout, set()
        self._communicator, request = communicator.Idup()
        wait_for(request, timeout, self.stages, "built their Pipeline")
        self._mailbox = Mailbox(self._communicator, background=True)
        self._everyone = Notices.attached(communicator)  # of all replicas
        self._notices = self._everyone or Notices(self._communicator)
        self._is_open = True
        atexit.register(self.close)

    def agree(self, error: Exception | None, settings: dict) -> None:
        """Raise on every rank where there is an error on one, or where settings differ; see `Notices.agree`.

        The channel is closed then: there is nobody to tell at the interpreter's end.
        """
        try:
            self._notices.agree(error, settings, self._timeout)
        except BaseException:
            self._release()
            raise

    def send(self, stage: int, kind: int, data: np.ndarray) -> None:
        """Send to a stage, without waiting."""
        self._mailbox.post(stage, ENDED + kind, data)

    def receive(self, stage: int, kind: int, what: str) -> np.ndarray:
        """Wait for a message of a stage, and return its bytes. what: says in errors what is waited for.

        Raises PipelineError if a rank fails meanwhile, or if that stage has ended; TimeoutError.
        """
        found = poll(lambda: self._look(stage, kind, what), self._timeout)
        if found is None:
            raise TimeoutError(
                f"stage {self.stage} has waited {self._timeout:.0f} s for {what} from stage {stage}: has it "
                "stopped, or does it take fewer steps? To wait longer: Pipeline(timeout=...)"
            )
        return found[1]

    def progress(self) -> None:
        """Let MPI work on what was sent."""
        self._mailbox.reap()

    def check(self) -> None:
        """Raise PipelineError if a rank has failed."""
        self._notices.check()

    def meet(self, what: str) -> None:
        """Wait for all replicas, if there are several, so that none waits in Horovod for one that has failed."""
        if self._everyone is not None:
            self._everyone.meet(what, self._timeout)

    def fail(self, error: BaseException) -> PipelineError | None:
        """Tell every rank why this one fails; if another has failed before, return the error that says so instead."""
        return self._notices.fail(error)

    @property
    def failure(self) -> str:
        """Why the pipeline cannot go on; nothing while it can."""
        return self._notices.failure

    def close(self) -> None:
        """Tell the other stages that this one has ended, with the error that is on its way if there is one."""
        if not self._is_open:
            return
        error = getattr(sys, "last_value", None)  # what ends the interpreter
        if error is not None:
            self.fail(error)
        if not self.failure:
            for stage in range(self.stages):
                if stage != self.stage:
                    self._mailbox.post(stage, ENDED, np.empty(0, np.uint8))
        self._release()

    def _release(self) -> None:
        """Get the last words out."""
        self._is_open = False
        atexit.unregister(self.close)
        self._mailbox.close(SHUTDOWN_TIMEOUT)
        if self._everyone is None:
            self._notices.close()

    def _look(self, stage: int, kind: int, what: str) -> tuple[int, np.ndarray] | None:
        """Return a stage's message if it is there; PipelineError if a rank has failed, or if none will come."""
        found = self._mailbox.look(ENDED + kind, stage)
        if found is not None:
            return found
        self.check()
        while (ended := self._mailbox.look(ENDED)) is not None:
            self._ended.add(ended[0])
        if stage not in self._ended:
            return None
        found = self._mailbox.look(ENDED + kind, stage)  # sent before its last word
        if found is None:
            raise PipelineError(
                f"stage {stage} has ended, while stage {self.stage} waits for {what}: every stage must take the same "
                "number of steps"
            )
        return found
