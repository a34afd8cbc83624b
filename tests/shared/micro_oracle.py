"""MiCRO's Algorithm 1 and the computation of its threshold, for all ranks at once, in NumPy."""

import math

import numpy as np

from hvd_sparse.sampling import hash_index


class MicroOracle:
    """The error e_i of every rank, and the checks of a step. n: number of elements, at most 65,536 per rank."""

    def __init__(self, n, ranks, k):
        self.n, self.ranks, self.k = n, ranks, k
        self.errors = np.zeros((ranks, n), np.float32)
        self.step, self.growth, self.reached = 0, 0.0, None
        self.shares = [k / ranks] * ranks  # one for each partition

    def span(self, rank):
        """Line 7: the partition of a rank. Partitions are contiguous, and ranks take them in turns."""
        p = (self.step + rank) % self.ranks
        return p, p * self.n // self.ranks, (p + 1) * self.n // self.ranks

    def owners(self):
        """Return for each element the rank whose partition contains it."""
        owner = np.empty(self.n, int)
        for rank in range(self.ranks):
            _, begin, end = self.span(rank)
            owner[begin:end] = rank
        return owner

    def check(self, gradients, reduced):
        """Check one step. Return the number of elements sent.

        gradients[ranks, n] are the inputs, and `reduced`[n] is the resulting sum. Lines 6 and 10 to 16: a_i = e_i +
        g_i; the selected elements are sent with the values of all ranks; e_i is a_i without them.
        """
        accumulated = self.errors + gradients.astype(np.float32)
        sent = reduced != 0
        wide = accumulated.astype(np.float64)
        rounding = self.ranks * 2.0**-24 * np.abs(wide).sum(0)  # of sums in float32, whatever cancels in them
        assert (np.abs(reduced - wide.sum(0))[sent] <= rounding[sent]).all(), f"step {self.step}"
        self.errors = np.where(sent, np.float32(0.0), accumulated)
        self.step += 1
        return int(sent.sum())

    def expect(self, gradients):
        """Return the selected elements, bool[n], by the threshold of the last step's histograms; update the threshold.

        Line 9. A rank selects its share of k instead if it finds less than 0.92 times this share - 4, more than 1.08
        times it + 4, or no elements.
        """
        accumulated = self.errors + gradients.astype(np.float32)
        threshold = math.inf if self.reached is None else self.reached * math.exp(self.growth)
        named, histograms = np.zeros(self.n, bool), {}
        for rank in range(self.ranks):
            p, begin, end = self.span(rank)
            magnitude, share = np.abs(accumulated[rank, begin:end]), self.shares[p]
            taken, bar = magnitude >= threshold, threshold
            if not taken.any() or not 0.92 * share - 4 <= taken.sum() <= 1.08 * share + 4:
                wanted = int(share + int(hash_index(self.step, begin)) / 2.0**64)
                order = np.argsort(-magnitude, kind="stable")
                taken[:] = False
                taken[order[:wanted]] = True
                bar = magnitude[order[: max(1, wanted)]].min()
            named[begin:end] = taken & (magnitude > 0)
            histograms[p] = self.histogram(magnitude, bar)
        self.learn(histograms)
        return named

    def histogram(self, magnitude, bar):
        """Return {bin: count}: 48 bins below the bar's bin, and 16 from this bin on. The last one includes all above.

        A bin is 1/16 of the way from a power of two to the next.
        """
        bins, own = bin_of(magnitude[magnitude > 0].astype(np.float64)), int(bin_of(float(np.float32(bar))))
        bins = np.minimum(bins[bins >= own - 48], own + 15)
        places, counts = np.unique(bins, return_counts=True)
        return dict(zip(places.tolist(), counts.tolist(), strict=True))

    def learn(self, histograms):
        """Find the threshold that k elements of all ranks reached, and the number of these in each partition."""
        total = {}
        for histogram in histograms.values():
            for place, count in histogram.items():
                total[place] = total.get(place, 0) + count
        above, place = 0, max(total) + 1
        while above < self.k:
            place -= 1
            last, above = above, above + total.get(place, 0)
        low, high = bound(place), bound(place + 1)
        inside = math.log(self.k / last) / math.log(above / last) if last else self.k / above
        reached = high * (low / high) ** inside
        part = (self.k - last) / (above - last)
        self.shares = []
        for p in range(self.ranks):
            counts = histograms[p]
            self.shares.append(sum(c for at, c in counts.items() if at > place) + part * counts.get(place, 0))
        if self.reached is not None:
            step = min(max(math.log(reached / self.reached), -0.22), 0.22)
            self.growth = 0.5 * (self.growth + step)
        self.reached = reached


def bin_of(value):
    """Return the bin of each value."""
    fraction, exponent = np.frexp(value)
    return 16 * exponent + ((2 * fraction - 1) * 16).astype(int)


def bound(place):
    """Return the start of a bin."""
    exponent, part = divmod(place, 16)
    return math.ldexp((1 + part / 16) / 2, exponent)
