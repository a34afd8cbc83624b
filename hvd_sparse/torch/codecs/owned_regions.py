"""Exactly k elements of each tensor, or of all together, reduced by the owners of regions: `hvd_sparse.reduce_scatter`.

On a number of ranks for which `exchange` says to gather, this is `FixedCount`.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from hvd_sparse import native_changes
from hvd_sparse.granularity import segments_of
from hvd_sparse.reduce_scatter import Entries, Form, Regions, selected_entries, told
from hvd_sparse.torch.codecs.base import Bucket, Entry, Round, in_training, place_of
from hvd_sparse.torch.codecs.fixed_count import FixedCount


class OwnedRegions(FixedCount):
    """A selection of exactly k, of which each region's owner keeps what is largest in the sum over ranks."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._scatters, self._numels = False, [self.parameters[name].numel() for name in self.parameters]
        self._used: dict[tuple[str, ...], Regions] = {}  # in the step under way

    @property
    def values(self) -> str:
        """The type of the values in `Bucket.message`: exact, as values are coded when they are sent to owners."""
        return "float32" if self._scatters else super().values

    @property
    def bucket_bytes(self) -> int:
        """The bytes of a message, at most: an owner of a region receives no more than its part of it."""
        return super().bucket_bytes * (self.exchange.size() if self._scatters else 1)

    def begin(self, now: Round) -> None:
        """Begin a step."""
        scatters = self.algorithm.scatters(now.world_size, self._numels)
        if scatters != self._scatters:
            self._scatters, self._density = scatters, 0.0
        super().begin(now)
        self._used = {}

    def end(self) -> None:
        """End a step that is complete."""
        super().end()
        self.regions = self._used or self.regions

    def told(self) -> list[float]:
        """Return what tells the ranks whether they know the same regions."""
        return told(self.regions, self.now.step) if self._scatters else []

    def plan(self, names: Sequence[str], prefix: str) -> list[Bucket]:
        """Return the buckets of these tensors, with their regions."""
        buckets = super().plan(names, prefix)
        if self._scatters:
            for bucket in buckets:
                bucket.regions = self._regions_of(bucket)
        return buckets

    def encode(self, bucket: Bucket, entries: Mapping[str, Entry]) -> None:
        """Accumulate and select; keep what was selected for the owners of regions."""
        super().encode(bucket, entries)
        if bucket.regions is not None:
            ns, ks = zip(*((payload.n, payload.k) for payload in bucket.payloads), strict=True)
            bucket.selected = selected_entries(bucket.message.cpu().numpy(), ns, ks, self.algorithm.coding)
            self._used[tuple(bucket.members)] = bucket.regions
            if self.algorithm.complete:
                bucket.residuals_at = partial(self._residuals_at, bucket, in_training(entries))

    def decode(self, bucket: Bucket, gathered: torch.Tensor | None, entries: Mapping[str, Entry], scale: float) -> None:
        """Clear what was both sent and kept by an owner; the sums are those that were kept."""
        if bucket.regions is None:
            super().decode(bucket, gathered, entries, scale)
            return
        if bucket.residuals_at is None:
            kept = bucket.regions.join(gathered.numpy())
            self._clear(bucket, kept, in_training(entries))
        else:
            kept = bucket.kept if gathered is None else Entries(bucket.kept.indices, gathered.numpy())
            self._clear_all(bucket, kept, in_training(entries))
        bucket.sums = {name: place_of(entry.gradient) for name, entry in entries.items()}
        scaled = kept.values * np.float32(scale)
        for name, indices, values in self._parts(bucket, Entries(kept.indices, scaled)):
            if name in bucket.sums:
                out = bucket.sums[name].view(-1).zero_()
                out.index_copy_(0, self._tensor(indices), self._tensor(values))

    def _clear(self, bucket: Bucket, kept: Entries, training: Mapping[str, Entry]) -> None:
        """Clear the error feedback where this rank's own entries were kept; add what the owner's rounding kept back."""
        selected, sent = bucket.selected, bucket.sent.entries
        was_kept = native_changes.find_common(sent.indices, kept.indices)
        indices = left = sent.indices[was_kept]
        retained = max((self.feedback[name].retained for name in training), default=0.0)
        exact = self.algorithm.values == "float32" and not retained
        if not exact:
            survived = sent.values[was_kept]
            left = selected.values[was_kept] - survived + np.float32(retained) * survived
        for name, inner, rest in self._parts(bucket, Entries(indices, left)):
            if name in training and inner.size:
                self.feedback[name].clear(self._tensor(inner), None if exact else self._tensor(rest))
        for name, inner, rest in self._parts(bucket, bucket.excess):
            if inner.size:
                self.feedback[name].residual.index_add_(0, self._tensor(inner), self._tensor(rest))

    def _residuals_at(self, bucket: Bucket, training: Mapping[str, Entry], indices: np.ndarray) -> torch.Tensor:
        """Return this rank's residuals at these elements of a bucket, float32; zero where it does not train."""
        parts = [
            self.feedback[name].residual.index_select(0, self._tensor(inner)).cpu()
            if name in training
            else torch.zeros(inner.size)
            for name, inner, _ in self._parts(bucket, Entries(indices, indices))
        ]
        return torch.cat(parts)

    def _clear_all(self, bucket: Bucket, kept: Entries, training: Mapping[str, Entry]) -> None:
        """Clear the error feedback where all of it was sent: at every element that owners have kept."""
        for name, indices, _ in self._parts(bucket, kept):
            if name in training and indices.size:
                inner, feedback = self._tensor(indices), self.feedback[name]
                left = feedback.residual.index_select(0, inner) * feedback.retained if feedback.retained else None
                feedback.clear(inner, left)

    def _parts(self, bucket: Bucket, entries: Entries):
        """Yield the members of a bucket: name, indices in it, and values."""
        ends = np.cumsum(bucket.layout.sizes)
        cuts = np.concatenate([[0], np.searchsorted(entries.indices, ends)])
        for name, end, size, first, last in zip(
            bucket.members, ends, bucket.layout.sizes, cuts[:-1], cuts[1:], strict=True
        ):
            yield name, entries.indices[first:last] - (end - size), entries.values[first:last]

    def _regions_of(self, bucket: Bucket) -> Regions:
        """Return the regions of a bucket: those that were agreed on before, if it has not changed."""
        algorithm, layout = self.algorithm, bucket.layout
        segments = segments_of([self.parameters[name].shape for name in bucket.members], algorithm)
        n, k = sum(layout.sizes), sum(layout.ks)
        form = Form(n, k, algorithm.coding, algorithm.values, algorithm.level, segments)
        regions = Regions(form, self.now.world_size, self.now.rank)
        before = self.regions.get(tuple(bucket.members))
        if before is not None and before.form.n == n and before.world_size == regions.world_size:
            regions.bounds = before.bounds
        return regions

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
