"""What MiCRO's Algorithm 1 demands of a step, for all ranks at once, in NumPy and float64, for any threshold."""

import numpy as np


class MicroOracle:
    """The error e_i of every rank, and what a step must have done to them. One flat vector of n elements."""

    def __init__(self, n, ranks):
        self.n, self.ranks = n, ranks
        self.errors = np.zeros((ranks, n))
        self.step = 0

    def owners(self):
        """Line 7: the rank that selects at each element, partitions contiguous and cyclic."""
        owner = np.empty(self.n, int)
        for rank in range(self.ranks):
            p = (self.step + rank) % self.ranks
            owner[p * self.n // self.ranks : (p + 1) * self.n // self.ranks] = rank
        return owner

    def check(self, gradients, reduced):
        """Check one step: gradients[ranks, n] went in, the sum `reduced`[n] came out. Return how many were sent.

        Lines 6 and 9 to 16: a_i = e_i + g_i; what its owner has at or above one threshold is sent, with the values of
        all ranks; e_i is a_i without it.
        """
        accumulated = self.errors + gradients
        seen = np.abs(accumulated[self.owners(), np.arange(self.n)])
        sent = reduced != 0
        np.testing.assert_allclose(reduced[sent], accumulated.sum(0)[sent], rtol=1e-5, atol=1e-4)
        assert sent.any() and seen[sent].min() >= seen[~sent].max() * (1 - 1e-6), "one threshold for all partitions"
        self.errors = np.where(sent, 0.0, accumulated)
        self.step += 1
        return int(sent.sum())
