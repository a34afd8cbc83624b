"""Hints of selections, as `ops.accumulate_bucket` takes them, that say what a test wants."""

from collections.abc import Sequence

import torch


def as_hints(guesses: Sequence[float], ks: Sequence[int]) -> torch.Tensor:
    """Return float64[selections, 3]: the hint of each is its guess, since nothing is taken off for a margin."""
    return torch.tensor([[guess, 1.0, k] for guess, k in zip(guesses, ks, strict=True)], dtype=torch.float64)
