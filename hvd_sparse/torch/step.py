"""The life cycle of one optimizer step: expected gradients, received gradients, and the order of messages.

A step is a list of buckets. A codec turns the gradients of a bucket into a message, the exchange sends it, and the
codec turns the messages of all ranks into sums. A step expects the tensors of the last one that was not given up: it
sends a bucket when the bucket's last gradient arrives, or, with a joint selection, when all gradients have arrived.
Unexpected tensors (all in the first step) go in late buckets at the step's first decompress, when every rank has
compressed all its gradients. Small tensors and those that the user names, and all tensors while the density is 1, are
sent dense.
"""

from collections.abc import Sequence
from functools import partial
from time import perf_counter

import torch

from hvd_sparse.algorithms import Algorithm
from hvd_sparse.dense_fallback import DenseFallback, TensorSize
from hvd_sparse.torch import ops
from hvd_sparse.torch.codecs import CODECS
from hvd_sparse.torch.codecs.base import Arrival, Bucket, Round
from hvd_sparse.torch.dense_bucket import DenseBucket, SmallTensors, concatenated, take_dense
from hvd_sparse.torch.device import device_of, is_cuda, refuse_damage
from hvd_sparse.torch.error_feedback import ErrorFeedback, StatePart, clip_ratio, make_error_feedback
from hvd_sparse.torch.exchange import SMALL_BYTES, Exchange, Pending
from hvd_sparse.torch.optimizer_step import OptimizerStep
from hvd_sparse.torch.parameters import Parameters
from hvd_sparse.torch.presence import Presence
from hvd_sparse.torch.reduce_scatter import ReduceScatter
from hvd_sparse.torch.traffic import Traffic
from hvd_sparse.torch.vote import checked_sums, start_vote, vote_of
from hvd_sparse.traffic import DenseFallbackStats
from hvd_sparse.units import Units


class Step(OptimizerStep):
    """Runs the optimizer steps of a compressor whose ranks have whole parameters."""

    def __init__(self, algorithm: Algorithm, parameters: Parameters, exchange: Exchange, traffic: Traffic):
        super().__init__(algorithm, parameters, exchange, traffic)
        self.device = device_of(parameters.device, exchange.collectives)
        self.feedback: dict[str, ErrorFeedback] = {
            name: make_error_feedback(algorithm, parameter, self.device, self._weight_decays[name])
            for name, parameter in parameters.items()
        }
        self.codec = CODECS[algorithm.selection](algorithm, parameters, self.feedback, exchange, traffic, self.device)
        self.thresholds = self.codec.thresholds
        self._small = [name for name, one in parameters.items() if not algorithm.compresses(name, one.numel())]
        self._together = SmallTensors(algorithm, {name: self.feedback[name] for name in self._small}, self.device)
        self._frozen_before: frozenset[str] = frozenset()  # in the last step, frozen on all ranks: not sent
        self._frozen_everywhere: frozenset[str] = frozenset()  # the same, in this step
        self._plan: list[Bucket] = []
        self._plan_key: tuple | None = None
        self._scatter = ReduceScatter(exchange)
        self._fallback: DenseFallback | None = None
        self._began = self._seconds = 0.0  # start of this step; time since the previous start
        self.damage = torch.zeros(2, dtype=torch.int64, device="cpu")  # of the last decode on CUDA: only recorded

        # What `begin` sets anew for each step:
        self.number = self.rank = 0
        self._awaited: set[str] = set()  # expected tensors that have not been added
        self._is_sealed = False  # whether no tensor can be added to the planned buckets any more
        self._dense: frozenset[str] = frozenset()  # tensors sent dense
        self._reduced_by_backend: frozenset[str] = frozenset()  # of these, sent in Horovod's own all-reduces
        self._bucket_of: dict[str, Bucket | DenseBucket] = {}
        self._deferred: list[Bucket] = []
        self._late: list[Bucket] = []
        self._votes: list[Pending] = []
        self._whole_factor = 1.0  # of all gradients, where the norm of the whole model clips them

    @property
    def regions(self) -> dict:
        """The regions of reduce-scatters, by the tensors of their messages."""
        return self.codec.regions

    @regions.setter
    def regions(self, regions: dict) -> None:
        """Set the regions from a checkpoint."""
        self.codec.regions = regions

    def state_parts(self, summed: bool) -> dict[str, StatePart]:
        """Return the checkpoint entry of each parameter; `summed` is ignored, as every rank has whole parameters."""
        place, count = self.exchange.rank(), self.exchange.size()
        return {
            name: StatePart(one, one.BUFFERS, one.parameter.numel(), 0, place, count)
            for name, one in sorted(self.feedback.items())
        }

    def forget_tensors(self) -> None:
        """Make the next step expect no tensors, as the first one does; keep the error feedback."""
        self.expected, self._frozen_before = (), frozenset()
        self.reset()

    def reset(self) -> None:
        """Reset what persists across steps: thresholds, timings of the dense fallback, the record of damage."""
        self._began, self._plan_key = 0.0, None
        if is_cuda(self.device):
            ops.take_decode_status(torch.empty(0, device=self.device))
        if self._fallback is not None:
            self._fallback.reset()
        for threshold in self.codec.thresholds.values():
            threshold.reset()

    def fallback(self, world_size: int) -> DenseFallback:
        """Return the rule that decides which tensors are sent dense at this world size."""
        if self._fallback is None or self._fallback.world_size != world_size:
            large = ((name, one) for name, one in self.parameters.items() if name not in self._small)
            tensors = {name: TensorSize(one.shape, one.element_size()) for name, one in large}
            self._fallback = DenseFallback(self.algorithm, tensors, world_size)
        return self._fallback

    def explain(self) -> DenseFallbackStats:
        """Return the entry of `stats` on the last step's choice between payloads and dense tensors."""
        if self._fallback is None:
            return DenseFallback.unused(self.algorithm)
        return self._fallback.explain(self.number, self.algorithm.schedule.density(self.number))

    def drop(self) -> None:
        """Give up the step under way."""
        self.arrivals = {}
        self.codec.drop()

    def begin(self, number: int, units: Units) -> None:
        """Begin an optimizer step, counted from 0; cut the expected tensors into buckets."""
        fallback = self.fallback(units.world_size)
        density = fallback.choose(number, self.algorithm.schedule.density(number))
        now = perf_counter()
        self._seconds, self._began = now - self._began if self._began else 0.0, now
        self.number, self.units, self.rank = number, units, self.exchange.rank()
        self.codec.begin(Round(number, density, (self.algorithm.seed << 32) + number, units, self.rank))
        self._awaited = set(self.expected)
        self._deferred, self._votes, self._late, self._is_sealed = [], [], [], False
        self._dense = frozenset(self.parameters if density >= 1.0 else (*self._small, *fallback.always))
        shared = self._dense if self.codec.is_joint else self._together.names if density < 1.0 else frozenset()
        self._reduced_by_backend = self._dense - self._frozen_before - shared
        self._tokens.begin(self.rank, len(self.expected))
        self._scatter.begin((self.algorithm.seed << 32) + number)
        if self._plan_key != (self.expected, density):
            self._plan_key = (self.expected, density)
            sparse = [name for name in self.expected if name not in self._dense]
            self._plan = self.codec.plan(sparse, "model" if self.codec.is_joint else "bucket")
            sent = units.world_size * sum(bucket.size for bucket in self._plan)
            for bucket in self._plan:
                bucket.is_small = bucket.most_bytes is None and bucket.scattered is None and sent <= SMALL_BYTES
        self._bucket_of = {name: bucket for bucket in self._plan for name in bucket.members}
        for bucket in self._plan:
            bucket.begin_step()
        self._start_presence()

    def _start_presence(self) -> None:
        """Start the all-reduce that tells which ranks take part in this step, and whether any parameter is frozen."""
        came = [*self.expected, *self._frozen_before] or list(self.parameters)
        freezes = any(not self.parameters[name].requires_grad for name in came)
        self._presence = Presence(self.exchange, freezes, self.sends_early, self.codec.region_numbers())
        self._in_flight = [self._presence.pending]

    def add(self, arrival: Arrival) -> torch.Tensor:
        """Add one gradient to the step; return the tensor for Horovod to all-reduce: a token or the dense tensor."""
        name = arrival.name
        self.arrivals[name] = arrival
        if name in self._reduced_by_backend:
            arrival.carries_token = False
            self._set_factor(arrival)
            carried = self._take_dense(arrival)
            self.traffic.count(payload_bytes=carried.nbytes)
        else:
            carried = self._tokens.take()
            bucket = self._bucket_of.get(name)
            if bucket is not None and not self.codec.is_joint:
                bucket.missing.discard(name)
                if not bucket.missing:
                    self._start(bucket)
        self._awaited.discard(name)
        if not self._awaited and not self._is_sealed and self.expected and not self._clips_model:
            self._seal()
        if self.sends_early:
            self._send_early()
        return carried

    def finish(self) -> None:
        """Send all buckets that have not been sent: no gradient is compressed after this in the step."""
        self._frozen_everywhere = self._find_frozen_everywhere()
        planned = self._frozen_everywhere.union(self.expected)
        if self.codec.is_joint and not self._is_sealed and (self._awaited or self.arrivals.keys() - planned):
            # A tensor is missing or new: the planned joint selection is dropped, and all tensors share a late bucket.
            planned, self._bucket_of, self._is_sealed = self._frozen_everywhere, {}, True
        if not self._is_sealed:
            self._seal()
        late = [self.arrivals[name] for name in sorted(self.arrivals) if name not in planned]
        if late:
            self._start_late(late)
        self._release(wait=True)
        self.traffic.count_gradients(self.arrivals.values(), self.exchange.collectives.token_bytes)

    def end(self, given_up: bool = False) -> None:
        """End a step; unless all ranks give it up, the next step expects the same tensors."""
        self._wait_for_unread()
        self._late = []
        self.codec.end()
        if not given_up:
            self.expected = tuple(name for name in sorted(self.arrivals) if name not in self._frozen_everywhere)
            self._frozen_before = self._frozen_everywhere
        self.arrivals, self._bucket_of = {}, {}
        for bucket in self._plan:
            bucket.begin_step()

    def overflowed(self) -> bool:
        """Return whether any gradient on any rank was not finite: then the step is skipped. Waits for the votes."""
        overflow, seconds, refuse = False, None, partial(refuse_damage, self.exchange, self.damage)
        for vote in self._votes:
            sums = checked_sums(vote.wait().tolist(), self.number, self.units, refuse)
            overflow, seconds = overflow or sums.bad > 0, sums.seconds
        if seconds is not None:
            self._fallback.note(self.number, seconds / self.units.world_size)
        return overflow

    def result(self, arrival: Arrival, carried: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the reduced gradient, float32[n] or in the gradient's own shape and dtype."""
        bucket = self._bucket_of.get(arrival.name)
        if not arrival.carries_token:
            result = carried
        elif isinstance(bucket, DenseBucket):
            with self.traffic.timed("exchange"):
                result = bucket.sum_of(arrival.name, scale)
        elif bucket is not None:
            return self._sum_of(bucket, arrival, scale)
        else:  # frozen on all ranks
            return arrival.gradient.new_zeros(arrival.gradient.numel())
        if arrival.commit is not None:
            arrival.commit()
        return result

    def _sum_of(self, bucket: Bucket, arrival: Arrival, scale: float) -> torch.Tensor:
        """Return a sum from its bucket; the first call decodes the bucket and clears the sent entries.

        Decoding a joint bucket may exchange values, so all of them are decoded, in the same order on all ranks.
        """
        if arrival.name not in bucket.sums:
            for one in (*self._plan, *self._late) if self.codec.is_joint else [bucket]:
                members = self._members(one)
                if one.is_started and members and not one.sums:
                    self._decode(one, members, scale)
        if scale != bucket.scale:
            raise ValueError(
                f"hvd_sparse: the reduction of {arrival.name} scales by {scale}, that of tensors in the same message "
                f"by {bucket.scale}: reduce all gradients of an optimizer alike"
            )
        total, dtype = bucket.sums[arrival.name], arrival.gradient.dtype
        return self.feedback[arrival.name].keep_excess(total, dtype, self.rank, self.units, scale)

    def _decode(self, bucket: Bucket, members: dict[str, Arrival], scale: float) -> None:
        with self.traffic.timed("exchange"):
            if self._scatter.started:
                self._scatter.finish(self._in_flight)
            gathered = None if bucket.pending is None else bucket.pending.wait()
        bucket.scale = scale
        with torch.no_grad():
            self.codec.decode(bucket, gathered, members, self.units.outgoing(scale))

    def _members(self, bucket: Bucket) -> dict[str, Arrival]:
        """Return the gradients of a bucket that have arrived."""
        return {name: self.arrivals[name] for name in bucket.members if name in self.arrivals}

    def _seal(self) -> None:
        """Send the expected buckets that have not been sent: all tensors have arrived, or no more will."""
        self._is_sealed = True
        arrivals = [self.arrivals[name] for name in self.expected if name in self.arrivals]
        if self.expected:
            self._start_all(arrivals, [bucket for bucket in self._plan if not bucket.is_started], "")

    def _start_late(self, arrivals: list[Arrival]) -> None:
        sparse = [arrival.name for arrival in arrivals if arrival.name not in self._dense]
        self._late = self.codec.plan(sparse, "late")
        for bucket in self._late:
            bucket.begin_step()
            self._bucket_of.update(dict.fromkeys(bucket.members, bucket))
        self._start_all(arrivals, self._late, "late.")

    def _start_all(self, arrivals: list[Arrival], buckets: list[Bucket], prefix: str) -> None:
        """Send the buckets and those dense gradients that Horovod does not all-reduce itself; start the vote."""
        if self._clips_model:
            training = [arrival.gradient for arrival in arrivals if not arrival.frozen]
            self._whole_factor = clip_ratio(self.algorithm, self.units, training) * self.units.incoming
        for bucket in buckets:
            self._start(bucket)
        dense = [arrival for arrival in arrivals if arrival.carries_token and arrival.name in self._dense]
        whole = self._take_together(dense) if dense else None
        self._vote(f"{prefix}vote")
        if whole is not None:
            dense_bucket = DenseBucket(dense, self.exchange.allreduce(f"{prefix}dense", whole))
            self._in_flight.append(dense_bucket.pending)
            self._bucket_of.update(dict.fromkeys((arrival.name for arrival in dense), dense_bucket))

    def _take_together(self, arrivals: Sequence[Arrival]) -> torch.Tensor:
        """Return the concatenated dense tensors for one all-reduce; all ranks have the same ones."""
        for arrival in arrivals:
            self._set_factor(arrival)
        taken = self._together.take_all(arrivals, self.units)
        if taken is not None:
            self.codec.finite.append(taken.finite)
            self.traffic.count(sent=taken.sent.numel())
            return taken.sent
        return concatenated([self._take_dense(arrival) for arrival in arrivals])

    def _start(self, bucket: Bucket) -> None:
        bucket.is_started = True
        arrivals = self._members(bucket)
        for arrival in arrivals.values():
            self._set_factor(arrival)
        self.codec.encode(bucket, arrivals)
        if bucket.message is None:
            return
        if bucket.is_small:
            bucket.pending = self.exchange.allgather_small(bucket.name, bucket.message)
            self._in_flight.append(bucket.pending)
        else:
            self._deferred.append(bucket)

    def _set_factor(self, arrival: Arrival) -> None:
        """Set the factor from a gradient to units of its error feedback, with clipping by the tensor or model norm."""
        if not arrival.frozen:
            feedback = self.feedback[arrival.name]
            arrival.factor = self._whole_factor if self._clips_model else feedback.factor(arrival.gradient, self.units)

    def _take_dense(self, arrival: Arrival) -> torch.Tensor:
        """Return the tensor that is sent for a dense gradient, whose factor is set; set its `commit`."""
        self.traffic.count(sent=arrival.gradient.numel())
        sent, finite = take_dense(arrival, self.feedback[arrival.name], self.units)
        self.codec.finite += finite
        return sent

    def _find_frozen_everywhere(self) -> frozenset[str]:
        """Return the parameters of this step that are frozen on all ranks; all-reduces if any rank has a frozen one."""
        with self.traffic.timed("exchange"):
            if not self._presence.anywhere_frozen():
                return frozenset()
            names = sorted(self.arrivals)
            flags = [float(not self.arrivals[name].frozen) for name in names]
            trains = torch.tensor(flags, dtype=torch.float32, device="cpu")
            ranks = self.exchange.allreduce("trains", trains).wait().tolist()
        return frozenset(name for name, count in zip(names, ranks, strict=True) if count == 0.0)

    def _send_early(self) -> None:
        """Send the deferred messages if all ranks may; wait for their answers."""
        if self._deferred:
            with self.traffic.timed("exchange"):
                may_gather = self._presence.may_gather()
            if may_gather:
                self._release(wait=False)

    def _release(self, wait: bool) -> None:
        """Start the deferred all-gathers, once the presence check shows that all ranks take part in this step."""
        with self.traffic.timed("exchange"):
            self._presence.check(self.units.world_size)
        deferred, self._deferred = self._deferred, []
        for bucket in deferred:
            if bucket.scattered is None:
                bucket.pending = self.exchange.allgather(bucket.name, bucket.message, bucket.most_bytes)
                self._in_flight.append(bucket.pending)
        self._deferred = self._scatter.start(deferred, self._presence, wait, self._in_flight)

    def _vote(self, name: str) -> None:
        """Start the vote on all gradients accumulated since the last vote, without waiting for the device."""
        flags, self.codec.finite = self.codec.finite, []
        bad = torch.cat([flag.view(-1) for flag in flags]).logical_not().sum() if flags else 0
        seconds = self._seconds if self._fallback.is_measured else None
        if is_cuda(self.device) and not self._votes:  # nothing is decoded between the votes of a step
            self.damage = ops.take_decode_status(torch.empty(0, device=self.device))
        vote = vote_of(bad, self.damage[0], self.number, self.units.loss_scale, seconds)
        self._votes.append(start_vote(self.exchange, name, vote, self.device))
        self._in_flight.append(self._votes[-1])
