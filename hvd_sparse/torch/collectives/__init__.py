"""The collectives that an exchange is made of, asynchronous, over the ranks of one compressor.

`horovod` has them on an unmodified Horovod, `distributed` on PyTorch's process groups. Horovod matches collectives by
their names, process groups by the order in which they are started: it must be the same on every rank.
"""

import abc
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch

from hvd_sparse.hierarchy import Hierarchy


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> torch.Tensor:
        """Return the result, waiting for it."""

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""


class Collectives(abc.ABC):
    """The ranks of one compressor, and what they do together."""

    may_join: bool  # whether a rank may stay away from a step without notice, as with hvd.join()
    token_bytes: int  # what is all-reduced in place of a gradient that is sent as a payload

    @abc.abstractmethod
    def size(self) -> int:
        """Return the number of ranks; RuntimeError before the host framework is initialised."""

    @abc.abstractmethod
    def rank(self) -> int:
        """Return this process's rank among them."""

    @abc.abstractmethod
    def can_start(self) -> bool:
        """Return whether the host framework runs, and this rank takes part."""

    @abc.abstractmethod
    def is_alone(self) -> bool:
        """Return whether the host framework runs, with a single rank, and calls no compressor therefore."""

    @abc.abstractmethod
    def is_first(self) -> bool:
        """Return whether this rank is to speak for all: the first, or any before the host framework runs."""

    @abc.abstractmethod
    def is_elastic(self) -> bool:
        """Return whether ranks come and go during the job."""

    @abc.abstractmethod
    def incarnation(self) -> object:
        """Return an object that is another one each time that the host framework is initialised anew."""

    @abc.abstractmethod
    def why_not_cuda(self) -> str:
        """Return why CUDA tensors cannot be exchanged, nothing if they can."""

    @abc.abstractmethod
    def check_everyone(self) -> None:
        """Raise ValueError unless these are all ranks, for as long as the job runs."""

    @abc.abstractmethod
    def everywhere(self, name: str, own: Hashable) -> list[Any]:
        """Return what each rank gives, in their order; waits for them."""

    @abc.abstractmethod
    def subsets(self, hierarchy: Hierarchy) -> dict[tuple[int, ...], "Collectives"]:
        """Return {ranks: their collectives} of all hosts and columns; makes what is missing, on every rank.

        Raises ValueError where the host framework does not permit that.
        """

    @abc.abstractmethod
    def gather(self, name: str, tensor: torch.Tensor) -> Handle:
        """Start gathering a tensor, of the same shape on all ranks; the result is all of them, one after the other."""

    @abc.abstractmethod
    def gather_varying(self, name: str, tensor: torch.Tensor) -> Handle:
        """Start gathering a vector, whose size may differ between ranks; the result is all, one after the other."""

    @abc.abstractmethod
    def add(self, name: str, tensor: torch.Tensor) -> Handle:
        """Start summing a tensor over the ranks, in place; the result is that tensor."""

    @abc.abstractmethod
    def send(self, name: str, tensor: torch.Tensor, sizes: Sequence[int], expected: int | None = None) -> Handle:
        """Start sending each rank its part of a vector; the result is what all ranks sent this one, in their order.

        sizes: the elements for each rank. expected: how many each rank sends this one, None if that is not known.
        """
