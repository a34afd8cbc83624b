"""The codec for exactly k elements of each tensor, or of all tensors jointly, with a sparse reduce-scatter.

`hvd_sparse.reduce_scatter` describes the exchange: each region of elements has an owner that reduces it. At a world
size for which `exchange` selects the all-gather, this codec is `FixedCount`.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from hvd_sparse.granularity import segments_of
from hvd_sparse.reduce_scatter import (
    MessageFormat,
    Regions,
    SparseVector,
    entries_to_clear,
    known_bounds,
    region_numbers,
    selected_entries,
)
from hvd_sparse.torch import ops
from hvd_sparse.torch.codecs.base import Arrivals, Bucket, Payload, Round, Scattered, in_training, sum_buffer
from hvd_sparse.torch.codecs.fixed_count import FixedCount


class OwnedRegions(FixedCount):
    """Selects exactly k elements; each region's owner keeps the largest sums over ranks of its region."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._scatters = False  # whether the step under way has a reduce-scatter
        numels = ((name, one.numel()) for name, one in self.parameters.items())
        self._numels = [numel for name, numel in numels if self.algorithm.compresses(name, numel)]
        self._used: dict[tuple[str, ...], Regions] = {}  # of the messages of the current step

    @property
    def values(self) -> str:
        """The value type of `Bucket.message`: float32 for a reduce-scatter, which quantizes when it sends to owners."""
        return "float32" if self._scatters else super().values

    @property
    def bucket_bytes(self) -> int:
        """The maximum bytes of a message; more if it is scattered, as each owner receives only its part."""
        return super().bucket_bytes * (self.exchange.size() if self._scatters else 1)

    def _sent_bytes(self, payload: Payload) -> int:
        """Return the bytes of a payload with the values that are sent, not those of `Bucket.message`."""
        form = self.algorithm.coding, self.algorithm.values, payload.segments
        return ops.payload_size(payload.n, payload.k, *form)

    def begin(self, now: Round) -> None:
        """Begin a step."""
        self._scatters = self.algorithm.scatters(now.world_size, self._numels)
        super().begin(now)
        self._used = {}

    def end(self) -> None:
        """End a step, also one that all ranks have given up."""
        super().end()
        if self._used:
            self.regions = {names: regions.bounds for names, regions in self._used.items()}

    def region_numbers(self) -> list[float]:
        """Return the numbers by which the ranks check that they have the same regions."""
        return region_numbers(self.regions, self.now.number) if self._scatters else []

    def plan(self, names: Sequence[str], prefix: str) -> list[Bucket]:
        """Return the buckets of these tensors, with their regions."""
        buckets = super().plan(names, prefix)
        if self._scatters:
            for bucket in buckets:
                bucket.scattered = Scattered(self._regions_of(bucket))
        return buckets

    def encode(self, bucket: Bucket, arrivals: Arrivals) -> None:
        """Accumulate and select; with regions, store the selected entries for the owners."""
        super().encode(bucket, arrivals)
        if bucket.scattered is not None:
            ns, ks = zip(*((payload.n, payload.k) for payload in bucket.payloads), strict=True)
            names, data = tuple(bucket.members), bucket.scattered
            data.selected = selected_entries(bucket.message.cpu().numpy(), ns, ks, self.algorithm.coding)
            data.regions.bounds = known_bounds(self.regions, names, data.regions.form.n, self.now.world_size)
            self._used[names] = data.regions
            if self.algorithm.complete:
                data.residuals_at = partial(self._residuals_at, bucket, in_training(arrivals))

    def decode(self, bucket: Bucket, gathered: torch.Tensor | None, arrivals: Arrivals, scale: float) -> None:
        """Clear the entries that this rank sent and an owner kept; set the bucket's sums to the kept sums."""
        if bucket.scattered is None:
            super().decode(bucket, gathered, arrivals, scale)
            return
        data = bucket.scattered
        if data.residuals_at is None:
            kept = data.regions.join(gathered.numpy())
            self._clear(bucket, kept, in_training(arrivals))
        else:
            kept = data.kept if gathered is None else SparseVector(data.kept.indices, gathered.numpy())
            self._clear_all(bucket, kept, in_training(arrivals))
        bucket.sums = {name: sum_buffer(arrival.gradient) for name, arrival in arrivals.items()}
        scaled = kept.values * np.float32(scale)
        for name, indices, values in self._parts(bucket, SparseVector(kept.indices, scaled)):
            if name in bucket.sums:
                out = bucket.sums[name].view(-1).zero_()
                out.index_copy_(0, self._tensor(indices), self._tensor(values))

    def _clear(self, bucket: Bucket, kept: SparseVector, training: Arrivals) -> None:
        """Clear the error feedback at this rank's kept entries; add the rounding errors of the region that it owns."""
        data, retained = bucket.scattered, self.feedback[next(iter(bucket.members))].retained
        indices, _, left = entries_to_clear(data.selected, data.sent.entries, kept, retained)
        exact = self.algorithm.values == "float32" and not retained
        for name, inner, rest in self._parts(bucket, SparseVector(indices, left)):
            if name in training and inner.size:
                self.feedback[name].clear(self._tensor(inner), None if exact else self._tensor(rest))
        for name, inner, rest in self._parts(bucket, data.excess):
            if inner.size:
                rest = self._tensor(rest) * (1.0 - retained)  # residuals, of any rank, have kept the other part
                self.feedback[name].residual.index_add_(0, self._tensor(inner), rest)

    def _residuals_at(self, bucket: Bucket, training: Arrivals, indices: np.ndarray) -> torch.Tensor:
        """Return this rank's residuals at these elements of a bucket, float32; zeros for frozen parameters."""
        parts = [
            self.feedback[name].residual.index_select(0, self._tensor(inner)).cpu()
            if name in training
            else torch.zeros(inner.size, dtype=torch.float32, device="cpu")
            for name, inner, _ in self._parts(bucket, SparseVector(indices, indices))
        ]
        return torch.cat(parts)

    def _clear_all(self, bucket: Bucket, kept: SparseVector, training: Arrivals) -> None:
        """Clear the error feedback at all kept elements: with `complete`, whole residuals were sent there."""
        for name, indices, _ in self._parts(bucket, kept):
            if name in training and indices.size:
                inner, feedback = self._tensor(indices), self.feedback[name]
                left = feedback.residual.index_select(0, inner) * feedback.retained if feedback.retained else None
                feedback.clear(inner, left)

    def _parts(self, bucket: Bucket, entries: SparseVector):
        """Yield the entries of each member of a bucket: name, indices in the member, and values."""
        ends = np.cumsum(bucket.layout.sizes)
        cuts = np.concatenate([[0], np.searchsorted(entries.indices, ends)])
        for name, end, size, first, last in zip(
            bucket.members, ends, bucket.layout.sizes, cuts[:-1], cuts[1:], strict=True
        ):
            yield name, entries.indices[first:last] - (end - size), entries.values[first:last]

    def _regions_of(self, bucket: Bucket) -> Regions:
        """Return the regions of a bucket, without bounds."""
        algorithm, layout = self.algorithm, bucket.layout
        segments = segments_of([self.parameters[name].shape for name in bucket.members], algorithm)
        form = MessageFormat(
            sum(layout.sizes), sum(layout.ks), algorithm.coding, algorithm.values, algorithm.level, segments
        )
        return Regions(form, self.now.world_size, self.now.rank)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
