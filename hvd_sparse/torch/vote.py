"""The vote on a step: an all-reduce tells whether to skip the step, and whether all ranks are at the same step."""

from collections.abc import Callable, Sequence

import torch

from hvd_sparse.announcement import STEP_MODULUS
from hvd_sparse.torch.device import is_cuda
from hvd_sparse.torch.exchange import Exchange, Pending
from hvd_sparse.units import Units, loss_scales_differ


class RanksDiffer(RuntimeError):
    """The ranks are at different steps, or have different loss scales."""


def start_vote(
    exchange: Exchange,
    name: str,
    bad: int | torch.Tensor,
    damaged: int | torch.Tensor,
    numbers: Sequence[float],
    device: torch.device,
) -> Pending:
    """Start the all-reduce of a vote, without waiting for the device; `counted` checks its sums.

    bad, damaged: the number of gradients that were not finite, and of damaged payloads, on this rank. numbers: those of
    `step_and_scale`, and any further ones.
    """
    if not is_cuda(device):
        vote = torch.tensor([int(bad), int(damaged), *numbers], dtype=torch.float64)
    else:
        vote = torch.zeros(2 + len(numbers), dtype=torch.float64, device=device)
        vote[0], vote[1] = bad, damaged
        for position, number in enumerate(numbers, 2):
            vote[position].fill_(number)  # not a copy from the host, which would wait for the device
    exchange.traffic.count(payload_bytes=vote.nbytes)
    return exchange.allreduce(name, vote)


def step_and_scale(number: int, loss_scale: float) -> tuple[float, ...]:
    """Return step and loss scale, each with its square: their sums tell whether all ranks have the same values."""
    step = number % STEP_MODULUS
    return step, step**2, loss_scale, loss_scale**2


def counted(sums: Sequence[float], number: int, units: Units, refuse_damage: Callable[[], None]) -> tuple[float, ...]:
    """Check the sums of a vote; return the number of gradients that were not finite, and any further sums.

    sums: gradients that were not finite, damaged payloads, those of `step_and_scale`, and any further ones, each
    summed over ranks. Raises RuntimeError on every rank if the ranks differ in step or loss scale; calls
    `refuse_damage` if there were damaged payloads.
    """
    bad, damaged, steps, squares, scales, scale_squares, *others = sums
    ranks = units.world_size
    if damaged > 0:
        refuse_damage()
    # Equal if and only if all steps are equal (Cauchy-Schwarz). Both products are rounded correctly; ** need not be.
    if steps * steps != squares * ranks:
        mean = number - number % STEP_MODULUS + steps / ranks
        raise RanksDiffer(
            f"hvd_sparse: this rank is at step {number}, the mean is {mean:g}. "
            "Load the compressor's state on every rank, or on none"
        )
    if abs(scales**2 - scale_squares * ranks) > 1e-9 * scales**2:  # equal except for rounding
        raise RanksDiffer(loss_scales_differ(units.loss_scale, scales / ranks))
    return bad, *others
