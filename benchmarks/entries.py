"""Random entries for payloads. Each rank of a job draws different ones."""

import numpy as np

ENTRY_BYTES = 6  # a float32 value and a run length


def draw_entries(n: int, k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return k random indices in [0, n), ascending, and values, float32[k]."""
    generator = np.random.default_rng(seed)
    return np.sort(generator.choice(n, k, replace=False)), generator.standard_normal(k, np.float32)
