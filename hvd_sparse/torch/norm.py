"""Sums of squares in float64: squares may overflow float32, and a float32 sum of many is wrong by parts in 1000.

A float64 copy of a whole gradient would take twice its memory and ten times as long as the sum, so the CPU copies a
span at a time, which stays in its cache. A CUDA device converts as it reads.
"""

import math

import torch

SPAN = 1 << 18  # elements


def sum_of_squares(tensor: torch.Tensor) -> float:
    """Return the sum of squares of all elements in float32; elements that are not finite count as zero."""
    flat = tensor.detach().reshape(-1)
    return sum(map(_of_span, flat.split(SPAN if flat.device.type == "cpu" else max(flat.numel(), 1))))


def _of_span(span: torch.Tensor) -> float:
    span = span.to(torch.float32)
    norm = float(torch.linalg.vector_norm(span, dtype=torch.float64))
    if not math.isfinite(norm):
        norm = float(torch.linalg.vector_norm(span.nan_to_num(0.0, 0.0, 0.0), dtype=torch.float64))
    return norm**2
