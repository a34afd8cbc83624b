"""The assignment of tensors to messages and selections, the same on every rank."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class BucketLayout(NamedTuple):
    """What the operators of buckets are told about a message, whose payloads lie one after the other.

    sizes: elements of each member. ks: entries of each selection. channels: how many groups of low-bit values each
    member has; empty for other values. is_joint: one selection in all members, in place of one in each.
    """

    sizes: Sequence[int]
    ks: Sequence[int]
    channels: Sequence[int] = ()
    is_joint: bool = False


def plan_buckets(sizes: Mapping[str, int], bucket_bytes: int, prefix: str) -> dict[str, list[str]]:
    """Cut payloads, {tensor name: bytes}, in name order into buckets of at most `bucket_bytes`, one payload at least.

    The result, {bucket name: members}, depends on nothing but the arguments: equal on all ranks, whatever the order of
    their hooks.
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
