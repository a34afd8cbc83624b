"""Dense tensors, sent in Horovod's own all-reduces, or several in one all-reduce of this package."""

import math
from collections.abc import Mapping, Sequence

import torch

from hvd_sparse.algorithms import Algorithm
from hvd_sparse.half import largest_sent
from hvd_sparse.torch.codecs.base import Arrival
from hvd_sparse.torch.error_feedback import Dense, ErrorFeedback, make_error_feedback
from hvd_sparse.torch.exchange import Pending
from hvd_sparse.units import Units

MOST_TOGETHER = 1 << 14  # elements of a small tensor; a larger one is sent at once, during backward


def concatenated(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors as one vector, in float32 or wider: 16-bit types may not hold the sum of which a mean is taken."""
    return torch.cat([one.reshape(-1).to(torch.promote_types(one.dtype, torch.float32)) for one in tensors])


class DenseBucket:
    """The dense tensors that share one all-reduce of this package."""

    def __init__(self, arrivals: Sequence[Arrival], pending: Pending):
        self._sizes = {arrival.name: arrival.gradient.numel() for arrival in arrivals}
        self.pending = pending
        self._sums: dict[str, torch.Tensor] | None = None

    def sum_of(self, name: str, scale: float) -> torch.Tensor:
        """Return the sum of a member over all ranks, times a scale."""
        if self._sums is None:
            parts = self.pending.wait().mul_(scale).split(list(self._sizes.values()))
            self._sums = dict(zip(self._sizes, parts, strict=True))
        return self._sums[name]


class Joined:
    """Concatenated parameters, with the interface of one parameter for the error feedback."""

    def __init__(self, parameters: Sequence[torch.Tensor], device: torch.device):
        self._parameters, self._device = parameters, device

    def numel(self) -> int:
        """Return the number of elements of all parameters."""
        return sum(parameter.numel() for parameter in self._parameters)

    def detach(self) -> torch.Tensor:
        """Return the concatenated elements, float32[n] on the device."""
        return torch.cat([one.detach().reshape(-1).to(self._device, torch.float32) for one in self._parameters])


class SmallTensors:
    """Small tensors with concatenated error-feedback buffers: a step accumulates all of them in one call.

    For a tensor of a hundred elements, the call overhead is far larger than the arithmetic.
    """

    def __init__(self, algorithm: Algorithm, feedback: Mapping[str, ErrorFeedback], device: torch.device):
        self._algorithm, self._device = algorithm, device
        self._feedback = {name: one for name, one in feedback.items() if one.parameter.numel() <= MOST_TOGETHER}
        self.names = frozenset(self._feedback)
        self._plan([])

    def _plan(self, names: Sequence[str]) -> None:
        self._names = names
        self._members = [self._feedback[name] for name in names]
        self._numels = [one.parameter.numel() for one in self._members]
        self._parts: dict[str, tuple[torch.Tensor, ...]] = {}  # the members' slices of each buffer
        decays = {one.weight_decay for one in self._members}
        self._decay_alike = len(decays) == 1
        whole = Joined([one.parameter for one in self._members], self._device)
        self._all = make_error_feedback(self._algorithm, whole, self._device, max(decays, default=0.0))

    def take_all(self, arrivals: Sequence[Arrival], units: Units) -> Dense | None:
        """Return the concatenated dense tensors to send; None if the caller has to accumulate them one by one.

        This is so if some are not small (their buffers may be slices of others), frozen or not float32, or if their
        factors or weight decays differ. The first arrival's `commit` updates the error feedback of all.
        """
        names, first = [arrival.name for arrival in arrivals], arrivals[0]
        if not self.names.issuperset(names):
            return None
        if names != self._names:
            self._plan(names)
        if not self._decay_alike or any(
            arrival.frozen or arrival.factor != first.factor or arrival.gradient.dtype != torch.float32
            for arrival in arrivals
        ):
            return None
        self._join()  # a checkpoint may have been loaded
        gradients = torch.cat([arrival.gradient.reshape(-1) for arrival in arrivals])
        dense = self._all.take_all(gradients, first.factor, units)
        self._join()  # the first step has allocated buffers
        first.commit = dense.commit
        return dense

    def _join(self) -> None:
        """Make the members' buffers slices of the concatenated buffers."""
        kinds = {kind for own in self._members for kind in own.buffers}
        for kind in sorted(kinds | self._all.buffers.keys()):
            if kind not in self._parts:
                self._parts[kind] = self._all.buffer(kind).split(self._numels)
            for own, part in zip(self._members, self._parts[kind], strict=True):
                if kind not in own.buffers:
                    own.buffers[kind] = part
                elif own.buffers[kind] is not part:
                    own.adopt(kind, part)


def take_dense(arrival: Arrival, feedback: ErrorFeedback, units: Units) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the dense tensor to send, and flags whether it is finite; set the arrival's `commit`."""
    gradient = arrival.gradient
    if arrival.frozen:
        return gradient.new_zeros(gradient.numel(), dtype=feedback.dense_dtype(gradient)), []
    most = largest_sent(units.world_size, units.averages) if gradient.dtype == torch.float16 else math.inf
    sent, finite, arrival.commit = feedback.take_all(gradient, arrival.factor, units, most)
    return sent, [finite]


def fills(buffer: torch.Tensor, parts: list[torch.Tensor]) -> bool:
    """Return whether the tensors are contiguous parts of the buffer and together fill it."""
    at = buffer.data_ptr()
    for part in parts:
        if part.dtype != buffer.dtype or part.data_ptr() != at:
            return False
        at += part.nbytes
    return at == buffer.data_ptr() + buffer.nbytes
