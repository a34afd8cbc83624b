"""A rank's selection in its partition of a model: the twin of partition."""

import math
from collections.abc import Sequence

import numpy as np

from hvd_sparse.partition import HISTOGRAM_SHIFT, SKETCH_BINS
from hvd_sparse.reference.accumulation import accumulate
from hvd_sparse.reference.selection import RUN, filter_threshold, sampled_runs, select_top_k
from hvd_sparse.sampling import hash_index
from hvd_sparse.threshold import SMALLEST

SKETCH_BELOW = 48


def accumulate_partition(
    gradients: Sequence[np.ndarray],
    residuals: Sequence[np.ndarray],
    *,
    factors: Sequence[float],
    begins: Sequence[int],
    begin: int,
    end: int,
    threshold: float,
    share: float = -1.0,
    sample: int = 0,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, float, np.ndarray]:
    """Accumulate, and select in elements [begin, end) of the vector that float32 residuals are parts of.

    See `hvd_sparse.torch.varying_ops.accumulate_partition`. Returns indices, sketch, threshold, and bool[members].
    """
    finite, part = [], np.zeros(end - begin, np.float32)
    for gradient, residual, factor, first in zip(gradients, residuals, factors, begins, strict=True):
        finite.append(accumulate(gradient, residual, factor=factor))
        low, high = max(begin, first), min(end, first + residual.size)
        if low < high:
            part[low - begin : high - begin] = residual[low - first : high - first]
    named = filter_threshold(part, threshold if share < 0.0 else max(threshold, SMALLEST))[0]  # zeros: of no share
    sketch = np.zeros(1 + SKETCH_BINS, np.float32)
    if share >= 0.0:
        share = min(share, part.size)
        fits = len(named) > 0 and 0.92 * share - 4.0 <= len(named) <= 1.08 * share + 4.0
        if not fits and part.size > 0:
            draw = int(hash_index(seed, begin)) / 2.0**64
            wanted = min(int(share + draw), part.size)
            named, values, _ = select_top_k(part, max(1, wanted), seed)
            named, values = named[np.abs(values) > 0.0], values[np.abs(values) > 0.0]  # not NaN
            threshold = float(np.abs(values).min()) if len(values) else 0.0
            named = named[: len(named) if wanted > 0 else 0]
        sketch[:] = make_sketch(part, threshold, len(named) if fits else None, sample, seed)
    return named + begin, sketch, threshold, np.array(finite, bool)


def make_sketch(part: np.ndarray, threshold: float, count: int | None, sample: int, seed: int) -> np.ndarray:
    """Return the counts, float32[65], of a sample around a threshold; count: what reaches it, if known."""
    smallest = np.float32(max(threshold, SMALLEST))
    if float(smallest) < threshold:
        smallest = np.nextafter(smallest, np.float32(math.inf))
    bar = int(smallest.view(np.uint32))
    base = max(0, (bar >> HISTOGRAM_SHIFT) - SKETCH_BELOW)
    runs = sampled_runs(part.size, sample, seed) if part.size else None
    taken = part if runs is None else part[: part.size // RUN * RUN].reshape(-1, RUN)[runs].reshape(-1)
    scale = 1.0 if runs is None else part.size / taken.size
    bits = taken.view(np.uint32) & 0x7FFFFFFF
    bits = bits[(bits >= max(1, base << HISTOGRAM_SHIFT)) & (bits <= 0x7F800000)].astype(np.int64)
    bins = np.minimum((bits >> HISTOGRAM_SHIFT) - base, SKETCH_BINS - 1)
    above = np.bincount(bins[bits >= bar], minlength=SKETCH_BINS)
    below = np.bincount(bins[bits < bar], minlength=SKETCH_BINS)
    exact = scale if count is None else count / max(1, above.sum())
    return np.concatenate([[base], (above * exact + below * scale).astype(np.float32)]).astype(np.float32)
