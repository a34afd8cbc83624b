"""What is selected together, and what travels together, in one step: what both scopes share.

`tensor_scope` selects in each tensor during backward, and starts a bucket's allgather when its last member is ready.
`model_scope` selects once, in all tensors, when the last gradient is ready.

Both know from the step before which tensors to expect, and start everything as soon as these are there. Tensors that
come unexpectedly (all of them in the first step) go with the late messages, at the step's first decompress: by then
every compress of the step has happened, on every rank.
"""

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hvd_sparse.algorithms import Algorithm
from hvd_sparse.centres import segments_of
from hvd_sparse.half import largest_sent, rest_of
from hvd_sparse.threshold import ScaledThreshold, Threshold
from hvd_sparse.torch import ops
from hvd_sparse.torch.exchange import Exchange, Pending
from hvd_sparse.torch.memory import ResidualMemory, make_memory
from hvd_sparse.torch.parameters import Parameters
from hvd_sparse.torch.tokens import TOKEN_BYTES, Tokens
from hvd_sparse.traffic import Traffic
from hvd_sparse.units import Units, loss_scales_differ

MOST_RANKS = 4096  # a multiple of it in the sum over ranks that tells who is there: somewhere a parameter is frozen


@dataclass(slots=True)
class Entry:
    """One gradient between its compress and its decompress."""

    name: str
    gradient: torch.Tensor  # as Horovod passed it, or a copy where the scope works
    frozen: bool  # the parameter does not train at present: it sends nothing and keeps its memory
    finite: bool = True  # known once the gradient has been read
    carries_token: bool = True  # Horovod's allreduce carries a token for it, not the tensor itself
    commit: Callable[[], None] | None = None  # what becomes of the memory of a tensor that travels dense
    origin: torch.Tensor | None = None  # what Horovod passed, if `gradient` is a copy


class Scope(abc.ABC):
    """What both scopes share: memories, the steps' entries, and the vote on whether the step counts."""

    def __init__(self, algorithm: Algorithm, parameters: Parameters, exchange: Exchange, traffic: Traffic):
        self.algorithm = algorithm
        self.parameters = parameters
        self.exchange = exchange
        self.traffic = traffic
        weight_decays = algorithm.weight_decays((name, parameters[name]) for name in parameters)
        self.memories: dict[str, ResidualMemory] = {
            name: make_memory(algorithm, parameters[name], self.device, weight_decays[name]) for name in parameters
        }
        least = max(algorithm.min_numel, 1)
        self._small = [name for name in parameters if parameters[name].numel() < least]
        self.thresholds: dict[str, Threshold | ScaledThreshold] = {}  # where the count varies
        self._segments: dict[tuple[str, ...], torch.Tensor | None] = {}
        self.expected: tuple[str, ...] = ()
        self._idle: frozenset[str] = frozenset()  # what came in the last step, frozen on every rank: nothing is sent
        self.entries: dict[str, Entry] = {}
        self._awaited: set[str] = set()
        self._deferred: list[Callable[[], Pending]] = []
        self._collectives: list[Pending] = []
        self._votes: list[Pending] = []
        self._sealed = self._under_way = False
        self._nowhere: frozenset[str] = frozenset()
        self._tokens = Tokens()
        self._dense: frozenset[str] = frozenset()  # what travels dense in this step
        self.damage = torch.zeros(2, dtype=torch.int64)  # of the step before, where it is recorded, not raised

    @property
    def device(self) -> torch.device:
        """Where it works: gradients are handed to it there, its memories, messages and results lie there."""
        return torch.device("cpu")

    def forget(self) -> None:
        """Expect nothing of the next step, as in the first one; keep the memories."""
        self.expected, self._idle = (), frozenset()
        self.restart()

    def restart(self) -> None:
        """Take every threshold anew: they outlive a step."""
        for threshold in self.thresholds.values():
            threshold.forget()

    def describe(self) -> list[str]:
        """Return one line a parameter that decays, for the comparison between ranks."""
        decays = {name: memory.weight_decay for name, memory in sorted(self.memories.items())}
        return [f"weight_decay of {name} = {decay!r}" for name, decay in decays.items() if decay]

    def begin(self, step: int, units: Units) -> None:
        """Begin an optimizer step, counted from 0."""
        self.step = step
        self.units = units
        self.density = self.algorithm.schedule.density(step)
        self.seed = (self.algorithm.seed << 32) + step
        self.entries = {}
        self._awaited = set(self.expected)
        self._votes = []
        self._sealed = False
        self._deferred = []
        self.ranks = units.world_size
        self._dense = frozenset(self.parameters if self.density >= 1.0 else self._small)
        if self._under_way:
            for memory in self.memories.values():
                memory.forget_spare()
        self._under_way = True
        self._tokens.begin(self.exchange.rank(), len(self.expected))
        came = [*self.expected, *self._idle] or list(self.parameters)
        freezes = any(not self.parameters[name].requires_grad for name in came)
        self._presence = self.exchange.allreduce("present", torch.full([1], 1.0 + MOST_RANKS * freezes))
        self._collectives = [self._presence]
        self.traffic.count(payload_bytes=4)

    def add(self, entry: Entry) -> torch.Tensor:
        """Take a gradient in; return what Horovod's own allreduce is to carry: a token, or the dense tensor."""
        name = entry.name
        self.entries[name] = entry
        carried = self._take(entry)
        self._awaited.discard(name)
        if not self._awaited and not self._sealed and self.expected:
            self._seal()
        if self._deferred:
            self._release(wait=False)
        return carried

    def finish(self) -> None:
        """Start everything that has not been started: no compress follows in this step."""
        self._nowhere = self._trained_nowhere()
        self._finish()
        self._release(wait=True)
        self._count()

    def _trained_nowhere(self) -> frozenset[str]:
        """Return which parameters of this step are frozen on every rank; asks the others if any is frozen here."""
        with self.traffic.timed("exchange"):
            if self._presence.wait() < MOST_RANKS:
                return frozenset()
            names = sorted(self.entries)
            trains = torch.tensor([float(not self.entries[name].frozen) for name in names])
            self.traffic.count(payload_bytes=trains.nbytes)
            ranks = self.exchange.allreduce("trains", trains).wait().tolist()
        return frozenset(name for name, count in zip(names, ranks, strict=True) if count == 0.0)

    def _count(self) -> None:
        """Count what Horovod alone would have been handed, and the tokens that it is."""
        gradients = [entry.gradient for entry in self.entries.values()]
        self.traffic.count(
            elements=sum(gradient.numel() for gradient in gradients),
            dense_bytes=sum(gradient.nbytes for gradient in gradients),
            payload_bytes=TOKEN_BYTES * sum(entry.carries_token for entry in self.entries.values()),
        )

    def end(self) -> None:
        """End a step that is complete: what it saw is what the next one expects.

        Lets go of its gradients, and waits for what a void step left unread: Horovod keeps those tensors until then.
        """
        for collective in self._collectives:
            collective.wait()
        self._tokens.end()
        self._under_way = False
        self.expected = tuple(name for name in sorted(self.entries) if name not in self._nowhere)
        self._idle = self._nowhere
        self.entries = {}

    def overflowed(self) -> bool:
        """Return whether any gradient of any rank was not finite: then the step does not count. Waits for the votes.

        RuntimeError on every rank if they are not at the same step, or if one met a damaged payload in the last one.
        """
        overflow = False
        for vote in self._votes:
            bad, damaged, steps, squares, scales, scale_squares = vote.wait().tolist()
            if damaged > 0:
                self._refuse_damage()
            if steps**2 != squares * self.ranks:  # equal if and only if all steps are, as Cauchy and Schwarz
                raise RuntimeError(
                    f"hvd_sparse: this rank is at step {self.step}, the mean is {steps / self.ranks:g}. "
                    "Load the compression's state on every rank, or on none"
                )
            if abs(scales**2 - scale_squares * self.ranks) > 1e-9 * scales**2:  # equal, but for rounding
                raise RuntimeError(loss_scales_differ(self.units.loss_scale, scales / self.ranks))
            overflow |= bad > 0
        return overflow

    @abc.abstractmethod
    def result(self, entry: Entry, carried: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the reduced gradient, float32[n] or in the entry's own shape and dtype."""

    def hold(self, entry: Entry, total: torch.Tensor, scale: float) -> torch.Tensor:
        """Return what a gradient of 16 bits holds of its sum, float32[n]; the rest goes back to the ranks' residuals.

        scale: what the sum over ranks was multiplied with.
        """
        dtype = entry.gradient.dtype
        most = torch.finfo(dtype).max
        total = total.view(-1)
        held = total.clamp(-most, most).to(dtype)
        part = rest_of(self.exchange.rank(), self.ranks) / scale
        self.memories[entry.name].buffer("residual").add_((total - held).mul_(part))
        return held

    def is_dense(self, name: str) -> bool:
        """Return whether a tensor travels dense in this step."""
        return name in self._dense

    def _take_all(self, entry: Entry, factor: float) -> torch.Tensor:
        """Bring a gradient that travels dense into its memory, for now; return what is to be sent."""
        units = self.units
        averages = units.reduction is not None and units.reduction * units.world_size <= 1.0
        most = largest_sent(self.ranks, averages) if entry.gradient.dtype == torch.float16 else math.inf
        sent, finite, entry.commit = self.memories[entry.name].take_all(entry.gradient, factor, units, most)
        self._note(entry, finite)
        return sent

    def _note(self, entry: Entry, finite: torch.Tensor) -> None:
        """Note whether a gradient was finite."""
        entry.finite = bool(finite)

    def _accumulate_bucket(self, entries: Sequence[Entry], *lists, **options) -> None:
        """Accumulate, select and pack; note which gradients were finite. The hints learn in the call."""
        _, finite = ops.accumulate_bucket_hinted(
            [entry.gradient for entry in entries],
            *lists,
            seed=self.seed,
            centre=self.algorithm.centre,
            **self._form(),
            **options,
        )
        self._note_all(entries, finite)

    def _note_all(self, entries: Sequence[Entry], finite: torch.Tensor) -> None:
        """Note which gradients were finite, bool[entries]."""
        if not finite.all():
            for entry, is_finite in zip(entries, finite.tolist(), strict=True):
                entry.finite &= is_finite

    def _buffer(self, size: int) -> torch.Tensor:
        """Make room for a message."""
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    @abc.abstractmethod
    def _take(self, entry: Entry) -> torch.Tensor:
        """Bring a gradient into its memory; return what Horovod is to carry."""

    @abc.abstractmethod
    def _seal(self) -> None:
        """Start what was expected: all of it is there, or no more will come."""

    @abc.abstractmethod
    def _finish(self) -> None:
        """Start everything that has not been started."""

    def _release(self, wait: bool) -> None:
        """Start the deferred allgathers once it is known that every rank takes part in this step.

        An allgather that meets a rank in hvd.join() kills Horovod's background thread there, and the others wait for
        ever: it must not be submitted. A sum of ones, started with the step, tells; it is there before a bucket fills.
        """
        if not wait and not (self._deferred and self._presence.is_done()):
            return
        with self.traffic.timed("exchange"):
            present, ranks = int(self._presence.wait()) % MOST_RANKS, self.ranks
        if present < ranks:
            raise RuntimeError(
                f"hvd_sparse does not work with hvd.join(): {ranks - present} of {ranks} ranks have joined. "
                "Horovod cannot gather from them. Give every rank as many steps: drop or repeat the last batches"
            )
        deferred, self._deferred = self._deferred, []
        self._collectives += [start() for start in deferred]

    def _vote(self, name: str, entries: list[Entry]) -> None:
        bad = sum(not entry.finite for entry in entries)
        vote = torch.tensor([bad, 0.0, *self._in_common()], dtype=torch.float64)
        self._votes.append(self.exchange.allreduce(name, vote))
        self._collectives.append(self._votes[-1])
        self.traffic.count(payload_bytes=vote.numel() * vote.element_size())

    def _refuse_damage(self) -> None:
        """Raise what all ranks recorded of damaged payloads: a rank that decodes on the CPU raised it at once."""
        damage = self.damage.view(torch.uint8)
        gathered = self.exchange.allgather("damage", damage).wait().view(torch.int64).view(-1, 2).tolist()
        met = [
            f"rank {rank} met {count} of them, the first that of rank {first // 256} with the wrong "
            f"{ops.FAILED_CHECKS[first % 256 - 1]}"
            for rank, (count, first) in enumerate(gathered)
            if count > 0
        ]
        raise RuntimeError(
            f"hvd_sparse: payloads were damaged on their way in the step before this one: {'; '.join(met)}. Their sums "
            "became NaN: go back to a checkpoint, and have the memory and the network of these ranks looked at"
        )

    def _in_common(self) -> tuple[float, ...]:
        """Return what must be the same on every rank, each with its square: sums of both tell."""
        step, loss_scale = self.step, self.units.loss_scale
        return step, step**2, loss_scale, loss_scale**2

    def _late(self) -> list[Entry]:
        known = {*self.expected, *self._nowhere}
        return [self.entries[name] for name in sorted(self.entries) if name not in known]

    def _pack_nothing(self, n: int, k: int, out: torch.Tensor, segments: torch.Tensor | None) -> None:
        """Write the payload of an empty contribution."""
        indices, values = out.new_empty(0, dtype=torch.int64), out.new_empty(0, dtype=torch.float32)
        ops.pack(indices, values, n, k, out, self.algorithm.coding, self.algorithm.values, segments)

    def _payload_size(self, n: int, k: int, segments: torch.Tensor | None) -> int:
        return ops.payload_size(n, k, self.algorithm.coding, self.algorithm.values, segments)

    def _form(self) -> dict[str, str]:
        """Return how payloads are coded, as the operators of buckets take it."""
        return {"coding": self.algorithm.coding, "value_dtype": self.algorithm.values}

    def _segments_of(self, names: tuple[str, ...]) -> torch.Tensor | None:
        """Return what shares the centres of low-bit values in tensors that lie one after the other."""
        if names not in self._segments:
            segments = segments_of([self.parameters[name].shape for name in names], self.algorithm)
            self._segments[names] = None if segments is None else torch.from_numpy(segments)
        return self._segments[names]


def place_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return where its sum goes, n float32: Horovod's own place is the gradient that it passed, if that fits."""
    in_place = gradient.dtype == torch.float32 and gradient.is_contiguous()
    return gradient if in_place else gradient.new_empty(gradient.numel(), dtype=torch.float32)
