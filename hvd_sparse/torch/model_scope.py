"""scope="model": one selection in all tensors, when the last gradient is ready."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from hvd_sparse.torch import ops
from hvd_sparse.torch.exchange import Pending
from hvd_sparse.torch.memory import ResidualMemory, decays, destinations, make_memory, whole_clip_factor
from hvd_sparse.torch.scope import Entry, Scope, place_of
from hvd_sparse.units import Units
from hvd_sparse.wire import top_k_count


@dataclass
class Group:
    """Tensors that share one selection, laid out by sorted name; the small ones follow in one dense message."""

    sparse: tuple[str, ...]
    dense: tuple[str, ...]
    offsets: dict[str, int]
    n: int
    memory: ResidualMemory  # of all the sparse tensors; theirs are slices of it
    hints: torch.Tensor  # float64[1, 3], of their selection
    name: str = ""  # of its collectives
    segments: torch.Tensor | None = None
    buffer: torch.Tensor | None = None
    gathered: Pending | None = None
    summed: Pending | None = None
    completed: bool = False
    sums: dict[str, torch.Tensor] = field(default_factory=dict)  # the reduced gradients of the sparse tensors
    small: torch.Tensor | None = None  # those of the dense ones, one after the other


class ModelScope(Scope):
    """One selection in all tensors: a global threshold, and clipping by the norm of the whole local gradient."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._groups: dict[tuple, Group] = {}
        self._group_of: dict[str, Group] = {}
        self._held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self, step: int, units: Units) -> None:
        """Begin a step."""
        self._put_back()
        super().begin(step, units)
        self._group_of = {}

    def end(self) -> None:
        """End a step that is complete."""
        super().end()
        self._put_back()
        for group in self._group_of.values():
            group.sums, group.small = {}, None

    def _finish(self) -> None:
        """Select and start whatever was not complete when the last gradient came."""
        late = self._late()
        if not self._sealed and self.expected:  # a tensor is missing: the others make their own selection
            late = [self.entries[name] for name in sorted(self.entries) if name not in self._nowhere]
        self._sealed = True
        if late:
            self._start(late, "late")

    def result(self, entry: Entry, carried: torch.Tensor, scale: float) -> torch.Tensor:
        """Cut a tensor out of the whole model's sum."""
        group = self._group_of.get(entry.name)
        if group is None:  # it trains nowhere
            return entry.gradient.new_zeros(entry.gradient.numel())
        if not group.completed:
            self._complete(group, scale)
        if entry.commit is not None:
            entry.commit()
        if entry.name in group.sums:
            return group.sums[entry.name]
        return group.small.narrow(0, group.offsets[entry.name], entry.gradient.numel())

    def _take(self, entry: Entry) -> torch.Tensor:
        return self._tokens.take()

    def _seal(self) -> None:
        self._sealed = True
        self._start([self.entries[name] for name in self.expected], "model")

    def _start(self, entries: list[Entry], name: str) -> None:
        """Select in the given tensors together, and send."""
        group = self._group([entry.name for entry in entries])
        self._group_of.update(dict.fromkeys((*group.sparse, *group.dense), group))
        group.gathered = group.summed = None
        group.completed = False
        self._hold([entry.name for entry in entries if entry.frozen and entry.name in group.sparse])
        factors = self._clip(entries)
        if group.sparse:
            group.name = name
            self._choose(group, factors)
            if group.buffer is not None:
                self._deferred.append(lambda: self._gather(group))
                self.traffic.count(payload_bytes=group.buffer.numel())
        parts = [self._take_dense(self.entries[member], factors[member]) for member in group.dense]
        self._vote(f"{name}.vote", entries)
        if parts:
            small = torch.cat(parts)
            group.summed = self.exchange.allreduce(f"{name}.dense", small)
            self._collectives.append(group.summed)
            self.traffic.count(payload_bytes=small.numel() * small.element_size(), sent=small.numel())

    def _choose(self, group: Group, factors: dict[str, float]) -> None:
        """Accumulate and select in a group, and make the message for all ranks, if there has to be one."""
        k = top_k_count(group.n, self.density)
        size = self._payload_size(group.n, k, group.segments)
        if group.buffer is None or group.buffer.numel() != size:
            group.buffer = self._buffer(size)
        entries = self._present(group)
        memories = [self.memories[entry.name] for entry in entries]
        self._accumulate_bucket(
            entries,
            *destinations(memories),
            layout=self._layout(group, [entry.name for entry in entries]),
            out=group.buffer,
            factors=[factors[entry.name] for entry in entries],
            weight_decay=decays(memories, self.units),
            hints=group.hints,
            **group.memory.rule(),
        )
        self.traffic.count(sent=k)

    def _present(self, group: Group) -> list[Entry]:
        """Return the tensors that share a selection and take part in this step."""
        return [self.entries[name] for name in group.sparse if not self.entries[name].frozen]

    def _layout(self, group: Group, names: Iterable[str]) -> ops.Layout:
        """Return where the group's one payload lies, and where these members have their part in it."""
        begins = [group.offsets[name] for name in names]
        one = ([group.n], [top_k_count(group.n, self.density)], [0], [group.segments])
        return ops.Layout(*one, selections=[0] * len(begins), begins=begins)

    def _gather(self, group: Group) -> Pending:
        group.gathered = self.exchange.allgather(group.name, group.buffer, self._most_bytes(group))
        return group.gathered

    def _most_bytes(self, group: Group) -> int | None:
        """Return what any rank may send at most, where that differs."""
        return None

    def _take_dense(self, entry: Entry, factor: float) -> torch.Tensor:
        gradient = entry.gradient
        dtype = torch.promote_types(self.memories[entry.name].dense_dtype(gradient), torch.float32)
        if not entry.frozen:
            sent = self._take_all(entry, factor)
            if entry.finite:
                return sent.reshape(-1).to(dtype)
        return torch.zeros(gradient.numel(), dtype=dtype)

    def _hold(self, frozen: list[str]) -> None:
        """Take the memory of frozen tensors out of the selection until the step is over."""
        for name in frozen:
            for buffer in self.memories[name].buffers.values():
                self._held.append((buffer, buffer.clone()))
                buffer.zero_()

    def _put_back(self) -> None:
        for buffer, kept in self._held:
            buffer.add_(kept)  # it holds nothing, or what a gradient of 16 bits could not hold of a sum
        self._held.clear()

    def _clips_model(self) -> bool:
        return getattr(self.algorithm, "clip_norm", None) is not None and self.algorithm.clip_scope == "model"

    def _clip(self, entries: list[Entry]) -> dict[str, float]:
        """Return what to scale each gradient with: clipped by its own norm, or by that of all on this rank."""
        units = self.units
        if not self._clips_model():
            return {
                entry.name: 1.0 if entry.frozen else self.memories[entry.name].factor(entry.gradient, units)
                for entry in entries
            }
        usable = [entry.gradient for entry in entries if not entry.frozen]
        return dict.fromkeys((entry.name for entry in entries), whole_clip_factor(self.algorithm, units, usable))

    def _group(self, names: list[str]) -> Group:
        """Return the layout of these tensors; their memories move into it."""
        dense = tuple(name for name in names if self.is_dense(name))
        sparse = tuple(name for name in names if not self.is_dense(name))
        if (sparse, dense) in self._groups:
            return self._groups[sparse, dense]
        offsets = {}
        for part in (sparse, dense):
            n = 0
            for name in part:
                offsets[name] = n
                n += self.parameters[name].numel()
        n_sparse = sum(self.parameters[name].numel() for name in sparse)
        memory = make_memory(self.algorithm, torch.empty(1).expand(n_sparse), self.device)
        for name in sparse:
            for kind in memory.BUFFERS:
                part = memory.buffer(kind).narrow(0, offsets[name], self.parameters[name].numel())
                self.memories[name].adopt(kind, part)
        hints = ops.new_hints(1, self.device)
        group = Group(sparse, dense, offsets, n_sparse, memory, hints, segments=self._segments_of(sparse))
        self._groups = {(sparse, dense): group}
        return self._groups[sparse, dense]

    @torch.no_grad()
    def _complete(self, group: Group, scale: float) -> None:
        """Wait for a group's messages; decode them into fresh tensors; clear the memory of what was sent."""
        group.completed = True
        if group.sparse:
            self._decode(group, scale)
        if group.summed is not None:
            with self.traffic.timed("exchange"):
                group.small = group.summed.wait().mul_(scale)

    def _decode(self, group: Group, scale: float) -> None:
        """Wait for the payloads; sum them; clear the memory of what was sent."""
        with self.traffic.timed("exchange"):
            gathered = group.gathered.wait()
        residual, *velocity = group.memory.cleared()
        whole = self._layout(group, group.sparse)._replace(selections=[0], begins=[0])
        ops.clear_bucket(group.buffer, [residual], velocity, layout=whole, kept=group.memory.kept, **self._form())
        group.sums = {name: place_of(self.entries[name].gradient) for name in group.sparse}
        ranks, outs = gathered.view(self.ranks, -1), list(group.sums.values())
        layout = self._layout(group, group.sparse)
        ops.reduce_bucket(ranks, outs, self.units.outgoing(scale), layout=layout, **self._form())
