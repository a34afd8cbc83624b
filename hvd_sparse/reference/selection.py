"""Selection of the k largest elements or of those that reach a threshold: the twin of select and threshold."""

import math

import numpy as np

from hvd_sparse.sampling import hash_index, stratified_sample

SCALAR_TYPES = ("float32", "float64", "float16", "bfloat16")
MIN_SAMPLE = 1024
RUN = 16  # elements that are read together: a line of a cache


def flatten(values) -> np.ndarray:
    """Return values as a one-dimensional array; ValueError unless it is of one of the four value types."""
    values = np.asarray(values)
    if values.dtype.name not in SCALAR_TYPES:
        raise ValueError(f"values must be of dtype {', '.join(SCALAR_TYPES)}; got {values.dtype.name}")
    return values.reshape(-1)


def magnitudes(values) -> np.ndarray:
    """Return |values| as float64[n], exact for all four types; NaN stays NaN. ValueError for another dtype."""
    values = flatten(values)
    with np.errstate(invalid="ignore"):  # a signalling NaN is one as well
        if values.dtype.name != "float64":
            values = values.astype(np.float32)
        return np.abs(values.astype(np.float64))


def tail_moments(values, threshold: float, logs: bool = False) -> tuple[float, ...]:
    """Return the number, sum, squares of |values| - threshold from 0 on; the sum of logs above 0, their number."""
    magnitude = magnitudes(values)
    excess = magnitude[magnitude >= threshold] - threshold
    positive = excess[excess > 0.0] if logs else excess[:0]
    numbers = (excess.size, excess.sum(), (excess**2).sum(), np.log(positive).sum(), positive.size)
    return tuple(float(number) for number in numbers)


def magnitude_order(values, seed: int = 0) -> np.ndarray:
    """Return the indices, int64[n], of values from first to last in magnitude order (see the module docstring)."""
    magnitude = magnitudes(values)
    missing = np.isnan(magnitude)
    kind = np.where(missing, 2, np.where(magnitude == 0, 1, 0))
    magnitude[missing] = 0.0
    position = np.arange(magnitude.size, dtype=np.uint64)
    tie = np.where(kind == 0, hash_index(seed, position), position)
    return np.lexsort((tie, -magnitude, kind)).astype(np.int64)


def check_count(k: int, n: int) -> None:
    """Raise ValueError unless 1 <= k <= n."""
    if not 1 <= k <= n:
        raise ValueError(f"k must be between 1 and the number of values, {n}; got {k}")


def select_top_k(values, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, float]:
    """Select exactly k entries, the first k in magnitude order.

    Returns (indices int64[k] ascending, values[indices] in the type of values, threshold). The threshold is the
    magnitude of the k-th entry, 0.0 if that is a zero or NaN. ValueError unless 1 <= k <= n (so for n = 0 always).
    Source: Deep Gradient Compression, algorithm 1; the unbiased cut is ours.
    """
    values = flatten(values)
    check_count(k, values.size)
    order = magnitude_order(values, seed)[:k]
    last = float(magnitudes(values[order[-1:]])[0])
    indices = np.sort(order)
    return indices, values[indices], 0.0 if math.isnan(last) else last


def filter_threshold(values, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Select every entry with |value| >= threshold, compared exactly (both as float64); NaN never passes.

    Returns (indices int64 ascending, values[indices] in the type of values). ValueError if the threshold is negative
    or NaN. Source: Dynamic Communication Thresholding, algorithm 1 (data parallel).
    """
    values = flatten(values)
    if not threshold >= 0.0:
        raise ValueError(f"threshold must be at least 0, got {threshold}")
    indices = np.flatnonzero(magnitudes(values) >= np.float64(threshold)).astype(np.int64)
    return indices, values[indices]


def sample_size(n: int, k: int, sample_fraction: float) -> int:
    """Return the size of the sample for a sampled threshold: about 32 of the k largest, and at least 1024 values."""
    return min(n, max(math.ceil(sample_fraction * n), -(-32 * n // k), MIN_SAMPLE))


def select_threshold(values, k: int, method: str = "exact", sample_fraction: float = 0.005, seed: int = 0) -> float:
    """Return a magnitude that about k values reach ("sampled"), or the k-th largest magnitude itself ("exact").

    NaN counts as 0. Sampled: the r-th largest of a stratified sample of s values, r = k * s / n rounded half up, at
    least 1; where the sample would be half of the values or more, exact. ValueError unless 1 <= k <= n, the method is
    one of the two and sample_fraction is in (0, 1]. Source: Deep Gradient Compression, section 5 (hierarchical
    sampling; the exact second stage is `select_top_k`).
    """
    values = flatten(values)
    n = values.size
    check_count(k, n)
    if method not in ("exact", "sampled"):
        raise ValueError(f'method must be "exact" or "sampled", got {method!r}')
    if not 0.0 < sample_fraction <= 1.0:
        raise ValueError(f"sample_fraction must be in (0, 1], got {sample_fraction}")
    rank = k
    size = sample_size(n, k, sample_fraction)
    if method == "sampled" and 2 * size < n:
        values = values[stratified_sample(n, size, seed)]
        rank = max(1, (2 * k * size + n) // (2 * n))
    magnitude = magnitudes(values)
    magnitude[np.isnan(magnitude)] = 0.0
    return float(np.sort(magnitude)[-rank])


def all_finite(values) -> bool:
    """Return whether every value, converted to float32, is finite: False for float64 1e300. True for no values."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(flatten(values).astype(np.float32)).all())


def sampled_runs(n: int, size: int, seed: int) -> np.ndarray | None:
    """Return which runs of RUN of n elements make a sample of about `size`, one of each stratum; None: take all.

    A run is as quick to read as one of its elements.
    """
    runs = n // RUN
    wanted = max(1, size // RUN)
    return None if n <= size or wanted >= runs else stratified_sample(runs, wanted, seed)
