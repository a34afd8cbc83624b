"""Reports of steps, to TensorBoard and other loggers."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from hvd_sparse.checks import checked_integer

Writer = Callable[[dict[str, float], int], Any]


class Log:
    """Where the numbers of steps are reported, and how often.

    Args:
        writer: A `SummaryWriter` of torch.utils.tensorboard or of tensorboardX, a writer of
            `tf.summary.create_file_writer`, or a function of {name: number} and a step, such as `wandb.log` and
            `mlflow.log_metrics`.
        every: Steps from one report to the next.
        prefix: What names begin with, before a "/".
    """

    def __init__(self, writer: Any, every: int, prefix: str):
        self._write = function_of(writer)
        self._every = checked_integer("every", every, 1)
        self._prefix = prefix

    def report(self, stats: Callable[[], Mapping], step: int) -> None:
        """Report the step that has ended, if it is its turn; step: how many there were. stats: gives the numbers."""
        if step % self._every == 0:
            self._write(numbers_of(stats(), self._prefix), step)


class Logged:
    """Base of compressors, asynchronous sessions and pipelines, whose steps can be logged."""

    PREFIX: ClassVar[str] = "compression"
    _log: Log | None = None

    def log_to(self, writer: Any, every: int = 1, prefix: str | None = None) -> None:
        """Report the numbers of each step to a logger: ratio, density, bytes, residual norm, seconds.

        Each rank reports its own numbers: call it on one rank, or on every rank with its own writer. In TensorFlow
        call that of a compressor on every rank before the first step, with None on ranks without a log: Horovod needs
        the same graph on all ranks. Pipelines have no residuals; compressors also report how many steps were skipped.

        Args:
            writer: A `SummaryWriter` of torch.utils.tensorboard, a writer of `tf.summary.create_file_writer`, or a
                function of a dict {name: number} and a step, such as `wandb.log` or `mlflow.log_metrics`. None: stop.
            every: Report every so many steps. The residual norm takes a pass over the residuals.
            prefix: Prefix of the names: `{prefix}/ratio`, `{prefix}/density` and so on. None: "compression", of a
                pipeline "pipeline".

        Raises:
            TypeError: The writer is none of these.
            ValueError: `every` is below 1.
            RuntimeError: Of a compressor in TensorFlow: a training step has been traced without a call of `log_to`, or
                this is a graph of TensorFlow 1. Use `stats()`.
        """
        log = None if writer is None else Log(writer, every, self.PREFIX if prefix is None else prefix)
        self._begin_log()
        self._log = log

    def _begin_log(self) -> None:
        """Raise RuntimeError if steps cannot be logged from now on."""

    def _report(self, stats: Callable[[], Mapping], step: int) -> None:
        """Report the step that has ended, if there is a log. stats: see `Log.report`."""
        if self._log is not None:
            self._log.report(stats, step)


def numbers_of(stats: Mapping, prefix: str) -> dict[str, float]:
    """Return the last step's numbers of `stats()` by name, in one flat dict."""
    step = stats["step"]
    numbers = {name: step[name] for name in ("ratio", "density", "payload_bytes", "received_bytes")}
    numbers |= {name: stats[name] for name in ("residual_norm", "skipped") if name in stats}
    numbers |= {f"seconds/{name}": seconds for name, seconds in step["seconds"].items()}
    return {f"{prefix}/{name}": float(number) for name, number in numbers.items()}


def function_of(writer: Any) -> Writer:
    """Return the function that writes {name: number} at a step; TypeError if the writer is of no known kind."""
    if callable(getattr(writer, "add_scalar", None)):

        def add(numbers: dict[str, float], step: int) -> None:
            """Write to a SummaryWriter."""
            for name, number in numbers.items():
                writer.add_scalar(name, number, step)

        return add
    if callable(getattr(writer, "as_default", None)):

        def summarize(numbers: dict[str, float], step: int) -> None:
            """Write to a writer of `tf.summary`."""
            import tensorflow as tf

            with writer.as_default():
                for name, number in numbers.items():
                    tf.summary.scalar(name, number, step)

        return summarize
    if callable(writer):
        return writer
    raise TypeError(
        "writer must be a SummaryWriter, a writer of tf.summary, or a function of a dict and a step such as wandb.log; "
        f"got {type(writer).__name__}"
    )
