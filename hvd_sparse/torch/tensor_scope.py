"""scope="tensor": a selection in each tensor during backward, payloads in buckets."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hvd_sparse.buckets import Bucket, plan_buckets
from hvd_sparse.centres import columns_of
from hvd_sparse.threshold import ThresholdHint, make_threshold
from hvd_sparse.torch import ops
from hvd_sparse.torch.exchange import Pending
from hvd_sparse.torch.scope import Entry, Scope, Selection
from hvd_sparse.wire import top_k_count


@dataclass
class Message:
    """A bucket on its way."""

    bucket: Bucket
    buffer: torch.Tensor | None = None  # where the payloads have equal sizes on all ranks
    parts: dict[str, torch.Tensor] = field(default_factory=dict)  # the payloads where they have not
    missing: set[str] = field(default_factory=set)
    started: bool = False
    pending: Pending | None = None
    places: torch.Tensor | None = None  # where the payloads are in what was gathered


class Payload(NamedTuple):
    """What a tensor's payload is at the density of the present step."""

    n: int
    k: int
    segments: torch.Tensor | None
    size: int


class TensorScope(Scope):
    """A selection of exactly k in each tensor; every payload has the same size on all ranks."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._plan: list[Message] = []
        self._plan_key = None
        self._message_of: dict[str, Message] = {}
        self._hints = {name: ThresholdHint() for name in self.parameters}
        self._payloads: dict[str, Payload] = {}
        self._payloads_density = None

    def begin(self, step: int) -> None:
        """Begin a step; cut the expected payloads into buckets."""
        super().begin(step)
        if self._payloads_density != self.density:
            self._payloads, self._payloads_density = {}, self.density
        if self._plan_key != (self.expected, self.density):
            self._plan_key = (self.expected, self.density)
            self._plan = self._messages([name for name in self.expected if not self.is_dense(name)], "bucket")
        self._message_of = {name: message for message in self._plan for name in message.bucket.offsets}
        for message in self._plan:
            message.missing = set(message.bucket.offsets)
            message.started = False
            message.places = None

    def _finish(self) -> None:
        """Start the buckets that miss a member, and the late ones."""
        if not self._sealed:
            self._seal()
        late = self._late()
        if not late:
            return
        for message in self._messages([entry.name for entry in late if entry.packed is not None], "late"):
            for name in message.bucket.offsets:
                self._insert(message, name, self.entries[name].packed)
                self._message_of[name] = message
            self._start(message)
        self._vote("late.vote", late)

    def result(self, entry: Entry, carried: torch.Tensor, scale: float) -> torch.Tensor:
        """Decode a bucket's member; clear the memory of what was sent."""
        if not entry.carries_token:
            if entry.commit is not None:
                entry.commit()
            return carried
        if entry.indices is not None:
            self.memories[entry.name].clear(entry.indices, entry.left)
        message = self._message_of[entry.name]
        with self.traffic.timed("exchange"):
            gathered = message.pending.wait()
        n = entry.gradient.numel()
        # Horovod's own place for the result is the gradient that it passed; other types need one of ours.
        in_place = entry.gradient.dtype == torch.float32 and entry.gradient.is_contiguous()
        out = entry.gradient.view(-1) if in_place else torch.empty(n)
        self._decode(message, gathered, entry.name, out, scale)
        return out

    def _take(self, entry: Entry) -> torch.Tensor:
        memory = self.memories[entry.name]
        factor = 1.0 if entry.frozen else memory.clip_factor(entry.gradient, self.exchange.size())
        if self.is_dense(entry.name):
            entry.carries_token = False
            self.traffic.count(sent=entry.gradient.numel())
            if entry.finite and not entry.frozen:
                carried, entry.commit = memory.take_all(entry.gradient, factor)
                return carried
            return torch.zeros(entry.gradient.shape, dtype=memory.dense_dtype(entry.gradient))
        selection = None if entry.frozen else self._choose(entry, factor)
        if selection is not None:
            entry.indices, entry.left = selection.indices, selection.left
        message = self._message_of.get(entry.name)
        packed = self._packed(entry.name, selection, message)
        if message is None:
            entry.packed = packed
            return self.token()
        message.missing.discard(entry.name)
        if not message.missing:
            self._start(message)
        return self.token()

    def _seal(self) -> None:
        self._sealed = True
        if not self.expected:
            return
        for message in self._plan:
            for name in message.missing:
                self._packed(name, None, message)
            if not message.started:
                self._start(message)
        self._vote("vote", [self.entries[name] for name in self.expected if name in self.entries])

    def _start(self, message: Message) -> None:
        buffer = self._joined(message)

        def start() -> Pending:
            """Start the allgather, once it is known that all take part."""
            message.pending = self.exchange.allgather(message.bucket.name, buffer)
            return message.pending

        message.started = True
        self._deferred.append(start)
        self.traffic.count(payload_bytes=buffer.numel())

    def _messages(self, names: list[str], prefix: str) -> list[Message]:
        sizes = {name: self._payload(name).size for name in names}
        return [self._message(bucket) for bucket in plan_buckets(sizes, self.algorithm.bucket_bytes, prefix)]

    def _payload(self, name: str) -> Payload:
        if name not in self._payloads:
            n, segments = self.parameters[name].numel(), self._segments_of((name,))
            k = top_k_count(n, self.density)
            self._payloads[name] = Payload(n, k, segments, self._payload_size(n, k, segments))
        return self._payloads[name]

    def _choose(self, entry: Entry, factor: float) -> Selection:
        """Bring a gradient into its memory, and select there."""
        return self._accumulate_and_select(entry, factor, self._payload(entry.name).k, self._hints[entry.name])

    def _message(self, bucket: Bucket) -> Message:
        return Message(bucket, torch.zeros(bucket.size, dtype=torch.uint8))

    def _packed(self, name: str, selection: Selection | None, message: Message | None) -> torch.Tensor:
        """Return the payload of a selection, in the message if there is one."""
        n, k, segments, size = self._payload(name)
        if message is None:
            out = torch.empty(size, dtype=torch.uint8)
        else:
            out = message.buffer.narrow(0, message.bucket.offsets[name], size)
        self._pack(selection, n, k, out, segments)
        return out

    def _insert(self, message: Message, name: str, packed: torch.Tensor) -> None:
        message.buffer.narrow(0, message.bucket.offsets[name], packed.numel()).copy_(packed)

    def _joined(self, message: Message) -> torch.Tensor:
        return message.buffer

    def _decode(self, message: Message, gathered: torch.Tensor, name: str, out: torch.Tensor, scale: float) -> None:
        payload = self._payload(name)
        place = (message.bucket.offsets[name], payload.n, payload.k)
        self._reduce(gathered, *place, out, scale, payload.segments)


class VaryingScope(TensorScope):
    """What reaches a threshold in each tensor; the sizes of the payloads differ between ranks and steps."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        names = sorted(self.parameters)
        self.thresholds = {
            name: make_threshold(self.algorithm, position, len(names)) for position, name in enumerate(names)
        }

    def _choose(self, entry: Entry, factor: float) -> Selection:
        memory, k = self.memories[entry.name], self._payload(entry.name).k
        entry.finite = memory.accumulate(entry.gradient, factor)
        threshold = self.thresholds[entry.name]
        indices, values = ops.filter_threshold(memory.residual, threshold.at(self.step, k, memory))
        threshold.learn(k, len(indices))
        return self._quantized(indices, values, (entry.name,))

    def _message(self, bucket: Bucket) -> Message:
        return Message(bucket)

    def _packed(self, name: str, selection: Selection | None, message: Message | None) -> torch.Tensor:
        n, segments = self.parameters[name].numel(), self._segments_of((name,))
        k = 1 if selection is None else max(1, selection.indices.numel())
        out = torch.empty(self._payload_size(n, k, segments), dtype=torch.uint8)
        self._pack(selection, n, k, out, segments)
        if message is not None:
            message.parts[name] = out
        return out

    def _insert(self, message: Message, name: str, packed: torch.Tensor) -> None:
        message.parts[name] = packed

    def _joined(self, message: Message) -> torch.Tensor:
        return torch.cat([message.parts[name] for name in message.bucket.offsets])

    def _decode(self, message: Message, gathered: torch.Tensor, name: str, out: torch.Tensor, scale: float) -> None:
        form = (self.algorithm.coding, self.algorithm.values)
        members = list(message.bucket.offsets)
        if message.places is None:
            parameters = [self.parameters[member] for member in members]
            sizes = [parameter.numel() for parameter in parameters]
            columns = [columns_of(parameter.shape, self.algorithm) for parameter in parameters]
            message.places = ops.locate_payloads(gathered, sizes, self.exchange.size(), *form, columns)
        places = message.places[:, :, members.index(name)].contiguous()
        ops.reduce_located(gathered, places, out.numel(), out, scale, *form, self._segments_of((name,)))
