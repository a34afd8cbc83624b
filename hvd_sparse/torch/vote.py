"""The vote on a step: a sum over ranks tells whether to skip it, and whether all ranks are at the same step."""

from collections.abc import Callable, Sequence

from hvd_sparse.units import Units, loss_scales_differ


def told(number: int, loss_scale: float) -> tuple[float, ...]:
    """Return step and loss scale, each with its square: the sums of both tell whether it is the same on every rank."""
    return number, number**2, loss_scale, loss_scale**2


def counted(sums: Sequence[float], number: int, units: Units, refuse_damage: Callable[[], None]) -> tuple[float, ...]:
    """Return how many gradients were not finite, and what was added up besides, from the sums over ranks of a vote.

    sums: of gradients that were not finite, of damaged payloads, of what `told` returned, and of anything else.
    RuntimeError on every rank if they differ in step or loss scale; `refuse_damage` is called where damage was met.
    """
    bad, damaged, steps, squares, scales, scale_squares, *others = sums
    ranks = units.world_size
    if damaged > 0:
        refuse_damage()
    if steps**2 != squares * ranks:  # equal if and only if all steps are, as Cauchy and Schwarz
        raise RuntimeError(
            f"hvd_sparse: this rank is at step {number}, the mean is {steps / ranks:g}. "
            "Load the compression's state on every rank, or on none"
        )
    if abs(scales**2 - scale_squares * ranks) > 1e-9 * scales**2:  # equal, but for rounding
        raise RuntimeError(loss_scales_differ(units.loss_scale, scales / ranks))
    return bad, *others
