"""Synthetic data for click-through models: a random teacher model gives the probability of each click.

Dense features are log-normal counts, and categories have Zipf frequencies, as in advertising logs. The teacher's logit
is the sum of a small random network of the dense features, a weight for each category, and products of the categories'
factors. No model can have a lower expected loss than the teacher itself, see `best_loss`.
"""

import numpy as np

DENSE = 13
CATEGORIES = (40, 200, 1000, 3000, 20, 500, 100, 2000)
FACTORS = 6


class Clicks:
    """`rows` samples of a teacher. dense: float32[rows, 13]; categories: int32[rows, 8]; clicked: float32[rows, 1]."""

    def __init__(self, rows, seed=0):
        teacher = np.random.default_rng([0, 1])  # the same of every seed
        hidden = teacher.normal(size=(DENSE, 32)) / np.sqrt(DENSE)
        out = teacher.normal(size=32) / np.sqrt(32)
        weights = [teacher.normal(size=size) for size in CATEGORIES]
        factors = [teacher.normal(size=(size, FACTORS)) / np.sqrt(FACTORS) for size in CATEGORIES]
        random = np.random.default_rng([seed, 2])
        self.dense = random.normal(size=(rows, DENSE)).astype(np.float32)
        columns = [np.minimum(random.zipf(1.3, rows) - 1, size - 1) for size in CATEGORIES]
        self.categories = np.stack(columns, axis=1).astype(np.int32)
        picked = np.stack([factor[column] for factor, column in zip(factors, columns, strict=True)])
        total = picked.sum(axis=0)
        products = 0.5 * ((total**2).sum(axis=1) - (picked**2).sum(axis=(0, 2)))
        logits = 3.0 * np.tanh(self.dense @ hidden) @ out + products
        logits += sum(weight[column] for weight, column in zip(weights, columns, strict=True)) * 0.5
        chance = 1.0 / (1.0 + np.exp(-logits))
        self.clicked = (random.random(rows) < chance).astype(np.float32)[:, None]
        self._chance = chance

    def __len__(self):
        return len(self.clicked)

    def best_loss(self):
        """Return the cross entropy of the teacher itself, in nats per click."""
        chance = np.clip(self._chance, 1e-9, 1 - 1e-9)
        return float(-(chance * np.log(chance) + (1 - chance) * np.log1p(-chance)).mean())


def check_rows(rows, batch_size, parts=1):
    """Raise a ValueError unless each of `parts` parts of the rows fills a batch."""
    if rows // parts < batch_size:
        raise ValueError(f"--batch-size {batch_size} is more than the {rows // parts} rows of a replica: raise --rows")


def batches(clicks, batch_size, seed, part=0, parts=1):
    """Yield the indices of batches endlessly, epoch after epoch; each of `parts` parts gets its share of an epoch.

    Raises:
        ValueError: A part has fewer rows than a batch.
    """
    check_rows(len(clicks), batch_size, parts)
    epoch = 0
    while True:
        order = np.random.default_rng([seed, epoch]).permutation(len(clicks))[part::parts]
        for begin in range(0, len(clicks) // parts - batch_size + 1, batch_size):
            yield order[begin : begin + batch_size]
        epoch += 1
