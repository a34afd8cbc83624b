"""scope="model": one selection in all tensors, when the last gradient is ready."""

from dataclasses import dataclass, field

import torch

from hvd_sparse.threshold import ThresholdHint
from hvd_sparse.torch.exchange import Pending
from hvd_sparse.torch.memory import ResidualMemory, make_memory, whole_clip_factor
from hvd_sparse.torch.scope import Entry, Scope, Selection
from hvd_sparse.wire import top_k_count


@dataclass
class Group:
    """Tensors that share one selection, laid out by sorted name; the small ones follow in one dense message."""

    sparse: tuple[str, ...]
    dense: tuple[str, ...]
    offsets: dict[str, int]
    n: int
    memory: ResidualMemory  # of all the sparse tensors; theirs are slices of it
    name: str = ""  # of its collectives
    hint: ThresholdHint = field(default_factory=ThresholdHint)
    selection: Selection | None = None
    buffer: torch.Tensor | None = None
    gathered: Pending | None = None
    summed: Pending | None = None
    completed: bool = False
    large: torch.Tensor | None = None  # the reduced gradients of the sparse tensors
    small: torch.Tensor | None = None  # those of the dense ones


class ModelScope(Scope):
    """One selection in all tensors: a global threshold, and clipping by the norm of the whole local gradient."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._groups: dict[tuple, Group] = {}
        self._group_of: dict[str, Group] = {}
        self._held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self, step: int) -> None:
        """Begin a step."""
        self._put_back()
        super().begin(step)
        self._group_of = {}

    def end(self) -> None:
        """End a step that is complete."""
        super().end()
        self._put_back()
        for group in self._group_of.values():
            group.large = group.small = None

    def _finish(self) -> None:
        """Select and start whatever was not complete when the last gradient came."""
        late = self._late()
        if not self._sealed and self.expected:  # a tensor is missing: the others make their own selection
            late = [self.entries[name] for name in sorted(self.entries)]
        self._sealed = True
        if late:
            self._start(late, "late")

    def result(self, entry: Entry, carried: torch.Tensor, scale: float) -> torch.Tensor:
        """Cut a tensor out of the whole model's sum."""
        group = self._group_of[entry.name]
        if not group.completed:
            self._complete(group, scale)
        if entry.commit is not None:
            entry.commit()
        whole = group.large if entry.name in group.sparse else group.small
        return whole.narrow(0, group.offsets[entry.name], entry.gradient.numel())

    def _take(self, entry: Entry) -> torch.Tensor:
        if not self._clips_model() and not self.is_dense(entry.name) and not entry.frozen:
            memory = self.memories[entry.name]
            entry.finite = memory.accumulate(entry.gradient, memory.clip_factor(entry.gradient, self.exchange.size()))
        return self.token()

    def _seal(self) -> None:
        self._sealed = True
        self._start([self.entries[name] for name in self.expected], "model")

    def _start(self, entries: list[Entry], name: str) -> None:
        """Select in the given tensors together, and send."""
        group = self._group([entry.name for entry in entries])
        self._group_of.update(dict.fromkeys((*group.sparse, *group.dense), group))
        group.selection = group.gathered = group.summed = None
        group.completed = False
        self._hold([entry.name for entry in entries if entry.frozen and entry.name in group.sparse])
        factors = self._clip(entries)
        if self._clips_model():
            for entry in entries:
                if not entry.frozen and entry.name in group.sparse:
                    memory = self.memories[entry.name]
                    entry.finite = memory.accumulate(entry.gradient, factors[entry.name])
        self._vote(f"{name}.vote", entries)
        if group.sparse:
            group.name = name
            self._choose(group)
            if group.buffer is not None:
                self._deferred.append(lambda: self._gather(group))
                self.traffic.count(payload_bytes=group.buffer.numel())
        if group.dense:
            parts = [self._take_dense(self.entries[member], factors[member]) for member in group.dense]
            small = torch.cat(parts)
            group.summed = self.exchange.allreduce(f"{name}.dense", small)
            self._collectives.append(group.summed)
            self.traffic.count(payload_bytes=small.numel() * small.element_size(), sent=small.numel())

    def _choose(self, group: Group) -> None:
        """Select in a group, and make the message for all ranks, if there has to be one."""
        k, segments = top_k_count(group.n, self.density), self._segments_of(group.sparse)
        size = self._payload_size(group.n, k, segments)
        if group.buffer is None or group.buffer.numel() != size:
            group.buffer = torch.zeros(size, dtype=torch.uint8)
        group.selection = self._quantized(*self._top_k(group.memory.residual, k, group.hint), group.sparse)
        self._pack(group.selection, group.n, k, group.buffer, segments)

    def _gather(self, group: Group) -> Pending:
        group.gathered = self.exchange.allgather(group.name, group.buffer)
        return group.gathered

    def _take_dense(self, entry: Entry, factor: float) -> torch.Tensor:
        memory = self.memories[entry.name]
        dtype = torch.promote_types(memory.dense_dtype(entry.gradient), torch.float32)
        if entry.frozen or not entry.finite:
            return torch.zeros(entry.gradient.numel(), dtype=dtype)
        sent, entry.commit = memory.take_all(entry.gradient, factor)
        return sent.reshape(-1).to(dtype)

    def _hold(self, frozen: list[str]) -> None:
        """Take the memory of frozen tensors out of the selection until the step is over."""
        for name in frozen:
            for buffer in self.memories[name].buffers.values():
                self._held.append((buffer, buffer.clone()))
                buffer.zero_()

    def _put_back(self) -> None:
        for buffer, kept in self._held:
            buffer.copy_(kept)
        self._held.clear()

    def _clips_model(self) -> bool:
        return getattr(self.algorithm, "clip_norm", None) is not None and self.algorithm.clip_scope == "model"

    def _clip(self, entries: list[Entry]) -> dict[str, float]:
        """Return each tensor's clipping factor: by its own norm, or all by the norm of the whole local gradient."""
        ranks = self.exchange.size()
        if not self._clips_model():
            return {
                entry.name: 1.0 if entry.frozen else self.memories[entry.name].clip_factor(entry.gradient, ranks)
                for entry in entries
                if self.is_dense(entry.name)
            }
        usable = [entry.gradient for entry in entries if not entry.frozen]
        return dict.fromkeys((entry.name for entry in entries), whole_clip_factor(self.algorithm, ranks, usable))

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
        memory = make_memory(self.algorithm, torch.empty(1).expand(n_sparse))
        for name in sparse:
            for kind in memory.BUFFERS:
                part = memory.buffer(kind).narrow(0, offsets[name], self.parameters[name].numel())
                self.memories[name].adopt(kind, part)
        self._groups = {(sparse, dense): Group(sparse, dense, offsets, n_sparse, memory)}
        return self._groups[sparse, dense]

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
        group.large = torch.empty(group.n)
        place = (0, group.n, top_k_count(group.n, self.density))
        self._reduce(gathered, *place, group.large, scale, self._segments_of(group.sparse))
        group.memory.clear(group.selection.indices, group.selection.left)
