"""Which payloads ride in one allgather: fixed by name order and size, so that every rank cuts them alike."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Bucket:
    """One message: its name, the byte offset of each member's payload in it, its size in bytes."""

    name: str
    offsets: Mapping[str, int]
    size: int


def plan_buckets(sizes: Mapping[str, int], bucket_bytes: int, prefix: str) -> list[Bucket]:
    """Cut payloads, {tensor name: bytes}, in name order into buckets of at most `bucket_bytes`, one payload at least.

    The result depends on nothing but the arguments: equal on all ranks, whatever the order of their hooks.
    """
    buckets: list[Bucket] = []
    offsets: dict[str, int] = {}
    filled = 0
    for name in sorted(sizes):
        if offsets and filled + sizes[name] > bucket_bytes:
            buckets.append(Bucket(f"{prefix}.{len(buckets)}", offsets, filled))
            offsets, filled = {}, 0
        offsets[name] = filled
        filled += sizes[name]
    if offsets:
        buckets.append(Bucket(f"{prefix}.{len(buckets)}", offsets, filled))
    return buckets
