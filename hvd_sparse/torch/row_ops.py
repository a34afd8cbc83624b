"""Typed calls into the native operators on rows of a matrix, on CPU and CUDA tensors.

Every function has a twin of the same name and arguments in `hvd_sparse.reference`, which specifies it. Bad arguments
raise ValueError. Values are a matrix [B, f] of float32, float64, float16 or bfloat16; results lie where the values do.
A mask has no gradient.
"""

import torch

from hvd_sparse.sampling import signed
from hvd_sparse.torch.ops import _ops


def select_top_k_rows(values: torch.Tensor, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask the k entries of largest magnitude of each row, exactly k in every row.

    NaN come first, by lower column; equal magnitudes are cut by a seeded hash of the column; zeros come last, by lower
    column. (Dynamic Communication Thresholding, Algorithm 2; the cut of ties is ours.)

    Args:
        values: A matrix [B, f] of float32, float64, float16 or bfloat16.
        k: Number of entries of each row, in [1, f].
        seed: Of the hash that breaks ties.

    Returns:
        The mask, bool[B, f]; and thresholds, float64[B]: the magnitude of the k-th entry, NaN if that is NaN.

    Raises:
        ValueError: k is out of range, or values are no such matrix.
    """
    return _ops.select_top_k_rows(values.detach(), k, signed(seed))


def laplace_threshold_rows(values: torch.Tensor, density: float) -> torch.Tensor:
    """Return for each row the magnitude that a part `density` of a Laplace distribution reaches.

    That is the row's mean magnitude, in which NaN and infinities count as zero, times -ln(density). (Dynamic
    Communication Thresholding, section 2.2.)

    Args:
        values: A matrix [B, f] of float32, float64, float16 or bfloat16.
        density: In (0, 1].

    Returns:
        float64[B].

    Raises:
        ValueError: The density is out of range, or values are no such matrix.
    """
    return _ops.laplace_threshold_rows(values.detach(), density)


def filter_threshold_rows(values: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """Mask NaN and nonzero elements that reach their row's threshold (as float64).

    Args:
        values: A matrix [B, f] of float32, float64, float16 or bfloat16.
        thresholds: float64[B], or [1] for all rows; at least 0. On a CUDA device, a wrong threshold raises no error: a
            negative one counts as 0, and NaN as infinity.

    Returns:
        The mask, bool[B, f].

    Raises:
        ValueError: A threshold is negative or NaN, their number differs, or values are no such matrix.
    """
    return _ops.filter_threshold_rows(values.detach(), thresholds.detach())
