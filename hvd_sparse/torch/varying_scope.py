"""Thresholds in each tensor: the sizes of the payloads differ between ranks and steps."""

import itertools
from collections.abc import Iterable

import torch

from hvd_sparse.centres import columns_of
from hvd_sparse.threshold import Plan, make_threshold
from hvd_sparse.torch import ops
from hvd_sparse.torch.memory import decays, destinations
from hvd_sparse.torch.scope import Entry, place_of
from hvd_sparse.torch.tensor_scope import Message, TensorScope
from hvd_sparse.wire import LOW_BITS, largest_payload


class VaryingScope(TensorScope):
    """What reaches a threshold in each tensor."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        names = sorted(self.parameters)
        self.thresholds = {
            name: make_threshold(self.algorithm, position, len(names)) for position, name in enumerate(names)
        }

    def _messages(self, names: list[str], prefix: str) -> list[Message]:
        messages = super()._messages(names, prefix)
        for message in messages:
            message.most_bytes = sum(map(self._largest_payload, message.bucket.offsets))
        return messages

    def _largest_payload(self, name: str) -> int:
        n = self.parameters[name].numel()
        return largest_payload(n, n, self.algorithm.coding, self.algorithm.values, self._payload(name).segments)

    def _fill(self, message: Message) -> None:
        """Accumulate and select in the members of a bucket; gather their payloads, those of nothing for the others."""
        entries = self._present(message)
        if entries:
            self._filter(message, entries)
        message.buffer = message.own
        if len(entries) < len(message.bucket.offsets):
            payloads = self._split(message, entries) if entries else {}
            message.buffer = torch.cat(
                [payloads[name] if name in payloads else self._nothing(name) for name in message.bucket.offsets]
            )

    def _filter(self, message: Message, entries: dict[str, Entry]) -> None:
        """Accumulate, select what reaches the thresholds, and pack it in `message.own`."""
        names = list(entries)
        message.own, thresholds, counts, offsets = self._select(entries)
        for name, threshold, count in zip(names, thresholds, counts, strict=True):
            self.thresholds[name].learn(self._payload(name).k, threshold, count)
        self.traffic.count(sent=sum(counts))
        message.layout = self._layout_of(names, counts, offsets)

    @staticmethod
    def _split(message: Message, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return each member's payload in `message.own`."""
        offsets = [*message.layout.offsets, message.own.numel()]
        parts = message.own.split([end - begin for begin, end in itertools.pairwise(offsets)])
        return dict(zip(names, parts, strict=True))

    def _select(self, entries: dict[str, Entry]) -> tuple[torch.Tensor, list[float], list[int], list[int]]:
        """Return payloads, one after the other, and of each the threshold, the count, and the offset in bytes."""
        names, memories = list(entries), [self.memories[name] for name in entries]
        gradients = [entry.gradient for entry in entries.values()]
        factors = [memory.factor(g, self.units) for memory, g in zip(memories, gradients, strict=True)]
        reads = self.thresholds[names[0]].reads
        if reads:
            for entry, memory, factor in zip(entries.values(), memories, factors, strict=True):
                entry.finite = memory.accumulate(entry.gradient, factor, self.units)
        plans = [self._plan_of(name) for name in names]
        payloads, info, finite = ops.filter_bucket(
            gradients,
            *destinations(memories),
            factors=factors,
            weight_decay=decays(memories, self.units),
            thresholds=[plan.threshold for plan in plans],
            ks=[plan.k for plan in plans],
            is_active=not reads,
            centre=self.algorithm.centre,
            columns=self._columns(names),
            **self._form(),
            **memories[0].rule(),
        )
        self._note_all(list(entries.values()), finite)
        thresholds, counts, offsets = info.t().tolist()
        return payloads, thresholds, list(map(int, counts)), list(map(int, offsets))

    def _plan_of(self, name: str) -> Plan:
        return self.thresholds[name].plan(self.step, self._payload(name).k, self.memories[name].values)

    def _layout_of(self, names: list[str], counts: list[int], offsets: list[int]) -> ops.Layout:
        return ops.Layout(
            ns=[self._payload(name).n for name in names],
            ks=[max(1, count) for count in counts],
            offsets=offsets,
            segments=[self._payload(name).segments for name in names],
            selections=list(range(len(names))),
            begins=[0] * len(names),
        )

    def _nothing(self, name: str) -> torch.Tensor:
        """Return the payload of a tensor that takes no part in this step."""
        n, segments = self.parameters[name].numel(), self._segments_of((name,))
        out = self._buffer(self._payload_size(n, 1, segments))
        self._pack_nothing(n, 1, out, segments)
        return out

    def _clear(self, message: Message) -> None:
        memories = [self.memories[name] for name in self._present(message)]
        if memories:
            residuals, velocities = self._cleared(memories)
            ops.clear_bucket(message.own, residuals, velocities, layout=message.layout, **self._form())

    def _decode(self, message: Message, gathered: torch.Tensor, scale: float) -> None:
        names = list(message.bucket.offsets)
        places = [place for place, name in enumerate(names) if name in self.entries]
        message.sums = {names[place]: place_of(self.entries[names[place]].gradient) for place in places}
        message.scale = scale
        self._sum(gathered, names, places, list(message.sums.values()), self.units.outgoing(scale))

    def _sum(self, gathered: torch.Tensor, names: list[str], places: list[int], outs: list[torch.Tensor], scale: float):
        """Sum the payloads of all ranks for the members at these places."""
        sizes, form = [self.parameters[name].numel() for name in names], self._form()
        columns = self._columns(names)
        ops.reduce_located_bucket(gathered, sizes, self.ranks, outs, places, scale, **form, columns=columns)

    def _columns(self, names: list[str]) -> list[int]:
        """Return how many groups of low-bit values each tensor has, nothing where one has no centres."""
        if self.algorithm.values not in LOW_BITS:
            return []
        return [columns_of(self.parameters[name].shape, self.algorithm) for name in names]
