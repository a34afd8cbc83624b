"""scope="tensor": a selection in each tensor during backward, payloads in buckets."""

from dataclasses import dataclass, field

import torch

from hvd_sparse.buckets import Bucket, plan_buckets
from hvd_sparse.threshold import ThresholdHint
from hvd_sparse.torch.exchange import Pending
from hvd_sparse.torch.scope import Entry, Scope
from hvd_sparse.wire import top_k_count


@dataclass
class Message:
    """A bucket on its way."""

    bucket: Bucket
    buffer: torch.Tensor
    missing: set[str] = field(default_factory=set)
    started: bool = False
    pending: Pending | None = None

    def slot(self, name: str, size: int) -> torch.Tensor:
        """Return where a member's payload goes."""
        return self.buffer.narrow(0, self.bucket.offsets[name], size)


class TensorScope(Scope):
    """A selection in each tensor, payloads in buckets."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._plan: list[Message] = []
        self._plan_key = None
        self._message_of: dict[str, Message] = {}
        self._hints = {name: ThresholdHint() for name in self.parameters}

    def begin(self, step: int) -> None:
        """Begin a step; cut the expected payloads into buckets."""
        super().begin(step)
        if self._plan_key != (self.expected, self.density):
            self._plan_key = (self.expected, self.density)
            self._plan = self._messages([name for name in self.expected if not self.is_dense(name)], "bucket")
        self._message_of = {name: message for message in self._plan for name in message.bucket.offsets}
        for message in self._plan:
            message.missing = set(message.bucket.offsets)
            message.started = False

    def _finish(self) -> None:
        """Start the buckets that miss a member, and the late ones."""
        if not self._sealed:
            self._seal()
        late = self._late()
        if not late:
            return
        for message in self._messages([entry.name for entry in late if entry.packed is not None], "late"):
            for name in message.bucket.offsets:
                packed = self.entries[name].packed
                message.slot(name, packed.numel()).copy_(packed)
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
        self._reduce(gathered, message.bucket.offsets[entry.name], n, self._count(entry.name), out, scale)
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
        n, k = entry.gradient.numel(), self._count(entry.name)
        selection = None
        if not entry.frozen:
            selection = self._accumulate_and_select(entry, factor, k, self._hints[entry.name])
            entry.indices, entry.left = selection.indices, selection.left
        message = self._message_of.get(entry.name)
        if message is None:
            entry.packed = torch.empty(self._payload_size(n, k), dtype=torch.uint8)
            self._pack(selection, n, k, entry.packed)
            return self.token()
        self._pack(selection, n, k, message.slot(entry.name, self._payload_size(n, k)))
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
                n, k = self.parameters[name].numel(), self._count(name)
                self._pack(None, n, k, message.slot(name, self._payload_size(n, k)))
            if not message.started:
                self._start(message)
        self._vote("vote", [self.entries[name] for name in self.expected if name in self.entries])

    def _start(self, message: Message) -> None:
        def start() -> Pending:
            """Start the allgather, once it is known that all take part."""
            message.pending = self.exchange.allgather(message.bucket.name, message.buffer)
            return message.pending

        message.started = True
        self._deferred.append(start)
        self.traffic.count(payload_bytes=message.bucket.size)

    def _messages(self, names: list[str], prefix: str) -> list[Message]:
        sizes = {name: self._payload_size(self.parameters[name].numel(), self._count(name)) for name in names}
        return [
            Message(bucket, torch.zeros(bucket.size, dtype=torch.uint8))
            for bucket in plan_buckets(sizes, self.algorithm.bucket_bytes, prefix)
        ]

    def _count(self, name: str) -> int:
        return top_k_count(self.parameters[name].numel(), self.density)
