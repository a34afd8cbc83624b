"""Typed calls into the native operators on buckets: the functions of `ops`, for several tensors in one call.

What they share with `ops` (types, errors, devices) is said there. Tensors may be on the CPU or on a CUDA device.
"""

from collections.abc import Sequence

import torch

from hvd_sparse.buckets import BucketLayout, of_each
from hvd_sparse.sampling import signed
from hvd_sparse.threshold import ThresholdHint
from hvd_sparse.torch.ops import _ops


def _numbers(layout: BucketLayout, members: Sequence[int] | None) -> tuple:
    """Return a layout and the numbers of the members in a call, in the form that the operators expect."""
    return (*layout, list(range(len(layout.sizes))) if members is None else members)


def new_hints(count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return initial hints for `accumulate_bucket`.

    Args:
        count: Number of selections.
        device: That of the gradients.

    Returns:
        float64[count, 3], each row a `ThresholdHint`: threshold, margin, k.

    Raises:
        RuntimeError: `count` is negative.
    """
    hint = torch.tensor([[0.0, ThresholdHint.margin, 0.0]], dtype=torch.float64, device="cpu")
    return hint.repeat(count, 1).to(device)


def accumulate_bucket(
    gradients: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor],
    velocities: Sequence[torch.Tensor] = (),
    parameters: Sequence[torch.Tensor] = (),
    *,
    layout: BucketLayout,
    members: Sequence[int] | None = None,
    out: torch.Tensor,
    factors: Sequence[float],
    hints: torch.Tensor,
    seed: int = 0,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float | Sequence[float] = 0.0,
    coding: str = "run_length",
    value_dtype: str = "float32",
    level: str = "mean",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do `accumulate`, `select_top_k`, `quantize` and `pack` for those members of a bucket that take part.

    Reads the buffers once if the hints are good.

    Args:
        gradients, residuals, velocities, parameters: As in `ops.accumulate`, one tensor for each of `members`;
            velocities and parameters may be empty. The parameter of a member whose weight_decay is 0 is not read.
        layout: The whole bucket.
        members: Ascending numbers of the members that take part; None: all. Another member counts as zeros in a joint
            selection. In a per-tensor selection, it is skipped, and its part of `out` is not written.
        out: uint8[bytes of the message], the destination of the payloads.
        factors: The factor of each gradient.
        hints: float64[selections, 3], each a `ThresholdHint`: threshold, margin, k. Updated in place; see `new_hints`.
        seed: As in `ops.select_top_k`.
        momentum, nesterov: As in `ops.accumulate`.
        weight_decay: A number, or one for each member that takes part.
        coding: As in `ops.pack`.
        value_dtype: As in `ops.quantize`; on a CUDA device not "float64".
        level: As in `ops.quantize`. The groups that share a level are the channels of the layout.

    Returns:
        float64[selections made, 2]: threshold, and the number of elements that reached the hint; and bool[members that
        take part]: was each gradient finite everywhere?

    Raises:
        ValueError: A list, a tensor or a number does not fit the layout, or a name is unknown. Then no buffer has
            changed.
    """
    lists = (list(gradients), list(residuals), list(velocities), list(parameters), factors)
    rule = (momentum, nesterov, of_each(weight_decay, gradients), signed(seed), hints, out)
    return _ops.accumulate_bucket(*lists, *rule, *_numbers(layout, members), coding, value_dtype, level)


def clear_bucket(
    message: torch.Tensor,
    residuals: Sequence[torch.Tensor],
    velocities: Sequence[torch.Tensor] = (),
    *,
    layout: BucketLayout,
    members: Sequence[int] | None = None,
    coding: str = "run_length",
    value_dtype: str = "float32",
    retained: float = 0.0,
) -> None:
    """Subtract a rank's own message from the residuals, and set the velocities to zero at its entries.

    The residual is then zero for float32 values, and the rounding error for other types; after this, `retained` times
    the sent value is added.

    Args:
        message: uint8[bytes of the message].
        residuals, velocities: As in `accumulate_bucket`, changed.
        layout, members, coding, value_dtype: As in `accumulate_bucket`, equal to those of the call that filled the
            message.
        retained: The retained fraction of the sent values.

    Returns:
        None.

    Raises:
        ValueError: A list or a tensor does not fit the layout, a name is unknown, or a payload is damaged.
    """
    form = (*_numbers(layout, members), coding, value_dtype, retained)
    _ops.clear_bucket(message, list(residuals), list(velocities), *form)


def reduce_bucket(
    gathered: torch.Tensor,
    outs: Sequence[torch.Tensor],
    scale: float = 1.0,
    *,
    layout: BucketLayout,
    members: Sequence[int] | None = None,
    coding: str = "run_length",
    value_dtype: str = "float32",
) -> None:
    """Do `reduce_payloads` for the selections in the messages of all ranks.

    Args:
        gathered: uint8[ranks, bytes of the message].
        outs: float32, as many elements as the member, contiguous, one for each of `members`; written.
        scale: Of the sums.
        layout: The whole bucket.
        members: Ascending numbers of the members whose sums are written; None: all.
        coding, value_dtype: As in `accumulate_bucket`.

    Returns:
        None.

    Raises:
        ValueError: A list or a tensor does not fit the layout, a name is unknown, or a payload is damaged: the message
            names its rank. Every payload is checked before `outs` are touched.
    """
    _ops.reduce_bucket(gathered, list(outs), scale, *_numbers(layout, members), coding, value_dtype)
