"""scope="model": one selection in all variables together."""

from hvd_sparse.tensorflow.bucket_scope import BucketScope, Message
from hvd_sparse.tensorflow.scope import Entry, Step


class ModelScope(BucketScope):
    """One selection in all variables: a global threshold, and clipping by the norm of the whole local gradient.

    Laid out in the order of the compressor's variables. The small ones travel dense, through Horovod's own allreduce.
    """

    def _selections(self) -> list[str]:
        return ["model"]

    def _selected(self, entries: list[Entry]) -> list[str]:
        return ["model"]

    def _choose(self, entries: list[Entry], step: Step) -> list[Message]:
        counts = self._counts([sum(entry.memory.size for entry in entries)], step)
        return [self._fill("model", entries, counts, self._hints.values(["model"], counts), step, joint=True)]
