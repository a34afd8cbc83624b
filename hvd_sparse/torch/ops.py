"""Typed calls into the native operators, `torch.ops.hvd_sparse.*`, on CPU tensors, and most of them on CUDA tensors.

Every function has a twin of the same name and arguments in `hvd_sparse.reference`, which specifies it; those of buckets
do what others do one by one. Bad arguments and damaged payloads raise ValueError. Values may be float32, float64,
float16 or bfloat16 and of any shape: they are read flattened, in row-major order. A seed is any integer that fits 64
bits. `segments`, int64[segments, 2]: what shares the levels of low-bit values, see `hvd_sparse.wire`; None: all
elements.

Tensors of one call lie on one device, where the results lie, too; `segments` always on the CPU. What differs on CUDA
devices, above all that damage is not raised but recorded (`take_decode_status`), is in docs/cuda.md.
"""

from collections.abc import Sequence

import torch

from hvd_sparse.buckets import BucketLayout
from hvd_sparse.library import find_library, has_cuda
from hvd_sparse.threshold import ThresholdHint
from hvd_sparse.torch import fakes

torch.ops.load_library(find_library("torch"))
_ops = torch.ops.hvd_sparse

# Of `take_decode_status`, from 1 on.
FAILED_CHECKS = ("magic", "version", "coding", "value dtype", "reserved", "n", "entries", "checksum", "positions")


def _signed(seed: int) -> int:
    """A seed as the signed 64-bit integer that operators take."""
    return (seed + 2**63) % 2**64 - 2**63


def _of_each(weight_decay: float | Sequence[float], members: Sequence) -> Sequence[float]:
    """A weight decay for each member."""
    return [weight_decay] * len(members) if isinstance(weight_decay, int | float) else weight_decay


def _numbers(layout: BucketLayout, members: Sequence[int] | None) -> tuple:
    """A layout, and the numbers of the members that take part in a call, as operators take them."""
    return (*layout, list(range(len(layout.sizes))) if members is None else members)


def accumulate(
    gradient: torch.Tensor,
    residual: torch.Tensor,
    velocity: torch.Tensor | None = None,
    parameter: torch.Tensor | None = None,
    *,
    factor: float = 1.0,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> torch.Tensor:
    """Bring a gradient of n elements into `residual` and `velocity`, float32[n], in place, in one pass.

    g is the gradient in float32, what is not finite as zero, times factor, plus weight_decay * parameter (float32[n]);
    where that overflows, zero too, and the gradient counts as not finite. No velocity: residual += g. Else velocity =
    momentum * velocity + g and residual += velocity; with nesterov velocity = momentum * (velocity + g) and residual +=
    velocity, then g. Where that overflows, both stay as they are, and the gradient counts as not finite. Every product
    and sum is rounded. Returns, as a bool scalar tensor, whether the gradient was finite everywhere.
    """
    return _ops.accumulate(gradient, residual, velocity, parameter, factor, momentum, nesterov, weight_decay)


def select_top_k(
    values: torch.Tensor, k: int, seed: int = 0, threshold_hint: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Select exactly the k elements of largest magnitude.

    Ties are broken by a seeded hash of the index. The hint, a guess at the threshold, changes the cost but never the
    result. Returns ascending indices int64[k], values[k], and float64[2]: the smallest selected magnitude, and how
    many elements were found to reach the hint (exact up to 2k; fewer than k: the data had to be read again).
    """
    return _ops.select_top_k(values, k, _signed(seed), threshold_hint)


def filter_threshold(values: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Select every element whose magnitude is at least `threshold`: ascending indices int64[m], values[m]."""
    return _ops.filter_threshold(values, threshold)


def select_threshold(
    values: torch.Tensor, k: int, method: str = "exact", sample_fraction: float = 0.005, seed: int = 0
) -> torch.Tensor:
    """Return, as a float64 scalar tensor, a threshold that k elements reach: "exact", or "sampled" (DGC, section 5)."""
    return _ops.select_threshold(values, k, method, sample_fraction, _signed(seed))


def all_finite(values: torch.Tensor) -> torch.Tensor:
    """Return, as a bool scalar tensor, whether every element is a finite float32."""
    return _ops.all_finite(values)


def payload_size(
    n: int, k: int, coding: str = "run_length", value_dtype: str = "float32", segments: torch.Tensor | None = None
) -> int:
    """Return the size in bytes of the payload of k of n elements."""
    return _ops.payload_size(n, k, coding, value_dtype, segments)


def pack(
    indices: torch.Tensor,
    values: torch.Tensor,
    n: int,
    k: int,
    out: torch.Tensor,
    coding: str = "run_length",
    value_dtype: str = "float32",
    segments: torch.Tensor | None = None,
) -> None:
    """Write the payload of k entries, or of none, into `out`, uint8[payload_size]."""
    _ops.pack(indices, values, n, k, out, coding, value_dtype, segments)


def unpack(
    payload: torch.Tensor,
    n: int,
    k: int,
    coding: str = "run_length",
    value_dtype: str = "float32",
    segments: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check a payload, uint8[payload_size], and return its indices int64 and values float32 (or float64)."""
    return _ops.unpack(payload, n, k, coding, value_dtype, segments)


def reduce_payloads(
    gathered: torch.Tensor,
    offset: int,
    n: int,
    k: int,
    out: torch.Tensor,
    scale: float = 1.0,
    coding: str = "run_length",
    value_dtype: str = "float32",
    segments: torch.Tensor | None = None,
) -> None:
    """Set `out`, float32[n], to scale times the sum, in rank order, of the payloads at gathered[:, offset:].

    `gathered`: uint8[ranks, bytes]. Every payload is checked before `out` is touched.
    """
    _ops.reduce_payloads(gathered, offset, n, k, out, scale, coding, value_dtype, segments)


def locate_payloads(
    gathered: torch.Tensor,
    ns: list[int],
    ranks: int,
    coding: str = "run_length",
    value_dtype: str = "float32",
    channels: Sequence[int] = (),
) -> torch.Tensor:
    """Find payloads whose numbers of entries differ between ranks; int64[2, ranks, len(ns)]: byte offsets, and k.

    `gathered`, uint8[bytes]: for each rank, one payload of each of `ns` elements. `channels`: of low-bit values, how
    many groups each has; empty for other values. k: its entries, at least 1.
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
    """Do `reduce_payloads` where `locate_payloads` found them: places int64[2, ranks], offsets and k, contiguous."""
    _ops.reduce_located(gathered, places, n, out, scale, coding, value_dtype, segments)


def quantize(
    values: torch.Tensor,
    value_dtype: str,
    level: str = "mean",
    indices: torch.Tensor | None = None,
    segments: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the float32 values that survive the wire as `value_dtype`.

    "int2" and "int1": signs and levels, "mean" or "min", of all values, or with segments, of those of each group.
    """
    return _ops.quantize(values, value_dtype, level, indices, segments)


def new_hints(count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the hints of `count` selections that `accumulate_bucket` has not seen yet, float64[count, 3]."""
    return torch.tensor([[0.0, ThresholdHint.margin, 0.0]], dtype=torch.float64).repeat(count, 1).to(device)


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
    """Do `accumulate`, `select_top_k`, `quantize` and `pack` for the members of a bucket that take part.

    One pass over memory if the hints are good.

    Args:
        gradients, residuals, velocities, parameters: one tensor for each of `members`; of velocities and parameters
            none, too. The parameter of a member whose weight_decay is 0 is not read.
        layout: The whole bucket.
        members: Ascending numbers of the members that take part; None: all. What does not counts as zeros in a joint
            selection; a separate selection in it is left alone, and so is its place in `out`.
        out: uint8[bytes of the message], where the payloads go.
        factors: What each gradient is scaled with.
        hints: float64[selections, 3], each a `ThresholdHint`: threshold, margin, k. They learn, in place; see
            `new_hints`.
        weight_decay: A number, or one a member that takes part.

    Returns:
        float64[selections made, 2]: threshold, and how many elements reached the hint; and bool[members that take
        part]: was each gradient finite everywhere?

    Raises:
        ValueError: A list, a tensor or a number that does not fit the layout.
    """
    lists = (list(gradients), list(residuals), list(velocities), list(parameters), factors)
    rule = (momentum, nesterov, _of_each(weight_decay, gradients), _signed(seed), hints, out)
    return _ops.accumulate_bucket(*lists, *rule, *_numbers(layout, members), coding, value_dtype, level)


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
    """Do `accumulate`, `filter_threshold`, `quantize` and `pack` of each tensor of a bucket; on the CPU.

    ks: where above 0, the threshold is that of the k largest residuals, once these are accumulated, and at least
    the smallest float32 above zero; `thresholds` then is a guess that only changes the cost, 0.0 for none. Where
    below 0, the -k largest are selected and no more, zeros left out. Unless is_active no gradient enters a
    residual. channels: of low-bit values, as in `locate_payloads`. stages: one a member, or none; where above
    0, a threshold that about k residuals reach is fitted in so many, the first to this distribution, by a sample that
    the seed chooses, and `thresholds` has a guess at it (SIDCo; without momentum and weight decay). Returns the
    payloads, uint8[bytes], one after the other; float64[members, 4], threshold, entries, the payload's offset in bytes,
    and of a fit, how many of the sample reached it over how many should; and bool[members]: was each gradient finite
    everywhere? The k of a payload is its entries, but at least 1.
    """
    lists = (list(gradients), list(residuals), list(velocities), list(parameters), factors)
    numbers = (momentum, nesterov, _of_each(weight_decay, gradients), is_active, thresholds, ks)
    fit = (stages, distribution, _signed(seed))
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
    """Do `accumulate` for tensors that are one vector, and select in elements [begin, end) of it; on the CPU.

    begins: where each begins, ascending; what lies between them counts as zeros. What reaches the threshold is
    selected. share: how many should; if fewer than 0.92 share - 4 do, or more than 1.08 share + 4, or none, that many
    of the largest are, but for zeros; of a fraction, one now and then; below 0: as many as do. sample: the elements of
    the partition that are counted, in runs of 16. Returns ascending indices into the vector, int64[m]; a sketch,
    float32[65]: of a histogram whose bins are 1/16 of an octave, the number of a bin, and how many elements are in it
    and the next ones, the last with all above, zeros where share is below 0; a float64 scalar, what all selected reach;
    and bool[members], was each gradient finite everywhere?
    """
    numbers = (begin, end, threshold, share, sample, _signed(seed))
    return _ops.accumulate_partition(list(gradients), list(residuals), factors, begins, *numbers)


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
    """Do `locate_payloads`, then `reduce_located` of those members of `ns` that `places` says, into `outs`; on the CPU.

    outs: float32[ns[place]] for each of `places`. An error names the rank; sums of members before are then written.
    """
    _ops.reduce_located_bucket(gathered, ns, ranks, list(outs), places, scale, coding, value_dtype, channels)


def take_decode_status(like: torch.Tensor) -> torch.Tensor:
    """Return what calls on the device of `like`, a CUDA tensor, met since this was asked last, int64[2], and forget it.

    How many selections of `reduce_payloads`, `reduce_located`, `reduce_bucket` and `clear_bucket` met a payload that
    failed a check; and for the first to say so (of several in one call, any) rank * 256 + check, see `FAILED_CHECKS`.
    Reading it waits for the device.
    """
    return _ops.take_decode_status(like)


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
    """Take what a rank's own message, uint8[bytes], says out of the residuals, and set the velocities to zero there.

    Nothing is left of float32 values; of others, what rounding kept back; then `retained` times what was sent is added.
    Layout and members: as in `accumulate_bucket`.
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
    """Do `reduce_payloads` for the selections of the ranks' messages, uint8[ranks, bytes]: outs float32[n] a member.

    Layout and members: as in `accumulate_bucket`; the members are those whose sums are wanted.
    """
    _ops.reduce_bucket(gathered, list(outs), scale, *_numbers(layout, members), coding, value_dtype)


fakes.register(with_cuda=has_cuda("torch"))
