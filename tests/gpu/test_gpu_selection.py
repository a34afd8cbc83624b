"""Accumulation and selection on a GPU: results equal those of the CPU and of the reference, bit for bit."""

import math

import numpy as np
import torch
from gpu_helpers import DTYPES, KINDS, SIZES, SMALL, assert_refuses, assert_same, make
from hinted import as_hints

from hvd_sparse import reference
from hvd_sparse.buckets import BucketLayout
from hvd_sparse.torch import bucket_ops, ops, varying_ops

RULES = (
    {},
    {"momentum": 0.9},
    {"momentum": 0.7, "nesterov": True, "weight_decay": 0.01, "factor": 0.5},
)


def counts_for(n):
    return sorted({1, n, *(max(1, round(density * n)) for density in (0.001, 0.1, 0.5))})


def check_selection(values, k, seed=5, hint=0.0):
    expected = ops.select_top_k(values, k, seed, hint)
    found = ops.select_top_k(values.cuda(), k, seed, hint)
    context = (values.dtype, values.numel(), k, hint)
    assert_same(found[0], expected[0], context)
    assert_same(found[1], expected[1], context)
    assert found[2][0].item() == expected[2][0].item(), context
    if 0 < hint < math.inf:
        reached = int(((values.abs().double() >= hint) & (values != 0)).sum())
        assert found[2][1].item() == reached, context


def test_select_top_k():
    for kind in KINDS:
        for dtype in DTYPES:
            for n in SIZES[:-1]:
                values = make(kind, n, dtype)
                for k in counts_for(n):
                    check_selection(values, k)


def test_select_top_k_of_millions():
    for dtype in DTYPES:
        for kind in ("normal", "ties", "nan", "sparse"):
            values = make(kind, SIZES[-1], dtype)
            for k in (1, 3000, SIZES[-1] // 2):
                check_selection(values, k)


def test_hints_wrong_in_both_directions_change_nothing():
    for n, k in ((65_537, 65), (SIZES[-1], 3000)):
        for kind in ("normal", "ties", "heavy_tailed", "infinite"):
            values = make(kind, n)
            exact = float(np.sort(np.nan_to_num(values.abs().numpy(), posinf=1e38))[-k])
            for hint in (5e-324, exact / 100, exact * 0.98, exact, exact * 1.001, exact * 100, 1e300, math.inf):
                check_selection(values, k, hint=hint)


def test_selection_matches_the_reference():
    values = make("ties", 4099)
    expected = reference.select_top_k(values.numpy(), 700, 3)
    found = ops.select_top_k(values.cuda(), 700, 3)
    np.testing.assert_array_equal(found[0].cpu().numpy(), expected[0])
    np.testing.assert_array_equal(found[1].cpu().numpy(), expected[1])


def test_views_and_misaligned_values():
    whole = make("normal", 70_001)
    on_gpu = whole.cuda()
    for begin in (1, 2, 3):
        found = ops.select_top_k(on_gpu[begin:], 70, 5, 1.0)
        assert_same(found[0], ops.select_top_k(whole[begin:], 70, 5, 1.0)[0])
    matrix = whole[:70_000].view(700, 100).t()
    assert_same(ops.select_top_k(on_gpu[:70_000].view(700, 100).t(), 70, 5)[0], ops.select_top_k(matrix, 70, 5)[0])


def memories(n, rule, device, offset=0):
    drawn = [make("normal", n + offset, seed=seed).to(device)[offset:] for seed in (1, 2, 3)]
    parameter = drawn[2] if "weight_decay" in rule else None
    return drawn[0], drawn[1] if rule else None, parameter


def accumulate_and_select(gradient, memory, k, hint, factor=1.0, **rule):
    """A bucket of one tensor: the payload, float64[1, 2], and bool[1], whether the gradient was finite."""
    n, (residual, velocity, parameter) = gradient.numel(), memory
    lists = [[] if one is None else [one] for one in (velocity, parameter)]
    out = torch.empty(ops.payload_size(n, k), dtype=torch.uint8, device=gradient.device)
    hints = as_hints([hint], [k]).to(gradient.device)
    form = {"layout": BucketLayout([n], [k]), "factors": [factor], "hints": hints, "seed": 3}
    return out, *bucket_ops.accumulate_bucket([gradient], [residual], *lists, out=out, **form, **rule)


def check_accumulation(gradient, rule, hint, offset=0):
    n = gradient.numel()
    k = max(1, n // 100)
    expected_memory, memory = memories(n, rule, "cpu", offset), memories(n, rule, "cuda", offset)
    context = (gradient.dtype, n, rule, hint)
    expected = accumulate_and_select(gradient, expected_memory, k, hint, **rule)
    found = accumulate_and_select(gradient.cuda(), memory, k, hint, **rule)
    for mine, theirs in zip(memory[:2], expected_memory[:2], strict=True):
        if mine is not None:
            assert_same(mine, theirs, context)
    assert_same(found[0], expected[0], context)
    assert found[1][0, 0].item() == expected[1][0, 0].item(), context
    assert_same(found[2], expected[2], context)
    expected_finite = ops.accumulate(gradient, *expected_memory, **rule)
    finite = ops.accumulate(gradient.cuda(), *memory, **rule)
    assert_same(finite, expected_finite, context)
    assert_same(memory[0], expected_memory[0], context)


def test_accumulate_and_select():
    for dtype in DTYPES:
        for n in SIZES:
            for rule in RULES:
                check_accumulation(make("normal", n, dtype), rule, 2.0)
        for kind in ("nan", "infinite", "denormal", "heavy_tailed", "zeros"):
            for rule in RULES:
                check_accumulation(make(kind, 65_537, dtype), rule, 2.5)
    for hint in (0.0, 1e-3, 1e9):
        check_accumulation(make("normal", 300_001), RULES[1], hint)
    check_accumulation(make("normal", 300_001), RULES[2], 2.0, offset=1)


def test_nothing_to_accumulate():
    empty = torch.empty(0, device="cuda")
    assert ops.accumulate(empty, empty.clone()).item() is True
    assert ops.all_finite(empty).item() is True
    assert ops.filter_threshold(empty, 1.0)[0].numel() == 0
    assert_refuses(ops.select_top_k, empty, 1, says="k must be in [1, 0]")
    assert_refuses(ops.select_top_k, torch.ones(5, device="cuda"), 6, says="k must be in [1, 5]")


def test_thresholds():
    n = 20_001 if SMALL else 300_001
    for kind in KINDS:
        for dtype in DTYPES:
            values = make(kind, n, dtype)
            for k in (1, 300, n // 2, n):
                for method in ("exact", "sampled"):
                    expected = ops.select_threshold(values, k, method, 0.01, 7)
                    assert_same(ops.select_threshold(values.cuda(), k, method, 0.01, 7), expected, (kind, dtype, k))


def test_filter_and_finite():
    for kind in KINDS:
        for dtype in DTYPES:
            values = make(kind, 65_537, dtype)
            assert_same(ops.all_finite(values.cuda()), ops.all_finite(values), (kind, dtype))
            for threshold in (0.0, 0.5, 3.0, 1e300, math.inf):
                expected = ops.filter_threshold(values, threshold)
                found = ops.filter_threshold(values.cuda(), threshold)
                assert_same(found[0], expected[0], (kind, dtype, threshold))
                assert_same(found[1], expected[1], (kind, dtype, threshold))
    assert_refuses(ops.filter_threshold, torch.ones(3, device="cuda"), math.nan, says="threshold must be")


def test_quantize():
    for kind in KINDS:
        values = make(kind, 65_537) * 1000
        for value_dtype in ("float32", "float16", "bfloat16", "none"):
            assert_same(ops.quantize(values.cuda(), value_dtype), ops.quantize(values, value_dtype), value_dtype)


def test_quantize_to_bits():
    indices = torch.arange(0, 3 * 65_537, 3)
    for segments in (None, torch.tensor([[0, 100], [5000, 1], [6000, 700]])):
        places = None if segments is None else indices
        for kind in KINDS:
            values = make(kind, 65_537)
            for value_dtype in ("int2", "int1"):
                for level in ("mean", "min"):
                    expected = ops.quantize(values, value_dtype, level, places, segments)
                    on_gpu = None if places is None else places.cuda()
                    found = ops.quantize(values.cuda(), value_dtype, level, on_gpu, segments)
                    assert_same(found, expected, (kind, value_dtype, level))


def test_tensors_on_two_devices_are_refused():
    on_gpu = torch.ones(9, device="cuda")
    assert_refuses(ops.accumulate, on_gpu, torch.zeros(9), says="residual must be on cuda")
    assert_refuses(ops.accumulate, torch.ones(9), on_gpu, says="gradient must be a CUDA tensor")
    options = {"factors": [1.0], "thresholds": [1.0], "ks": [0]}
    assert_refuses(varying_ops.filter_bucket, [on_gpu], [torch.zeros_like(on_gpu)], **options, says="no CUDA tensors")


def test_another_stream():
    values = make("normal", 3_000_001)
    on_gpu = values.cuda()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        shifted = on_gpu + 1.0
        found = ops.select_top_k(shifted, 3000, 1)
    stream.synchronize()
    assert_same(found[0], ops.select_top_k(values + 1.0, 3000, 1)[0])
