"""Asynchronous collectives on PyTorch's process groups: gloo, and NCCL for CUDA tensors.

Ranks must start them in the same order. DistributedDataParallel calls its hooks so; nothing that is started may depend
on whether another collective is done already.

Process groups gather only what has the same size on every rank, and ask what to expect of an all-to-all. Where sizes
differ they are exchanged first; what follows is started as soon as this process starts the next such collective, or
waits for one.
"""

import abc
import ctypes
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from hvd_sparse.hierarchy import Hierarchy
from hvd_sparse.torch.collectives import Collectives, Handle

NOT_INITIALISED = "hvd_sparse: torch.distributed is not initialised; call torch.distributed.init_process_group() first"
PADDED = 1.25  # times the bytes of all ranks: up to so much, they are padded to the largest, and gathered at once
LAST = 16  # works that are kept

_subsets: dict[tuple[int, ...], tuple[object, Any]] = {}  # ranks: the incarnation, and their group in it

# A gloo thread that frees a tensor while Python exits aborts the process. The last works, which a thread may not have
# done with, are never freed therefore.
_last: deque[Any] = deque(maxlen=LAST)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_last))


class WorkHandle:
    """One or several works under way. result: the tensor that they write into; origin: where it is copied to, if so."""

    def __init__(self, works: Iterable[Any], result: torch.Tensor, origin: torch.Tensor | None = None):
        self._works, self._result, self._origin = list(works), result, origin

    def wait(self) -> torch.Tensor:
        """Return the result, waiting for it."""
        for work in self._works:
            work.wait()
            _last.append(work)
        self._works.clear()
        return self._result if self._origin is None else self._origin.copy_(self._result)

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""
        return all(work.is_completed() for work in self._works)


class Postponed(abc.ABC):
    """A collective whose sizes are exchanged first."""

    def __init__(self, owner: "DistributedCollectives", sizes: Handle, tensor: torch.Tensor):
        self._owner, self._sizes, self._tensor = owner, sizes, tensor
        self._rest: Handle | None = None

    def start(self) -> None:
        """Start what follows, waiting for the sizes."""
        sizes = self._sizes.wait().tolist()
        self._rest = self._follow(self._tensor, sizes)

    @abc.abstractmethod
    def _follow(self, tensor: torch.Tensor, sizes: list[int]) -> Handle:
        """Start the collective itself, given all ranks' sizes."""

    def wait(self) -> torch.Tensor:
        """Return the result, waiting for it."""
        if self._rest is None:
            self._owner.start_postponed()
        return cast(Handle, self._rest).wait()

    def is_done(self) -> bool:
        """Return whether `wait` would return at once; False for as long as it has not been started."""
        return self._rest is not None and self._rest.is_done()


class Gathered(Postponed):
    """An all-gather of vectors of different sizes."""

    def _follow(self, tensor: torch.Tensor, sizes: list[int]) -> Handle:
        return self._owner.gather_sizes(tensor, sizes)


class Sent(Postponed):
    """An all-to-all of parts that only their senders know the sizes of."""

    def __init__(self, owner: "DistributedCollectives", sizes: Handle, tensor: torch.Tensor, own: Sequence[int]):
        super().__init__(owner, sizes, tensor)
        self._own = own

    def _follow(self, tensor: torch.Tensor, sizes: list[int]) -> Handle:
        return self._owner.send_sizes(tensor, self._own, sizes)


class Padded(WorkHandle):
    """An all-gather of vectors that were padded to the largest."""

    def __init__(self, works: Iterable[Any], result: torch.Tensor, sizes: Sequence[int]):
        super().__init__(works, result)
        self._sizes = sizes

    def wait(self) -> torch.Tensor:
        """Return the vectors without their padding."""
        rows = super().wait().view(len(self._sizes), -1)
        return torch.cat([row[:size] for row, size in zip(rows, self._sizes, strict=True)])


class DistributedCollectives(Collectives):
    """The collectives of one compressor over one process group; None: all ranks."""

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
        self._postponed: list[Postponed] = []

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group; RuntimeError before torch.distributed is initialised."""
        if not dist.is_initialized():
            raise RuntimeError(NOT_INITIALISED)
        return dist.group.WORLD if self._group is None else self._group

    def size(self) -> int:
        """Return the number of ranks."""
        return self.group.size()

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self.group.rank()

    def can_start(self) -> bool:
        """Return whether torch.distributed is initialised."""
        return dist.is_initialized()

    def is_alone(self) -> bool:
        """Return False: hooks are called in a lone process, too."""
        return False

    def is_first(self) -> bool:
        """Return whether this rank is to speak for all: the group's first, or any before there is a group."""
        return not dist.is_initialized() or self.rank() == 0

    def is_elastic(self) -> bool:
        """Return False: torchrun starts all processes anew where it is elastic."""
        return False

    def incarnation(self) -> object:
        """Return an object that is another one each time that torch.distributed is initialised: the group of all."""
        return dist.group.WORLD

    def why_not_cuda(self) -> str:
        """Return nothing: a process group for CUDA tensors is DistributedDataParallel's own requirement."""
        return ""

    def check_everyone(self) -> None:
        """Raise ValueError unless these are all ranks."""
        if self._group is not None and self.size() != dist.get_world_size():
            raise ValueError(
                f'exchange="hierarchical" works on all ranks, got a process group of {self.size()} of the '
                f"{dist.get_world_size()} ranks that there are"
            )

    def everywhere(self, name: str, own: Hashable) -> list[Any]:
        """Return what each rank gives, in their order; waits for them."""
        found: list[Any] = [None] * self.size()
        dist.all_gather_object(found, own, group=self.group)
        return found

    def subsets(self, hierarchy: Hierarchy) -> dict[tuple[int, ...], Collectives]:
        """Return {ranks: their collectives} of all hosts and columns; makes groups that are missing."""
        found: dict[tuple[int, ...], Collectives] = {}
        for ranks in dict.fromkeys((*hierarchy.hosts, *hierarchy.columns)):
            incarnation, group = _subsets.get(ranks, (None, None))
            if incarnation is not self.incarnation():
                group = dist.new_group(list(ranks))
                _subsets[ranks] = self.incarnation(), group
            if dist.get_rank() in ranks:
                found[ranks] = DistributedCollectives(group)
        return found

    def gather(self, name: str, tensor: torch.Tensor) -> Handle:
        """Start gathering a tensor, of the same shape on all ranks."""
        origin, tensor = tensor, self._placed(tensor.contiguous())
        whole = tensor.new_empty((self.size(), *tensor.shape))
        work = dist.all_gather(list(whole.unbind()), tensor, group=self.group, async_op=True)
        gathered = whole.flatten(0, 1)
        return WorkHandle([work], gathered, _back(origin, tensor, gathered.shape))

    def gather_varying(self, name: str, tensor: torch.Tensor) -> Handle:
        """Start gathering a vector: first its size."""
        self.start_postponed()
        sizes = self.gather(name, torch.tensor([tensor.numel()]))
        return self._postpone(Gathered(self, sizes, tensor.contiguous()))

    def add(self, name: str, tensor: torch.Tensor) -> Handle:
        """Start summing a tensor over the ranks, in place."""
        placed = self._placed(tensor)
        work = dist.all_reduce(placed, group=self.group, async_op=True)
        return WorkHandle([work], placed, None if placed is tensor else tensor)

    def send(self, name: str, tensor: torch.Tensor, sizes: Sequence[int], expected: int | None = None) -> Handle:
        """Start sending each rank its part of a vector: first the sizes, where they are not known."""
        if expected is not None:
            return self.send_sizes(tensor, sizes, [expected] * self.size())
        self.start_postponed()
        others = self.send_sizes(torch.tensor(sizes, dtype=torch.int64), [1] * self.size(), [1] * self.size())
        return self._postpone(Sent(self, others, tensor, sizes))

    def start_postponed(self) -> None:
        """Start what has waited for sizes."""
        postponed, self._postponed = self._postponed, []
        for one in postponed:
            one.start()

    def gather_sizes(self, tensor: torch.Tensor, sizes: Sequence[int]) -> Handle:
        """Start gathering vectors of these sizes."""
        origin, tensor, most, total = tensor, self._placed(tensor), max(sizes), sum(sizes)
        if min(sizes) == most:
            return self.gather("", origin)
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

    def send_sizes(self, tensor: torch.Tensor, sizes: Sequence[int], others: Sequence[int]) -> Handle:
        """Start sending each rank its part of a vector, when it is known how much the others send this one."""
        origin, tensor = tensor, self._placed(tensor.contiguous())
        received = tensor.new_empty(sum(others))
        work = dist.all_to_all_single(received, tensor, list(others), list(sizes), group=self.group, async_op=True)
        return WorkHandle([work], received, _back(origin, tensor, received.shape))

    def _postpone(self, one: Postponed) -> Postponed:
        self._postponed.append(one)
        return one

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor where the group can send it from: on the device, if it has no backend for the CPU."""
        if tensor.is_cuda or torch.device("cpu") in self.group._device_types:
            return tensor
        return tensor.to(torch.device("cuda", torch.cuda.current_device()))


def _back(origin: torch.Tensor, placed: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
    """Return where a result is copied to, if a tensor was moved to where it can be sent from."""
    return None if placed.device == origin.device else origin.new_empty(shape)
