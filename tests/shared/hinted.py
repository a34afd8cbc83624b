"""Threshold hints with chosen values, in the form that `bucket_ops.accumulate_bucket` expects."""

from collections.abc import Sequence

import torch


def as_hints(guesses: Sequence[float], ks: Sequence[int]) -> torch.Tensor:
    """Return float64[selections, 3]. The hint of each selection is exactly its guess, because the margin is 1."""
    return torch.tensor([[guess, 1.0, k] for guess, k in zip(guesses, ks, strict=True)], dtype=torch.float64)
