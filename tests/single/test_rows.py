"""Selection in rows, and payloads of masked matrices: NumPy arrays and PyTorch tensors equal the reference."""

from functools import partial

import numpy as np
import pytest
import torch
from drawn import CODINGS, DAMAGE, WIDTHS, damaged, sealed, verdict
from drawn_rows import DENSITIES, WIDE_SEEDS, as_array, bars, every_kind, matrices, row_counts
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from hvd_sparse import native_rows, reference, wire
from hvd_sparse.torch import row_ops

DTYPES = sorted(WIDTHS)


def same(found, expected):
    """Equal bit for bit, but for the bits of a NaN."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    bits = f"u{found.itemsize}"
    alike = np.ascontiguousarray(found).view(bits) == np.ascontiguousarray(expected).view(bits)
    if found.dtype.kind == "f":
        alike |= np.isnan(found) & np.isnan(expected)
    assert alike.all(), (np.argwhere(~alike)[:5], found[~alike][:5], expected[~alike][:5])


def check_selection(values, k, seed):
    array = as_array(values)
    expected = reference.select_top_k_rows(array, k, seed)
    for ours, theirs in zip(row_ops.select_top_k_rows(values, k, seed), expected, strict=True):
        same(ours, theirs)


def check_thresholds(values, density):
    array = as_array(values)
    with np.errstate(all="ignore"):
        expected = reference.laplace_threshold_rows(array, density)
    same(row_ops.laplace_threshold_rows(values, density), expected)


def check_filter(values, thresholds):
    array = as_array(values)
    expected = reference.filter_threshold_rows(array, thresholds)
    same(row_ops.filter_threshold_rows(values, torch.from_numpy(thresholds)), expected)


@given(st.data(), matrices(), WIDE_SEEDS)
@examples(250)
def test_select_top_k_rows(data, values, seed):
    check_selection(values, data.draw(row_counts(values.shape[1])), seed)


@given(matrices(), DENSITIES)
@examples(200)
def test_laplace_threshold_rows(values, density):
    check_thresholds(values, density)


@given(st.data(), matrices())
@examples(200)
def test_filter_threshold_rows(data, values):
    check_filter(values, data.draw(bars(values)))


@pytest.mark.parametrize("shape", [(6, 500), (3, 4097), (1, 70_000), (200, 1), (30, 17)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_rows(dtype, shape):
    for _, values in every_kind(shape, dtype):
        for k in {1, -(-shape[1] // 20), shape[1] // 2 or 1, shape[1]}:
            check_selection(values, k, 11)
        check_thresholds(values, 0.05)
        exact = reference.select_top_k_rows(as_array(values), -(-shape[1] // 20))[1]
        check_filter(values, np.nan_to_num(exact))


def test_rows_of_very_different_scales():
    rng = np.random.default_rng(2)
    values = torch.from_numpy(rng.standard_normal((100, 700)) * 10.0 ** rng.integers(-30, 30, (100, 1)))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        check_selection(values.to(dtype), 35, 3)


def test_a_row_depends_on_no_other():
    values = torch.from_numpy(np.random.default_rng(4).integers(-9, 10, (50, 301)).astype(np.float32))
    whole = row_ops.select_top_k_rows(values, 15, 6)
    for row in range(50):
        alone = row_ops.select_top_k_rows(values[row : row + 1], 15, 6)
        same(alone[0][0], whole[0][row])
        same(alone[1], whole[1][row : row + 1])


@given(st.data(), matrices(), WIDE_SEEDS, st.sampled_from(CODINGS))
@examples(250)
def test_pack_rows(data, values, seed, coding):
    array, n = as_array(values), values.numel()
    mask = np.random.default_rng(seed % 2**32).random(values.shape) < data.draw(st.sampled_from([0, 0.02, 0.5, 1]))
    kept = max(1, int(mask.sum()))
    if n == 0 or (coding == "dense" and kept != n):
        for module in (reference, native_rows):
            with pytest.raises(ValueError, match="must be"):
                module.pack_rows(array, mask, coding)
        return
    payload = native_rows.pack_rows(array, mask, coding)
    same(payload, reference.pack_rows(array, mask, coding))
    form = (values.shape, kept, array.dtype.name, coding)
    found, expected = native_rows.unpack_rows(payload, *form), reference.unpack_rows(payload, *form)
    same_numbers(found[0], expected[0], form[2])
    same(found[1], expected[1])


@given(st.data(), matrices(), WIDE_SEEDS)
@examples(200)
def test_pack_kept(data, values, seed):
    array = as_array(values)
    mask = np.random.default_rng(seed % 2**32).random(values.shape) < data.draw(st.sampled_from([0, 0.02, 0.5, 1]))
    payload, name = native_rows.pack_kept(array, mask), array.dtype.name
    same(payload, reference.pack_kept(array, mask))
    same_numbers(native_rows.unpack_kept(payload, mask, name), reference.unpack_kept(payload, mask, name), name)


def same_numbers(found, expected, value_dtype):
    """Values of the payload's own type are the same numbers as the reference's, which are wide."""
    assert found.dtype == (np.uint16 if value_dtype == "bfloat16" else value_dtype)
    if value_dtype == "bfloat16":
        same((found.astype(np.uint32) << 16).view(np.float32), expected)
    else:
        same(found.astype(expected.dtype), expected)


@given(st.data(), matrices("bfloat16"))
@examples(60)
def test_bits_of_bfloat16(data, values):
    """What PyTorch can give NumPy of a bfloat16 tensor does as well."""
    array = as_array(values)
    raw = array.view(np.uint16)
    mask, _ = reference.select_top_k_rows(array, data.draw(row_counts(values.shape[1])))
    if values.numel() > 0:
        same(native_rows.pack_rows(raw, mask, value_dtype="bfloat16"), native_rows.pack_rows(array, mask))
    same(native_rows.pack_kept(raw, mask, value_dtype="bfloat16"), native_rows.pack_kept(array, mask))


@given(st.data(), matrices(), DAMAGE, st.sampled_from([*CODINGS[2:], "run_length"]), st.booleans())
@examples(300)
def test_damaged_payloads_are_refused_or_read_the_same(data, values, damage, coding, is_sealed):
    array = as_array(values)
    mask = np.random.default_rng(values.numel()).random(values.shape) < 0.3
    kept, name = max(1, int(mask.sum())), array.dtype.name
    form = (values.shape, kept, name, coding)
    calls = [("unpack_kept", reference.pack_kept(array, mask), (mask, name))]
    if values.numel() > 0:
        calls.append(("unpack_rows", reference.pack_rows(array, mask, coding), form))
    for function, payload, arguments in calls:
        payload = damaged(payload, damage)
        payload = sealed(payload) if is_sealed and payload.size >= 32 else payload
        expected = verdict(partial(getattr(reference, function), payload, *arguments))
        found = verdict(partial(getattr(native_rows, function), payload, *arguments))
        assert (expected is None) == (found is None)
        if found is not None:
            same_numbers(as_tuple(found)[0], as_tuple(expected)[0], name)
            for ours, theirs in zip(as_tuple(found)[1:], as_tuple(expected)[1:], strict=True):
                same(ours, theirs)


def as_tuple(found):
    return found if isinstance(found, tuple) else (found,)


def test_payloads_of_other_masks_are_refused():
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    payload = native_rows.pack_kept(values, values > 5)
    for mask in (values > 4, values > 6, values > 99):
        with pytest.raises(ValueError, match="payload"):
            native_rows.unpack_kept(payload, mask, "float32")
    with pytest.raises(ValueError, match="entries is 0, expected 1"):
        native_rows.unpack_kept(native_rows.pack_kept(values, values > 99), values > 10, "float32")
    with pytest.raises(ValueError, match="entries is 1, expected 0"):
        native_rows.unpack_kept(native_rows.pack_kept(values, values > 10), values > 99, "float32")
    payload = native_rows.pack_rows(values, values > 5)
    for shape, k in (((4, 4), 6), ((3, 4), 5), ((3, 4), 7)):
        with pytest.raises(ValueError, match="payload"):
            native_rows.unpack_rows(payload, shape, k, "float32")
    with pytest.raises(ValueError, match="payload size in bytes is"):
        native_rows.unpack_rows(payload, (3, 4), 6, "float16")


MATRIX, MASK = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.bool_)
PAYLOAD = np.zeros(40, np.uint8)
REFUSED = {
    "values must be a matrix with at least one column, got \\[4\\]": lambda: native_rows.pack_kept(
        np.zeros(4, np.float32), MASK
    ),
    "at least one column, got \\[4, 0\\]": lambda: native_rows.pack_kept(np.zeros((4, 0)), MASK),
    "at least one column, got list": lambda: native_rows.pack_kept([[1.0]], MASK),
    "values must be of dtype float32.*; got int64": lambda: native_rows.pack_kept(np.zeros((2, 3), np.int64), MASK),
    "values must be of dtype float32.*; got uint16": lambda: native_rows.pack_kept(np.zeros((2, 3), np.uint16), MASK),
    'got float32 with value_dtype="bfloat16"': lambda: native_rows.pack_kept(MATRIX, MASK, value_dtype="bfloat16"),
    "values must be contiguous, got strides": lambda: native_rows.pack_kept(MATRIX[:, ::2], MASK[:, :2].copy()),
    "mask must be a contiguous array of bool, got uint8": lambda: native_rows.pack_rows(MATRIX, MASK.view(np.uint8)),
    "mask must have the shape of the values, \\[2, 3\\]; got \\[3, 2\\]": lambda: native_rows.pack_rows(
        MATRIX, MASK.reshape(3, 2)
    ),
    "mask must have the shape of the values": lambda: native_rows.pack_kept(MATRIX, MASK.reshape(6)),
    "coding must be one of": lambda: native_rows.pack_rows(MATRIX, MASK, "morse"),
    "k must be n = 6 where all are sent, got 1": lambda: native_rows.pack_rows(MATRIX, MASK, "dense"),
    "payload must be a contiguous array uint8": lambda: native_rows.unpack_rows(MATRIX, (2, 3), 1, "float32"),
    "shape must be an integer of at least 0, got -2": lambda: native_rows.unpack_rows(PAYLOAD, (-2, -3), 1, "float32"),
    "value_dtype must be one of float32.*; got 'int2'": lambda: native_rows.unpack_rows(PAYLOAD, (2, 3), 1, "int2"),
    "value_dtype must be one of float32.*; got 'none'": lambda: native_rows.unpack_kept(PAYLOAD, MASK, "none"),
    "k must be an integer of at least 1, got -1": lambda: native_rows.unpack_rows(PAYLOAD, (2, 3), -1, "float32"),
    "k must be at most n = 6, got 7": lambda: native_rows.unpack_rows(PAYLOAD, (2, 3), 7, "float32"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_numpy_says_what_was_wrong(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def test_torch_says_what_was_wrong():
    values = torch.zeros(2, 3)
    refused = {
        "values must be a matrix with at least one column, got": lambda: row_ops.select_top_k_rows(values[0], 1),
        "values must be float32, float64, float16 or bfloat16, got Int": lambda: row_ops.select_top_k_rows(
            values.int(), 1
        ),
        "number of columns, 3; got 4": lambda: row_ops.select_top_k_rows(values, 4),
        "number of columns, 3; got 0": lambda: row_ops.select_top_k_rows(values, 0),
        "density must be in \\(0, 1\\], got 1.5": lambda: row_ops.laplace_threshold_rows(values, 1.5),
        "thresholds must be Double, got Float": lambda: row_ops.filter_threshold_rows(values, torch.zeros(2)),
        "thresholds must have 1 or 2 elements": lambda: row_ops.filter_threshold_rows(values, torch.zeros(3).double()),
        "thresholds must be at least 0, got -1": lambda: row_ops.filter_threshold_rows(values, -torch.ones(1).double()),
    }
    for message, call in refused.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_threads_and_layout_change_nothing():
    values = torch.from_numpy(np.random.default_rng(3).integers(-99, 99, (301, 400)).astype(np.float32))
    alone = row_ops.select_top_k_rows(values, 20, 5)
    turned = row_ops.select_top_k_rows(values.t().contiguous().t(), 20, 5)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        together = row_ops.select_top_k_rows(values, 20, 5)
        thresholds = row_ops.laplace_threshold_rows(values, 0.05)
    finally:
        torch.set_num_threads(threads)
    for other in (turned, together):
        assert torch.equal(alone[0], other[0]) and torch.equal(alone[1], other[1])
    assert torch.equal(thresholds, row_ops.laplace_threshold_rows(values, 0.05))


def test_torch_operators_pass_opcheck():
    values = torch.randn(4, 9)
    ops = torch.ops.hvd_sparse
    for op, arguments in (
        (ops.select_top_k_rows, (values, 2, 0)),
        (ops.laplace_threshold_rows, (values, 0.1)),
        (ops.filter_threshold_rows, (values, torch.ones(4).double())),
    ):
        torch.library.opcheck(op.default, arguments)


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_traces_them_whole(dynamic):
    def keep(values):
        mask, thresholds = row_ops.select_top_k_rows(values, 3, 7)
        bars = row_ops.laplace_threshold_rows(values, 0.5)
        passed = row_ops.filter_threshold_rows(values, bars)
        return torch.where(mask, values, 0.0), torch.where(passed, values, 0.0), thresholds, bars

    compiled = torch.compile(keep, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows, columns in ((4, 9), (7, 33), (2, 5)):
        values = torch.randn(rows, columns, requires_grad=True)
        for found, expected in zip(compiled(values), keep(values), strict=True):
            assert torch.equal(found, expected)
        compiled(values)[0].sum().backward()
        assert int((values.grad != 0).sum()) == 3 * rows


def test_sizes_are_those_of_the_wire():
    values = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    mask, _ = reference.select_top_k_rows(values, 26)
    assert native_rows.pack_rows(values, mask).size == wire.payload_size(64 * 512, 64 * 26, "auto")
    assert native_rows.pack_kept(values, mask).size == wire.payload_size(64 * 26, 64 * 26, "dense")
