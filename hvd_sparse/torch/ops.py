"""Typed calls into the native operators, `torch.ops.hvd_sparse.*`: all on CPU tensors, most also on CUDA tensors.

What a function computes is specified by the one of the same name in `hvd_sparse.reference`, in NumPy; the `*_bucket`
functions do the same for several tensors in one call. Bad arguments and damaged payloads raise ValueError. Values may
be float32, float64, float16 or bfloat16 and of any shape: they are read flattened, in row-major order. A seed is any
integer that fits 64 bits. `segments`, int64[segments, 2], lists the groups of elements that share the quantization
levels of low-bit values, see `hvd_sparse.wire`; None: all elements are one group. Autograd sees no change in place.

All tensors of a call are on one device, and so are the results; only `segments` is always on the CPU. docs/cuda.md
lists the differences on CUDA devices: above all, damage is recorded (`take_decode_status`) instead of raised.
"""

from collections.abc import Sequence

import torch

from hvd_sparse.buckets import BucketLayout
from hvd_sparse.library import find_library, has_cuda
from hvd_sparse.threshold import ThresholdHint
from hvd_sparse.torch import fakes

torch.ops.load_library(find_library("torch"))
_ops = torch.ops.hvd_sparse

_CHECKS = "magic, version, coding, value dtype, reserved field, element count n, entries, checksum, positions"
FAILED_CHECKS = tuple(_CHECKS.split(", "))  # as `take_decode_status` numbers them, from 1


def _signed(seed: int) -> int:
    """Return a seed as the signed 64-bit integer that the operators expect."""
    return (seed + 2**63) % 2**64 - 2**63


def _of_each(weight_decay: float | Sequence[float], members: Sequence) -> Sequence[float]:
    """Return one weight decay for each member."""
    return [weight_decay] * len(members) if isinstance(weight_decay, int | float) else weight_decay


def _numbers(layout: BucketLayout, members: Sequence[int] | None) -> tuple:
    """Return a layout and the numbers of the members in a call, in the form that the operators expect."""
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
    """Accumulate a gradient of n elements in `residual` and `velocity`, float32[n], in place, in one pass.

    g is the gradient in float32, with zeros for elements that are not finite, times factor, plus weight_decay *
    parameter (float32[n]). Where g overflows, it is zero too, and the gradient counts as not finite. Without a
    velocity: residual += g. With one: velocity = momentum * velocity + g and residual += velocity; with nesterov,
    velocity = momentum * (velocity + g) and residual += velocity, then += g. A velocity below the smallest normal
    float32 is zero. Where this overflows, both buffers keep their values, and the gradient counts as not finite. Every
    product and sum is rounded. Returns whether the gradient was finite everywhere, a bool scalar tensor.
    """
    return _ops.accumulate(gradient, residual, velocity, parameter, factor, momentum, nesterov, weight_decay)


def select_top_k(
    values: torch.Tensor, k: int, seed: int = 0, threshold_hint: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Select exactly the k elements of largest magnitude.

    A seeded hash of the index breaks ties. The hint, a guess at the threshold, changes the cost but never the result.
    Returns ascending indices int64[k], values[k], and float64[2]: the smallest selected magnitude, and the number of
    elements that reached the hint (exact up to 2k; below k, the data was read a second time).
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

    `gathered`, uint8[bytes]: for each rank, one payload for each size in `ns`. `channels`: for low-bit values, the
    number of groups of each tensor; empty for other values. k: the payload's number of entries, at least 1.
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
    """Do `reduce_payloads` at the offsets and with the k of `locate_payloads`: contiguous places int64[2, ranks]."""
    _ops.reduce_located(gathered, places, n, out, scale, coding, value_dtype, segments)


def quantize(
    values: torch.Tensor,
    value_dtype: str,
    level: str = "mean",
    indices: torch.Tensor | None = None,
    segments: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the float32 values that a receiver decodes when `values` are sent as `value_dtype`.

    "int2" and "int1" send signs and a quantization level, the "mean" or "min", of all values, or with segments, of
    each group.
    """
    return _ops.quantize(values, value_dtype, level, indices, segments)


def new_hints(count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return initial hints of `count` selections for `accumulate_bucket`, float64[count, 3]."""
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
    """Do `accumulate`, `select_top_k`, `quantize` and `pack` for those members of a bucket that take part.

    Reads the buffers once if the hints are good.

    Args:
        gradients, residuals, velocities, parameters: One tensor for each of `members`; velocities and parameters may
            be empty. The parameter of a member whose weight_decay is 0 is not read.
        layout: The whole bucket.
        members: Ascending numbers of the members that take part; None: all. Another member counts as zeros in a joint
            selection. In a per-tensor selection, it is skipped, and its part of `out` is not written.
        out: uint8[bytes of the message], the destination of the payloads.
        factors: The factor of each gradient.
        hints: float64[selections, 3], each a `ThresholdHint`: threshold, margin, k. Updated in place; see `new_hints`.
        weight_decay: A number, or one for each member that takes part.

    Returns:
        float64[selections made, 2]: threshold, and the number of elements that reached the hint; and bool[members that
        take part]: was each gradient finite everywhere?

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
    """Do `accumulate`, `filter_threshold`, `quantize` and `pack` for each tensor of a bucket; on the CPU only.

    Args:
        ks: If k > 0, the threshold is that of the k largest accumulated residuals, and at least the smallest positive
            float32; `thresholds` is then a guess that only changes the cost, 0.0 for none. If k < 0, at most the -k
            largest residuals are selected, without zeros.
        is_active: If false, no gradient is accumulated.
        channels: For low-bit values, as in `locate_payloads`.
        stages: One for each member, or empty. If above 0, a threshold that about k residuals reach is fitted in this
            number of stages, the first with `distribution`, on a sample that the seed chooses; `thresholds` has a guess
            at it (SIDCo; without momentum and weight decay).

    Returns:
        The concatenated payloads, uint8[bytes]; float64[members, 3]: threshold, number of entries, and the payload's
        offset in bytes; bool[members]: was each gradient finite everywhere? A payload's k is its entries, at least 1.
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
    """Do `accumulate` for tensors that form one vector, and select from its elements [begin, end).

    Args:
        begins: The ascending start of each tensor in the vector; gaps between tensors count as zeros.
        threshold: Elements that reach it are selected.
        share: The expected number of these. If none, fewer than 0.92 share - 4 or more than 1.08 share + 4 reach the
            threshold, the `share` largest are selected instead, without zeros; for a fraction, one now and then. Below
            0: the selection is never corrected.
        sample: The number of elements of the partition in the histogram, in runs of 16.

    Returns:
        Ascending indices into the vector, int64[m]; a sketch, float32[65], of a histogram with bins of 1/16 octave (the
        number of its first bin, the counts of that bin and the next ones, the last one with all elements above; zeros
        if share is below 0); the threshold that all selected elements reach, a float64 scalar; bool[members]: was each
        gradient finite everywhere? On a CUDA device, the call waits for it, and sketch and threshold are on the CPU.
    """
    numbers = (begin, end, threshold, share, sample, _signed(seed))
    return _ops.accumulate_partition(list(gradients), list(residuals), factors, begins, *numbers)


def fit_thresholds(
    residuals: Sequence[torch.Tensor],
    ks: Sequence[int],
    stages: Sequence[int],
    distribution: str = "exponential",
    seed: int = 0,
) -> list[list[float]]:
    """Fit, for each residual, float32[n], a threshold that about k elements reach, as `filter_bucket` does (SIDCo).

    On a CUDA device, the samples are copied to the CPU, all at once, and fitted there. Returns for each residual: the
    threshold; and whether it should not be used, 1.0 if so.
    """
    return _ops.fit_thresholds(list(residuals), ks, stages, distribution, _signed(seed)).tolist()


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
    """Do `locate_payloads`, then `reduce_located` into outs, float32[ns[place]] for each of `places`; on the CPU only.

    Every payload is checked before outs are touched.
    """
    _ops.reduce_located_bucket(gathered, ns, ranks, list(outs), places, scale, coding, value_dtype, channels)


def take_decode_status(like: torch.Tensor) -> torch.Tensor:
    """Return and reset the record of damaged payloads on the device of `like`, a CUDA tensor: int64[2].

    The first number counts the selections of `reduce_payloads`, `reduce_located`, `reduce_bucket` and `clear_bucket`
    with a payload that failed a check. The second is rank * 256 + check (see `FAILED_CHECKS`) of the first failure; of
    several in one call, any. Reading the result waits for the device.
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
    """Subtract a rank's own message, uint8[bytes], from the residuals, and set the velocities to zero at its entries.

    The residual is then zero for float32 values, and the rounding error for other types; after this, `retained` times
    the sent value is added. Layout and members: as in `accumulate_bucket`.
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
    """Do `reduce_payloads` for the selections in the ranks' messages, uint8[ranks, bytes].

    outs: float32[n] for each member. Layout: as in `accumulate_bucket`. Members: those whose sums are written. Every
    payload is checked before `outs` are touched.
    """
    _ops.reduce_bucket(gathered, list(outs), scale, *_numbers(layout, members), coding, value_dtype)


fakes.register(with_cuda=has_cuda("torch"))
