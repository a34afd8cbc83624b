"""All ranks send the same elements of the whole model: first which, then a sum of the values at these.

float32 values are summed by an allreduce. What has fewer bits is gathered and summed in rank order: the sum has then
lost nothing that is not in a residual.
"""

import abc

import torch

from hvd_sparse.centres import by_group
from hvd_sparse.reference import hash_index, stratified_sample
from hvd_sparse.threshold import (
    ScaledThreshold,
    ThresholdHint,
    exact_count,
    histogram_cut,
    partition,
    sampled_histogram,
)
from hvd_sparse.torch import ops
from hvd_sparse.torch.model_scope import Group, ModelScope
from hvd_sparse.wire import LOW_BITS, largest_payload, payload_size, top_k_count


class UnionScope(ModelScope, abc.ABC):
    """Each rank names elements, none of them twice; the values at all that were named are summed."""

    def _choose(self, group: Group, factors: dict[str, float]) -> None:
        self._accumulate(group, factors)
        indices = self._name_elements(group)
        k, coding = max(1, len(indices)), self.algorithm.coding
        group.buffer = torch.empty(payload_size(group.n, k, coding, "none"), dtype=torch.uint8)
        ops.pack(indices, torch.zeros(len(indices)), group.n, k, group.buffer, coding, "none")

    def _most_bytes(self, group: Group) -> int:
        return largest_payload(group.n, group.n, self.algorithm.coding, "none")

    def _accumulate(self, group: Group, factors: dict[str, float]) -> None:
        """Bring the gradients into their memories."""
        for entry in self._present(group):
            factor = factors[entry.name]
            entry.finite = bool(self.memories[entry.name].accumulate(entry.gradient, factor, self.units))

    @abc.abstractmethod
    def _name_elements(self, group: Group) -> torch.Tensor:
        """Return ascending indices into the whole model that this rank names."""

    def _decode(self, group: Group, scale: float) -> None:
        indices = self._union(group)
        self.traffic.count(sent=len(indices))
        sum_values = self._sum_values if self.algorithm.values == "float32" else self._sum_quantized
        indices, total, left = sum_values(group, indices, self.units.outgoing(scale))
        whole = torch.zeros(group.n).index_copy_(0, indices, total)
        sizes = [self.parameters[name].numel() for name in group.sparse]
        group.sums = dict(zip(group.sparse, whole.split(sizes), strict=True))
        group.memory.clear(indices, left)

    def _sum_values(self, group: Group, indices: torch.Tensor, scale: float) -> tuple:
        """Return the indices, the sum of all ranks' values there, and None: nothing is left."""
        values = group.memory.residual.index_select(0, indices).mul_(scale)  # before the sum, which might overflow
        self.traffic.count(payload_bytes=4 * len(indices))
        with self.traffic.timed("exchange"):
            total = self.exchange.allreduce(f"{group.name}.values", values).wait()
        return indices, total, None

    def _sum_quantized(self, group: Group, indices: torch.Tensor, scale: float) -> tuple:
        """Return the indices in another order, the sum of all ranks' values there, and what rounding left of them."""
        dtype, segments = self.algorithm.values, self._segments_of(group.sparse)
        if dtype in LOW_BITS:
            order, segments = map(torch.from_numpy, by_group(indices.numpy(), segments))
            indices = indices[order]
        values, places = group.memory.residual.index_select(0, indices), torch.arange(len(indices))
        sent = ops.quantize(values, dtype, self.algorithm.centre, places, segments)
        k = max(1, len(indices))  # no elements at all: an empty contribution
        form = ("dense", dtype, segments)
        packed = torch.empty(ops.payload_size(k, k, *form), dtype=torch.uint8)
        ops.pack(places, sent, k, k, packed, *form)
        self.traffic.count(payload_bytes=packed.numel())
        with self.traffic.timed("exchange"):
            gathered = self.exchange.allgather(f"{group.name}.values", packed).wait()
        total = torch.empty(k)
        ops.reduce_payloads(gathered.view(self.ranks, -1), 0, k, k, total, scale, *form)
        return indices, total[: len(indices)], values - sent

    def _union(self, group: Group) -> torch.Tensor:
        """Return what all ranks named, ascending."""
        with self.traffic.timed("exchange"):
            gathered = group.gathered.wait()
        n, coding = group.n, self.algorithm.coding
        offsets, counts = ops.locate_payloads(gathered, [n], self.ranks, coding, "none").flatten(1).tolist()
        parts = [
            ops.unpack(gathered.narrow(0, offset, payload_size(n, k, coding, "none")), n, k, coding, "none")[0]
            for offset, k in zip(offsets, counts, strict=True)
        ]
        return torch.cat(parts).sort().values


class LeaderScope(UnionScope):
    """CLT-k: the rank whose turn it is names its k largest, the others none."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._hint = ThresholdHint()

    def _name_elements(self, group: Group) -> torch.Tensor:
        if self.step % self.ranks != self.exchange.rank():
            return torch.empty(0, dtype=torch.int64)
        k = top_k_count(group.n, self.density)
        indices, _, info = ops.select_top_k(group.memory.residual, k, self.seed, self._hint.value(k))
        threshold, passed = info.tolist()
        self._hint.update(k, threshold, int(passed))
        return indices


class PartitionScope(UnionScope):
    """MiCRO: every rank names what reaches the threshold in the partition whose turn it is."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.thresholds = {"model": ScaledThreshold()} if self.algorithm.controller == "scaling" else {}

    def _name_elements(self, group: Group) -> torch.Tensor:
        k, rank, ranks = top_k_count(group.n, self.density), self.exchange.rank(), self.ranks
        begin, end = partition(self.step, rank, ranks, group.n)
        part = group.memory.residual[begin:end]
        scaled = self.thresholds.get("model")
        if scaled is not None:
            return ops.filter_threshold(part, scaled.at(self.step, k))[0] + begin
        return self._above_cut(group, part, k) + begin

    def _above_cut(self, group: Group, part: torch.Tensor, k: int) -> torch.Tensor:
        """Return which of a partition's elements are above the threshold that all ranks read off their histograms."""
        own = sampled_histogram(part.numpy(), k, self.seed)
        self.traffic.count(payload_bytes=own.nbytes)
        with self.traffic.timed("exchange"):
            total = self.exchange.allreduce(f"{group.name}.histogram", torch.from_numpy(own.copy())).wait()
        cut = histogram_cut(total.numpy(), k)
        indices = ops.filter_threshold(part, cut.threshold)[0]
        draw = int(hash_index(self.seed, self.exchange.rank()))
        largest = exact_count(cut, own, part.numpy(), len(indices), draw)
        if largest > 0:
            indices = ops.select_top_k(part, largest, self.seed)[0]
            indices = indices[part[indices] != 0.0]
        return indices

    def _union(self, group: Group) -> torch.Tensor:
        indices = super()._union(group)
        for threshold in self.thresholds.values():
            threshold.learn(top_k_count(group.n, self.density), len(indices))
        return indices


class RandomScope(UnionScope):
    """Random-k: every rank draws the same elements from the seed and the step, so that none has to be named."""

    def _choose(self, group: Group, factors: dict[str, float]) -> None:
        self._accumulate(group, factors)
        group.buffer = None

    def _name_elements(self, group: Group) -> torch.Tensor:
        return torch.from_numpy(stratified_sample(group.n, top_k_count(group.n, self.density), self.seed))

    def _union(self, group: Group) -> torch.Tensor:
        return self._name_elements(group)
