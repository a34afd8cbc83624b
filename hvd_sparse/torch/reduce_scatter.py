"""The collectives of `hvd_sparse.reduce_scatter`: an all-to-all to the owners of regions, an all-gather of sums."""

from collections.abc import Sequence

import numpy as np
import torch

from hvd_sparse.reduce_scatter import must_balance
from hvd_sparse.torch.codecs.base import Bucket, Scattered
from hvd_sparse.torch.exchange import Exchange, Pending
from hvd_sparse.torch.presence import Presence


class ReduceScatter:
    """The reduce-scatters of the optimizer steps, one step at a time."""

    def __init__(self, exchange: Exchange):
        self.exchange = exchange
        self.started: list[Bucket] = []
        self._seed = 0

    def begin(self, seed: int) -> None:
        """Begin a step."""
        self.started, self._seed = [], seed

    def start(
        self, buckets: Sequence[Bucket], presence: Presence, wait: bool, collectives: list[Pending]
    ) -> list[Bucket]:
        """Start sending entries to the owners of their regions, for all buckets with regions; record the collectives.

        Returns the buckets on whose regions the ranks have to agree in this step: these wait until all gradients have
        arrived. With `wait`, all have arrived, and no bucket is returned.
        """
        scattered = [bucket for bucket in buckets if bucket.scattered is not None]
        if not scattered:
            return []
        balances = must_balance(presence.sums(), self.exchange.size())
        unknown = [bucket for bucket in scattered if balances or bucket.scattered.regions.bounds is None]
        if wait:
            self._balance(unknown)
            unknown = []
        ready = [bucket for bucket in scattered if all(bucket is not one for one in unknown)]
        for bucket in ready:
            data = bucket.scattered
            data.sent = sent = data.regions.split(data.selected)
            bucket.pending = self.exchange.alltoall(bucket.name, torch.from_numpy(sent.message), sent.splits)
            collectives.append(bucket.pending)
        self.started += ready
        return unknown

    def finish(self, collectives: list[Pending]) -> None:
        """Reduce the received entries, and start the all-gather of the kept sums. Waits for all ranks."""
        started, self.started = self.started, []
        for bucket in started:
            received = bucket.pending.wait().numpy()
            data = bucket.scattered
            payload, data.excess = data.regions.reduce(received, data.sent.padding, self._seed)
            name, most = f"{bucket.name}.kept", data.regions.most_kept_bytes
            bucket.pending = self.exchange.allgather(name, torch.from_numpy(payload), most)
            collectives.append(bucket.pending)
        for bucket in started:
            if bucket.scattered.residuals_at is not None:
                self._complete(bucket, bucket.scattered, collectives)

    def _complete(self, bucket: Bucket, data: Scattered, collectives: list[Pending]) -> None:
        """Start the all-reduce of all ranks' residuals at the elements whose sums the owners kept."""
        data.kept = data.regions.join(bucket.pending.wait().numpy())
        bucket.pending = None
        if data.kept.indices.size:
            own = data.residuals_at(data.kept.indices)
            bucket.pending = self.exchange.allreduce(f"{bucket.name}.completed", own)
            collectives.append(bucket.pending)

    def _balance(self, buckets: Sequence[Bucket]) -> None:
        """Balance the regions by a histogram of the selected indices of all ranks."""
        every = [bucket.scattered for bucket in buckets]
        counts = [torch.from_numpy(data.regions.count(data.selected)) for data in every]
        with self.exchange.traffic.timed("exchange"):
            names = [f"{bucket.name}.regions" for bucket in buckets]
            sums = [self.exchange.allreduce(name, own) for name, own in zip(names, counts, strict=True)]
            for data, pending in zip(every, sums, strict=True):
                data.regions.balance(np.asarray(pending.wait()))
