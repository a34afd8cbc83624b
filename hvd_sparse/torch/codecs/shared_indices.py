"""The codec for shared indices: ranks first agree on indices into the model, then sum their values there.

An all-reduce sums float32 values. Quantized values are all-gathered and summed in rank order, so that every rounding
error is in a residual. The size of this second exchange depends on the gathered indices, so the codec starts it itself.
"""

import abc
import itertools
from collections.abc import Mapping, Sequence

import torch

from hvd_sparse.buckets import BucketLayout
from hvd_sparse.granularity import by_group
from hvd_sparse.partition import SKETCH_BINS, PredictedThreshold, ScaledThreshold, partition, sketch_sample
from hvd_sparse.sampling import stratified_sample
from hvd_sparse.threshold import ThresholdHint
from hvd_sparse.torch import bucket_ops, ops, varying_ops
from hvd_sparse.torch.codecs.base import Arrivals, Bucket, Codec, in_training, sum_buffer
from hvd_sparse.torch.error_feedback import ErrorFeedback, make_error_feedback
from hvd_sparse.wire import LOW_BITS, largest_payload, payload_size


class SharedIndices(Codec):
    """All ranks send their values at the same indices.

    They are those that the ranks have selected, no two the same (CLT-k, MiCRO), or that each rank computes (random-k).
    """

    is_joint = True

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.selection = SELECTIONS[self.algorithm.selection](self)
        self.thresholds = self.selection.thresholds
        self._whole: dict[tuple[str, ...], ErrorFeedback] = {}  # of all members; each member's is a slice
        self._aside: list[tuple[str, str, torch.Tensor]] = []  # name, kind of buffer, saved content

    def drop(self) -> None:
        """Give up the step under way: frozen tensors get their buffers back."""
        self._put_back()

    def end(self) -> None:
        """End a step, also one that all ranks have given up."""
        super().end()
        self._put_back()

    def plan(self, names: Sequence[str], prefix: str) -> list[Bucket]:
        """Return the one bucket of these tensors."""
        if not names:
            return []
        bucket = self._plan_joint(names, prefix)
        bucket.most_bytes = largest_payload(bucket.payloads[0].n, bucket.payloads[0].n, self.algorithm.coding, "none")
        return [bucket]

    def encode(self, bucket: Bucket, arrivals: Arrivals) -> None:
        """Accumulate and select; pack the indices, without values, unless all ranks can compute them."""
        whole = self._whole_of(bucket)
        self._set_frozen_aside([name for name, arrival in arrivals.items() if arrival.frozen])
        if not self.selection.sends_indices:
            self.accumulate(in_training(arrivals))
            return
        indices = self.selection.select_indices(whole.residual, bucket, in_training(arrivals))
        n, k, coding = bucket.payloads[0].n, max(1, len(indices)), self.algorithm.coding
        bucket.message = indices.new_empty(payload_size(n, k, coding, "none"), dtype=torch.uint8)
        ops.pack(indices, indices.new_zeros(len(indices), dtype=torch.float32), n, k, bucket.message, coding, "none")

    def decode(self, bucket: Bucket, gathered: torch.Tensor | None, arrivals: Arrivals, scale: float) -> None:
        """Sum the values of all ranks at the shared indices, and clear them in the residual."""
        whole, payload = self._whole_of(bucket), bucket.payloads[0]
        if gathered is None:
            indices = self.selection.select_indices(whole.residual, bucket, {})
        else:
            indices = self._shared_indices(gathered, payload.n)
        self.traffic.count(sent=len(indices))
        sum_values = self._sum_values if self.algorithm.values == "float32" else self._sum_quantized
        rows = self._rows(self.selection.sketch(bucket.name))
        total, left, sketches = sum_values(bucket, whole.residual, indices, scale, rows)
        self.selection.learn(payload.k, len(indices), sketches)
        bucket.sums = self._spread(bucket, indices, total, arrivals)
        whole.clear(indices, left)

    def _spread(
        self, bucket: Bucket, indices: torch.Tensor, total: torch.Tensor, arrivals: Arrivals
    ) -> dict[str, torch.Tensor]:
        """Return the sums of `arrivals`: `total` at these indices into the bucket, zeros elsewhere."""
        n, k, names = bucket.payloads[0].n, len(indices), [name for name in bucket.members if name in arrivals]
        if k == 0:
            return {name: sum_buffer(arrivals[name].gradient).zero_() for name in names}
        packed = total.new_empty(payload_size(n, k), dtype=torch.uint8)
        ops.pack(indices, total, n, k, packed)
        sums = {name: sum_buffer(arrivals[name].gradient) for name in names}
        layout = BucketLayout(bucket.layout.sizes, [k], [], True)
        bucket_ops.reduce_bucket(packed.view(1, -1), list(sums.values()), layout=layout, members=bucket.numbers(names))
        return sums

    def _rows(self, sketch: torch.Tensor) -> torch.Tensor:
        """Return the sketches to exchange with the values, float32[ranks, 65 or 0]: zeros but for this rank's row."""
        rows = torch.zeros(self.now.world_size, len(sketch), dtype=torch.float32, device="cpu")
        rows[self.now.rank] = sketch
        return rows

    def _sum_values(
        self, bucket: Bucket, residual: torch.Tensor, indices: torch.Tensor, scale: float, rows: torch.Tensor
    ) -> tuple:
        """Return the sums of all ranks' values, None (no rounding errors), and the sum of `rows`."""
        values = residual.index_select(0, indices).mul_(scale)  # before the sum, which might overflow otherwise
        sent = torch.cat([values, rows.view(-1).to(values.device)])
        with self.traffic.timed("exchange"):
            total = self.exchange.allreduce(f"{bucket.name}.values", sent).wait()
        total, sketches = total.split([len(indices), rows.numel()])
        return total, None, sketches.view_as(rows).cpu()

    def _sum_quantized(
        self, bucket: Bucket, residual: torch.Tensor, indices: torch.Tensor, scale: float, rows: torch.Tensor
    ) -> tuple:
        """Do `_sum_values`, with rounding errors, with a payload in which the elements of a group are adjacent."""
        dtype, segments = self.algorithm.values, bucket.payloads[0].segments
        places = order = torch.arange(len(indices), device=indices.device)
        if dtype in LOW_BITS:
            order, segments = map(torch.from_numpy, by_group(indices.numpy(force=True), segments))
        values = residual.index_select(0, indices[order.to(indices.device)])
        sent = ops.quantize(values, dtype, self.algorithm.level, places, segments)
        k = max(1, len(indices))  # without elements, an empty payload
        form = ("dense", dtype, segments)
        packed = sent.new_empty(ops.payload_size(k, k, *form), dtype=torch.uint8)
        ops.pack(places, sent, k, k, packed, *form)
        own = torch.nn.functional.pad(rows[self.now.rank], (0, rows.shape[1] % 2))  # a multiple of 8 bytes
        message = torch.cat([packed, own.view(torch.uint8).to(packed.device)])
        with self.traffic.timed("exchange"):
            gathered = self.exchange.allgather(f"{bucket.name}.values", message).wait().view(self.now.world_size, -1)
        sketches = gathered[:, packed.numel() :].contiguous().view(torch.float32)[:, : rows.shape[1]].cpu()
        total = sent.new_empty(k)
        ops.reduce_payloads(gathered, 0, k, k, total, scale, *form)
        back = order.argsort().to(indices.device)  # from the order of groups to that of the indices
        return total[back], (values - sent)[back], sketches

    def _shared_indices(self, gathered: torch.Tensor, n: int) -> torch.Tensor:
        """Return the indices that all ranks selected, ascending."""
        coding = self.algorithm.coding
        located = varying_ops.locate_payloads(gathered, [n], self.now.world_size, coding, "none")
        parts = []
        for rank, (offset, k) in enumerate(zip(*located.flatten(1).tolist(), strict=True)):
            payload = gathered.narrow(0, offset, payload_size(n, k, coding, "none"))
            try:
                parts.append(ops.unpack(payload, n, k, coding, "none")[0])
            except ValueError as error:
                raise ValueError(f"hvd_sparse: from rank {rank}: {error}") from error
        return torch.cat(parts).sort().values

    def _set_frozen_aside(self, frozen: Sequence[str]) -> None:
        """Save and zero the buffers of frozen tensors until the end of the step, so that they are not selected."""
        for name in frozen:
            for kind, buffer in self.feedback[name].buffers.items():
                self._aside.append((name, kind, buffer.clone()))
                buffer.zero_()

    def _put_back(self) -> None:
        for name, kind, kept in self._aside:
            self.feedback[name].buffer(kind).add_(kept)  # added: the buffer may have the excess of a 16-bit sum
        self._aside.clear()

    def _whole_of(self, bucket: Bucket) -> ErrorFeedback:
        """Return the error feedback of all members as one vector; the members' buffers become slices of it."""
        names = tuple(bucket.members)
        if names not in self._whole:
            size = torch.empty(1, dtype=torch.float32, device=self.device).expand(bucket.payloads[0].n)
            whole = make_error_feedback(self.algorithm, size, self.device)
            for kind in whole.BUFFERS:
                for name, part in zip(names, whole.buffer(kind).split(bucket.layout.sizes), strict=True):
                    self.feedback[name].adopt(kind, part)
            self._whole = {names: whole}
        return self._whole[names]


class Selection(abc.ABC):
    """The rule by which a rank selects indices."""

    sends_indices = True  # whether indices must be sent to the other ranks
    thresholds: Mapping[str, ScaledThreshold | PredictedThreshold] = {}

    def __init__(self, codec: SharedIndices):
        self._codec = codec

    @abc.abstractmethod
    def select_indices(self, residual: torch.Tensor, bucket: Bucket, arrivals: Arrivals) -> torch.Tensor:
        """Return ascending indices into the whole model's residual.

        With `sends_indices`, accumulate the gradients first; otherwise the codec has done so.
        """

    def sketch(self, name: str) -> torch.Tensor:
        """Return this rank's sketch of a bucket, to exchange with the values, float32[65]; or an empty one."""
        return torch.empty(0, dtype=torch.float32, device="cpu")

    def learn(self, k: int, count: int, sketches: torch.Tensor) -> None:  # noqa: B027 - a selection without a threshold has nothing to learn
        """Update the threshold from the number of indices that all ranks selected, and from all ranks' sketches."""


class Leader(Selection):
    """CLT-k: one rank, in turn, selects its k largest elements; the others select none."""

    def __init__(self, codec: SharedIndices):
        super().__init__(codec)
        self._hint = ThresholdHint()

    def select_indices(self, residual: torch.Tensor, bucket: Bucket, arrivals: Arrivals) -> torch.Tensor:
        """Return the indices of the k largest elements, or none."""
        now, k = self._codec.now, bucket.payloads[0].k
        self._codec.accumulate(arrivals)
        if now.number % now.world_size != now.rank:
            return residual.new_empty(0, dtype=torch.int64)
        indices, _, info = ops.select_top_k(residual, k, now.seed, self._hint.value(k))
        threshold, passed = info.tolist()
        self._hint.update(k, threshold, int(passed))
        return indices


class Partition(Selection):
    """MiCRO: each rank selects the elements of its current partition that reach the threshold."""

    def __init__(self, codec: SharedIndices):
        super().__init__(codec)
        self._predicts = codec.algorithm.controller == "histogram"
        self.thresholds = {"model": PredictedThreshold() if self._predicts else ScaledThreshold()}
        self._sketches: dict[str, torch.Tensor] = {}  # by bucket

    def select_indices(self, residual: torch.Tensor, bucket: Bucket, arrivals: Arrivals) -> torch.Tensor:
        """Return the indices selected in the partition, in one pass over the gradients."""
        if not arrivals:  # all are frozen
            self._sketches[bucket.name] = torch.zeros(1 + SKETCH_BINS, dtype=torch.float32, device="cpu")
            return residual.new_empty(0, dtype=torch.int64)
        now, k, sizes = self._codec.now, bucket.payloads[0].k, bucket.layout.sizes
        begin, end = partition(now.number, now.rank, now.world_size, len(residual))
        threshold, share = self.thresholds["model"].plan(k, now.world_size)
        starts = dict(zip(bucket.members, itertools.accumulate(sizes, initial=0), strict=False))
        indices, sketch, _, finite = varying_ops.accumulate_partition(
            [arrival.gradient for arrival in arrivals.values()],
            [self._codec.feedback[name].residual for name in arrivals],
            factors=[arrival.factor for arrival in arrivals.values()],
            begins=[starts[name] for name in arrivals],
            begin=begin,
            end=end,
            threshold=threshold,
            share=share,
            sample=sketch_sample(end - begin, k),
            seed=now.seed,
        )
        self._codec.finite.append(finite)
        self._sketches[bucket.name] = sketch
        return indices

    def sketch(self, name: str) -> torch.Tensor:
        """Return this rank's sketch, for the histogram controller."""
        own = self._sketches.pop(name)
        return own if self._predicts else super().sketch(name)

    def learn(self, k: int, count: int, sketches: torch.Tensor) -> None:
        """Update the threshold: from the sketches, or by scaling it."""
        threshold = self.thresholds["model"]
        if isinstance(threshold, PredictedThreshold):
            threshold.learn(k, self._codec.now.rank, sketches.numpy())
        else:
            threshold.learn(k, count)


class Random(Selection):
    """Random-k: every rank draws the same indices from the seed and the step, so that they need not be sent."""

    sends_indices = False

    def select_indices(self, residual: torch.Tensor, bucket: Bucket, arrivals: Arrivals) -> torch.Tensor:
        """Return the indices that all ranks draw. The codec has accumulated the gradients."""
        drawn = stratified_sample(len(residual), bucket.payloads[0].k, self._codec.now.seed)
        return torch.from_numpy(drawn).to(residual.device)


SELECTIONS: dict[str, type[Selection]] = {"leader": Leader, "partition": Partition, "random": Random}
