"""All ranks send the same elements of the whole model: first which, then a sum of the values at these.

float32 values are summed by an all-reduce. Quantized values are gathered and summed in rank order: what the sum loses
then is in a residual. These sums depend on what was gathered, so this codec asks the exchange for them itself.
"""

import abc
from collections.abc import Mapping, Sequence

import torch

from hvd_sparse.granularity import by_group
from hvd_sparse.sampling import hash_index, stratified_sample
from hvd_sparse.threshold import (
    ScaledThreshold,
    ThresholdHint,
    exact_count,
    histogram_cut,
    partition,
    sampled_histogram,
)
from hvd_sparse.torch import ops
from hvd_sparse.torch.codecs.base import Bucket, Codec, Entry, Round, in_training
from hvd_sparse.torch.codecs.fixed_count import plan_joint
from hvd_sparse.torch.error_feedback import ErrorFeedback, make_error_feedback
from hvd_sparse.wire import LOW_BITS, largest_payload, payload_size


class SharedIndices(Codec):
    """Each rank names elements, none of them twice; the values at all that were named are summed."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.selection = SELECTIONS[self.algorithm.layout](self)
        self._whole: dict[tuple[str, ...], ErrorFeedback] = {}  # of all members; theirs are slices of it
        self._held: list[tuple[str, str, torch.Tensor]] = []  # name, kind of buffer, and what it had

    @property
    def is_joint(self) -> bool:
        """The selection is one in all tensors."""
        return True

    @property
    def thresholds(self) -> Mapping:
        """Those of the selection."""
        return self.selection.thresholds

    def begin(self, now: Round) -> None:
        """Begin a step."""
        super().begin(now)
        self._put_back()

    def end(self) -> None:
        """End a step that is complete."""
        super().end()
        self._put_back()

    def plan(self, names: Sequence[str], prefix: str) -> list[Bucket]:
        """Return the one bucket of these tensors."""
        if not names:
            return []
        bucket = plan_joint(self, names, prefix)
        bucket.most_bytes = largest_payload(bucket.payloads[0].n, bucket.payloads[0].n, self.algorithm.coding, "none")
        return [bucket]

    def encode(self, bucket: Bucket, entries: Mapping[str, Entry]) -> None:
        """Accumulate; name elements, in a message without values, where the others cannot know them."""
        whole = self._whole_of(bucket)
        self._hold([name for name, entry in entries.items() if entry.frozen])
        self._accumulate(in_training(entries))
        if not self.selection.is_named:
            return
        indices, n = self.selection.indices(whole.residual, bucket.payloads[0].k, bucket.name), bucket.payloads[0].n
        k, coding = max(1, len(indices)), self.algorithm.coding
        bucket.message = torch.empty(payload_size(n, k, coding, "none"), dtype=torch.uint8)
        ops.pack(indices, torch.zeros(len(indices)), n, k, bucket.message, coding, "none")

    def decode(self, bucket: Bucket, gathered: torch.Tensor | None, entries: Mapping[str, Entry], scale: float) -> None:
        """Sum the values of all ranks at what was named, and clear these."""
        whole, payload = self._whole_of(bucket), bucket.payloads[0]
        if gathered is None:
            indices = self.selection.indices(whole.residual, payload.k, bucket.name)
        else:
            indices = self._union(gathered, payload.n)
        self.selection.learn(payload.k, len(indices))
        self.traffic.count(sent=len(indices))
        sum_values = self._sum_values if self.algorithm.values == "float32" else self._sum_quantized
        indices, total, left = sum_values(bucket, whole.residual, indices, scale)
        summed = torch.zeros(payload.n).index_copy_(0, indices, total)
        bucket.sums = dict(zip(bucket.members, summed.split(bucket.layout.sizes), strict=True))
        whole.clear(indices, left)

    def _sum_values(self, bucket: Bucket, residual: torch.Tensor, indices: torch.Tensor, scale: float) -> tuple:
        """Return the indices, the sum of all ranks' values there, and None: nothing is left."""
        values = residual.index_select(0, indices).mul_(scale)  # before the sum, which might overflow
        self.traffic.count(payload_bytes=4 * len(indices))
        with self.traffic.timed("exchange"):
            total = self.exchange.allreduce(f"{bucket.name}.values", values).wait()
        return indices, total, None

    def _sum_quantized(self, bucket: Bucket, residual: torch.Tensor, indices: torch.Tensor, scale: float) -> tuple:
        """Return the indices in another order, the sum of all ranks' values there, and what rounding left of them."""
        dtype, segments = self.algorithm.values, bucket.payloads[0].segments
        if dtype in LOW_BITS:
            order, segments = map(torch.from_numpy, by_group(indices.numpy(), segments))
            indices = indices[order]
        values, places = residual.index_select(0, indices), torch.arange(len(indices))
        sent = ops.quantize(values, dtype, self.algorithm.level, places, segments)
        k = max(1, len(indices))  # no elements at all: an empty contribution
        form = ("dense", dtype, segments)
        packed = torch.empty(ops.payload_size(k, k, *form), dtype=torch.uint8)
        ops.pack(places, sent, k, k, packed, *form)
        self.traffic.count(payload_bytes=packed.numel())
        with self.traffic.timed("exchange"):
            gathered = self.exchange.allgather(f"{bucket.name}.values", packed).wait()
        total = torch.empty(k)
        ops.reduce_payloads(gathered.view(self.now.world_size, -1), 0, k, k, total, scale, *form)
        return indices, total[: len(indices)], values - sent

    def _union(self, gathered: torch.Tensor, n: int) -> torch.Tensor:
        """Return what all ranks named, ascending."""
        coding = self.algorithm.coding
        located = ops.locate_payloads(gathered, [n], self.now.world_size, coding, "none")
        parts = [
            ops.unpack(gathered.narrow(0, offset, payload_size(n, k, coding, "none")), n, k, coding, "none")[0]
            for offset, k in zip(*located.flatten(1).tolist(), strict=True)
        ]
        return torch.cat(parts).sort().values

    def _hold(self, frozen: Sequence[str]) -> None:
        """Take the residuals of frozen tensors out of the selection until the step is over."""
        for name in frozen:
            for kind, buffer in self.feedback[name].buffers.items():
                self._held.append((name, kind, buffer.clone()))
                buffer.zero_()

    def _put_back(self) -> None:
        for name, kind, kept in self._held:
            self.feedback[name].buffer(kind).add_(kept)  # to what a gradient of 16 bits could not hold of a sum
        self._held.clear()

    def _whole_of(self, bucket: Bucket) -> ErrorFeedback:
        """Return the error feedback of all members as one; theirs move into it."""
        names = tuple(bucket.members)
        if names not in self._whole:
            whole = make_error_feedback(self.algorithm, torch.empty(1).expand(bucket.payloads[0].n), self.device)
            for kind in whole.BUFFERS:
                for name, part in zip(names, whole.buffer(kind).split(bucket.layout.sizes), strict=True):
                    self.feedback[name].adopt(kind, part)
            self._whole = {names: whole}
        return self._whole[names]


class Selection(abc.ABC):
    """Which elements a rank names."""

    is_named = True  # whether the others have to be told
    thresholds: Mapping[str, ScaledThreshold] = {}

    def __init__(self, codec: SharedIndices):
        self._codec = codec

    @abc.abstractmethod
    def indices(self, residual: torch.Tensor, k: int, name: str) -> torch.Tensor:
        """Return ascending indices into the residual of the whole model. name: of the bucket."""

    def learn(self, k: int, count: int) -> None:  # noqa: B027
        """Learn from how many elements all ranks named."""


class Leader(Selection):
    """CLT-k: the rank whose turn it is names its k largest, the others none."""

    def __init__(self, codec: SharedIndices):
        super().__init__(codec)
        self._hint = ThresholdHint()

    def indices(self, residual: torch.Tensor, k: int, name: str) -> torch.Tensor:
        """Return the k largest, or none."""
        now = self._codec.now
        if now.step % now.world_size != now.rank:
            return torch.empty(0, dtype=torch.int64)
        indices, _, info = ops.select_top_k(residual, k, now.seed, self._hint.value(k))
        threshold, passed = info.tolist()
        self._hint.update(k, threshold, int(passed))
        return indices


class Partition(Selection):
    """MiCRO: every rank names what reaches the threshold in the partition whose turn it is."""

    def __init__(self, codec: SharedIndices):
        super().__init__(codec)
        self.thresholds = {"model": ScaledThreshold()} if codec.algorithm.controller == "scaling" else {}

    def indices(self, residual: torch.Tensor, k: int, name: str) -> torch.Tensor:
        """Return those of the partition."""
        now = self._codec.now
        begin, end = partition(now.step, now.rank, now.world_size, len(residual))
        part = residual[begin:end]
        scaled = self.thresholds.get("model")
        if scaled is not None:
            return ops.filter_threshold(part, scaled.at(now.step, k))[0] + begin
        return self._above_cut(part, k, name) + begin

    def learn(self, k: int, count: int) -> None:
        """Scale the threshold, if it is scaled."""
        for threshold in self.thresholds.values():
            threshold.learn(k, count)

    def _above_cut(self, part: torch.Tensor, k: int, name: str) -> torch.Tensor:
        """Return which of a partition's elements are above the threshold that all ranks read off their histograms."""
        codec, now = self._codec, self._codec.now
        own = sampled_histogram(part.numpy(), k, now.seed)
        codec.traffic.count(payload_bytes=own.nbytes)
        with codec.traffic.timed("exchange"):
            total = codec.exchange.allreduce(f"{name}.histogram", torch.from_numpy(own.copy())).wait()
        cut = histogram_cut(total.numpy(), k)
        indices = ops.filter_threshold(part, cut.threshold)[0]
        draw = int(hash_index(now.seed, now.rank))
        largest = exact_count(cut, own, part.numpy(), len(indices), draw)
        if largest > 0:
            indices = ops.select_top_k(part, largest, now.seed)[0]
            indices = indices[part[indices] != 0.0]
        return indices


class Random(Selection):
    """Random-k: every rank draws the same elements from the seed and the step, so that none has to be named."""

    is_named = False

    def indices(self, residual: torch.Tensor, k: int, name: str) -> torch.Tensor:
        """Return those that all ranks draw."""
        return torch.from_numpy(stratified_sample(len(residual), k, self._codec.now.seed))


SELECTIONS: dict[str, type[Selection]] = {"leader": Leader, "partition": Partition, "random": Random}
