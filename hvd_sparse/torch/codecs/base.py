"""The common part of all codecs: buckets, their payloads, and the interface of a codec."""

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from hvd_sparse.algorithms import Algorithm
from hvd_sparse.buckets import BucketLayout, plan_buckets
from hvd_sparse.granularity import channels_of, segments_of
from hvd_sparse.reduce_scatter import NOTHING, Bounds, Regions, Sent, SparseVector
from hvd_sparse.torch import ops
from hvd_sparse.torch.error_feedback import ErrorFeedback
from hvd_sparse.torch.exchange import Exchange, Pending
from hvd_sparse.torch.parameters import Parameters
from hvd_sparse.torch.traffic import Traffic
from hvd_sparse.units import Units
from hvd_sparse.wire import LOW_BITS, top_k_count


@dataclass(slots=True)
class Arrival:
    """One gradient between its compress and its decompress."""

    name: str
    gradient: torch.Tensor  # as Horovod passed it, or a copy on the step's device
    frozen: bool  # the parameter is frozen: it sends nothing, and its residual stays
    factor: float = 1.0  # the factor of the gradient when it is accumulated
    carries_token: bool = True  # Horovod all-reduces a token for it, not the tensor itself
    is_lent: bool = False  # Horovod all-reduces the passed tensor's own memory, and may write to it
    commit: Callable[[], None] | None = None  # updates the error feedback of a dense tensor
    origin: torch.Tensor | None = None  # the tensor that Horovod passed, if `gradient` is a copy
    version: int = 0  # of the tensor that Horovod passed: PyTorch counts its changes

    @property
    def passed(self) -> torch.Tensor:
        """The tensor that Horovod passed."""
        return self.gradient if self.origin is None else self.origin


Arrivals = Mapping[str, Arrival]  # by name


@dataclass(frozen=True)
class Round:
    """The data of the current step that a codec needs."""

    number: int  # of the step, from 0
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
class Scattered:
    """A bucket's data in a reduce-scatter."""

    regions: Regions
    selected: SparseVector = NOTHING  # the entries that this rank selected
    sent: Sent | None = None  # the same entries as sent to the owners
    excess: SparseVector = NOTHING  # rounding errors of the sums that this rank owns
    kept: SparseVector | None = None  # the owners' kept sums, if residuals are then all-reduced
    residuals_at: Callable[[np.ndarray], torch.Tensor] | None = None  # this rank's residuals; None: no all-reduce


@dataclass
class Bucket:
    """Tensors in one message. A bucket is reused while the expected tensors and the density stay the same."""

    name: str  # of the collective
    members: Mapping[str, int]  # their positions in the message
    payloads: list[Payload]  # one for each member, or one in all with a joint selection
    layout: BucketLayout
    hints: torch.Tensor | None = None  # float64[selections, 3], updated by each selection
    message: torch.Tensor | None = None  # uint8[bytes], sent by this rank
    most_bytes: int | None = None  # upper bound for any rank, if sizes differ between ranks
    scattered: Scattered | None = None  # for a reduce-scatter: then `message` is not sent
    is_small: bool = False  # all messages of the step are small and need no presence check
    missing: set[str] = field(default_factory=set)
    is_started: bool = False
    pending: Pending | None = None
    sums: dict[str, torch.Tensor] = field(default_factory=dict)  # the reduced gradients, after decoding
    scale: float = 1.0  # the factor of `sums`

    @property
    def size(self) -> int:
        """The total bytes of the payloads."""
        return sum(payload.size for payload in self.payloads)

    def begin_step(self) -> None:
        """Begin a step."""
        self.missing, self.is_started, self.sums, self.pending = set(self.members), False, {}, None

    def numbers(self, names: Iterable[str]) -> list[int]:
        """Return the positions of these members."""
        return [self.members[name] for name in names]


class Codec(abc.ABC):
    """Turns the gradients of a bucket into a message, and the messages of all ranks into sums."""

    is_joint = False  # whether the tensors share one selection, which needs all gradients

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
        self.now: Round  # of the step under way
        self.finite: list[torch.Tensor] = []  # bool, any shape: was each gradient since the last vote finite?
        self.thresholds: Mapping = {}  # by name; they persist across steps and are part of a checkpoint
        self.regions: Bounds = {}  # of reduce-scatters: part of a checkpoint
        self._segments: dict[tuple[str, ...], torch.Tensor | None] = {}

    @property
    def values(self) -> str:
        """The type of the values in messages."""
        return self.algorithm.values

    def drop(self) -> None:  # noqa: B027 - most codecs have nothing to give back
        """Give up the step under way, if there is one."""

    def begin(self, now: Round) -> None:
        """Begin a step."""
        self.now = now
        self.finite = []

    def end(self) -> None:
        """End a step, also one that all ranks have given up."""
        self.finite = []

    def region_numbers(self) -> list[float]:
        """Return this rank's numbers for the presence sum, by which the ranks compare their regions."""
        return []

    @abc.abstractmethod
    def plan(self, names: Sequence[str], prefix: str) -> list[Bucket]:
        """Return the buckets of these tensors, in the order of names, at the step's density; none for no tensors."""

    @abc.abstractmethod
    def encode(self, bucket: Bucket, arrivals: Arrivals) -> None:
        """Accumulate and select in the members that take part; set the bucket's message, or None for no message."""

    @abc.abstractmethod
    def decode(self, bucket: Bucket, gathered: torch.Tensor | None, arrivals: Arrivals, scale: float) -> None:
        """Clear the sent entries; set the bucket's sums over ranks, times `scale`, for all of `arrivals`."""

    def accumulate(self, arrivals: Arrivals) -> None:
        """Accumulate gradients in their error feedback."""
        for name, arrival in arrivals.items():
            self.finite.append(self.feedback[name].accumulate(arrival.gradient, arrival.factor, self.now.units))

    def _form(self) -> dict[str, str]:
        """Return the coding and value type of payloads, as arguments of the bucket operators."""
        return {"coding": self.algorithm.coding, "value_dtype": self.values}

    def _make_bucket(self, name: str, members: Sequence[str], payloads: list[Payload]) -> Bucket:
        """Return a bucket of these members, in this order, with these payloads."""
        sizes = [self.parameters[member].numel() for member in members]
        ks = [payload.k for payload in payloads]
        layout = BucketLayout(sizes, ks, self._channels(members), self.is_joint)
        return Bucket(name, {member: number for number, member in enumerate(members)}, payloads, layout)

    def _payload_of(self, names: tuple[str, ...], n: int, k: int) -> Payload:
        """Return the form of a payload with k of the n elements of these tensors."""
        segments = self._segments_of(names)
        size = ops.payload_size(n, k, self.algorithm.coding, self.values, segments)
        return Payload(n, k, segments, size)

    def _plan_joint(self, names: Sequence[str], name: str) -> Bucket:
        """Return the bucket of tensors with a joint selection, in the order of names."""
        n = sum(self.parameters[member].numel() for member in names)
        return self._make_bucket(name, names, [self._payload_of(tuple(names), n, top_k_count(n, self.now.density))])

    def _pack_nothing(self, payload: Payload, out: torch.Tensor) -> None:
        """Write a payload without entries."""
        indices, values = out.new_empty(0, dtype=torch.int64), out.new_empty(0, dtype=torch.float32)
        ops.pack(indices, values, payload.n, payload.k, out, segments=payload.segments, **self._form())

    def _channels(self, names: Iterable[str]) -> list[int]:
        """Return each tensor's number of groups for low-bit values; empty for other value types."""
        if self.values not in LOW_BITS:
            return []
        return [channels_of(self.parameters[name].shape, self.algorithm) for name in names]

    def _segments_of(self, names: tuple[str, ...]) -> torch.Tensor | None:
        """Return the groups that share quantization levels in the concatenation of these tensors."""
        if names not in self._segments:
            segments = segments_of([self.parameters[name].shape for name in names], self.algorithm)
            self._segments[names] = None if segments is None else torch.from_numpy(segments)
        return self._segments[names]


class BucketCodec(Codec):
    """The common part of codecs with a payload for each tensor, which are sent in buckets of `bucket_bytes`."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._payloads: dict[str, Payload] = {}
        self._form_of_payloads: tuple[float, str] | None = None  # density and value type

    @property
    def bucket_bytes(self) -> int:
        """The maximum bytes of a message. A single payload that is larger gets a separate message."""
        return self.algorithm.bucket_bytes

    def begin(self, now: Round) -> None:
        """Begin a step."""
        super().begin(now)
        if self._form_of_payloads != (now.density, self.values):
            self._payloads, self._form_of_payloads = {}, (now.density, self.values)

    def plan(self, names: Sequence[str], prefix: str) -> list[Bucket]:
        """Return the buckets of these tensors, planned for payloads of exactly k entries."""
        sizes = {name: self._sent_bytes(self._payload(name)) for name in names}
        return [
            self._make_bucket(name, members, [self._payload(member) for member in members])
            for name, members in plan_buckets(sizes, self.bucket_bytes, prefix).items()
        ]

    def _sent_bytes(self, payload: Payload) -> int:
        """Return the bytes of a payload, for the size of a bucket."""
        return payload.size

    def _payload(self, name: str) -> Payload:
        if name not in self._payloads:
            n = self.parameters[name].numel()
            self._payloads[name] = self._payload_of((name,), n, top_k_count(n, self.now.density))
        return self._payloads[name]


def cleared(feedback: Sequence[ErrorFeedback]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the residuals and velocities in which sent entries are cleared."""
    buffers = [one.cleared() for one in feedback]
    return [own[0] for own in buffers], [velocity for own in buffers for velocity in own[1:]]


def in_training(arrivals: Arrivals) -> dict[str, Arrival]:
    """Return the arrivals whose parameters are not frozen."""
    return {name: arrival for name, arrival in arrivals.items() if not arrival.frozen}


def sum_buffer(gradient: torch.Tensor) -> torch.Tensor:
    """Return the destination of the sum, n float32: the gradient's own memory if its type and layout allow it."""
    in_place = gradient.dtype == torch.float32 and gradient.is_contiguous()
    return gradient if in_place else gradient.new_empty(gradient.numel(), dtype=torch.float32)
