"""The assignment of tensors to buckets and selections, the same on every rank."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class BucketLayout(NamedTuple):
    """The layout of a bucket's message of concatenated payloads, for the bucket operators.

    sizes: elements of each member. ks: entries of each selection. channels: for low-bit values, the number of groups of
    each member; empty for other values. is_joint: one selection in all members, instead of one in each.
    """

    sizes: Sequence[int]
    ks: Sequence[int]
    channels: Sequence[int] = ()
    is_joint: bool = False


def of_each(weight_decay: float | Sequence[float], members: Sequence) -> list[float]:
    """Return one weight decay for each member of a bucket."""
    return [weight_decay] * len(members) if isinstance(weight_decay, int | float) else list(weight_decay)


def plan_buckets(sizes: Mapping[str, int], bucket_bytes: int, prefix: str) -> dict[str, list[str]]:
    """Divide payloads, {tensor name: bytes}, in name order into buckets of at most `bucket_bytes` or one payload.

    The result, {bucket name: members}, depends only on the arguments. So it is equal on all ranks, in whatever order
    their gradient hooks run.
    """
    buckets: dict[str, list[str]] = {}
    members: list[str] = []
    filled = 0
    for name in sorted(sizes):
        if not members or filled + sizes[name] > bucket_bytes:
            members = buckets.setdefault(f"{prefix}.{len(buckets)}", [])
            filled = 0
        members.append(name)
        filled += sizes[name]
    return buckets
