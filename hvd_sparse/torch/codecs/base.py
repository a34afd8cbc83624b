"""The common part of all codecs: buckets, their payloads, and the interface of a codec."""

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from hvd_sparse.algorithms import Algorithm
from hvd_sparse.buckets import BucketLayout
from hvd_sparse.granularity import channels_of, segments_of
from hvd_sparse.reduce_scatter import NOTHING, Entries, Regions, Sent
from hvd_sparse.torch import ops
from hvd_sparse.torch.error_feedback import ErrorFeedback
from hvd_sparse.torch.exchange import Exchange, Pending
from hvd_sparse.torch.parameters import Parameters
from hvd_sparse.traffic import Traffic
from hvd_sparse.units import Units
from hvd_sparse.wire import LOW_BITS


@dataclass(slots=True)
class Entry:
    """One gradient between its compress and its decompress."""

    name: str
    gradient: torch.Tensor  # as Horovod passed it, or a copy on the device where the step works
    frozen: bool  # the parameter does not train at present: it sends nothing, and its residual stays
    factor: float = 1.0  # what the gradient is scaled with when it is accumulated
    carries_token: bool = True  # Horovod's all-reduce carries a token for it, not the tensor itself
    commit: Callable[[], None] | None = None  # what becomes of the error feedback of a tensor that is sent dense
    origin: torch.Tensor | None = None  # what Horovod passed, if `gradient` is a copy


@dataclass(frozen=True)
class Round:
    """What a codec has to know of the step under way."""

    step: int  # counted from 0
    density: float
    seed: int
    units: Units
    rank: int

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.units.world_size


class Payload(NamedTuple):
    """The form of one selection's payload."""

    n: int
    k: int
    segments: torch.Tensor | None
    size: int  # in bytes


@dataclass
class Bucket:
    """Tensors in one message, for as long as the same ones are expected at the same density."""

    name: str  # of its collective
    members: Mapping[str, int]  # their numbers, in the order of the message
    payloads: list[Payload]  # one for each member, or one of all where the selection is joint
    layout: BucketLayout
    hints: torch.Tensor | None = None  # float64[selections, 3], what they have learned
    message: torch.Tensor | None = None  # uint8[bytes], what this rank sends
    most_bytes: int | None = None  # that any rank may send, where that differs
    regions: Regions | None = None  # where it is reduced by their owners: then `message` does not leave the rank
    selected: Entries = NOTHING  # what this rank selected, there
    sent: Sent | None = None  # the same as it was sent to the owners
    excess: Entries = NOTHING  # what rounding kept back of the sums that this rank owns
    kept: Entries | None = None  # what owners have kept, where all ranks then add their residuals
    residuals_at: Callable[[np.ndarray], torch.Tensor] | None = None  # this rank's residuals; None: not added
    is_small: bool = False  # all messages of the step are, so that they go at once
    missing: set[str] = field(default_factory=set)
    is_started: bool = False
    pending: Pending | None = None
    sums: dict[str, torch.Tensor] = field(default_factory=dict)  # the reduced gradients, once it has arrived
    scale: float = 1.0  # that they were reduced with

    @property
    def size(self) -> int:
        """The bytes of its payloads."""
        return sum(payload.size for payload in self.payloads)

    def restart(self) -> None:
        """Begin a step."""
        self.missing, self.is_started, self.sums, self.pending = set(self.members), False, {}, None

    def numbers(self, names: Iterable[str]) -> list[int]:
        """Return the numbers of these members."""
        return [self.members[name] for name in names]


class Codec(abc.ABC):
    """Turns the gradients of a bucket into a message, and the messages of all ranks into sums."""

    def __init__(
        self,
        algorithm: Algorithm,
        parameters: Parameters,
        feedback: Mapping[str, ErrorFeedback],
        exchange: Exchange,
        traffic: Traffic,
        device: torch.device,
    ):
        self.algorithm = algorithm
        self.parameters = parameters
        self.feedback = feedback
        self.exchange = exchange
        self.traffic = traffic
        self.device = device
        self.finite: list[torch.Tensor] = []  # bool, of any shape: was each gradient finite, since the last vote?
        self.regions: dict[tuple[str, ...], Regions] = {}  # of messages that are reduced by owners of regions: state
        self._segments: dict[tuple[str, ...], torch.Tensor | None] = {}

    @property
    def is_joint(self) -> bool:
        """Whether the tensors share one selection, so that all have to be there before it is made."""
        return False

    @property
    def thresholds(self) -> Mapping:
        """The thresholds that outlive a step, by name: state."""
        return {}

    @property
    def values(self) -> str:
        """The type of the values in messages."""
        return self.algorithm.values

    def begin(self, now: Round) -> None:
        """Begin a step."""
        self.now = now
        self.finite = []

    def end(self) -> None:
        """End a step that is complete."""
        self.finite = []

    def told(self) -> list[float]:
        """Return what the ranks add up as a step begins, for their regions."""
        return []

    @abc.abstractmethod
    def plan(self, names: Sequence[str], prefix: str) -> list[Bucket]:
        """Return the buckets of these tensors, in the order of names, at the density of the step; none of nothing."""

    @abc.abstractmethod
    def encode(self, bucket: Bucket, entries: Mapping[str, Entry]) -> None:
        """Accumulate and select in the members that take part; put the message in the bucket, None for no message."""

    @abc.abstractmethod
    def decode(self, bucket: Bucket, gathered: torch.Tensor | None, entries: Mapping[str, Entry], scale: float) -> None:
        """Clear what was sent; put the sums of all ranks, times a scale, in the bucket, for all of `entries`."""

    def accumulate(self, entries: Mapping[str, Entry]) -> None:
        """Bring gradients into their error feedback."""
        for name, entry in entries.items():
            self.finite.append(self.feedback[name].accumulate(entry.gradient, entry.factor, self.now.units))

    def _form(self) -> dict[str, str]:
        """Return how payloads are coded, as the operators of buckets take it."""
        return {"coding": self.algorithm.coding, "value_dtype": self.values}

    def bucket_of(self, name: str, members: Sequence[str], payloads: list[Payload]) -> Bucket:
        """Return the bucket of these payloads, of the members in this order."""
        sizes = [self.parameters[member].numel() for member in members]
        ks = [payload.k for payload in payloads]
        layout = BucketLayout(sizes, ks, self._channels(members), self.is_joint)
        return Bucket(name, {member: number for number, member in enumerate(members)}, payloads, layout)

    def payload_of(self, names: tuple[str, ...], n: int, k: int) -> Payload:
        """Return the form of the payload of k of n elements of these tensors."""
        segments = self._segments_of(names)
        size = ops.payload_size(n, k, self.algorithm.coding, self.values, segments)
        return Payload(n, k, segments, size)

    def _pack_nothing(self, payload: Payload, out: torch.Tensor) -> None:
        """Write the payload of an empty contribution."""
        indices, values = out.new_empty(0, dtype=torch.int64), out.new_empty(0, dtype=torch.float32)
        ops.pack(indices, values, payload.n, payload.k, out, segments=payload.segments, **self._form())

    def _channels(self, names: Iterable[str]) -> list[int]:
        """Return how many groups of low-bit values each tensor has, nothing where one has no levels."""
        if self.values not in LOW_BITS:
            return []
        return [channels_of(self.parameters[name].shape, self.algorithm) for name in names]

    def _segments_of(self, names: tuple[str, ...]) -> torch.Tensor | None:
        """Return what shares the levels of low-bit values in tensors that lie one after the other."""
        if names not in self._segments:
            segments = segments_of([self.parameters[name].shape for name in names], self.algorithm)
            self._segments[names] = None if segments is None else torch.from_numpy(segments)
        return self._segments[names]


def in_training(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return those whose parameters train at present."""
    return {name: entry for name, entry in entries.items() if not entry.frozen}


def place_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return where its sum goes, n float32: Horovod's own place is the gradient that it passed, if that fits."""
    in_place = gradient.dtype == torch.float32 and gradient.is_contiguous()
    return gradient if in_place else gradient.new_empty(gradient.numel(), dtype=torch.float32)
