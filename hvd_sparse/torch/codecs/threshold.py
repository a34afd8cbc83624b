"""The codec for elements that reach a threshold: payload sizes differ between ranks and steps."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from hvd_sparse.buckets import BucketLayout
from hvd_sparse.threshold import SMALLEST, Plan, make_threshold
from hvd_sparse.torch import bucket_ops, ops, varying_ops
from hvd_sparse.torch.codecs.base import Arrivals, Bucket, BucketCodec, Round, cleared, in_training, sum_buffer
from hvd_sparse.torch.device import is_cuda
from hvd_sparse.torch.error_feedback import decays, destinations
from hvd_sparse.wire import largest_payload


@dataclass
class Filtered:
    """The concatenated payloads of the members that take part."""

    payloads: torch.Tensor  # uint8[bytes]
    thresholds: list[float]
    counts: list[int]
    offsets: list[int]  # in bytes

    def split(self) -> tuple[torch.Tensor, ...]:
        """Return the payload of each member."""
        bounds = itertools.pairwise([*self.offsets, self.payloads.numel()])
        return self.payloads.split([end - begin for begin, end in bounds])


class Threshold(BucketCodec):
    """Selects the elements that reach a threshold in each tensor; buckets are planned as if exactly k were sent."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        names = sorted(self.parameters)
        self.thresholds = {
            name: make_threshold(self.algorithm, position, len(names)) for position, name in enumerate(names)
        }
        self._own: dict[str, Filtered] = {}  # by bucket: this rank's payloads
        self._planned: set[str] = set()  # the tensors that this step has filtered

    def begin(self, now: Round) -> None:
        """Begin a step."""
        super().begin(now)
        self._planned.clear()

    def end(self) -> None:
        """End a step; tensors that it sent dense, or not at all, have not used their thresholds."""
        super().end()
        for name, threshold in self.thresholds.items():
            if name not in self._planned:
                threshold.miss(self.now.number)

    def plan(self, names: Sequence[str], prefix: str) -> list[Bucket]:
        """Return the buckets of these tensors."""
        buckets = super().plan(names, prefix)
        for bucket in buckets:
            bucket.most_bytes = sum(map(self._largest_payload, bucket.members))
        return buckets

    def encode(self, bucket: Bucket, arrivals: Arrivals) -> None:
        """Accumulate, select and pack the members that take part; add empty payloads for the others."""
        training = in_training(arrivals)
        if training:
            self._own[bucket.name] = own = self._filter(training)
            for name, *found in zip(training, own.thresholds, own.counts, strict=True):
                self.thresholds[name].learn(self._payload(name).k, *found)
            self.traffic.count(sent=sum(own.counts))
            bucket.message = own.payloads
        if len(training) < len(bucket.members):
            payloads = dict(zip(training, own.split(), strict=True)) if training else {}
            whole = [payloads[name] if name in payloads else self._nothing(name) for name in bucket.members]
            bucket.message = torch.cat(whole)

    def decode(self, bucket: Bucket, gathered: torch.Tensor | None, arrivals: Arrivals, scale: float) -> None:
        """Clear the sent entries, and sum the payloads of all ranks, whose headers have their sizes."""
        training = in_training(arrivals)
        if training:
            self.clear(bucket, training)
        names = list(bucket.members)
        places = [place for place, name in enumerate(names) if name in arrivals]
        bucket.sums = {names[place]: sum_buffer(arrivals[names[place]].gradient) for place in places}
        self._sum(gathered, names, places, list(bucket.sums.values()), scale)

    def clear(self, bucket: Bucket, training: Arrivals) -> None:
        """Clear the sent entries in the error feedback of the members that took part."""
        own, feedback = self._own.pop(bucket.name), [self.feedback[name] for name in training]
        layout = self._layout_of(training, own)
        bucket_ops.clear_bucket(own.payloads, *cleared(feedback), layout=layout, **self._form())

    def _filter(self, arrivals: Arrivals) -> Filtered:
        if is_cuda(self.device):
            return self._filter_on_device(arrivals)
        gradients = [arrival.gradient for arrival in arrivals.values()]
        feedback, units = [self.feedback[name] for name in arrivals], self.now.units
        plans = [self._plan_of(name) for name in arrivals]
        payloads, info, finite = varying_ops.filter_bucket(
            gradients,
            *destinations(feedback),
            factors=[arrival.factor for arrival in arrivals.values()],
            weight_decay=decays(feedback, units),
            thresholds=[plan.threshold for plan in plans],
            ks=[plan.k for plan in plans],
            level=self.algorithm.level,
            channels=self._channels(arrivals),
            stages=[plan.stages for plan in plans],
            **self.algorithm.fit(self.now.number),
            **self._form(),
            **feedback[0].rule(),
        )
        self.finite.append(finite)
        thresholds, counts, offsets = info.t().tolist()
        return Filtered(payloads, thresholds, list(map(int, counts)), list(map(int, offsets)))

    def _filter_on_device(self, arrivals: Arrivals) -> Filtered:
        """Do `_filter` on a CUDA device, tensor by tensor; waits for it, as the host needs the payload sizes."""
        payloads, thresholds, counts = [], [], []
        self.accumulate(arrivals)
        for name, plan in zip(arrivals, self._plans_on_device(arrivals), strict=True):
            residual, threshold = self.feedback[name].residual, plan.threshold
            if plan.stages > 0:  # the fit cannot be used: exactly the k largest, without zeros
                indices, values, info = ops.select_top_k(residual, plan.k)
                threshold, is_there = max(info[0].item(), SMALLEST), values != 0
                indices, values = indices[is_there], values[is_there]
            else:
                if plan.k > 0:
                    threshold = max(ops.select_threshold(residual, plan.k).item(), SMALLEST)
                indices, values = ops.filter_threshold(residual, threshold)
            payloads.append(self._packed(name, indices, values))
            thresholds.append(threshold)
            counts.append(len(indices))
        sizes = [payload.numel() for payload in payloads]
        offsets = [0, *itertools.accumulate(sizes[:-1])]
        return Filtered(torch.cat(payloads), thresholds, counts, offsets)

    def _plans_on_device(self, names: Iterable[str]) -> list[Plan]:
        """Return the plans of accumulated tensors: fitted thresholds; stages are left where a fit cannot be used."""
        plans, fit = [self._plan_of(name) for name in names], self.algorithm.fit(self.now.number)
        if not fit:
            return plans
        ks, residuals = [plan.k for plan in plans], [self.feedback[name].residual for name in names]
        fits = varying_ops.fit_thresholds(residuals, ks, [plan.stages for plan in plans], **fit)
        return [plan if misfit else Plan(found) for plan, (found, misfit) in zip(plans, fits, strict=True)]

    def _packed(self, name: str, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        algorithm, n = self.algorithm, self.parameters[name].numel()
        payload = self._payload_of((name,), n, max(1, len(indices)))
        if algorithm.values != "float32":
            values = ops.quantize(values, algorithm.values, algorithm.level, indices, payload.segments)
        out = torch.zeros(payload.size, dtype=torch.uint8, device=self.device)
        ops.pack(indices, values, n, payload.k, out, segments=payload.segments, **self._form())
        return out

    def _plan_of(self, name: str) -> Plan:
        payload = self._payload(name)
        self._planned.add(name)
        return self.thresholds[name].plan(self.now.number, payload.k, payload.n)

    def _layout_of(self, names: Iterable[str], own: Filtered) -> BucketLayout:
        sizes = [self.parameters[name].numel() for name in names]
        return BucketLayout(sizes, [max(1, count) for count in own.counts], self._channels(names))

    def _nothing(self, name: str) -> torch.Tensor:
        """Return the empty payload of a tensor that takes no part in this step."""
        payload = self._payload_of((name,), self.parameters[name].numel(), 1)
        out = torch.zeros(payload.size, dtype=torch.uint8, device=self.device)
        self._pack_nothing(payload, out)
        return out

    def _largest_payload(self, name: str) -> int:
        n = self.parameters[name].numel()
        return largest_payload(n, n, self.algorithm.coding, self.algorithm.values, self._payload(name).segments)

    def _sum(self, gathered: torch.Tensor, names: list[str], places: list[int], outs: list[torch.Tensor], scale: float):
        """Sum the payloads of all ranks for the members at these positions."""
        sizes, form = [self.parameters[name].numel() for name in names], self._form()
        channels, ranks = self._channels(names), self.now.world_size
        if not is_cuda(self.device):
            varying_ops.reduce_located_bucket(gathered, sizes, ranks, outs, places, scale, **form, channels=channels)
            return
        found = varying_ops.locate_payloads(gathered, sizes, ranks, **form, channels=channels)
        for place, out in zip(places, outs, strict=True):
            own, segments = found[:, :, place].contiguous(), self._segments_of((names[place],))
            varying_ops.reduce_located(gathered, own, out.numel(), out, scale, **form, segments=segments)
