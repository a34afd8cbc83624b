"""MiCRO's selection in a partition and SIDCo's fitted thresholds on a GPU: results equal the CPU's, bit for bit."""

import math

import torch
from gpu_helpers import KINDS, SMALL, assert_refuses, assert_same, make

from hvd_sparse.torch import varying_ops

SIZES = (1000, 1, 4099, 20_001) if SMALL else (1000, 1, 65_537, 300_001)


def draw_parts(kind, gap, device):
    """Gradients, residuals that are slices of one vector, and where they begin in it; `gap` elements follow each."""
    begins, at = [], 0
    for size in SIZES:
        begins.append(at)
        at += size + gap
    whole = make(kind, at, seed=1).nan_to_num(0.0, 3.0, -3.0).to(device)
    residuals = [whole.narrow(0, begin, size) for begin, size in zip(begins, SIZES, strict=True)]
    return [make(kind, size, seed=2).to(device) for size in SIZES], residuals, begins, at


def select(device, kind, gap, cut, **options):
    """Return what accumulate_partition gives, and the residuals."""
    gradients, residuals, begins, n = draw_parts(kind, gap, device)
    begin, end = (round(part * n) for part in cut)
    options = {"factors": [0.5] * len(SIZES), "begins": begins, "begin": begin, "end": end, "seed": 3, **options}
    return varying_ops.accumulate_partition(gradients, residuals, **options), residuals


def check(kind, gap, cut, **options):
    (indices, sketch, threshold, finite), residuals = select("cuda", kind, gap, cut, **options)
    (indices_too, sketch_too, threshold_too, finite_too), expected = select("cpu", kind, gap, cut, **options)
    context = (kind, gap, cut, options)
    assert_same(indices, indices_too, context)
    assert_same(finite, finite_too, context)
    assert torch.equal(sketch, sketch_too), context
    assert threshold.item() == threshold_too.item(), context
    for found, wanted in zip(residuals, expected, strict=True):
        assert_same(found, wanted, context)


def test_partitions():
    for kind in KINDS:
        for gap in (0, 5):
            for cut in ((0.0, 0.5), (0.3, 0.31), (0.5, 1.0), (0.2, 0.2)):
                for threshold in (0.0, 1.5, 1e9, math.inf):
                    for share in (0.3, 40.0) if SMALL else (0.0, 0.3, 40.0, 5000.0):
                        check(kind, gap, cut, threshold=threshold, share=share, sample=2048)
                    check(kind, gap, cut, threshold=threshold)


def test_a_share_that_the_threshold_meets():
    (indices, *_), _ = select("cpu", "normal", 0, (0.0, 0.5), threshold=1.5)
    for share in (0.95, 1.0, 1.05):
        check("normal", 0, (0.0, 0.5), threshold=1.5, share=share * len(indices), sample=10**9)


def test_fits():
    for kind in KINDS:
        residuals = [make(kind, n, seed=4).nan_to_num(0.0, 3.0, -3.0) for n in (1, 17, 1000, 70_001, 300_007)]
        ks, stages = [1, 1, 10, 70, 3000], [1, 2, 3, 2, 4]
        for distribution in ("exponential", "gamma", "pareto"):
            expected = varying_ops.fit_thresholds(residuals, ks, stages, distribution, 7)
            found = varying_ops.fit_thresholds([one.cuda() for one in residuals], ks, stages, distribution, 7)
            assert found == expected, (kind, distribution)


def test_what_is_refused():
    residual = torch.ones(9, device="cuda")
    assert_refuses(varying_ops.fit_thresholds, [residual], [10], [1], says="k must be in [1, 9]")
    assert_refuses(
        varying_ops.fit_thresholds, [residual, torch.ones(9)], [1, 1], [1, 1], says="residual must be on cuda"
    )
    options = {"factors": [1.0], "begins": [0], "begin": 0, "end": 9, "threshold": 1.0}
    assert_refuses(
        varying_ops.accumulate_partition, [residual], [torch.ones(9)], **options, says="residual must be on cuda"
    )
    options["end"] = -1
    assert_refuses(
        varying_ops.accumulate_partition, [residual], [residual.clone()], **options, says="a partition must be"
    )
