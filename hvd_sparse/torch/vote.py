"""The vote on a step: an all-reduce tells whether to skip the step, and whether all ranks are at the same step."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hvd_sparse.announcement import STEP_MODULUS
from hvd_sparse.torch.device import is_cuda
from hvd_sparse.torch.exchange import Exchange, Pending
from hvd_sparse.units import Units, loss_scales_differ


class RanksDiffer(RuntimeError):
    """The ranks are at different steps, or have different loss scales."""


class Vote(NamedTuple):
    """A rank's vote on a step, or the sums of all ranks' votes. The squares tell whether all ranks have equal numbers.

    bad: the gradients that were not finite. damaged: the payloads that failed a check. seconds: the duration of the
    step, for the measured dense fallback; None: not sent.
    """

    bad: float | torch.Tensor
    damaged: float | torch.Tensor
    step: float
    step_squared: float
    loss_scale: float
    loss_scale_squared: float
    seconds: float | None = None


def vote_of(
    bad: int | torch.Tensor, damaged: int | torch.Tensor, number: int, loss_scale: float, seconds: float | None = None
) -> Vote:
    """Return this rank's vote on step `number`. The other arguments are those of `Vote`."""
    step = number % STEP_MODULUS
    return Vote(bad, damaged, step, step**2, loss_scale, loss_scale**2, seconds)


def start_vote(exchange: Exchange, name: str, vote: Vote, device: torch.device) -> Pending:
    """Start the all-reduce of a vote, without waiting for the device; `checked_sums` takes its result."""
    numbers = [number for number in vote if number is not None]
    if not is_cuda(device):
        sent = torch.tensor([float(number) for number in numbers], dtype=torch.float64, device="cpu")
    else:
        sent = torch.zeros(len(numbers), dtype=torch.float64, device=device)
        for position, number in enumerate(numbers):
            sent[position].fill_(number)  # not a copy from the host, which would wait for the device
    return exchange.allreduce(name, sent)


def checked_sums(sums: Sequence[float], number: int, units: Units, refuse_damage: Callable[[], None]) -> Vote:
    """Return the sums of a vote over all ranks, after checking them.

    Raises RanksDiffer on every rank if the ranks differ in step or loss scale; calls `refuse_damage` if there were
    damaged payloads.
    """
    total, ranks = Vote(*sums), units.world_size
    if total.damaged > 0:
        refuse_damage()
    # Equal if and only if all steps are equal (Cauchy-Schwarz). Both products are rounded correctly; ** need not be.
    if total.step * total.step != total.step_squared * ranks:
        mean = number - number % STEP_MODULUS + total.step / ranks
        raise RanksDiffer(
            f"hvd_sparse: this rank is at step {number}, the mean is {mean:g}. "
            "Load the compressor's state on every rank, or on none"
        )
    squared = total.loss_scale**2
    if abs(squared - total.loss_scale_squared * ranks) > 1e-9 * squared:  # equal except for rounding
        raise RanksDiffer(loss_scales_differ(units.loss_scale, total.loss_scale / ranks))
    return total
