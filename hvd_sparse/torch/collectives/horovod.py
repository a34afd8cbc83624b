"""Named, asynchronous collectives on Horovod, unmodified.

Names come from the compressor's ordinal and from fixed bucket numbers, never from the order of calls within a step:
hooks run in another order on every rank.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

from hvd_sparse.hierarchy import Hierarchy
from hvd_sparse.members import Members, is_elastic
from hvd_sparse.process_sets import process_sets_of
from hvd_sparse.torch.collectives import Collectives, Handle
from hvd_sparse.torch.in_flight import held, held_all
from hvd_sparse.torch.tokens import TOKEN_BYTES

WITHOUT_CUDA = (
    "Horovod was built without CUDA. To compress on the device, install it again with "
    "HOROVOD_GPU_OPERATIONS=NCCL pip install --no-cache-dir --force-reinstall horovod"
)


class HorovodHandle:
    """A collective of Horovod under way. holders: of what it was given; made before, as its thread resizes outputs."""

    def __init__(self, handle: int, holders: list[torch.Tensor]):
        self._handle = handle
        self._held = holders

    def wait(self) -> Any:
        """Return the result, waiting for it."""
        result = hvd.synchronize(self._handle)
        self._held.clear()
        return result

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""
        return hvd.poll(self._handle)


class SentHandle(HorovodHandle):
    """An all-to-all under way: Horovod returns besides how much each rank sent."""

    def wait(self) -> torch.Tensor:
        """Return what was received, waiting for it."""
        return super().wait()[0]


class HorovodCollectives(Members, Collectives):
    """The collectives of one compressor over one process set; None: all ranks."""

    may_join = True
    token_bytes = TOKEN_BYTES

    def __init__(self, process_set):
        super().__init__(hvd, process_set, "hvd_sparse")

    def can_start(self) -> bool:
        """Return whether Horovod runs, and this rank takes part."""
        process_set = self.process_set
        if not hvd.is_initialized() or process_set.process_set_id is None or not process_set.included():
            return False
        try:
            process_set.size()
        except ValueError:  # Horovod was started anew, without this process set
            return False
        return True

    def is_alone(self) -> bool:
        """Return whether Horovod runs, with a single rank, and is not elastic."""
        return hvd.is_initialized() and hvd.size() == 1 and not is_elastic()

    def is_first(self) -> bool:
        """Return whether this rank is to speak for all: the set's first, or any before Horovod runs."""
        return not hvd.is_initialized() or (self.can_start() and self.rank() == 0)

    def is_elastic(self) -> bool:
        """Return whether Horovod's elastic launcher started this job."""
        return is_elastic()

    def incarnation(self) -> object:
        """Return an object that is another one after each hvd.init(): Horovod's table of the collectives in flight.

        Size and rank do not tell: an elastic job may replace another host, and this rank keeps both. Handles do not
        tell, as Horovod counts them from 0 again.
        """
        return mpi_ops._handle_map

    def why_not_cuda(self) -> str:
        """Return why CUDA tensors cannot be exchanged, nothing if they can."""
        return "" if hvd.cuda_built() else WITHOUT_CUDA

    def everywhere(self, name: str, own: Hashable) -> list[Any]:
        """Return what each of all ranks gives, in their order; waits for them."""
        return hvd.allgather_object(own, name=f"hvd_sparse.{name}")

    def subsets(self, hierarchy: Hierarchy) -> dict[tuple[int, ...], Collectives]:
        """Return {ranks: their collectives} of all hosts and columns; makes process sets that are missing."""
        return {
            ranks: HorovodCollectives(process_set) for ranks, process_set in process_sets_of(hvd, hierarchy).items()
        }

    def gather(self, name: str, tensor: torch.Tensor) -> Handle:
        """Start gathering a tensor."""
        output = tensor.new()  # as hvd.allgather_async would make it
        holders = held_all([tensor, output])
        handle = mpi_ops._allgather_async(tensor, output, self._named(name), self.process_set)
        return HorovodHandle(handle, holders)

    def gather_varying(self, name: str, tensor: torch.Tensor) -> Handle:
        """Start gathering a vector: Horovod's all-gather is the same for both."""
        return self.gather(name, tensor)

    def add(self, name: str, tensor: torch.Tensor) -> Handle:
        """Start summing a tensor over the ranks, in place."""
        holders = [held(tensor)]
        handle = hvd.allreduce_async_(tensor, name=self._named(name), op=hvd.Sum, process_set=self.process_set)
        return HorovodHandle(handle, holders)

    def send(self, name: str, tensor: torch.Tensor, sizes: Sequence[int], expected: int | None = None) -> Handle:
        """Start sending each rank its part of a vector; Horovod finds out what to expect."""
        split = torch.tensor(sizes, dtype=torch.int32)
        output, received = tensor.new(), split.new()  # as hvd.alltoall_async would make them
        holders = held_all([tensor, split, output, received])
        handle = mpi_ops._alltoall_async(tensor, split, output, received, self._named(name), self.process_set)
        return SentHandle(handle, holders)

    def _named(self, name: str) -> str:
        return f"{self._prefix}.{name}"
