"""Named, asynchronous collectives on an unmodified Horovod.

The names contain the compressor's ordinal and a fixed bucket number. They never depend on the order of calls within a
step, because hooks run in a different order on every rank.
"""

from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

from hvd_sparse.hierarchy import Hierarchy
from hvd_sparse.members import Members, is_elastic
from hvd_sparse.process_sets import process_sets_of
from hvd_sparse.torch.collectives import Collectives, Handle
from hvd_sparse.torch.in_flight import extra_reference, extra_references
from hvd_sparse.torch.tokens import TOKEN_BYTES

WITHOUT_CUDA = (
    "Horovod was built without CUDA. To compress on the device, build it again with HOROVOD_GPU_OPERATIONS=NCCL "
    "(docs/installation.md, in the source tree of hvd_sparse: scripts/horovod.sh)"
)


class HorovodHandle:
    """A Horovod collective under way.

    holders: extra references to the collective's tensors (see `in_flight`). They are made before the collective starts,
    because Horovod's thread resizes the output.
    """

    def __init__(self, handle: int, holders: list[torch.Tensor]):
        self._handle = handle
        self._references = holders

    def wait(self) -> Any:
        """Wait for the result and return it."""
        result = hvd.synchronize(self._handle)
        self._references.clear()
        return result

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""
        return hvd.poll(self._handle)


class SentHandle(HorovodHandle):
    """An all-to-all under way. Horovod's result is a pair: what was received, and how much each rank sent."""

    def wait(self) -> torch.Tensor:
        """Wait for the vector that was received and return it."""
        return super().wait()[0]


class HorovodCollectives(Members, Collectives):
    """The collectives of one compressor over a Horovod process set; None stands for all ranks."""

    may_join = True
    token_bytes = TOKEN_BYTES

    def __init__(self, process_set):
        super().__init__(hvd, process_set, "hvd_sparse")

    def can_start(self) -> bool:
        """Return whether Horovod is initialised and this rank is in the process set."""
        process_set = self.process_set
        if not hvd.is_initialized() or process_set.process_set_id is None or not process_set.included():
            return False
        try:
            process_set.size()
        except ValueError:  # Horovod was initialised again, without this process set
            return False
        return True

    def is_alone(self) -> bool:
        """Return whether Horovod is initialised with a single rank and is not elastic."""
        return hvd.is_initialized() and hvd.size() == 1 and not is_elastic()

    def is_first(self) -> bool:
        """Return whether this rank prints messages for all: rank 0 of the set, or any rank before hvd.init()."""
        return not hvd.is_initialized() or (self.can_start() and self.rank() == 0)

    def is_elastic(self) -> bool:
        """Return whether Horovod's elastic launcher started this job."""
        return is_elastic()

    def incarnation(self) -> object:
        """Return Horovod's table of collectives in flight, which is a new object after each hvd.init().

        World size and rank do not show a new initialisation: if an elastic job replaces another host, this rank keeps
        both. Handles do not show it either, because Horovod counts them from 0 again.
        """
        return mpi_ops._handle_map

    def why_not_cuda(self) -> str:
        """Return why CUDA tensors cannot be exchanged; an empty string if they can."""
        return "" if hvd.cuda_built() else WITHOUT_CUDA

    def subsets(self, hierarchy: Hierarchy) -> dict[tuple[int, ...], Collectives]:
        """Return {ranks: their collectives} for each host and column; create missing process sets."""
        return {
            ranks: HorovodCollectives(process_set) for ranks, process_set in process_sets_of(hvd, hierarchy).items()
        }

    def allgather(self, name: str, tensor: torch.Tensor) -> Handle:
        """Start an all-gather of a tensor."""
        output = tensor.new()  # like hvd.allgather_async
        holders = extra_references([tensor, output])
        handle = mpi_ops._allgather_async(tensor, output, self._named(name), self.process_set)
        return HorovodHandle(handle, holders)

    def allgather_varying(self, name: str, tensor: torch.Tensor) -> Handle:
        """Start an all-gather of a vector. Horovod's all-gather accepts different sizes."""
        return self.allgather(name, tensor)

    def allreduce(self, name: str, tensor: torch.Tensor) -> Handle:
        """Start an all-reduce that sums a tensor in place."""
        holders = [extra_reference(tensor)]
        handle = hvd.allreduce_async_(tensor, name=self._named(name), op=hvd.Sum, process_set=self.process_set)
        return HorovodHandle(handle, holders)

    def alltoall(self, name: str, tensor: torch.Tensor, sizes: Sequence[int], expected: int | None = None) -> Handle:
        """Start an all-to-all of a vector. Horovod exchanges the sizes, so `expected` is ignored."""
        split = torch.tensor(sizes, dtype=torch.int32, device="cpu")
        output, received = tensor.new(), split.new()  # like hvd.alltoall_async
        holders = extra_references([tensor, split, output, received])
        handle = mpi_ops._alltoall_async(tensor, split, output, received, self._named(name), self.process_set)
        return SentHandle(handle, holders)

    def _named(self, name: str) -> str:
        return f"{self._prefix}.{name}"
