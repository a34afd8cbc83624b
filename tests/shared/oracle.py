"""DGC, Gradient Dropping, DCT, CLT-k, SIDCo and a hard threshold for all ranks at once, in float64.

Transcribed from the papers (DGC: Algorithms 3 and 4, with exact top-k), without code of hvd_sparse. A run also reports
the smallest gap between the last selected and the first unselected magnitude. Tests search for data without near-ties,
so that float32 and float64 must select the same elements.
"""

import functools
from dataclasses import dataclass

import numpy as np
import tiers
from sidco_oracle import Sidco

STEPS = 100 if tiers.ALL else 50  # of a training that is compared
CLEAR_GAP = 2e-6  # relative; rounding errors of float32 stay below it for a few steps


@dataclass(frozen=True)
class Method:
    """The settings. Gradient Dropping is the method without momentum, clipping and weight decay."""

    density: object = 0.05  # a number, or a function of the step
    scope: str = "tensor"
    min_numel: int = 100
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: object = 0.0  # a number, or {name: number}
    clip_norm: float | None = None
    clip_scope: str = "tensor"
    factor_masking: bool = True
    samomentum: bool = False  # DGS, Algorithm 3: only u, magnified where it was not sent
    lifespan: int | None = None  # DCT: steps that a threshold is used
    band: float | None = 4.0  # DCT: a count off by more than this factor renews the threshold in the next step
    value: float | None = None  # the threshold of hard_threshold
    stages: int | None = None  # SIDCo: initial number of stages
    distribution: str = "exponential"
    cyclic: bool = False  # CLT-k: the ranks take turns in selecting for all
    values: str = "float32"  # or "int2", "int1": Gradient Dropping, section 5.4
    level: str = "mean"
    granularity: str = "tensor"
    owned: bool = False  # reduce-scatter: the owners of regions keep the largest sums
    complete: bool = False  # then all ranks send their whole v at the kept elements

    def density_at(self, step):
        return self.density(step) if callable(self.density) else self.density


@dataclass
class Outcome:
    """Parameters, each rank's u and v, and the smallest relative gap at the edge of a selection."""

    parameters: dict
    u: list
    v: list
    gap: float


def train(method, initial, gradients, ranks, steps, lr, average=True, delivered=None):
    """Train on all ranks.

    gradients(step, rank): {name: array}; they do not depend on the parameters. The optimizer receives scale * the sum
    over ranks; scale is 1 / ranks or 1. Clipping and weight decay apply to this gradient. delivered(array): the part of
    a sum that a 16-bit gradient can represent. The rest returns to the ranks' residuals: powers of two, except for the
    first rank.
    """
    scale = 1 / ranks if average else 1
    theta = {name: np.array(value, np.float64) for name, value in initial.items()}
    u = [{name: np.zeros(value.shape) for name, value in theta.items()} for _ in range(ranks)]
    v = [{name: np.zeros(value.shape) for name, value in theta.items()} for _ in range(ranks)]
    kept = [{} for _ in range(ranks)]
    owners = Owners(method, ranks)
    gap = np.inf
    for step in range(steps):
        reduced = {name: np.zeros(value.shape) for name, value in theta.items()}
        for k in range(ranks):
            local = clip(method, ranks, scale, gradients(step, k))
            for name in theta:
                local[name] = local[name] + decay_of(method, name) / (scale * ranks) * theta[name]
            accumulate(method, u[k], v[k], local)
        choices = [choose(method, step, v[k], kept[k]) for k in range(ranks)]
        if method.owned and ranks > 1:
            choices = owners.keep(step, v, choices)
        for k in range(ranks):
            masks, here = choices[step % ranks if method.cyclic else k]
            gap = min(gap, here)
            for name, mask in masks.items():
                sent = v[k][name] * mask
                if method.values != "float32" and not is_dense(method, step, sent):
                    sent, here = quantized(method, v[k][name], mask)
                    gap = min(gap, here)
                reduced[name] += sent
                v[k][name] = v[k][name] - sent
                if method.samomentum:  # v holds u: unchanged where it was sent, magnified elsewhere
                    v[k][name] = v[k][name] / method.momentum + sent
                if method.factor_masking and not is_dense(method, step, v[k][name]):
                    u[k][name] = u[k][name] * ~mask
        for name in theta:
            if delivered is not None and not is_dense(method, step, theta[name]):
                rest = reduced[name] - delivered(scale * reduced[name]) / scale
                reduced[name] = reduced[name] - rest
                part = 2.0 ** -int(np.ceil(np.log2(ranks)))
                for k in range(ranks):
                    v[k][name] = v[k][name] + rest * (part if k else 1 - (ranks - 1) * part)
            theta[name] = theta[name] - lr * scale * reduced[name]
    return Outcome(theta, u, v, gap)


def decay_of(method, name):
    return method.weight_decay[name] if isinstance(method.weight_decay, dict) else method.weight_decay


def clip(method, ranks, scale, local):
    """Local gradient clipping by the L2 norm of each tensor, or of all tensors together.

    DGC, Algorithm 1 and Appendix C: G^k = scale * gradient is clipped to clip_norm * N^(-1/2).
    """
    if method.clip_norm is None:
        return dict(local)
    bound = method.clip_norm / np.sqrt(ranks) / scale
    norms = {name: np.sqrt(np.sum(np.square(gradient))) for name, gradient in local.items()}
    if method.clip_scope == "model":
        norms = dict.fromkeys(norms, np.sqrt(sum(norm**2 for norm in norms.values())))
    return {name: gradient * min(1.0, bound / norms[name]) for name, gradient in local.items()}


def accumulate(method, u, v, local):
    """Lines 11 and 12 of Algorithm 3 (momentum SGD) and Algorithm 4 (Nesterov); line 6 of DGS's Algorithm 3."""
    for name, gradient in local.items():
        if method.samomentum:
            v[name] = method.momentum * v[name] + gradient
        elif method.nesterov:
            u[name] = method.momentum * (u[name] + gradient)
            v[name] = v[name] + u[name] + gradient
        else:
            u[name] = method.momentum * u[name] + gradient
            v[name] = v[name] + u[name]


def quantized(method, v, mask):
    """Return signs times levels at the mask, and the relative gap between small and large values.

    A group is a tensor or a channel (its last dimension). It has one level, or one level for values below the mean
    magnitude and one for the others.
    """
    sent, gap = np.zeros(v.shape), np.inf
    by_channel = method.granularity == "channel" and v.ndim > 1
    channels = range(v.shape[-1]) if by_channel else [...]
    for channel in channels:
        at = (..., channel) if by_channel else ...
        magnitudes, chosen = np.abs(v[at]), mask[at]
        if not chosen.any():
            continue
        classes = [chosen]
        if method.values == "int2":
            edge = magnitudes[chosen].mean()
            classes = [chosen & (magnitudes < edge), chosen & (magnitudes >= edge)]
            others = magnitudes[chosen & (magnitudes != magnitudes[chosen].max())]
            gap = min(gap, np.min(np.abs(others - edge)) / edge) if others.size else gap
        for one in classes:
            if one.any():
                level = magnitudes[one].mean() if method.level == "mean" else magnitudes[one].min()
                sent[at] += np.sign(v[at]) * one * level
    return sent, gap


def is_dense(method, step, tensor):
    return method.density_at(step) >= 1.0 or tensor.size < method.min_numel


def choose(method, step, v, kept):
    """Return {name: mask} of the elements to send, and the gap at the edge: by count, or by a threshold."""
    counted = method.value is None and method.lifespan is None and method.stages is None
    return select(method, step, v) if counted else reach(method, step, v, kept)


def reach(method, step, v, kept):
    """DCT, Algorithm 1: every L steps, tau = element floor(n * eta) of sort(|w|); elements with |w| >= tau are sent.

    Tensor i of m renews its threshold i / m of a life-span later. Life-spans follow each other: step 1, steps 2 and 3,
    steps 4 to 7, and so on until they have L steps. Not in the paper: a tensor that sent too many or too few elements
    renews its threshold in the next step. A hard threshold is constant. SIDCo's is fitted in every step.
    """
    masks, gap, begin, lifespan = {}, np.inf, 0, 1
    while method.lifespan and begin + lifespan <= step:
        begin += lifespan
        lifespan = min(begin, method.lifespan)
    for position, name in enumerate(sorted(v)):
        magnitudes = np.abs(v[name])
        if is_dense(method, step, v[name]):
            masks[name] = np.ones(v[name].shape, bool)
            continue
        if method.stages is not None:
            masks[name], here = fitted(
                method, step, magnitudes, kept.setdefault(name, Sidco(method.stages, method.distribution))
            )
            gap = min(gap, here)
            continue
        if method.value is not None:
            kept[name] = method.value
        is_due = method.value is None and (name not in kept or step == begin + position * lifespan // len(v))
        k = max(1, round(method.density_at(step) * magnitudes.size))
        if is_due:
            index = int(np.floor(magnitudes.size * (1.0 - method.density_at(step)) + 1e-9))
            kept[name] = np.sort(magnitudes, axis=None)[index]
        masks[name] = magnitudes >= kept[name]
        others = magnitudes[magnitudes != kept[name]]
        gap = min(gap, np.min(np.abs(others - kept[name])) / kept[name])
        if method.value is None and method.band is not None and not is_due:
            if masks[name].sum() > method.band * k or masks[name].sum() < k / method.band:
                del kept[name]
    return masks, gap


def fitted(method, step, magnitudes, sidco):
    """SIDCo, Algorithm 1: a threshold fitted in stages. The counts adapt the number of stages."""
    k = max(1, round(method.density_at(step) * magnitudes.size))
    threshold, gap = sidco.threshold(magnitudes, k / magnitudes.size)
    mask = magnitudes >= threshold
    sidco.count(mask.sum(), k, k / magnitudes.size)
    return mask, gap


def select(method, step, v):
    """Return {name: mask} of the elements to send, and the relative gap at the edge of the selections."""
    masks = {name: np.ones(tensor.shape, bool) for name, tensor in v.items() if is_dense(method, step, tensor)}
    sparse = sorted(name for name in v if name not in masks)
    groups = [[name] for name in sparse] if method.scope == "tensor" else [sparse] if sparse else []
    gap = np.inf
    for group in groups:
        magnitudes = np.abs(np.concatenate([v[name].reshape(-1) for name in group]))
        k = max(1, round(method.density_at(step) * magnitudes.size))
        order = np.argsort(-magnitudes)
        edge, below = magnitudes[order[k - 1]], magnitudes[order[k]]
        gap = min(gap, (edge - below) / edge)
        mask = np.zeros(magnitudes.size, bool)
        mask[order[:k]] = True
        ends = np.cumsum([v[name].size for name in group])[:-1]
        for name, part in zip(group, np.split(mask, ends), strict=True):
            masks[name] = part.reshape(v[name].shape)
    return masks, gap


def train_without_ties(method, initial, draw, ranks, steps, lr, average=True, delivered=None):
    """Train on draw(step, rank, seed) with the first seed whose selections have clear edges; return outcome, seed."""
    for seed in range(50):
        drawn = functools.partial(draw, seed=seed)
        outcome = train(method, initial, drawn, ranks, steps, lr, average, delivered)
        if outcome.gap > CLEAR_GAP:
            return outcome, seed
    raise AssertionError("no data without near-ties among 50 seeds")


class Owners:
    """Reduce-scatter: the selections of all ranks lie in one row, tensor by tensor, and each rank owns a region of it.

    Regions have equal shares of all selected elements; they are computed in the first step and every 64 steps. An owner
    keeps the ceil(k / ranks) largest sums.
    """

    def __init__(self, method, ranks):
        self.method, self.ranks, self.cuts = method, ranks, None

    def keep(self, step, v, choices):
        """Return for each rank the mask of elements that it selected and the owner kept, and the gap at the edge.

        With `complete`, each rank sends at all elements that owners kept.
        """
        names = sorted(name for name in v[0] if not is_dense(self.method, step, v[0][name]))
        if not names:
            return choices
        selected = [np.concatenate([masks[name].reshape(-1) for name in names]) for masks, _ in choices]
        values = [np.concatenate([v[k][name].reshape(-1) for name in names]) for k in range(self.ranks)]
        if self.cuts is None or step % 64 == 0:
            self.cuts = self.shares(np.sum(selected, axis=0))
        sums = np.abs(sum(value * mask for value, mask in zip(values, selected, strict=True)))
        most, winners, gap = -(-int(selected[0].sum()) // self.ranks), np.zeros(sums.size, bool), choices[0][1]
        for begin, end in zip(self.cuts[:-1], self.cuts[1:], strict=True):
            found = begin + np.flatnonzero(np.any([mask[begin:end] for mask in selected], axis=0))
            ordered = found[np.argsort(-sums[found])]
            winners[ordered[:most]] = True
            if ordered.size > most:
                gap = min(gap, 1 - sums[ordered[most]] / sums[ordered[most - 1]])
        ends = np.cumsum([v[0][name].size for name in names])[:-1]
        parts = dict(zip(names, np.split(winners, ends), strict=True))
        kept = [
            {
                name: (mask | self.method.complete) & parts[name].reshape(mask.shape) if name in parts else mask
                for name, mask in masks.items()
            }
            for masks, _ in choices
        ]
        return [(masks, min(gap, here)) for masks, (_, here) in zip(kept, choices, strict=True)]

    def shares(self, counts):
        """Return the boundaries of the regions. An element that no rank selected counts as a millionth."""
        weights = counts + 1e-6
        cuts, passed, target = [0], 0.0, weights.sum() / self.ranks
        for place, weight in enumerate(weights):
            while len(cuts) < self.ranks and passed + weight >= target * len(cuts) - 1e-12:
                cuts.append(round(place + (target * len(cuts) - passed) / weight))
            passed += weight
        return [*cuts, len(counts)]
