"""A compressor in the state of an elastic job: `hvd.elastic.TorchState(model=..., optimizer=..., compression=c)`.

Each rank commits and restores its own residual. It is never broadcast: N ranks with the residual of one would send it
N times. A rank that joins starts with an empty one.
"""

from horovod.torch.elastic.state import StateHandler


class CompressionStateHandler(StateHandler):
    """Commits and restores one `SparseCompressor`."""

    def __init__(self, compression):
        super().__init__(compression)
        self.save()

    def save(self) -> None:
        """Copy this rank's state, as `commit` asks."""
        self._saved = self.value.state_dict()

    def restore(self) -> None:
        """Go back to the copy."""
        self.value.restore_own(self._saved)

    def sync(self) -> None:
        """Keep the current state. In the first step after a reset, the ranks agree on the number of the step."""
