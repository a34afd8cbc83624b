"""Groups of elements that share quantization levels. A group is a tensor or a channel of a tensor."""

from collections.abc import Sequence

import numpy as np

from hvd_sparse.algorithms import Algorithm
from hvd_sparse.wire import LOW_BITS, Segments


def channels_of(shape: Sequence[int], algorithm: Algorithm) -> int:
    """Return the number of groups in a tensor: 1, or with granularity "channel" the size of its last dimension.

    A tensor with fewer than two dimensions is always one group.
    """
    return int(shape[-1]) if algorithm.granularity == "channel" and len(shape) > 1 else 1


def segments_of(shapes: Sequence[Sequence[int]], algorithm: Algorithm) -> np.ndarray | None:
    """Return (begin, channels) of each of several concatenated tensors, int64[tensors, 2]; None for a single group."""
    channels = [channels_of(shape, algorithm) for shape in shapes]
    if algorithm.values not in LOW_BITS or channels == [1]:
        return None
    sizes = np.array([np.prod(shape, dtype=np.int64) for shape in shapes])
    return np.stack([np.cumsum(sizes) - sizes, channels], axis=1).astype(np.int64)


def group_of(indices, segments: Segments) -> np.ndarray:
    """Return the group number of each element, int64[k]. indices: int64[k], ascending. Without segments, all are 0."""
    indices = np.asarray(indices, np.int64).reshape(-1)
    if segments is None or len(segments) == 0:
        return np.zeros(indices.size, np.int64)
    begins, channels = np.asarray(segments, np.int64).reshape(-1, 2).T
    at = np.searchsorted(begins, indices, side="right") - 1
    return (np.cumsum(channels) - channels)[at] + (indices - begins[at]) % channels[at]


def by_group(indices: np.ndarray, segments: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Sort ascending indices by group.

    Returns:
        The order, int64[k], such that `indices[order]` lists one group after the other, and its segments.
    """
    groups = group_of(indices, segments)
    order = np.argsort(groups, kind="stable")
    begins = np.unique(groups[order], return_index=True)[1]
    return order, np.stack([begins, np.ones_like(begins)], axis=1).astype(np.int64)
