"""A stage's way to the others: messages by MPI, and word of what goes wrong anywhere, so that nobody waits for ever."""

import atexit
import sys

import numpy as np

from hvd_sparse.mailbox import Mailbox, poll

CONTROL = 1  # tag of what ends a run; others are kinds of messages
FAILED, ENDED = b"F", b"E"
PATIENCE = 5.0  # seconds to get the last word out
GREETING_BYTES = 512


class PipelineError(RuntimeError):
    """Another stage has failed, or has ended while this one waits for it; the text says which, and why."""


class Channel:
    """This stage's end of a pipeline on a communicator of mpi4py, whose ranks are the stages.

    Has a communicator of its own, so that other messages cannot be mixed up with its. timeout: seconds to wait for any
    message. Raises TimeoutError unless every rank of the communicator builds its own.
    """

    def __init__(self, communicator, timeout: float):
        self.stage, self.stages = communicator.Get_rank(), communicator.Get_size()
        self._timeout, self._ended, self._failure = timeout, set(), ""
        self._communicator, request = communicator.Idup()
        self._finish(request, "built their Pipeline")
        self._mailbox = Mailbox(self._communicator, background=True)
        self._is_open = True
        atexit.register(self.close)

    def agree(self, error: Exception | None) -> None:
        """Raise on every stage where there is an error on one: what a stage's own arguments got wrong.

        Raises the stage's own error there, PipelineError elsewhere.
        """
        mine = "" if error is None else f"stage {self.stage}: {type(error).__name__}: {error}"
        greeting = np.zeros(GREETING_BYTES, np.uint8)
        text = mine.encode()[:GREETING_BYTES]
        greeting[: len(text)] = np.frombuffer(text, np.uint8)
        everyone = np.zeros((self.stages, GREETING_BYTES), np.uint8)
        self._finish(self._communicator.Iallgather(greeting, everyone), "built their Pipeline")
        texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in everyone]
        if any(texts):
            self._failure = next(filter(None, texts))
            raise error if error is not None else PipelineError(self._failure)

    def send(self, stage: int, kind: int, data: np.ndarray) -> None:
        """Send to a stage, without waiting."""
        self._mailbox.post(stage, CONTROL + kind, data)

    def receive(self, stage: int, kind: int, what: str) -> np.ndarray:
        """Wait for a message of a stage, and return its bytes. what: says in errors what is waited for.

        Raises PipelineError if a stage fails meanwhile, or if that one has ended; TimeoutError.
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

    def fail(self, error: BaseException) -> None:
        """Tell every stage why this one fails, unless that came from another stage."""
        if not self._failure:
            self._failure = f"stage {self.stage} has failed: {type(error).__name__}: {error}"
            self._tell(FAILED + self._failure.encode())

    @property
    def failure(self) -> str:
        """Why the pipeline cannot go on; nothing while it can."""
        return self._failure

    def close(self) -> None:
        """Tell the other stages that this one has ended, with the error that is on its way if there is one."""
        if not self._is_open:
            return
        self._is_open = False
        atexit.unregister(self.close)
        error = getattr(sys, "last_value", None)  # what ends the interpreter
        if error is not None:
            self.fail(error)
        if not self._failure:
            self._tell(ENDED)
        self._mailbox.close(PATIENCE)

    def _tell(self, text: bytes) -> None:
        for stage in range(self.stages):
            if stage != self.stage:
                self._mailbox.post(stage, CONTROL, np.frombuffer(text, np.uint8))
        self._mailbox.reap()

    def _look(self, stage: int, kind: int, what: str) -> tuple[int, np.ndarray] | None:
        """Return a stage's message if it is there; PipelineError if a stage has failed, or if none will come."""
        found = self._mailbox.look(CONTROL + kind, stage)
        if found is not None or not self._heed_control(stage):
            return found
        found = self._mailbox.look(CONTROL + kind, stage)  # sent before its last word
        if found is None:
            raise PipelineError(
                f"stage {stage} has ended, while stage {self.stage} waits for {what}: every stage must take the same "
                "number of steps"
            )
        return found

    def _heed_control(self, stage: int) -> bool:
        """Return whether a stage has ended; PipelineError if one has failed."""
        while (found := self._mailbox.look(CONTROL)) is not None:
            source, text = found[0], bytes(found[1])
            if text[:1] == FAILED:
                self._failure = text[1:].decode(errors="replace")
                raise PipelineError(self._failure)
            self._ended.add(source)
        return stage in self._ended

    def _finish(self, request, what: str) -> None:
        if poll(lambda: request.Test() or None, self._timeout) is None:
            raise TimeoutError(f"not all {self.stages} stages have {what} within {self._timeout:g} s")
