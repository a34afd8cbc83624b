"""DGS and its baselines (Yan et al., 2020, Algorithms 1 to 3) in float64, with M, v_k and magnified momentum.

Each layer is a flat vector. No code of hvd_sparse is used. Line 14 of the paper's Algorithm 2 prints v - G; this code
uses v + G, as in Equations 4 and 6b.
"""

import numpy as np


class DgsOracle:
    """The state of the server and all workers.

    theta_0: {layer: array[n]}. method: "dgs", "dgc_async", "gd_async", "dct_async", "asgd" or "msgd".
    """

    def __init__(
        self,
        method,
        theta,
        workers,
        density=1.0,
        momentum=0.0,
        pull_density=None,
        dense_below=0,
        lifespan=1,
        band=None,
        nesterov=False,
    ):
        self.nesterov = nesterov
        self.method, self.density, self.m, self.pull = method, density, momentum, pull_density
        self.dense_below = dense_below
        self.theta_0 = {j: np.array(layer, np.float64).reshape(-1) for j, layer in theta.items()}
        self.M = self.zeros()
        self.v = [self.zeros() for _ in range(workers)]
        self.u = [self.zeros() for _ in range(workers)]
        self.r = [self.zeros() for _ in range(workers)]
        self.lifespan, self.band = lifespan, band
        self.tau = [{} for _ in range(workers)]  # thresholds that are kept
        self.pushes = [0] * workers
        self.gap = np.inf  # smallest relative gap between selected and unselected magnitudes
        self.sent = []  # number of entries in each push

    def zeros(self):
        return {j: np.zeros(layer.size) for j, layer in self.theta_0.items()}

    def theta(self, k):
        """Equation 5: the parameters at which worker k computes its gradient."""
        return {j: self.theta_0[j] + self.v[k][j] for j in self.theta_0}

    def model(self):
        return {j: self.theta_0[j] + self.M[j] for j in self.theta_0}

    def step(self, k, gradient, lr, weight_decay=0.0):
        """Do the step of worker k from line 5 of Algorithm 3. gradient: {layer: array[n]} at theta(k)."""
        theta, count = self.theta(k), 0
        for j, layer in gradient.items():
            g = lr * (np.asarray(layer, np.float64).reshape(-1) + weight_decay * theta[j])
            sent = getattr(self, self.method)(k, j, g)
            count += np.count_nonzero(sent)
            self.M[j] = self.M[j] - sent
        self.sent.append(count)
        self.pushes[k] += 1
        for j in self.theta_0:
            G = self.M[j] - self.v[k][j]
            if self.pull is not None:
                G = G * self.mask(G, self.pull)
            self.v[k][j] = self.v[k][j] + G

    def mask(self, layer, density):
        if layer.size < self.dense_below or density >= 1.0:
            return np.ones(layer.size, bool)
        keep = max(1, int(np.floor(density * layer.size + 0.5)))
        order = np.argsort(-np.abs(layer), kind="stable")
        if keep < layer.size and layer[order[keep - 1]] != 0:
            edge, below = np.abs(layer[order[keep - 1]]), np.abs(layer[order[keep]])
            self.gap = min(self.gap, (edge - below) / edge)
        mask = np.zeros(layer.size, bool)
        mask[order[:keep]] = True
        return mask

    def dgs(self, k, j, g):
        """Algorithm 3, lines 6 to 11. Dense layers have ordinary momentum."""
        u = self.m * self.u[k][j] + g
        mask = self.mask(u, self.density)
        self.u[k][j] = u + (1.0 / self.m - 1.0) * u * ~mask
        return u * mask

    def gd_async(self, k, j, g):
        """Algorithm 1, lines 6 to 12."""
        r = self.r[k][j] + g
        mask = self.mask(r, self.density)
        self.r[k][j] = r * ~mask
        return r * mask

    def dct_async(self, k, j, g):
        """Dynamic Communication Thresholding, Algorithm 1.

        A life-span grows from 1 to L by powers of two, tensors take turns in it, and a threshold that far too many or
        too few reached is dropped.
        """
        r = self.r[k][j] + g
        if r.size < self.dense_below:
            return r
        sparse = sorted(name for name, layer in self.theta_0.items() if layer.size >= self.dense_below)
        t = self.pushes[k]
        begin, span = 0, 1
        while begin + span <= t:
            begin += span
            span = min(begin, self.lifespan)
        if j not in self.tau[k] or t == begin + sparse.index(j) * span // len(sparse):
            mask = self.mask(r, self.density)
            self.tau[k][j] = np.abs(r[mask]).min()
        else:
            mask = np.abs(r) >= self.tau[k][j]
            self.gap = min(self.gap, np.abs(np.abs(r) / self.tau[k][j] - 1.0).min())
            wanted = max(1, int(np.floor(self.density * r.size + 0.5)))
            if self.band is not None and not wanted <= mask.sum() * self.band <= wanted * self.band**2:
                del self.tau[k][j]
        self.r[k][j] = r * ~mask
        return r * mask

    def dgc_async(self, k, j, g):
        """Deep Gradient Compression, Algorithm 3, lines 11 to 16; Appendix B. Layers sent whole have plain momentum."""
        if self.nesterov:
            self.u[k][j] = self.m * (self.u[k][j] + g)
            v = self.r[k][j] + self.u[k][j] + g
        else:
            self.u[k][j] = self.m * self.u[k][j] + g
            v = self.r[k][j] + self.u[k][j]
        mask = self.mask(v, self.density)
        self.r[k][j] = v * ~mask
        if not mask.all():
            self.u[k][j] = self.u[k][j] * ~mask
        return v * mask

    def asgd(self, k, j, g):
        return g

    def msgd(self, k, j, g):
        """As torch.optim.SGD."""
        self.u[k][j] = self.m * self.u[k][j] + g
        return g + self.m * self.u[k][j] if self.nesterov else self.u[k][j]
