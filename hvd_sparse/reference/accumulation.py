"""Accumulation of a gradient in residual and velocity, in place: the twin of accumulate."""

import numpy as np

from hvd_sparse.reference.selection import check_count, flatten, select_top_k


def accumulate(
    gradient,
    residual,
    velocity=None,
    parameter=None,
    *,
    factor: float = 1.0,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> bool:
    """Bring a gradient of n values into residual and velocity, float32[n], in place; return whether it was finite.

    g is the gradient in float32, what is not finite as zero, times factor, plus weight_decay * parameter; where that
    overflows, zero too, and the gradient counts as not finite. No velocity: residual += g. Else velocity = momentum *
    velocity + g and residual += velocity; with nesterov velocity = momentum * (velocity + g) and residual += velocity,
    then g. A velocity below the smallest normal float32 is zero: denormals would stay, and slow down the arithmetic.
    Where residual or velocity overflows, both stay as they are, and the gradient counts as not finite. Every product
    and every sum is rounded to float32. Source: Gradient Dropping, section 4; Deep Gradient Compression,
    Algorithms 3 and 4.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        local = flatten(gradient).astype(np.float32)
        finite = np.isfinite(local)
        local = np.where(finite, local, np.float32(0.0)) * np.float32(factor)
        if np.float32(weight_decay) != 0.0:
            local = local + flatten(parameter).astype(np.float32) * np.float32(weight_decay)
        usable = np.isfinite(local)
        local = np.where(usable, local, np.float32(0.0))
        u = None
        if velocity is None:
            v = residual + local
        elif nesterov:
            u = _without_denormals((velocity + local) * np.float32(momentum))
            v = (residual + u) + local
        else:
            u = _without_denormals(velocity * np.float32(momentum) + local)
            v = residual + u
        holds = np.isfinite(v)
        residual[:] = np.where(holds, v, residual)
        if velocity is not None:
            velocity[:] = np.where(holds, u, velocity)
    return bool(finite.all() and usable.all() and holds.all())


def _without_denormals(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.float32(0.0), values)


def accumulate_top_k(
    gradient, residual, velocity=None, parameter=None, *, k: int, seed: int = 0, **rule
) -> tuple[np.ndarray, np.ndarray, float, bool]:
    """Do `accumulate`, then `select_top_k` in the residual; rule: what `accumulate` takes by keyword.

    Returns indices int64[k], values float32[k], the smallest selected magnitude, and whether the gradient was finite.
    ValueError unless 1 <= k <= n, before anything changes.
    """
    check_count(k, flatten(gradient).size)
    finite = accumulate(gradient, residual, velocity, parameter, **rule)
    return *select_top_k(residual, k, seed), finite
