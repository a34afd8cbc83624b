"""Values of 2 bits and 1, and dense payloads: by hand, and torch.ops.hvd_sparse.* equal the NumPy twins."""

import math
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_ops import same
from tiers import examples

from hvd_sparse import reference, wire
from hvd_sparse.torch import ops, varying_ops

LOW_BIT = ["int2", "int1"]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.0, math.inf, -math.inf, 1e-45, -1e-45, 1.1754944e-38, 3.4028235e38, -3.4028235e38]
VALUES = [-3.0, 1.0, 0.0, -0.0, 2.0, -6.0]  # magnitudes 3, 1, 2 and 6: a mean of 3


def tensor(array):
    return None if array is None else torch.from_numpy(np.asarray(array))


@pytest.mark.parametrize(
    ("value_dtype", "level", "segments", "expected"),
    [
        ("int1", "mean", None, [-3, 3, 3, -3, 3, -3]),
        ("int1", "min", None, [-1, 1, 1, -1, 1, -1]),
        ("int2", "mean", None, [-4.5, 1.5, 1.5, -1.5, 1.5, -4.5]),  # 3 reaches the mean: it is large
        ("int2", "min", None, [-3, 1, 1, -1, 1, -3]),
        ("int1", "mean", [[0, 1]], [-3, 3, 3, -3, 3, -3]),
        ("int1", "mean", [[0, 2]], [-2.5, 3.5, 2.5, -3.5, 2.5, -3.5]),  # channels -3, 0, 2 and 1, -0, -6
        ("int1", "min", [[0, 2]], [-2, 1, 2, -1, 2, -1]),
        ("int2", "mean", [[0, 2]], [-3, 1, 2, -1, 2, -6]),
        ("int1", "mean", [[0, 1], [3, 3]], [-2, 2, 2, -0.0, 2, -6]),  # -3, 1, 0; then three groups of one
        ("int2", "mean", [[0, 4], [4, 1]], [-3, 1, 0, -0.0, 2, -6]),  # four groups of one; then 2 and -6
    ],
)
def test_examples_worked_out_by_hand(value_dtype, level, segments, expected):
    found = reference.quantize(np.float32(VALUES), value_dtype, level, np.arange(6), segments)
    same(tensor(found), np.float32(expected))


@pytest.mark.parametrize(
    ("value_dtype", "values", "expected"),
    [
        ("int1", [0.0, -0.0], [0.0, -0.0]),
        ("int2", [0.0, -0.0], [0.0, -0.0]),
        ("int1", [0.1, -0.1, 0.1], [0.1, -0.1, 0.1]),
        ("int2", [0.1, -0.1, 0.1], [0.1, -0.1, 0.1]),
        ("int2", [0.1, -0.1, 0.0], [0.1, -0.1, 0.0]),  # no small values: their level is zero
        ("int1", [3.4028235e38, -3.4028235e38], [3.4028235e38, -3.4028235e38]),
        ("int1", [4e-45, -1e-45, 4e-45], [3e-45, -3e-45, 3e-45]),  # 3, 1 and 3 units: 7 / 3
        ("int2", [math.inf, -1.0, 3.0], [math.inf, -2.0, 2.0]),
        ("int1", [-5.0], [-5.0]),
        ("int2", [-5.0], [-5.0]),
    ],
)
def test_awkward_values_by_hand(value_dtype, values, expected):
    same(tensor(reference.quantize(np.float32(values), value_dtype)), np.float32(expected))


def test_a_mean_halfway_between_two_floats_is_rounded_to_even():
    """A product of the sum with 1 / 98, rounded, would be below the middle."""
    odd, even = np.float32(2) - np.float32([3 * 2.0**-23, 2 * 2.0**-23])
    values = np.float32([odd, -even] * 49)
    for found in (tensor(reference.quantize(values, "int1")), ops.quantize(tensor(values), "int1")):
        same(found, np.float32([even, -even] * 49))


@pytest.mark.parametrize("value_dtype", ["int1", "int2"])
@pytest.mark.parametrize("level", ["mean", "min"])
def test_a_host_that_flushes_denormals_changes_nothing(value_dtype, level):
    values = np.float32([1e-45, -3e-45, 2e-45, 7e-45, 1e-40])
    expected = reference.quantize(values, value_dtype, level)
    torch.set_flush_denormal(True)
    try:
        found = ops.quantize(tensor(values), value_dtype, level)
    finally:
        torch.set_flush_denormal(False)
    same(found, expected)


@pytest.mark.parametrize(
    ("n", "k", "coding", "value_dtype", "segments", "size"),
    [
        (100, 3, "run_length", "int1", None, 48),  # 32 + 2 + 6 = 40, a level, 3 bits: 45
        (100, 4, "run_length", "int1", None, 56),  # 42 -> 44, a level, 4 bits: 49
        (100, 3, "run_length", "int2", None, 56),  # 40, two levels, 6 bits: 49
        (100, 50, "run_length", "int2", [[0, 3], [90, 2]], 192),  # 134 -> 136, ten levels, 100 bits: 189
        (100, 3, "run_length", "int1", [[0, 10]], 56),  # 40, three entries meet three groups of ten, 3 bits: 53
        (9, 9, "dense", "float32", None, 72),  # 32 + 36 = 68
        (9, 9, "dense", "none", None, 32),
        (9, 9, "dense", "int1", None, 40),  # a level, 9 bits: 38
        (9, 9, "dense", "int2", [[0, 3], [6, 2]], 80),  # ten levels, 18 bits: 75
    ],
)
def test_payload_size_by_hand(n, k, coding, value_dtype, segments, size):
    assert wire.payload_size(n, k, coding, value_dtype, segments) == size
    assert ops.payload_size(n, k, coding, value_dtype, tensor(segments)) == size


def sealed(start, entries, n, rest):
    header = b"HVDS" + bytes(start) + struct.pack("<QQ", n, entries)
    crc = zlib.crc32(header + bytes(8) + rest)
    return header + struct.pack("<II", crc, 0) + rest


def test_bytes_by_hand():
    """Elements 1, 4, 5 and 8 of three channels: the groups are 1, 1, 2 and 2, of which two of four could be met."""
    indices, segments = np.array([1, 4, 5, 8]), [[0, 3]]
    sent = np.float32([-0.5, 2.0, 1.0, -1.0])
    places = struct.pack("<H4H", 4, 1, 2, 0, 2) + bytes(2)
    section = struct.pack("<4f", 0.5, 2.0, 1.0, 1.0) + bytes(8)  # of each group the smaller first; room for a third
    codes = bytes([0b01_00_10_01])  # from the right: small and negative, large, small, small and negative
    expected = sealed([1, 0, 5, 0], 4, 9, places + section + codes + bytes(3))
    payload = reference.pack(indices, sent, 9, 4, "run_length", "int2", segments)
    assert payload.tobytes() == expected
    dense = sealed([1, 1, 6, 0], 9, 9, struct.pack("<f", 0.25) + bytes([0b0100_0110, 1, 0, 0]))
    signs = np.float32([1, -1, -1, 1, 1, 1, -1, 1, -1])
    assert reference.pack(np.arange(9), signs / 4, 9, 9, "dense", "int1").tobytes() == dense


@st.composite
def sent_entries(draw, dense=False):
    """Matrices one after the other or none said, indices of their elements, and values of them without NaN."""
    shapes = draw(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=4))
    sizes = [rows * channels + more % channels for rows, channels, more in shapes]  # the last row may be short
    n = sum(sizes)
    segments = np.array([np.cumsum(sizes) - sizes, [channels for _, channels, _ in shapes]]).T.copy()
    indices = np.arange(n) if dense else np.array(sorted(draw(st.sets(st.integers(0, n - 1), min_size=1))))
    number = st.one_of(st.sampled_from(SPECIAL), st.integers(-4, 4), st.floats(width=32, allow_nan=False))
    values = np.float32(draw(st.lists(number, min_size=len(indices), max_size=len(indices))))
    return n, indices, values, draw(st.sampled_from([None, segments]))


FORMS = st.tuples(st.sampled_from(LOW_BIT), st.sampled_from(reference.LEVELS))


@given(sent_entries(), FORMS)
@examples(300)
def test_quantize_as_the_reference_does(case, form):
    _, indices, values, segments = case
    expected = reference.quantize(values, *form, indices, segments)
    same(ops.quantize(tensor(values), *form, tensor(indices), tensor(segments)), expected)
    assert (np.signbit(expected) == np.signbit(values)).all()
    if segments is None:
        same(ops.quantize(tensor(values), *form), expected)


@given(sent_entries(), st.sampled_from(LOW_BIT))
@examples(100)
def test_a_least_level_never_overshoots_and_a_mean_keeps_the_sum(case, value_dtype):
    _, indices, values, segments = case
    values = np.where(np.isfinite(values), values, 0)
    left = np.abs(values).astype(float)
    assert (reference.quantize(np.abs(values), value_dtype, "min", indices, segments)[left > 0] <= left[left > 0]).all()
    means = reference.quantize(values, value_dtype, "mean", indices, segments)[left > 0]
    assert np.abs(means).astype(float).sum() == pytest.approx(left.sum(), rel=1e-6, abs=len(left) * 2.0**-149)


def check_payload(n, indices, sent, form, segments):
    """The same bytes, and the same entries read from them; returns them."""
    k = len(indices)
    payload = reference.pack(indices, sent, n, k, *form, segments)
    assert ops.payload_size(n, k, *form, tensor(segments)) == payload.size
    out = torch.full((payload.size,), 255, dtype=torch.uint8)
    ops.pack(tensor(indices), tensor(sent), n, k, out, *form, tensor(segments))
    same(out, payload)
    for found in (reference.unpack(payload, n, k, *form, segments), ops.unpack(out, n, k, *form, tensor(segments))):
        for one, wanted in zip(found, (indices, sent), strict=True):
            same(torch.as_tensor(one), wanted)
    return payload


@given(st.booleans().flatmap(sent_entries), FORMS)
@examples(300)
def test_what_is_quantized_travels_unchanged(case, form):
    n, indices, values, segments = case
    sent = reference.quantize(values, *form, indices, segments)
    check_payload(n, indices, sent, ("run_length", form[0]), segments)
    if len(indices) == n:
        check_payload(n, indices, sent, ("dense", form[0]), segments)


@pytest.mark.parametrize("value_dtype", ["float32", "float64", "float16", "bfloat16", *LOW_BIT])
@pytest.mark.parametrize("n", [1, 9, 65536, 65537, 140_000])
def test_all_elements_travel_without_places(make, n, value_dtype):
    sent = make("heavy_tailed", n).numpy()
    sent = sent.astype(float) if value_dtype == "float64" else reference.quantize(sent, value_dtype)
    check_payload(n, np.arange(n), sent, ("dense", value_dtype), None)


@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "constant", "infinite", "denormal", "sparse", "striped"])
@pytest.mark.parametrize("value_dtype", LOW_BIT)
def test_large_tensors_of_every_kind(make, kind, value_dtype):
    n, segments = 140_000, np.array([[0, 300], [60_000, 1], [61_000, 511]])
    values = make(kind, n).numpy()
    indices, selected, _ = reference.select_top_k(values, 70_000)
    for level in reference.LEVELS:
        for some in (None, segments):
            sent = reference.quantize(selected, value_dtype, level, indices, some)
            same(ops.quantize(tensor(selected), value_dtype, level, tensor(indices), tensor(some)), sent)
            check_payload(n, indices, sent, ("run_length", value_dtype), some)


@given(sent_entries(), st.sampled_from(LOW_BIT), st.data())
@examples(150)
def test_any_section_under_a_right_checksum_is_read_as_the_reference_does(case, value_dtype, data):
    n, indices, _, segments = case
    form = (n, len(indices), "run_length", value_dtype)
    payload = reference.pack(indices, np.zeros(len(indices), np.float32), *form, segments)
    begin = wire.payload_layout(*form, segments).values
    size = payload.size - begin
    payload[begin:] = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
    payload[24:28] = np.frombuffer(struct.pack("<I", reference.checksum(payload)), np.uint8)
    expected = reference.unpack(payload, *form, segments)
    for found, wanted in zip(ops.unpack(tensor(payload), *form, tensor(segments)), expected, strict=True):
        same(found, wanted)


def gathered_rows(rng, n, k, form, level, segments):
    """The payloads of four ranks, of which the third sends nothing, and the sum of what they send."""
    rows, sums = [], np.zeros(n, np.float32)
    for rank in range(4):
        indices = np.sort(rng.choice(n, 0 if rank == 2 else k, replace=False))
        values = rng.standard_normal(len(indices)).astype(np.float32)
        sent = reference.quantize(values, form[1], level, indices, segments)
        sums[indices] += np.float32(1 / 3) * sent
        rows.append(reference.pack(indices, sent, n, k, *form, segments))
    return np.pad(np.stack(rows), ((0, 0), (8, 16)), constant_values=255), sums


SUMS = [
    (9, 9, "dense", None),
    (9, 4, "run_length", [[0, 4]]),
    (65537, 65537, "dense", [[0, 7], [40_000, 1]]),
    (140_000, 70_000, "run_length", [[0, 300], [65_000, 40]]),
]


@pytest.mark.parametrize(("n", "k", "coding", "segments"), SUMS)
@pytest.mark.parametrize("value_dtype", ["float32", *LOW_BIT])
@pytest.mark.parametrize("level", reference.LEVELS)
def test_reduce_payloads(n, k, coding, segments, value_dtype, level):
    form = (coding, value_dtype)
    gathered, sums = gathered_rows(np.random.default_rng(n), n, k, form, level, segments)
    same(tensor(reference.reduce_payloads(gathered, 8, n, k, *form, 1 / 3, segments)), sums)
    out = torch.full((n,), math.nan)
    ops.reduce_payloads(tensor(gathered), 8, n, k, out, 1 / 3, *form, tensor(segments))
    same(out, sums)


@given(st.booleans().flatmap(sent_entries), FORMS)
@examples(100)
def test_what_arrives_and_what_is_left_are_what_was_there(case, form):
    """To the rounding of the one subtraction that makes the residual, in a float32."""
    n, indices, values, segments = case
    values = np.clip(values, -1e38, 1e38)
    sent = ops.quantize(tensor(values), *form, tensor(indices), tensor(segments))
    left = (tensor(values) - sent).numpy().astype(float)
    k, wanted = len(indices), ("run_length", form[0], tensor(segments))
    packed = torch.empty(ops.payload_size(n, k, *wanted), dtype=torch.uint8)
    ops.pack(tensor(indices), sent, n, k, packed, *wanted)
    out = torch.full((n,), math.nan)
    ops.reduce_payloads(packed[None], 0, n, k, out, 1.0, *wanted)
    arrived = out.numpy()[indices].astype(float)
    assert (np.abs(arrived + left - values) <= 2.0**-23 * np.abs(left)).all()
    assert (np.delete(out.numpy(), indices) == 0).all()


NS, CHANNELS, COUNTS = [70_000, 6, 1000], [7, 3, 20], [[30, 0, 1000], [0, 6, 1], [66_000, 2, 17]]  # by rank and member


def located_message(value_dtype, channels=CHANNELS):
    """The messages of all ranks, the places of their payloads, and each member's sum."""
    rng, parts, places = np.random.default_rng(0), [], []
    sums = [np.zeros(n, np.float32) for n in NS]
    for counts in COUNTS:
        for n, number, count, total in zip(NS, channels, counts, sums, strict=True):
            indices = np.sort(rng.choice(n, count, replace=False))
            sent = rng.standard_normal(count).astype(np.float32)
            sent = reference.quantize(sent, value_dtype, "mean", indices, [[0, number]])
            places.append((sum(part.size for part in parts), max(1, count)))
            parts.append(reference.pack(indices, sent, n, max(1, count), "run_length", value_dtype, [[0, number]]))
            total[indices] += np.float32(0.5) * sent
    return np.concatenate(parts), np.array(places).T.reshape(2, len(COUNTS), len(NS)), sums


@pytest.mark.parametrize("value_dtype", ["float32", *LOW_BIT])
def test_payloads_of_matrices_are_found_and_added(value_dtype):
    form = ("run_length", value_dtype)
    gathered, places, sums = located_message(value_dtype)
    same(tensor(reference.locate_payloads(gathered, NS, 3, *form, CHANNELS)), places)
    found = varying_ops.locate_payloads(tensor(gathered), NS, 3, *form, CHANNELS)
    same(found, places)
    for member, (n, total) in enumerate(zip(NS, sums, strict=True)):
        segments = np.array([[0, CHANNELS[member]]])
        same(tensor(reference.reduce_located(gathered, places[:, :, member], n, *form, 0.5, segments)), total)
        out = torch.full((n,), 7.0)
        varying_ops.reduce_located(
            tensor(gathered), found[:, :, member].contiguous(), n, out, 0.5, *form, tensor(segments)
        )
        same(out, total)


def test_payloads_of_single_groups_are_found_without_channels():
    gathered, places, _ = located_message("int2", [1, 1, 1])
    same(tensor(reference.locate_payloads(gathered, NS, 3, "run_length", "int2")), places)
    same(varying_ops.locate_payloads(tensor(gathered), NS, 3, "run_length", "int2"), places)


@pytest.mark.parametrize("channels", [[], [7, 3, 30], [7, 6, 20], [2, 3, 20], [1, 1, 1]])
def test_payloads_of_other_matrices_are_not_found(channels):
    gathered, _, _ = located_message("int1")
    with pytest.raises(ValueError, match=r"hvd_sparse.locate_payloads: .*(checksum|are left|end at|entries)"):
        varying_ops.locate_payloads(tensor(gathered), NS, 3, "run_length", "int1", channels)
    with pytest.raises(ValueError, match=r"are left|end at|entries"):
        reference.locate_payloads(gathered, NS, 3, "run_length", "int1", channels or None)
