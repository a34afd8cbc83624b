"""Reports of a compressor's steps, to TensorBoard and other loggers."""

from collections.abc import Callable, Mapping
from typing import Any

from hvd_sparse.checks import checked_integer

Writer = Callable[[dict[str, float], int], Any]


class Log:
    """Where a compressor reports its numbers, and how often.

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


def numbers_of(stats: Mapping, prefix: str) -> dict[str, float]:
    """Return the last step's numbers of a compressor's `stats()` by name, in one flat dict."""
    step = stats["step"]
    numbers = {name: step[name] for name in ("ratio", "density", "payload_bytes", "received_bytes")}
    numbers["residual_norm"] = stats["residual_norm"]
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
