"""Entries of payloads, drawn: the ranks of a job choose different ones."""

import numpy as np

ENTRY_BYTES = 6  # a float32 and a run length


def draw_entries(n: int, k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return k of n indices, ascending, and values, float32[k]."""
    generator = np.random.default_rng(seed)
    return np.sort(generator.choice(n, k, replace=False)), generator.standard_normal(k, np.float32)
