"""scope="tensor": a selection in each tensor during backward, payloads in buckets.

A bucket is worked on as a whole, when its last member's gradient is there: one call into the core for all of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hvd_sparse.buckets import Bucket, plan_buckets
from hvd_sparse.torch import ops
from hvd_sparse.torch.exchange import Pending
from hvd_sparse.torch.memory import ResidualMemory, decays, destinations
from hvd_sparse.torch.scope import Entry, Scope, place_of
from hvd_sparse.units import Units
from hvd_sparse.wire import top_k_count


@dataclass
class Message:
    """A bucket on its way."""

    bucket: Bucket
    buffer: torch.Tensor  # its payloads
    hints: torch.Tensor  # float64[members, 3], of their selections
    own: torch.Tensor | None = None  # those of the members that take part, where counts vary
    missing: set[str] = field(default_factory=set)
    started: bool = False
    pending: Pending | None = None
    sums: dict[str, torch.Tensor] = field(default_factory=dict)  # the reduced gradients, once it has arrived
    scale: float = 1.0  # that they were reduced with
    members: tuple[str, ...] = ()  # those that `layout` is of
    layout: ops.Layout | None = None
    most_bytes: int | None = None  # that any rank may send, where that differs


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
        self._thawed: dict[str, Pending] = {}  # what travels dense, in the first step after it trained nowhere
        names = list(self.parameters)
        self._hints = dict(zip(names, ops.new_hints(len(names), self.device), strict=True))  # float64[3] each
        self._payloads: dict[str, Payload] = {}
        self._payloads_density = None

    def begin(self, step: int, units: Units) -> None:
        """Begin a step; cut the expected payloads into buckets."""
        super().begin(step, units)
        self._thawed = {}
        if self._payloads_density != self.density:
            self._payloads, self._payloads_density = {}, self.density
        if self._plan_key != (self.expected, self.density):
            self._plan_key = (self.expected, self.density)
            self._plan = self._messages([name for name in self.expected if not self.is_dense(name)], "bucket")
        self._message_of = {name: message for message in self._plan for name in message.bucket.offsets}
        for message in self._plan:
            message.missing = set(message.bucket.offsets)
            message.started = False
            message.sums = {}

    def end(self) -> None:
        """End a step that is complete."""
        super().end()
        for message in self._message_of.values():
            message.sums = {}

    def result(self, entry: Entry, carried: torch.Tensor, scale: float) -> torch.Tensor:
        """Take a tensor's sum out of its bucket's; the first one to ask clears the memory of what was sent."""
        if not entry.carries_token:
            if entry.commit is None:
                return carried
            entry.commit()
            return self._own(entry, carried)
        if entry.name in self._thawed:
            return self._thawed_sum(entry, scale)
        message = self._message_of.get(entry.name)
        if message is None:  # it trains nowhere
            return entry.gradient.new_zeros(entry.gradient.numel())
        if entry.name not in message.sums:
            self._complete(message, scale)
        if scale != message.scale:
            raise ValueError(
                f"hvd_sparse: the reduction of {entry.name} scales by {scale}, that of tensors in the same message by "
                f"{message.scale}: reduce all gradients of an optimizer alike"
            )
        return message.sums[entry.name]

    @torch.no_grad()
    def _complete(self, message: Message, scale: float) -> None:
        """Wait for a bucket; take what was sent out of the memories; sum."""
        with self.traffic.timed("exchange"):
            gathered = message.pending.wait()
        self._clear(message)
        self._decode(message, gathered, scale)

    def _take(self, entry: Entry) -> torch.Tensor:
        name = entry.name
        if name in self._dense and name not in self._idle:
            return self._take_dense(entry)
        message = self._message_of.get(name)
        if message is not None:
            message.missing.discard(name)
            if not message.missing:
                self._start(message)
        return self._tokens.take()

    def _take_dense(self, entry: Entry) -> torch.Tensor:
        memory, gradient = self.memories[entry.name], entry.gradient
        entry.carries_token = False
        dtype = memory.dense_dtype(gradient)
        self.traffic.count(sent=gradient.numel(), payload_bytes=gradient.numel() * dtype.itemsize)
        if not entry.frozen:
            sent = self._take_all(entry, memory.factor(gradient, self.units))
            if entry.finite:
                return sent
        return gradient.new_zeros(gradient.numel(), dtype=dtype)

    def _own(self, entry: Entry, carried: torch.Tensor) -> torch.Tensor:
        """Return a reduced gradient in a place of its own: the memory takes back what it keeps for the next step."""
        if not self.memories[entry.name].is_spare(carried):
            return carried
        place = place_of(entry.gradient)
        place.view(-1).copy_(carried.view(-1))
        return place

    def _seal(self) -> None:
        """Start the buckets that miss a member."""
        self._sealed = True
        if not self.expected:
            return
        for message in self._plan:
            if not message.started:
                self._start(message)
        self._vote("vote", [self.entries[name] for name in self.expected if name in self.entries])

    def _finish(self) -> None:
        """Start the late buckets, too."""
        if not self._sealed:
            self._seal()
        late = self._late()
        if not late:
            return
        self._thaw([entry for entry in late if entry.carries_token and self.is_dense(entry.name)])
        late_sparse = [entry.name for entry in late if not self.is_dense(entry.name)]
        for message in self._messages(late_sparse, "late"):
            self._message_of.update(dict.fromkeys(message.bucket.offsets, message))
            self._start(message)
        self._vote("late.vote", late)

    def _thaw(self, entries: list[Entry]) -> None:
        """Send what travels dense, and trained nowhere in the step before: Horovod carries a token for it."""
        for entry in entries:
            sent = self._take_dense(entry).reshape(-1)
            entry.carries_token = True
            summed = sent.to(torch.promote_types(sent.dtype, torch.float32), copy=True)
            self._thawed[entry.name] = self.exchange.allreduce(f"late.{entry.name}", summed)
            self._collectives.append(self._thawed[entry.name])

    def _thawed_sum(self, entry: Entry, scale: float) -> torch.Tensor:
        """Return the sum of what was frozen in the step before."""
        with self.traffic.timed("exchange"):
            total = self._thawed.pop(entry.name).wait()
        if entry.commit is not None:
            entry.commit()
        return total.mul_(scale)

    def _start(self, message: Message) -> None:
        self._fill(message)

        def start() -> Pending:
            """Start the allgather, once it is known that all take part."""
            message.pending = self.exchange.allgather(message.bucket.name, message.buffer, message.most_bytes)
            return message.pending

        message.started = True
        self._deferred.append(start)
        self.traffic.count(payload_bytes=message.buffer.numel())

    def _messages(self, names: list[str], prefix: str) -> list[Message]:
        sizes = {name: self._payload(name).size for name in names}
        buckets = plan_buckets(sizes, self.algorithm.bucket_bytes, prefix)
        messages = [Message(one, self._buffer(one.size), self._hints_of(one.offsets)) for one in buckets]
        for message in messages:
            self._hints.update(zip(message.bucket.offsets, message.hints, strict=True))
        return messages

    def _hints_of(self, names: Iterable[str]) -> torch.Tensor:
        """Return a copy of what the selections of these tensors have learned, float64[tensors, 3]."""
        return torch.stack([self._hints[name] for name in names])

    def _payload(self, name: str) -> Payload:
        if name not in self._payloads:
            n, segments = self.parameters[name].numel(), self._segments_of((name,))
            k = top_k_count(n, self.density)
            self._payloads[name] = Payload(n, k, segments, self._payload_size(n, k, segments))
        return self._payloads[name]

    def _fill(self, message: Message) -> None:
        """Accumulate and select in the members of a bucket; write their payloads, those of nothing for the others."""
        entries = self._present(message)
        for name in message.bucket.offsets:
            if name not in entries:
                payload = self._payload(name)
                out = message.buffer.narrow(0, message.bucket.offsets[name], payload.size)
                self._pack_nothing(payload.n, payload.k, out, payload.segments)
        if not entries:
            return
        memories, units = [self.memories[name] for name in entries], self.units
        is_whole = len(entries) == len(message.bucket.offsets)
        hints = message.hints if is_whole else self._hints_of(entries)
        self._accumulate_bucket(
            list(entries.values()),
            *destinations(memories),
            layout=self._layout(message, entries),
            out=message.buffer,
            factors=[self.memories[name].factor(entry.gradient, units) for name, entry in entries.items()],
            weight_decay=decays(memories, units),
            hints=hints,
            **memories[0].rule(),
        )
        if not is_whole:
            for name, learned in zip(entries, hints, strict=True):
                self._hints[name].copy_(learned)
        self.traffic.count(sent=sum(self._payload(name).k for name in entries))

    def _clear(self, message: Message) -> None:
        """Take what was sent out of the memories."""
        entries = self._present(message)
        memories = [self.memories[name] for name in entries]
        residuals, velocities = self._cleared(memories)
        form = {**self._form(), "kept": memories[0].kept} if memories else self._form()
        ops.clear_bucket(message.buffer, residuals, velocities, layout=self._layout(message, entries), **form)

    @staticmethod
    def _cleared(memories: list[ResidualMemory]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the residuals, and the velocities, that what was sent leaves."""
        cleared = [memory.cleared() for memory in memories]
        return [own[0] for own in cleared], [velocity for own in cleared for velocity in own[1:]]

    def _decode(self, message: Message, gathered: torch.Tensor, scale: float) -> None:
        """Sum the payloads of all ranks for all members that have a gradient here."""
        members = [name for name in message.bucket.offsets if name in self.entries]
        message.sums = {name: place_of(self.entries[name].gradient) for name in members}
        message.scale = scale
        ranks, outs = gathered.view(self.ranks, -1), list(message.sums.values())
        ops.reduce_bucket(
            ranks, outs, self.units.outgoing(scale), layout=self._layout(message, members), **self._form()
        )

    def _present(self, message: Message) -> dict[str, Entry]:
        """Return the members of a bucket that take part in this step."""
        members = {name: self.entries[name] for name in message.bucket.offsets if name in self.entries}
        return {name: entry for name, entry in members.items() if not entry.frozen}

    def _layout(self, message: Message, names) -> ops.Layout:
        """Return where the payloads of these members lie; each is a selection of its own. Mostly they are all."""
        members = tuple(names)
        if message.layout is None or message.members != members:
            payloads = [self._payload(name) for name in members]
            message.members = members
            message.layout = ops.Layout(
                ns=[payload.n for payload in payloads],
                ks=[payload.k for payload in payloads],
                offsets=[message.bucket.offsets[name] for name in members],
                segments=[payload.segments for payload in payloads],
                selections=list(range(len(payloads))),
                begins=[0] * len(payloads),
            )
        return message.layout
