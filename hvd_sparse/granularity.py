"""Groups of elements that share the levels of low-bit values: a tensor, or a channel of it."""

from collections.abc import Sequence

import numpy as np

from hvd_sparse.algorithms import Algorithm
from hvd_sparse.wire import LOW_BITS, Segments


def channels_of(shape: Sequence[int], algorithm: Algorithm) -> int:
    """Return how many groups a tensor of this shape has: one, or as many as its last dimension where it has two."""
    return int(shape[-1]) if algorithm.granularity == "channel" and len(shape) > 1 else 1


def segments_of(shapes: Sequence[Sequence[int]], algorithm: Algorithm) -> np.ndarray | None:
    """Return the segments, int64[tensors, 2], of tensors that lie one after the other; None for a single group."""
    channels = [channels_of(shape, algorithm) for shape in shapes]
    if algorithm.values not in LOW_BITS or channels == [1]:
        return None
    sizes = np.array([np.prod(shape, dtype=np.int64) for shape in shapes])
    return np.stack([np.cumsum(sizes) - sizes, channels], axis=1).astype(np.int64)


def group_of(indices, segments: Segments) -> np.ndarray:
    """Return the group, int64[k], of elements at ascending indices: all 0 without segments, else a channel's number."""
    indices = np.asarray(indices, np.int64).reshape(-1)
    if segments is None or len(segments) == 0:
        return np.zeros(indices.size, np.int64)
    begins, channels = np.asarray(segments, np.int64).reshape(-1, 2).T
    at = np.searchsorted(begins, indices, side="right") - 1
    return (np.cumsum(channels) - channels)[at] + (indices - begins[at]) % channels[at]


def by_group(indices: np.ndarray, segments: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the order that puts ascending indices of one group together, int64[k], and the segments of that order."""
    groups = group_of(indices, segments)
    order = np.argsort(groups, kind="stable")
    begins = np.unique(groups[order], return_index=True)[1]
    return order, np.stack([begins, np.ones_like(begins)], axis=1).astype(np.int64)
