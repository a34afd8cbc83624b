"""Selection in rows on a GPU: results equal the CPU's, bit for bit."""

import torch
from gpu_helpers import CAN_CAPTURE, CANNOT_CAPTURE, DTYPES, KINDS, SMALL, assert_refuses, assert_same, make, need

from hvd_sparse.torch import row_ops

SHAPES = ((1, 1), (0, 5), (200, 1), (3, 31), (64, 257)) + (() if SMALL else ((512, 4096), (2, 70_001)))


def matrix(kind, rows, columns, dtype=torch.float32):
    return make(kind, rows * columns, dtype).reshape(rows, columns)


def check_rows(values, k, seed=5):
    context = (values.dtype, values.shape, k)
    mask, thresholds = row_ops.select_top_k_rows(values, k, seed)
    found = row_ops.select_top_k_rows(values.cuda(), k, seed)
    assert_same(found[0], mask, context)
    assert_same(found[1], thresholds, context)
    bars = thresholds.nan_to_num(1.0)
    passed = row_ops.filter_threshold_rows(values.cuda(), bars.cuda())
    assert_same(passed, row_ops.filter_threshold_rows(values, bars), context)


def test_rows_of_every_kind():
    for kind in KINDS:
        for dtype in DTYPES:
            for rows, columns in SHAPES:
                values = matrix(kind, rows, columns, dtype)
                for k in sorted({1, -(-columns // 20), -(-columns // 2), columns}):
                    check_rows(values, k)


def test_laplace_thresholds():
    for kind in KINDS:
        for dtype in DTYPES:
            for rows, columns in SHAPES:
                values = matrix(kind, rows, columns, dtype)
                for density in (0.05, 1.0):
                    expected = row_ops.laplace_threshold_rows(values, density)
                    assert_same(row_ops.laplace_threshold_rows(values.cuda(), density), expected, (kind, dtype, rows))


def test_thresholds_for_all_rows():
    values = matrix("nan", 64, 257)
    for bar in (0.0, 5e-324, 1.0, 1e300, float("inf")):
        bars = torch.tensor([bar], dtype=torch.float64)
        expected = row_ops.filter_threshold_rows(values, bars)
        assert_same(row_ops.filter_threshold_rows(values.cuda(), bars.cuda()), expected, bar)


def test_views_are_read_row_by_row():
    values = matrix("normal", 257, 64).t()
    for found, expected in zip(
        row_ops.select_top_k_rows(values.cuda(), 9), row_ops.select_top_k_rows(values.contiguous(), 9), strict=True
    ):
        assert_same(found, expected)


def test_nothing_waits_for_the_device():
    """A capture into a CUDA graph fails where the host would have to wait."""
    need(CAN_CAPTURE, CANNOT_CAPTURE)
    values = matrix("normal", 64, 257).cuda()
    bars = torch.ones(64, dtype=torch.float64, device="cuda")
    row_ops.select_top_k_rows(values, 9)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = (
            *row_ops.select_top_k_rows(values, 9),
            row_ops.laplace_threshold_rows(values, 0.05),
            row_ops.filter_threshold_rows(values, bars),
        )
    values.copy_(matrix("ties", 64, 257))
    graph.replay()
    torch.cuda.synchronize()
    other = values.cpu()
    expected = (
        *row_ops.select_top_k_rows(other, 9),
        row_ops.laplace_threshold_rows(other, 0.05),
        row_ops.filter_threshold_rows(other, bars.cpu()),
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)


def test_what_is_refused():
    values = torch.zeros(2, 3, device="cuda")
    assert_refuses(row_ops.select_top_k_rows, values, 4, says="number of columns, 3; got 4")
    assert_refuses(row_ops.select_top_k_rows, values[0], 1, says="a matrix with at least one column")
    assert_refuses(row_ops.laplace_threshold_rows, values, 0.0, says="density must be in (0, 1]")
    cpu = torch.ones(2, dtype=torch.float64)
    assert_refuses(row_ops.filter_threshold_rows, values, cpu, says="thresholds must be on cuda:0")
    assert_refuses(row_ops.filter_threshold_rows, values, cpu.float().cuda(), says="thresholds must be Double")
    assert_refuses(row_ops.filter_threshold_rows, values, torch.ones(3).double().cuda(), says="1 or 2 elements")
