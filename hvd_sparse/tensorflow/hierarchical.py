"""The hierarchical exchange: hosts sum gradients, compress shards and exchange these (`hvd_sparse.hierarchy`).

The twin of `hvd_sparse.torch.hierarchical`, as a part of a step's graph. All hosts must have the same number of ranks,
as Horovod needs the same graph on all ranks.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_sparse.algorithms import Algorithm
from hvd_sparse.granularity import channels_of
from hvd_sparse.half import HALF
from hvd_sparse.hierarchy import algorithm_between_hosts, find_hierarchy, shard_shape
from hvd_sparse.process_sets import process_sets_of
from hvd_sparse.schedule import is_always_dense
from hvd_sparse.tensorflow.codecs.base import Arrival, Round, once, round_to_half
from hvd_sparse.tensorflow.exchange import Exchange, in_time
from hvd_sparse.units import Units


class Shard:
    """A part of a variable, with the interface of a variable that the error feedback uses."""

    dtype = tf.float32  # of the gradient, which is a sum over the ranks of a host

    def __init__(self, whole: tf.Variable, begin: int, end: int, row: int):
        self.whole, self._begin, self._end = whole, begin, end
        self.shape = tf.TensorShape(shard_shape(begin, end, row))

    def read_value(self) -> tf.Tensor:
        """Return the elements."""
        return tf.reshape(self.whole.read_value(), [-1])[self._begin : self._end]


class Hosts:
    """The hosts of a job, and this rank's shard of each variable.

    Args:
        algorithm: The compression method.
        variables: All variables, by name.
        decays: The weight decay of each variable, by name.
        exchange: The exchange of all ranks.

    Raises:
        ValueError: The hosts differ in their number of ranks, or Horovod does not permit process sets.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        variables: Mapping[str, tf.Variable],
        decays: Mapping[str, float],
        exchange: Exchange,
    ):
        exchange.check_everyone()
        if not hvd.is_initialized():
            raise ValueError('exchange="hierarchical" needs to know the hosts: call hvd.init() first')
        hierarchy = in_time(lambda: find_hierarchy(algorithm.ranks_per_host, hvd.size(), exchange.allgather_object))
        if len(set(map(len, hierarchy.hosts))) > 1:
            sizes = list(map(len, hierarchy.hosts))
            raise ValueError(f"in TensorFlow, all hosts must have the same number of ranks, got {sizes}")
        sets, rank = process_sets_of(hvd, hierarchy), exchange.rank()
        self.shard, self.host_size = hierarchy.shard_of(rank), hierarchy.shards
        self.host_count, self.host_number = len(hierarchy.hosts), hierarchy.hosts.index(hierarchy.host_of(rank))
        self.host = Exchange(sets[hierarchy.host_of(rank)])
        self.column = Exchange(sets[hierarchy.columns[self.shard]])
        # Variables with fewer elements than there are shards are sent dense, whatever min_numel permits.
        self.dense_algorithm = dataclasses.replace(algorithm, min_numel=max(algorithm.min_numel, hierarchy.shards))
        self.cuts: dict[str, np.ndarray] = {}
        rows = {}
        for name, variable in variables.items():
            if self.dense_algorithm.compresses(name, variable.shape.num_elements()):
                rows[name] = channels_of(variable.shape, algorithm)
                self.cuts[name] = hierarchy.cut(variable.shape.num_elements(), rows[name])
        self.algorithm = algorithm_between_hosts(algorithm, {name: decays[name] for name in self.cuts})
        self.shards = {name: Shard(variables[name], *self.bounds(name), rows[name]) for name in self.cuts}

    def bounds(self, name: str) -> tuple[int, int]:
        """Return the begin and the end of this rank's shard of a variable."""
        begin, end = self.cuts[name][self.shard : self.shard + 2].tolist()
        return begin, end

    def inner(self, now: Round) -> Round:
        """Return the `Round` for the codec of a column, whose world size is the number of hosts.

        It shares the lists and the counters of `now`: what the codec adds to one is in the other.
        """
        return dataclasses.replace(now, units=Units(self.host_count, now.units.reduction, now.units.loss_scale))

    def add(self, arrivals: Sequence[Arrival], now: Round) -> None:
        """Replace each sharded gradient with this rank's shard of its sum over the host's ranks."""
        arrivals = [arrival for arrival in arrivals if arrival.name in self.cuts]
        if not arrivals:
            return
        incoming = tf.cast(now.units.incoming, tf.float32)
        parts: list[list[tf.Tensor]] = [[] for _ in range(self.host_size)]
        for arrival in arrivals:
            whole = tf.reshape(tf.cast(arrival.gradient, tf.float32), [-1])
            if self.dense_algorithm.clips is not None:
                whole *= tf.cast(arrival.clip_ratio, tf.float32)
            for part, piece in zip(parts, tf.split(whole, np.diff(self.cuts[arrival.name])), strict=True):
                part.append(piece)
        sizes = [sum(int(piece.shape[0]) for piece in part) for part in parts]
        own = sizes[self.shard]
        message = once(now.present, tf.concat([piece for part in parts for piece in part], 0))
        received = self.host.alltoall_floats(f"host{now.suffix}", message, sizes) if self.host_size > 1 else message
        rows = tf.unstack(tf.reshape(received, [self.host_size, own]))
        total = rows[0]
        for row in rows[1:]:  # in the order of the ranks
            total += row
        sent_bytes = 4 * (sum(sizes) - own)
        now.counted.add(payload_bytes=sent_bytes, surplus_bytes=4 * (self.host_size - 1) * own - sent_bytes)
        for arrival, shard in zip(
            arrivals, tf.split(total, [self._length(arrival.name) for arrival in arrivals]), strict=True
        ):
            arrival.gradient, arrival.factor = shard, incoming

    def deliver(self, arrivals: Sequence[Arrival], now: Round) -> None:
        """All-gather the shards of the results within the host, and set the arrivals' `decode`."""
        arrivals = [arrival for arrival in arrivals if arrival.name in self.cuts]
        if not arrivals:
            return
        own = tf.concat([self._result(arrival, now) for arrival in arrivals], 0)
        every = own
        if self.host_size > 1:
            every = self.host.gather(f"result{now.suffix}", own)
            now.counted.add(payload_bytes=4 * own.shape[0])
            now.counted.add(surplus_bytes=4 * (tf.size(every, tf.int64) - 2 * own.shape[0]))
        lengths = [np.diff(self.cuts[arrival.name]) for arrival in arrivals]
        parts = tf.split(every, np.stack(lengths, axis=1).reshape(-1))  # shard by shard, gradient by gradient
        for number, arrival in enumerate(arrivals):
            whole = tf.concat(parts[number :: len(arrivals)], 0)
            arrival.decode = lambda whole=whole: whole

    def _result(self, arrival: Arrival, now: Round) -> tf.Tensor:
        """Return this rank's shard of the reduced gradient, from payloads or from a dense all-reduce."""
        decoded = arrival.decode()
        if now.is_dense is None:
            return decoded
        scale, buffers = tf.cast(now.units.reduction, tf.float32), arrival.taken[1]
        name, sent = f"dense.{arrival.name}{now.suffix}", once(now.present, tf.reshape(arrival.taken[0], [-1]))

        def dense() -> tuple[tf.Tensor, tf.Tensor]:
            """Return the sum over hosts, and the next residual, with this rank's part of what a 16-bit type loses."""
            total = self.column.allreduce(name, sent) * scale
            if arrival.dtype.name not in HALF:
                return total, buffers["residual"]
            rank, retained = self.column.rank(), arrival.feedback.retained
            rounded, excess = round_to_half(total, arrival.dtype, rank, self.inner(now).units, retained)
            return rounded, buffers["residual"] + excess

        result, buffers["residual"] = tf.cond(now.is_dense, dense, lambda: (decoded, buffers["residual"]))
        sent = tf.cast(now.is_dense, tf.int64) * self._length(arrival.name)
        now.counted.add(payload_bytes=4 * sent, sent=sent)
        return tf.ensure_shape(result, [self._length(arrival.name)])

    def _length(self, name: str) -> int:
        begin, end = self.bounds(name)
        return end - begin


def make_hosts(
    algorithm: Algorithm, variables: Mapping[str, tf.Variable], decays: Mapping[str, float], exchange: Exchange
) -> Hosts | None:
    """Return the hosts for a hierarchical exchange; None for other exchanges, and if all steps are dense."""
    adds = algorithm.is_hierarchical and not is_always_dense(algorithm.schedule)
    return Hosts(algorithm, variables, decays, exchange) if adds else None
