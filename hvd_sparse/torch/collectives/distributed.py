"""Asynchronous collectives on PyTorch's process groups: gloo, and NCCL for CUDA tensors.

All ranks must start collectives in the same order. DistributedDataParallel calls its hooks in the same order on every
rank. The code here must not decide what to start by asking whether another collective is done.

The all-gather of a process group needs the same size on every rank, and its all-to-all needs the sizes to be received.
If the sizes differ, the ranks exchange them first, and the main collective is postponed. A process starts its postponed
collectives when it starts the next collective with unknown sizes or waits for a result.
"""

import atexit
import functools
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist

from hvd_sparse.hierarchy import Hierarchy
from hvd_sparse.torch.collectives import Collectives, Handle

NOT_INITIALISED = "hvd_sparse: torch.distributed is not initialised; call torch.distributed.init_process_group() first"
PADDED = 1.25  # largest ratio of padded to unpadded bytes at which vectors are padded and gathered in one collective
EXIT_SECONDS = 0.1

if dist.is_available():
    # PyTorch imports this module when it builds the first DistributedDataParallel. Imported then, the default arguments
    # of its functions keep the process group, and destroy_process_group never ends the threads of gloo.
    import torch.distributed.nn

# {world: {ranks: process group}}. They live as long as the world does: destroy_process_group ends their threads, too.
_subsets: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()


@functools.cache
def wait_at_exit() -> None:
    """Make the process wait a moment before it ends, once for all collectives.

    The threads of gloo free the tensors of a collective after its result has arrived. If one of them does so while
    Python ends, the process aborts: "terminate called without an active exception".
    """
    atexit.register(time.sleep, EXIT_SECONDS)


class WorkHandle:
    """One or several `torch.distributed.Work` objects under way.

    Args:
        works: The Work objects.
        result: The tensor that they write to.
        origin: The tensor that `wait` copies the result to and returns; None: `wait` returns `result`.
    """

    def __init__(self, works: Iterable[Any], result: torch.Tensor, origin: torch.Tensor | None = None):
        self._works, self._result, self._origin = list(works), result, origin

    def wait(self) -> torch.Tensor:
        """Wait for the result and return it."""
        for work in self._works:
            work.wait()
        self._works.clear()
        return self._result if self._origin is None else self._origin.copy_(self._result)

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""
        return all(work.is_completed() for work in self._works)


class Postponed:
    """A collective that starts after the ranks have exchanged its sizes.

    Args:
        owner: The collectives that it is one of.
        sizes: The exchange of the sizes, one number for each rank.
        follow: Starts the collective, given the sizes.
    """

    def __init__(self, owner: "DistributedCollectives", sizes: Handle, follow: Callable[[list[int]], Handle]):
        self._owner, self._sizes, self._follow = owner, sizes, follow
        self._rest: Handle | None = None

    def start(self) -> None:
        """Wait for the sizes, then start the collective."""
        self._rest = self._follow(self._sizes.wait().tolist())

    def wait(self) -> torch.Tensor:
        """Wait for the result and return it."""
        if self._rest is None:
            self._owner.start_postponed()
        return cast(Handle, self._rest).wait()

    def is_done(self) -> bool:
        """Return whether `wait` would return at once; False before the collective has started."""
        return self._rest is not None and self._rest.is_done()


class Padded(WorkHandle):
    """An all-gather of vectors that were padded to the size of the largest."""

    def __init__(self, works: Iterable[Any], result: torch.Tensor, sizes: Sequence[int]):
        super().__init__(works, result)
        self._sizes = sizes

    def wait(self) -> torch.Tensor:
        """Wait for the vectors and return them without padding, concatenated."""
        rows = super().wait().view(len(self._sizes), -1)
        return torch.cat([row[:size] for row, size in zip(rows, self._sizes, strict=True)])


class DistributedCollectives(Collectives):
    """The collectives of one compressor over a process group; None stands for all ranks."""

    may_join = False
    token_bytes = 0

    def __init__(self, group: dist.ProcessGroup | None = None):
        if not dist.is_available():
            raise ImportError("hvd_sparse.torch.ddp needs torch.distributed, which this PyTorch was built without")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "process_set must be a torch.distributed.ProcessGroup under DistributedDataParallel, as from "
                f"torch.distributed.new_group(), got {type(group).__name__}"
            )
        self._group = group
        self.device: torch.device | None = None  # of the model; None: unknown
        self.leaves_out = False  # whether the model may leave out parameters in a step
        self._whole: DistributedCollectives | None = None  # of which these are a subset
        self._postponed: list[Postponed] = []
        wait_at_exit()

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group. Raises RuntimeError before torch.distributed is initialised."""
        if not dist.is_initialized():
            raise RuntimeError(NOT_INITIALISED)
        return dist.group.WORLD if self._group is None else self._group

    def size(self) -> int:
        """Return the world size of the group."""
        return self.group.size()

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self.group.rank()

    def can_start(self) -> bool:
        """Return whether torch.distributed is initialised."""
        return dist.is_initialized()

    def is_alone(self) -> bool:
        """Return False: DistributedDataParallel calls hooks with a single rank, too."""
        return False

    def is_first(self) -> bool:
        """Return whether this rank prints messages for all: rank 0 of the group, or any rank before initialisation."""
        return not dist.is_initialized() or self.rank() == 0

    def is_elastic(self) -> bool:
        """Return False: an elastic torchrun restarts all processes."""
        return False

    def may_leave_out(self) -> bool:
        """Return whether the model may leave out parameters in a step."""
        return self.leaves_out if self._whole is None else self._whole.leaves_out

    def incarnation(self) -> object:
        """Return the group of all ranks, which is a new object each time torch.distributed is initialised."""
        return dist.group.WORLD

    def why_not_cuda(self) -> str:
        """Return an empty string: DistributedDataParallel itself requires a process group for CUDA tensors."""
        return ""

    def check_everyone(self) -> None:
        """Raise ValueError unless the process group contains all ranks."""
        if self._group is not None and self.size() != dist.get_world_size():
            raise ValueError(
                'hvd_sparse: exchange="hierarchical" needs all ranks of the job, got a process group of '
                f"{self.size()} of the {dist.get_world_size()} ranks that there are"
            )

    def allgather_object(self, own: Hashable) -> list[Any]:
        """All-gather a Python object. Return the objects in the order of ranks; block until all have arrived."""
        found: list[Any] = [None] * self.size()
        with torch.cuda.device(self._cuda()) if self._lacks_cpu() else nullcontext():  # where NCCL gathers objects
            dist.all_gather_object(found, own, group=self.group)
        return found

    def subsets(self, hierarchy: Hierarchy) -> dict[tuple[int, ...], Collectives]:
        """Return {ranks: their collectives} for each host and column that contains this rank; create missing groups."""
        found: dict[tuple[int, ...], Collectives] = {}
        groups = _subsets.setdefault(self.incarnation(), {})
        for ranks in dict.fromkeys((*hierarchy.hosts, *hierarchy.columns)):
            if ranks not in groups:
                groups[ranks] = dist.new_group(list(ranks))
            if dist.get_rank() in ranks:
                own = DistributedCollectives(groups[ranks])
                found[ranks], own.device, own._whole = own, self.device, self
        return found

    def allgather(self, name: str, tensor: torch.Tensor) -> Handle:
        """Start an all-gather of a tensor that has the same shape on all ranks."""
        origin, tensor = tensor, self._placed(tensor.contiguous())
        whole = tensor.new_empty((self.size(), *tensor.shape))
        work = dist.all_gather(list(whole.unbind()), tensor, group=self.group, async_op=True)
        gathered = whole.flatten(0, 1)
        return WorkHandle([work], gathered, _back(origin, tensor, gathered.shape))

    def allgather_varying(self, name: str, tensor: torch.Tensor) -> Handle:
        """Start an all-gather of a vector. Its size is gathered first."""
        self.start_postponed()
        sizes = self.allgather(name, torch.tensor([tensor.numel()], device="cpu"))
        return self._postpone(sizes, functools.partial(self.allgather_sizes, tensor.contiguous()))

    def allreduce(self, name: str, tensor: torch.Tensor) -> Handle:
        """Start an all-reduce that sums a tensor in place."""
        placed = self._placed(tensor)
        work = dist.all_reduce(placed, group=self.group, async_op=True)
        return WorkHandle([work], placed, None if placed is tensor else tensor)

    def alltoall(self, name: str, tensor: torch.Tensor, sizes: Sequence[int], expected: int | None = None) -> Handle:
        """Start an all-to-all of a vector. If `expected` is None, the sizes are exchanged first."""
        if expected is not None:
            return self.alltoall_sizes(tensor, sizes, [expected] * self.size())
        self.start_postponed()
        each = [1] * self.size()
        others = self.alltoall_sizes(torch.tensor(sizes, dtype=torch.int64, device="cpu"), each, each)
        return self._postpone(others, functools.partial(self.alltoall_sizes, tensor, sizes))

    def start_postponed(self) -> None:
        """Start the collectives that wait for their sizes."""
        postponed, self._postponed = self._postponed, []
        for one in postponed:
            one.start()

    def allgather_sizes(self, tensor: torch.Tensor, sizes: Sequence[int]) -> Handle:
        """Start an all-gather of vectors. sizes: the number of elements on each rank."""
        origin, tensor, most, total = tensor, self._placed(tensor), max(sizes), sum(sizes)
        if min(sizes) == most:
            return self.allgather("sizes", origin)
        if tensor.device == origin.device and most * len(sizes) <= PADDED * total:
            row = torch.cat([tensor, tensor.new_zeros(most - tensor.numel())])
            whole = tensor.new_empty((len(sizes), most))
            work = dist.all_gather(list(whole.unbind()), row, group=self.group, async_op=True)
            return Padded([work], whole, sizes)
        whole = tensor.new_empty(total)
        parts = whole.split(list(sizes))
        parts[self.rank()].copy_(tensor)
        ranks = dist.get_process_group_ranks(self.group)
        works = [
            dist.broadcast(part, src=rank, group=self.group, async_op=True)
            for part, rank in zip(parts, ranks, strict=True)
            if part.numel() > 0
        ]
        return WorkHandle(works, whole, _back(origin, tensor, whole.shape))

    def alltoall_sizes(self, tensor: torch.Tensor, sizes: Sequence[int], others: Sequence[int]) -> Handle:
        """Start an all-to-all of a vector. sizes: elements to each rank; others: elements from each rank."""
        origin, tensor = tensor, self._placed(tensor.contiguous())
        received = tensor.new_empty(sum(others))
        work = dist.all_to_all_single(received, tensor, list(others), list(sizes), group=self.group, async_op=True)
        return WorkHandle([work], received, _back(origin, tensor, received.shape))

    def _postpone(self, sizes: Handle, follow: Callable[[list[int]], Handle]) -> Postponed:
        self._postponed.append(Postponed(self, sizes, follow))
        return self._postponed[-1]

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on a device that the group supports: a CUDA copy if the group has no CPU backend."""
        return tensor if tensor.is_cuda or not self._lacks_cpu() else tensor.to(self._cuda())

    def _lacks_cpu(self) -> bool:
        """Return whether the group has no backend for CPU tensors."""
        return torch.device("cpu") not in self.group._device_types

    def _cuda(self) -> torch.device:
        """Return the model's device, whatever the current device is: NCCL accepts one rank for each device."""
        if self.device is not None and self.device.type == "cuda":
            return self.device
        return torch.device("cuda", torch.cuda.current_device())


def _back(origin: torch.Tensor, placed: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
    """Return a new tensor on the device of `origin` for the result; None if `placed` is on the same device."""
    return None if placed.device == origin.device else origin.new_empty(shape)
