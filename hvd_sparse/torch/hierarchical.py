"""The optimizer step of the hierarchical exchange: hosts sum gradients, compress shards and exchange these.

`hvd_sparse.hierarchy` describes the algorithm. Each column of ranks has a separate `Step` for its shards. This class
passes the sums over a host's ranks to that step and distributes its results. Small tensors, and those that the user
names, are sent dense, in one all-reduce over all ranks.
"""

import itertools

import numpy as np
import torch

from hvd_sparse.algorithms import Algorithm
from hvd_sparse.buckets import plan_buckets
from hvd_sparse.dense_fallback import DenseFallback
from hvd_sparse.granularity import channels_of
from hvd_sparse.hierarchy import Hierarchy, algorithm_between_hosts, find_hierarchy
from hvd_sparse.torch.codecs.base import Arrival, sum_buffer
from hvd_sparse.torch.dense_bucket import DenseBucket, concatenated, take_dense
from hvd_sparse.torch.error_feedback import ErrorFeedback, StatePart, clip_ratio, make_error_feedback
from hvd_sparse.torch.exchange import Exchange, Pending
from hvd_sparse.torch.hosts import Host, Shard, ShardResult, Shards
from hvd_sparse.torch.optimizer_step import OptimizerStep
from hvd_sparse.torch.parameters import Parameters, gradient_dtype
from hvd_sparse.torch.presence import Presence
from hvd_sparse.torch.step import Step
from hvd_sparse.torch.traffic import PartOfStep, Traffic
from hvd_sparse.torch.vote import RanksDiffer, checked_sums, start_vote, vote_of
from hvd_sparse.traffic import DenseFallbackStats
from hvd_sparse.units import Units

HOST_BYTES = 1 << 22  # of one message of dense gradients within a host; larger tensors are sent alone, without a copy


class HierarchicalStep(OptimizerStep):
    """Runs the optimizer steps of a compressor whose ranks have shards of the parameters."""

    def __init__(self, algorithm: Algorithm, parameters: Parameters, exchange: Exchange, traffic: Traffic):
        exchange.collectives.check_everyone()
        super().__init__(algorithm, parameters, exchange, traffic)
        self.device = torch.device("cpu")
        self._kinds = make_error_feedback(algorithm, torch.empty(0, device=self.device), self.device).BUFFERS
        self._laid_out_in: object | None = None
        self.has_state = False  # the hosts are not known, and to find them takes all ranks
        self.small: dict[str, ErrorFeedback] = {}
        self.inner: Step | None = None  # of the column; None if this rank has no shard

        # What `lay_out` sets:
        self.hierarchy: Hierarchy
        self.shard: int | None = None  # the number of this rank's shard
        self.cuts: dict[str, np.ndarray] = {}  # where the shards of each large tensor begin, and the end; none is dense
        self._host: Host

        # What `begin` sets anew for each step:
        self.number = self.rank = 0
        self._planned: dict[str, list[str]] = {}  # the tensors of the messages within the host, by title
        self._missing: dict[str, set[str]] = {}  # of these, the tensors without a gradient so far
        self._title_of: dict[str, str] = {}
        self._whole_ratio = 1.0  # clips the whole gradient

        # What a step collects:
        self._finite: list[torch.Tensor] = []
        self._groups: dict[str, tuple[list[str], Pending]] = {}  # the started messages within the host, by title
        self._within: dict[str, tuple[Arrival, Pending | None]] = {}  # this rank's shards; the sums of those sent dense
        self._sums: dict[str, list[tuple[ShardResult, int]]] | None = None  # the results: see `_deliver`
        self._dense_of: dict[str, DenseBucket] = {}  # the message of the small tensors, for each of them

    # State

    @property
    def feedback(self) -> dict[str, ErrorFeedback]:
        """The error feedback of small tensors, and of this rank's shards of large ones."""
        return self.small | (self.inner.feedback if self.inner is not None else {})

    @property
    def thresholds(self) -> dict:
        """The thresholds by name, between hosts."""
        return {} if self.inner is None else self.inner.thresholds

    @property
    def regions(self) -> dict:
        """The regions of reduce-scatters between hosts."""
        return {} if self.inner is None else self.inner.regions

    @regions.setter
    def regions(self, regions: dict) -> None:
        """Set the regions from a checkpoint."""
        if self.inner is not None:
            self.inner.regions = regions

    def state_parts(self, summed: bool) -> dict[str, StatePart]:
        """Return the checkpoint entry of each parameter: this rank's shard, or if `summed`, the whole tensor."""
        self.lay_out()
        rank, ranks = self.exchange.rank(), self.exchange.size()
        host, hosts = self.hierarchy.hosts.index(self.hierarchy.host_of(rank)), len(self.hierarchy.hosts)
        found = {
            name: StatePart(one, one.BUFFERS, one.parameter.numel(), 0, rank, ranks) for name, one in self.small.items()
        }
        shards = {} if self.inner is None else self.inner.feedback
        if not summed:
            return found | {
                name: StatePart(one, one.BUFFERS, one.parameter.numel(), 0, host, hosts) for name, one in shards.items()
            }
        for name, cut in self.cuts.items():
            begin = 0 if self.shard is None else int(cut[self.shard])
            found[name] = StatePart(shards.get(name), self._kinds, int(cut[-1]), begin, host, hosts)
        return found

    def lay_out(self) -> None:
        """Find the hosts and divide the tensors into shards, on all ranks, after each initialisation of Horovod."""
        collectives = self.exchange.collectives
        if self._laid_out_in is collectives.incarnation():
            return
        rank, ranks = self.exchange.rank(), self.exchange.size()
        hierarchy = find_hierarchy(self.algorithm.ranks_per_host, ranks, collectives.allgather_object)
        subsets = collectives.subsets(hierarchy)
        before = self._places()
        self.hierarchy, self.shard = hierarchy, hierarchy.shard_of(rank)
        sizes = {name: self.parameters[name].numel() for name in sorted(self.parameters)}
        large = [name for name, n in sizes.items() if n >= hierarchy.shards and self.algorithm.compresses(name, n)]
        self.small = {
            name: self.small.get(name)
            or make_error_feedback(self.algorithm, self.parameters[name], self.device, self._weight_decays[name])
            for name in self.parameters
            if name not in large
        }
        self.cuts = {name: hierarchy.cut(self.parameters[name].numel(), self._row(name)) for name in large}
        own = hierarchy.host_of(rank)
        self._host = Host(own, Exchange(subsets[own], self.traffic), hierarchy.shards)
        self.inner = None
        if self.shard is not None:
            traffic = PartOfStep(self.traffic)
            column = Exchange(subsets[hierarchy.columns[self.shard]], traffic)
            shards = Shards({name: self._shard_of(name) for name in large})
            inner = algorithm_between_hosts(self.algorithm, {name: self._weight_decays[name] for name in large})
            self.inner = Step(inner, shards, column, traffic)
        if self._laid_out_in is not None:
            self._move(before)
        self._laid_out_in, self.has_state = collectives.incarnation(), True

    def _row(self, name: str) -> int:
        return channels_of(self.parameters[name].shape, self.algorithm)

    def _shard_of(self, name: str) -> Shard:
        begin, end = self.cuts[name][self.shard : self.shard + 2].tolist()
        return Shard(self.parameters[name], begin, end, self._row(name))

    def _places(self) -> dict[str, tuple[ErrorFeedback, int]]:
        """Return this rank's error feedback, and where in the whole parameter it begins."""
        shards = {} if self.inner is None else self.inner.feedback
        whole = {name: (one, 0) for name, one in self.small.items()}
        return whole | {name: (one, int(self.cuts[name][self.shard])) for name, one in shards.items()}

    def _move(self, before: dict[str, tuple[ErrorFeedback, int]]) -> None:
        """Add the error feedback of the last layout within each host, for the ranks that own it now; on all ranks."""
        now = self.feedback
        for name, kind in itertools.product(sorted(self.parameters), self._kinds):
            part = torch.zeros(self.parameters[name].numel(), dtype=torch.float32, device=self.device)
            old, begin = before.get(name, (None, 0))
            if old is not None and kind in old.buffers:
                part.narrow(0, begin, old.parameter.numel()).copy_(old.buffers[kind])
            if name in self.cuts:
                part = self._host.scatter(f"moved.{name}.{kind}", [part], [self.cuts[name].tolist()]).wait()
            if name in now and bool(part.any()):
                now[name].buffer(kind).copy_(part)

    def forget_tensors(self) -> None:
        """Make the next step expect no tensors; keep the error feedback."""
        self.expected = ()
        if self.inner is not None:
            self.inner.forget_tensors()

    def reset(self) -> None:
        """Reset what persists across steps, between hosts."""
        if self.inner is not None:
            self.inner.reset()

    def explain(self) -> DenseFallbackStats:
        """Return the entry of `stats` on the last step's choice between payloads and dense tensors between hosts."""
        return DenseFallback.unused(self.algorithm) if self.inner is None else self.inner.explain()

    # A step

    def drop(self) -> None:
        """Give up the step under way."""
        self.arrivals = {}
        if self.inner is not None:
            self.inner.drop()

    def begin(self, number: int, units: Units) -> None:
        """Begin an optimizer step, counted from 0."""
        self.lay_out()
        self.number, self.units, self.rank = number, units, self.exchange.rank()
        self._drop_tensors()
        self._presence = Presence(self.exchange, False, self.sends_early)
        self._in_flight = [self._presence.pending]
        if self.inner is not None:
            self.inner.begin(number, Units(len(self.hierarchy.hosts), units.reduction, units.loss_scale))
        large = [name for name in self.expected if name in self.cuts]
        self._tokens.begin(self.rank, len(self.expected))
        self._planned = plan_buckets({name: 4 * self.parameters[name].numel() for name in large}, HOST_BYTES, "host")
        self._missing = {title: set(names) for title, names in self._planned.items()}
        self._title_of = {name: title for title, names in self._planned.items() for name in names}

    def add(self, arrival: Arrival) -> torch.Tensor:
        """Add one gradient to the step; return the token for Horovod to all-reduce."""
        self.arrivals[arrival.name] = arrival
        if title := self._title_of.get(arrival.name):
            self._missing[title].discard(arrival.name)
            self._start_full()
        return self._tokens.take()

    def finish(self) -> None:
        """Sum the gradients over the host's ranks, compress this rank's shards, and start exchanging them."""
        with self.traffic.timed("exchange"):
            self._presence.check(self.units.world_size)
        self._start_small()
        unplanned = [name for name in self.arrivals if name in self.cuts and name not in self._title_of]
        late = plan_buckets({name: 4 * self.parameters[name].numel() for name in unplanned}, HOST_BYTES, "late")
        for title, names in (self._planned | late).items():
            self._start(title, names)
        counts = self._count_in_host()
        for names, pending in self._groups.values():
            with self.traffic.timed("exchange"):
                total = pending.wait()
            self._pass_on(self._shards_of(names, total, counts))
        if self.inner is not None:
            self.inner.finish()
        self.traffic.count_gradients(self.arrivals.values(), self.exchange.collectives.token_bytes)

    def overflowed(self) -> bool:
        """Return whether any gradient on any rank was not finite: then the step is skipped. Waits for all ranks."""
        bad, failure = sum(int(flag.logical_not().sum()) for flag in self._finite), None
        if self.inner is not None:
            try:
                bad += self.inner.overflowed()
            except RanksDiffer as error:  # only ranks of this column know: the others learn it from the next vote
                failure = error
        vote = vote_of(bad, 0, self.number, self.units.loss_scale)
        sums = start_vote(self.exchange, "vote", vote, self.device).wait().tolist()
        overflow = checked_sums(sums, self.number, self.units, lambda: None).bad > 0
        if failure is not None:
            raise failure
        return overflow

    def result(self, arrival: Arrival, carried: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the reduced gradient, float32[n] or in the gradient's own shape and dtype."""
        if arrival.name in self.cuts:
            if self._sums is None:
                self._sums = self._deliver(scale)
            out = sum_buffer(arrival.gradient)
            for shard, (part, at) in enumerate(self._sums[arrival.name]):
                begin, end = self.cuts[arrival.name][shard : shard + 2].tolist()
                part.put(out.view(-1)[begin:end], at)
            return out
        with self.traffic.timed("exchange"):
            total = self._dense_of[arrival.name].sum_of(arrival.name, scale)
        if arrival.commit is not None:
            arrival.commit()
        return total

    def end(self, given_up: bool = False) -> None:
        """End a step; unless all ranks give it up, the next step expects the same tensors."""
        self._wait_for_unread()
        if self.inner is not None:
            self.inner.end(given_up)
        if not given_up:
            self.expected = tuple(sorted(self.arrivals))
        self._drop_tensors()

    def _drop_tensors(self) -> None:
        """Drop the tensors of a step."""
        self.arrivals, self._finite, self._groups, self._within = {}, [], {}, {}
        self._sums, self._dense_of = None, {}

    # Small tensors

    def _take_dense(self, arrival: Arrival) -> torch.Tensor:
        """Return the tensor that is sent for a small gradient, clipped; set its `commit`."""
        if not arrival.frozen:
            arrival.factor = self._clip(arrival) * self.units.incoming
        sent, finite = take_dense(arrival, self.small[arrival.name], self.units)
        self._finite += finite
        self.traffic.count(sent=arrival.gradient.numel())
        return sent

    def _start_small(self) -> None:
        """Start one all-reduce of all small tensors; first compute the factor that clips the whole gradient."""
        arrivals = [self.arrivals[name] for name in sorted(self.arrivals)]
        if self._clips_model:
            gradients = [arrival.gradient for arrival in arrivals if not arrival.frozen]
            self._whole_ratio = clip_ratio(self.algorithm, self.units, gradients)
        small = [arrival for arrival in arrivals if arrival.name not in self.cuts]
        if small:
            whole = concatenated([self._take_dense(arrival) for arrival in small])
            message = DenseBucket(small, self.exchange.allreduce("dense", whole))
            self._dense_of = dict.fromkeys((arrival.name for arrival in small), message)
            self._in_flight.append(message.pending)

    # Within a host

    def _clip(self, arrival: Arrival) -> float:
        """Return the factor that clips a gradient by its own norm or by the norm of this rank's whole gradient."""
        if self.algorithm.clips is None:
            return 1.0
        return self._whole_ratio if self._clips_model else clip_ratio(self.algorithm, self.units, [arrival.gradient])

    def _start_full(self) -> None:
        """Start the complete messages, once the presence check shows that all ranks take part in this step."""
        full = [title for title in self._planned if not self._missing[title] and title not in self._groups]
        if self._clips_model or not self.sends_early or not full:
            return
        with self.traffic.timed("exchange"):
            if not self._presence.may_gather():
                return
            self._presence.check(self.units.world_size)
        for title in full:
            self._start(title, self._planned[title])

    def _start(self, title: str, names: list[str]) -> None:
        """Start summing gradients over the host's ranks."""
        if title in self._groups:
            return
        tensors = [self._outgoing(name, self.arrivals.get(name)) for name in names]
        pending = self._host.scatter(title, tensors, [self.cuts[name].tolist() for name in names])
        self._groups[title] = names, pending
        self._in_flight.append(pending)

    def _count_in_host(self) -> dict[str, list[float]]:
        """Return, for each large tensor, how many of the host's ranks have a gradient, and on how many it trains."""
        arrivals = [self.arrivals.get(name) for name in self.cuts]
        own = [[arrival is not None, arrival is not None and not arrival.frozen] for arrival in arrivals]
        pending = self._host.total("flags", torch.tensor(own, dtype=torch.float64, device=self.device))
        with self.traffic.timed("exchange"):
            return dict(zip(self.cuts, pending.wait().tolist(), strict=True))

    def _outgoing(self, name: str, arrival: Arrival | None) -> torch.Tensor:
        """Return a gradient for the sum within the host, float32[n], clipped; zeros if there is none."""
        if arrival is None or arrival.frozen:
            return torch.zeros(self.parameters[name].numel(), dtype=torch.float32, device=self.device)
        factor = self._clip(arrival)
        whole = arrival.gradient.detach().reshape(-1).to(torch.float32)
        return whole if factor == 1.0 else whole * factor

    def _shards_of(self, names: list[str], total: torch.Tensor, counts: dict[str, list[float]]) -> dict[str, Arrival]:
        """Return the gradients of this rank's shards, from a message's sum; none for tensors without a gradient."""
        arrivals, at = {}, 0
        if self.shard is None:
            return arrivals
        for name in names:
            begin, end = self.cuts[name][self.shard : self.shard + 2].tolist()
            came, trains = counts[name]
            if came > 0:
                arrivals[name] = Arrival(name, total[at : at + end - begin], frozen=trains == 0)
            at += end - begin
        return arrivals

    def _pass_on(self, arrivals: dict[str, Arrival]) -> None:
        """Compress shards and start exchanging them with other hosts, while further sums are under way."""
        for name, arrival in arrivals.items():
            carried = self.inner.add(arrival)
            pending = None
            if not arrival.carries_token:
                pending = self.inner.exchange.allreduce(f"dense.{name}", carried, counted=False)  # by `add`
                self._in_flight.append(pending)
            self._within[name] = arrival, pending

    def _deliver(self, scale: float) -> dict[str, list[tuple[ShardResult, int]]]:
        """Return, for each tensor, its shards: the gathered part of each, and the tensor's start in this part."""
        started = []
        for title, (names, _) in self._groups.items():
            own = [self._result_of(name, scale) for name in names] if self.shard is not None else []
            lengths = np.diff([self.cuts[name] for name in names])  # of each tensor's shards
            pending = self._host.gather(f"{title}.result", own, lengths.sum(axis=0).tolist())
            started.append((names, np.cumsum(lengths, axis=0) - lengths, pending))
        sums = {}
        for names, begins, pending in started:
            with self.traffic.timed("exchange"):
                parts = pending.wait()
            sums |= {name: list(zip(parts, own, strict=True)) for name, own in zip(names, begins.tolist(), strict=True)}
        return sums

    def _result_of(self, name: str, scale: float) -> torch.Tensor:
        """Return the reduced gradient of this rank's shard, float32; zeros if no rank of the host has a gradient."""
        if name not in self._within:
            begin, end = self.cuts[name][self.shard : self.shard + 2].tolist()
            return torch.zeros(end - begin, dtype=torch.float32, device=self.device)
        arrival, pending = self._within[name]
        reduced = None
        if pending is not None:
            with self.traffic.timed("exchange"):
                reduced = pending.wait().mul_(scale)
        total = self.inner.result(arrival, reduced, scale).view(-1)
        dtype, inner = gradient_dtype(self.parameters[name]), self.inner
        return inner.feedback[name].keep_excess(total, dtype, inner.rank, inner.units, scale).float()
