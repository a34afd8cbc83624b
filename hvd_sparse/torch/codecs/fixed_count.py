"""The codec for exactly k elements of each tensor, or of all tensors jointly: all ranks' payloads have equal size."""

from collections.abc import Sequence

import torch

from hvd_sparse.torch import bucket_ops
from hvd_sparse.torch.codecs.base import Arrivals, Bucket, BucketCodec, cleared, in_training, sum_buffer
from hvd_sparse.torch.error_feedback import decays, destinations


class FixedCount(BucketCodec):
    """Selects exactly k elements in each tensor during backward; or with scope="model", in all tensors after it."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.is_joint = self.algorithm.selection == "model"
        names = [*self.parameters]
        self._hints = dict(zip(names, bucket_ops.new_hints(len(names), self.device), strict=True))  # float64[3] each
        self._joint_hints = bucket_ops.new_hints(1, self.device)

    def plan(self, names: Sequence[str], prefix: str) -> list[Bucket]:
        """Return the buckets of these tensors, with their hints."""
        if not names:
            return []
        if self.is_joint:
            bucket = self._plan_joint(names, prefix)
            bucket.hints = self._joint_hints
            return [bucket]
        buckets = super().plan(names, prefix)
        for bucket in buckets:
            bucket.hints = torch.stack([self._hints[name] for name in bucket.members])
            self._hints.update(zip(bucket.members, bucket.hints, strict=True))
        return buckets

    def encode(self, bucket: Bucket, arrivals: Arrivals) -> None:
        """Accumulate, select and pack in one call into the core; members that take no part send empty payloads."""
        if bucket.message is None:
            bucket.message = torch.zeros(bucket.size, dtype=torch.uint8, device=self.device)
        training = in_training(arrivals)
        if not training or not self.is_joint:
            self._pack_absent(bucket, training)
        if not training:
            return
        feedback, members = [self.feedback[name] for name in training], bucket.numbers(training)
        _, finite = bucket_ops.accumulate_bucket(
            [arrival.gradient for arrival in training.values()],
            *destinations(feedback),
            layout=bucket.layout,
            members=members,
            out=bucket.message,
            factors=[arrival.factor for arrival in training.values()],
            weight_decay=decays(feedback, self.now.units),
            hints=bucket.hints,
            seed=self.now.seed,
            level=self.algorithm.level,
            **self._form(),
            **feedback[0].rule(),
        )
        self.finite.append(finite)
        ks = bucket.layout.ks
        self.traffic.count(sent=sum(ks if self.is_joint else (ks[member] for member in members)))

    def decode(self, bucket: Bucket, gathered: torch.Tensor | None, arrivals: Arrivals, scale: float) -> None:
        """Clear the sent entries, and sum the payloads of all ranks."""
        training = in_training(arrivals)
        if training:
            self.clear(bucket, training)
        bucket.sums = {name: sum_buffer(arrival.gradient) for name, arrival in arrivals.items()}
        ranks, outs = gathered.view(self.now.world_size, -1), list(bucket.sums.values())
        bucket_ops.reduce_bucket(
            ranks, outs, scale, layout=bucket.layout, members=bucket.numbers(arrivals), **self._form()
        )

    def clear(self, bucket: Bucket, training: Arrivals) -> None:
        """Clear the sent entries in the error feedback of the members that took part."""
        feedback = [self.feedback[name] for name in training]
        form = {"layout": bucket.layout, "members": bucket.numbers(training), **self._form()}
        bucket_ops.clear_bucket(bucket.message, *cleared(feedback), retained=feedback[0].retained, **form)

    def _pack_absent(self, bucket: Bucket, training: Arrivals) -> None:
        """Write empty payloads for members that take no part; for a joint selection, one if no member takes part."""
        offset = 0
        for name, payload in zip(bucket.members, bucket.payloads, strict=not self.is_joint):
            if name not in training:
                self._pack_nothing(payload, bucket.message.narrow(0, offset, payload.size))
            offset += payload.size
