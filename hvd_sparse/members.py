"""The ranks of a compressor, and the prefix of its collectives' names: the same for both frameworks."""

import os
from collections import Counter

OTHER_FRAMEWORK = (
    "hvd_sparse: the Horovod of another framework was imported after {0}. Horovod keeps one table of process sets, "
    "that of the last import, so optimizers of {0} would not exchange gradients. Import {0} last, or in another process"
)
NOT_INITIALISED = "hvd_sparse: Horovod is not initialised; call hvd.init() first"
NOT_ADDED = (
    "hvd_sparse: Horovod does not have the process_set (any more): pass it to hvd.init(process_sets=[...]), or to "
    "hvd.add_process_set()"
)
NOT_INCLUDED = "hvd_sparse: this rank is not in the process_set of the compressor that it calls"
_ordinals: Counter = Counter()


class Members:
    """The ranks of one compressor.

    hvd: `horovod.torch` or `horovod.tensorflow`. Compressors are numbered as they are built: build them in the same
    order on every rank. Raises TypeError unless process_set is None or one of Horovod's, and RuntimeError if Horovod
    keeps the process sets of another framework.
    """

    def __init__(self, hvd, process_set, prefix: str):
        self._hvd = hvd
        if hvd.is_initialized() and not hvd.global_process_set.included():
            raise RuntimeError(OTHER_FRAMEWORK.format(hvd.__name__))
        self.process_set = hvd.global_process_set if process_set is None else process_set
        if not isinstance(self.process_set, hvd.ProcessSet):
            raise TypeError(f"process_set must be a horovod ProcessSet, got {type(self.process_set).__name__}")
        ranks = self.process_set.ranks
        whole = self.process_set is hvd.global_process_set or ranks is None
        family = f"{prefix}.{'all' if whole else '-'.join(map(str, ranks))}"
        self._prefix = f"{family}.{_ordinals[family]}"
        _ordinals[family] += 1
        self._known: dict[str, int] = {}  # the last size and rank

    def size(self) -> int:
        """Return the number of ranks that exchange; RuntimeError before hvd.init(), or on a rank that is not one."""
        return self._number("size")

    def rank(self) -> int:
        """Return this process's rank within the process set; RuntimeError before hvd.init(), or if it is not in it."""
        return self._number("rank")

    def _number(self, which: str) -> int:
        if not self._hvd.is_initialized():
            raise RuntimeError(NOT_INITIALISED)
        if self.process_set.process_set_id is None:
            raise RuntimeError(NOT_ADDED)
        if not self.process_set.included():
            raise RuntimeError(NOT_INCLUDED)  # Horovod would say that the set does not exist
        try:
            self._known[which] = getattr(self.process_set, which)()
        except ValueError:  # a rank has ended, so Horovod has forgotten its process sets; others may save states
            if which not in self._known or is_elastic():
                raise
        return self._known[which]

    def allgather_object(self, own) -> list:
        """All-gather a Python object over all ranks of the job. Return the objects in the order of ranks."""
        return self._hvd.allgather_object(own, name="hvd_sparse.hosts")

    def check_everyone(self) -> None:
        """Raise ValueError unless these are all ranks, for as long as the job runs."""
        if is_elastic():
            raise ValueError(
                'hvd_sparse: exchange="hierarchical" does not work in elastic jobs: take "gather" or "reduce_scatter"'
            )
        if self.process_set is not self._hvd.global_process_set:
            raise ValueError(
                f'hvd_sparse: exchange="hierarchical" needs all ranks of the job: leave out process_set, got ranks '
                f"{self.process_set.ranks}"
            )

    def check_process_set(self, theirs) -> None:
        """Raise ValueError unless an optimizer's process set is this one."""
        if theirs.process_set_id != self.process_set.process_set_id:
            raise ValueError(
                "hvd_sparse: the optimizer and its compressor must have the same process_set, got ranks "
                f"{theirs.ranks or 'all'} and {self.process_set.ranks or 'all'}"
            )


def is_elastic() -> bool:
    """Return whether this is a job of Horovod's elastic launcher: its ranks come and go."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"
