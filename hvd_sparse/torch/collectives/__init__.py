"""The asynchronous collectives that an exchange uses, over the ranks of one compressor.

The module `horovod` implements them with an unmodified Horovod, the module `distributed` with PyTorch's process groups.
Horovod matches the collectives of different ranks by name. Process groups match them by the order in which they start,
so the order must be the same on every rank.
"""

import abc
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch

from hvd_sparse.hierarchy import Hierarchy


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> torch.Tensor:
        """Wait for the result and return it."""

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""


class Collectives(abc.ABC):
    """The ranks of one compressor and their collectives. The backend is Horovod or torch.distributed."""

    may_join: bool  # whether a rank may miss a step without notice, as with hvd.join()
    token_bytes: int  # size of the token that is all-reduced in place of a gradient sent as a payload

    @abc.abstractmethod
    def size(self) -> int:
        """Return the world size of these ranks; raise RuntimeError before the backend is initialised."""

    @abc.abstractmethod
    def rank(self) -> int:
        """Return this process's rank, in [0, size())."""

    @abc.abstractmethod
    def can_start(self) -> bool:
        """Return whether the backend is initialised and this rank takes part."""

    @abc.abstractmethod
    def is_alone(self) -> bool:
        """Return whether the job has a single rank, for which the backend does not call the compressor."""

    @abc.abstractmethod
    def is_first(self) -> bool:
        """Return whether this rank prints messages for all ranks: rank 0, or any rank before initialisation."""

    @abc.abstractmethod
    def is_elastic(self) -> bool:
        """Return whether ranks may join or leave during the job."""

    def may_leave_out(self) -> bool:
        """Return whether a rank may leave out parameters that others use, though `may_join` is False."""
        return False

    @abc.abstractmethod
    def incarnation(self) -> object:
        """Return an object that changes each time the backend is initialised again."""

    @abc.abstractmethod
    def why_not_cuda(self) -> str:
        """Return why CUDA tensors cannot be exchanged; an empty string if they can."""

    @abc.abstractmethod
    def check_everyone(self) -> None:
        """Raise ValueError unless the collectives include all ranks of the job."""

    @abc.abstractmethod
    def allgather_object(self, own: Hashable) -> list[Any]:
        """All-gather a Python object. Return the objects in the order of ranks; block until all have arrived."""

    @abc.abstractmethod
    def subsets(self, hierarchy: Hierarchy) -> dict[tuple[int, ...], "Collectives"]:
        """Return {ranks: their collectives} for each host and column that contains this rank.

        Every rank must call this method, because it creates missing groups.

        Raises:
            ValueError: The backend cannot create the groups.
        """

    @abc.abstractmethod
    def allgather(self, name: str, tensor: torch.Tensor) -> Handle:
        """Start an all-gather of a tensor that has the same shape on all ranks. The result concatenates dimension 0."""

    @abc.abstractmethod
    def allgather_varying(self, name: str, tensor: torch.Tensor) -> Handle:
        """Start an all-gather of a vector whose size may differ between ranks. The result concatenates the vectors."""

    @abc.abstractmethod
    def allreduce(self, name: str, tensor: torch.Tensor) -> Handle:
        """Start an all-reduce that sums a tensor in place. The result is this tensor."""

    @abc.abstractmethod
    def alltoall(self, name: str, tensor: torch.Tensor, sizes: Sequence[int], expected: int | None = None) -> Handle:
        """Start an all-to-all of a vector. The result concatenates the parts received, in the order of ranks.

        Args:
            name: The name of the collective.
            tensor: A vector of sum(sizes) elements: the parts for all ranks, in the order of ranks.
            sizes: The number of elements for each rank.
            expected: The number of elements that this rank receives from each rank; None if it does not know.
        """
