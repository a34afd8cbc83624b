"""Typed calls into the native operators whose numbers of entries vary from step to step.

What they share with `ops` (types, errors, devices) is said there.
"""

from collections.abc import Sequence

import torch

from hvd_sparse.buckets import of_each
from hvd_sparse.sampling import signed
from hvd_sparse.torch.ops import _ops


def locate_payloads(
    gathered: torch.Tensor,
    ns: list[int],
    ranks: int,
    coding: str = "run_length",
    value_dtype: str = "float32",
    channels: Sequence[int] = (),
) -> torch.Tensor:
    """Find payloads whose numbers of entries differ between ranks. Checks only the fields that it reads.

    Args:
        gathered: uint8[bytes]: for each rank, one payload for each size in `ns`.
        ns: Elements of each tensor; at least one tensor.
        ranks: Number of ranks, from 1 to 2^23.
        coding: As in `ops.pack`.
        value_dtype: As in `ops.quantize`.
        channels: For low-bit values, the number of groups of each tensor; empty for other values, or for one group.

    Returns:
        int64[2, ranks, len(ns)], on the CPU: byte offset and k of each payload. k is its number of entries, at least 1.

    Raises:
        ValueError: A number is out of range, a name is unknown, or a payload is damaged: the message names the rank of
            the first one.
    """
    return _ops.locate_payloads(gathered, ns, ranks, coding, value_dtype, channels)


def reduce_located(
    gathered: torch.Tensor,
    places: torch.Tensor,
    n: int,
    out: torch.Tensor,
    scale: float = 1.0,
    coding: str = "run_length",
    value_dtype: str = "float32",
    segments: torch.Tensor | None = None,
) -> None:
    """Do `reduce_payloads` for payloads that `locate_payloads` found.

    Args:
        gathered: uint8[bytes], the messages of all ranks.
        places: int64[2, ranks], contiguous, on the CPU: for one tensor, the offsets and the k of `locate_payloads`.
        n, out, scale, coding, value_dtype, segments: As in `ops.reduce_payloads`.

    Returns:
        None.

    Raises:
        ValueError: As in `ops.reduce_payloads`; or places leave `gathered`.
    """
    _ops.reduce_located(gathered, places, n, out, scale, coding, value_dtype, segments)


def filter_bucket(
    gradients: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor],
    velocities: Sequence[torch.Tensor] = (),
    parameters: Sequence[torch.Tensor] = (),
    *,
    factors: Sequence[float],
    thresholds: Sequence[float],
    ks: Sequence[int],
    is_active: bool = True,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float | Sequence[float] = 0.0,
    coding: str = "run_length",
    value_dtype: str = "float32",
    level: str = "mean",
    channels: Sequence[int] = (),
    stages: Sequence[int] = (),
    distribution: str = "exponential",
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do `accumulate`, `filter_threshold`, `quantize` and `pack` for each tensor of a bucket; on the CPU only.

    Args:
        gradients, residuals, velocities, parameters: As in `ops.accumulate`, one tensor for each member; velocities and
            parameters may be empty. The parameter of a member whose weight_decay is 0 is not read.
        factors: The factor of each gradient.
        thresholds: Of each member, at least 0.
        ks: One for each member. 0: the residuals that reach the threshold are selected. If k > 0, the threshold is that
            of the k largest accumulated residuals, and at least the smallest positive float32; `thresholds` is then a
            guess that only changes the cost, 0.0 for none.
        is_active: If false, no gradient is accumulated.
        momentum, nesterov: As in `ops.accumulate`.
        weight_decay: A number, or one for each member.
        coding: As in `ops.pack`.
        value_dtype, level: As in `ops.quantize`.
        channels: As in `locate_payloads`.
        stages: One for each member, or empty. If above 0, a threshold that about k residuals reach is fitted in this
            number of stages; `thresholds` has a guess at it (SIDCo, section 2; without momentum and weight decay).
        distribution: Of the first stage: "exponential", "gamma" or "pareto".
        seed: Of the sample that is fitted.

    Returns:
        The concatenated payloads, uint8[bytes]; float64[members, 3]: threshold, number of entries, and the payload's
        offset in bytes; bool[members]: was each gradient finite everywhere? A payload's k is its entries, at least 1.

    Raises:
        ValueError: A list has another length, a tensor another type or size, a number is out of range, a name is
            unknown, or weight decay lacks the parameters. Then no buffer has changed.
        NotImplementedError: A tensor is on a CUDA device.
    """
    lists = (list(gradients), list(residuals), list(velocities), list(parameters), factors)
    numbers = (momentum, nesterov, of_each(weight_decay, gradients), is_active, thresholds, ks)
    fit = (stages, distribution, signed(seed))
    return _ops.filter_bucket(*lists, *numbers, coding, value_dtype, level, channels, *fit)


def accumulate_partition(
    gradients: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor],
    *,
    factors: Sequence[float],
    begins: Sequence[int],
    begin: int,
    end: int,
    threshold: float,
    share: float = -1.0,
    sample: int = 0,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do `accumulate` for tensors that form one vector, and select from its elements [begin, end) (MiCRO, Algorithm 1).

    Args:
        gradients, residuals: As in `ops.accumulate`, one tensor for each member.
        factors: The factor of each gradient.
        begins: The ascending start of each tensor in the vector; gaps between tensors count as zeros.
        begin, end: The partition: elements [begin, end) of the vector.
        threshold: Elements that reach it are selected; at least 0, infinity if unknown.
        share: The expected number of these. If none, fewer than 0.92 share - 4 or more than 1.08 share + 4 reach the
            threshold, the `share` largest are selected instead, without zeros; for a fraction, one now and then. Below
            0: the selection is never corrected.
        sample: The number of elements of the partition in the histogram, in runs of 16; at least one run.
        seed: Of the sample, of a fraction of the share, and of the order of equal magnitudes.

    Returns:
        Ascending indices into the vector, int64[m]; a sketch, float32[65], of a histogram with bins of 1/16 octave (the
        number of its first bin, the counts of that bin and the next ones, the last one with all elements above; zeros
        if share is below 0); the threshold that all selected elements reach, a float64 scalar; bool[members]: was each
        gradient finite everywhere? On a CUDA device, the call waits for it, and sketch and threshold are on the CPU.

    Raises:
        ValueError: A list has another length, a tensor another type or size, the tensors overlap, or a number is out of
            range.
    """
    numbers = (begin, end, threshold, share, sample, signed(seed))
    return _ops.accumulate_partition(list(gradients), list(residuals), factors, begins, *numbers)


def fit_thresholds(
    residuals: Sequence[torch.Tensor],
    ks: Sequence[int],
    stages: Sequence[int],
    distribution: str = "exponential",
    seed: int = 0,
) -> list[list[float]]:
    """Fit, for each residual, a threshold that about k elements reach, as `filter_bucket` does (SIDCo, section 2).

    On a CUDA device, the samples are copied to the CPU, all at once, and fitted there.

    Args:
        residuals: float32, contiguous, in any shape.
        ks: The k of each residual, from 1 to its number of elements.
        stages: The number of stages of each, at least 1.
        distribution, seed: As in `filter_bucket`.

    Returns:
        For each residual: the threshold; and whether it should not be used, 1.0 if so.

    Raises:
        ValueError: A list has another length, a residual another type, a number is out of range, or the distribution is
            unknown.
    """
    return _ops.fit_thresholds(list(residuals), ks, stages, distribution, signed(seed)).tolist()


def reduce_located_bucket(
    gathered: torch.Tensor,
    ns: Sequence[int],
    ranks: int,
    outs: Sequence[torch.Tensor],
    places: Sequence[int],
    scale: float = 1.0,
    coding: str = "run_length",
    value_dtype: str = "float32",
    channels: Sequence[int] = (),
) -> None:
    """Do `locate_payloads`, then `reduce_located` for some of the tensors; on the CPU only.

    Args:
        gathered, ns, ranks, coding, value_dtype, channels: As in `locate_payloads`.
        outs: float32, ns[place] elements, contiguous, one for each of `places`; written.
        places: The tensors to sum: different numbers in [0, len(ns)).
        scale: Of the sums.

    Returns:
        None.

    Raises:
        ValueError: As in `locate_payloads`; or an entry of outs or places does not fit. Every payload is checked before
            outs are touched.
        NotImplementedError: A tensor is on a CUDA device.
    """
    _ops.reduce_located_bucket(gathered, ns, ranks, list(outs), places, scale, coding, value_dtype, channels)
