"""Codings of positions: by hand, their sizes and the entropy, and torch.ops.hvd_sparse.* equal the NumPy twins."""

import math
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_low_bit import LOW_BIT, check_payload, sent_entries, tensor
from test_ops import same
from tiers import examples

from hvd_sparse import reference, wire
from hvd_sparse.torch import ops, varying_ops

CODINGS = ["run_length", "elias_fano", "bitmap", "auto"]  # of any number of entries
DTYPES = ["float32", "float64", "float16", "bfloat16", "none"]
RESNET = 25_600_000
FITS = st.sampled_from(CODINGS)


def sealed(start, entries, n, rest):
    header = b"HVDS" + bytes(start) + struct.pack("<QQ", n, entries)
    return header + struct.pack("<II", zlib.crc32(header + bytes(8) + rest), 0) + rest


# Elements 1, 4 and 9 of 10. With l low bits their Elias-Fano code is 3 l + floor(9 / 2^l) + 3 bits long: 12 for l = 0,
# 10 for l = 1, 11 for l = 2. So each is cut into one low bit and the rest: 0 and 1, 2 and 0, 4 and 1. The low bits,
# from the right, are 101: the byte 0x05. The rest, plus the number of entries before, are 0 + 0, 2 + 1 and 4 + 2:
# bits 0, 3 and 6, the byte 0x49. The bitmap has the bits 1 and 4 of its first byte, 0x12, and bit 1 of its second.
INDICES, FANO, BITMAP = [1, 4, 9], "0549", "1202"


@pytest.mark.parametrize(
    ("coding", "value_dtype", "start", "rest"),
    [
        ("elias_fano", "none", [1, 2, 4, 0], FANO + "000000000000"),
        ("elias_fano", "float16", [1, 2, 2, 0], FANO + "003c 00c0 0038"),
        ("elias_fano", "float32", [1, 2, 0, 0], FANO + "0000 0000803f 000000c0 0000003f"),
        ("bitmap", "none", [1, 3, 4, 0], BITMAP + "000000000000"),
        ("bitmap", "float16", [1, 3, 2, 0], BITMAP + "003c 00c0 0038"),
        ("bitmap", "float32", [1, 3, 0, 0], BITMAP + "0000 0000803f 000000c0 0000003f"),
        ("auto", "float16", [1, 3, 2, 0], BITMAP + "003c 00c0 0038"),  # as short as Elias-Fano: two bytes
    ],
)
def test_payloads_worked_out_by_hand(coding, value_dtype, start, rest):
    form, rest = (coding, value_dtype), bytes.fromhex(rest)
    rest += bytes(-len(rest) % 8)
    payload = reference.pack(INDICES, np.float32([1, -2, 0.5]), 10, 3, *form)
    assert payload.tobytes() == sealed(start, 3, 10, rest)
    assert reference.pack([], [], 10, 3, *form).tobytes() == sealed(start, 0, 10, bytes(len(rest)))
    for found in (reference.unpack(payload, 10, 3, *form), ops.unpack(tensor(payload), 10, 3, *form)):
        assert found[0].tolist() == INDICES


def test_low_bits_longer_than_a_byte_by_hand():
    """300 and 999 of 1000: 8 low bits, 2 * 8 + 3 + 2 = 21 bits, and no fewer with 7 (23) or 9 (21, but one more)."""
    assert wire.elias_fano_low_bits(1000, 2) == 8
    section = reference.encode_elias_fano([300, 999], 1000)
    assert section.tolist() == [300 - 256, 999 - 3 * 256, 0b10010]  # the rest is 1 and 3: bits 1 + 0 and 3 + 1
    assert reference.decode_elias_fano(section, 2, 1000).tolist() == [300, 999]


@pytest.mark.parametrize(
    ("n", "k", "coding", "value_dtype", "size"),
    [
        (1, 1, "elias_fano", "none", 40),  # a byte with a bit
        (65, 65, "elias_fano", "none", 56),  # 64 + 65 bits: 17 bytes
        (RESNET, 25_600, "elias_fano", "none", 38_288),  # 9 * 25,600 bits, 49,999 + 25,600 bits: 32 + 28,800 + 9,450
        (RESNET, 25_600, "elias_fano", "float32", 140_688),  # 38,282 -> 38,284, + 102,400 = 140,684
        (65, 2, "bitmap", "float32", 56),  # 32 + 9 = 41 -> 44, + 8
        (RESNET, 25_600, "bitmap", "float64", 32 + 3_200_000 + 204_800),
        (9, 9, "auto", "float32", 72),  # all are sent: 32 + 36
        (RESNET, 25_600, "auto", "float16", 89_488),  # Elias-Fano: 38,282 + 51,200 = 89,482
    ],
)
def test_payload_size_by_hand(n, k, coding, value_dtype, size):
    assert wire.payload_size(n, k, coding, value_dtype) == ops.payload_size(n, k, coding, value_dtype) == size


@given(st.one_of(st.integers(1, 300), st.integers(1, 2**48)), st.floats(0, 1))
@examples(300)
def test_low_bits_are_the_fewest_that_make_it_shortest(n, fraction):
    k = max(1, int(n * fraction**4))
    bits = [k * low + (n - 1 >> low) + k for low in range(60)]
    assert wire.elias_fano_low_bits(n, k) == bits.index(min(bits))


@given(st.one_of(st.integers(1, 300), st.integers(1, 2**48)), st.floats(0, 1), st.sampled_from([*DTYPES, *LOW_BIT]))
@examples(300)
def test_auto_is_never_larger_than_another_and_both_sides_agree_on_sizes(n, fraction, value_dtype):
    k = max(1, int(n * fraction**4))
    least = wire.payload_size(n, k, "auto", value_dtype)
    assert ops.payload_size(n, k, "auto", value_dtype) == least
    for coding in [*CODINGS[:3], *(["dense"] if k == n else [])]:
        size = wire.payload_size(n, k, coding, value_dtype)
        assert least <= size == ops.payload_size(n, k, coding, value_dtype)
    assert wire.payload_size(n, k, wire.resolve_coding("auto", n, k), value_dtype) == least


def test_auto_is_never_larger_at_any_small_size():
    for n in range(1, 130):
        for k in range(1, n + 1):
            sizes = {coding: wire.positions_size(coding, n, k) for coding in ("bitmap", "elias_fano", "run_length")}
            chosen = wire.resolve_coding("auto", n, k)
            assert chosen == ("dense" if k == n else min(sizes, key=sizes.get))  # the first where there are several
            assert wire.positions_size(chosen, n, k) <= min(sizes.values())
            assert wire.payload_layout(n, k, "auto").coding == chosen


@pytest.mark.parametrize(
    ("density", "coding"),
    [
        *((1e-6, "elias_fano"), (0.001, "elias_fano"), (0.01, "elias_fano"), (0.1, "elias_fano")),
        *((0.2, "elias_fano"), (0.3, "bitmap"), (0.5, "bitmap"), (0.999, "bitmap"), (1.0, "dense")),
    ],
)
def test_auto_at_these_densities_is(density, coding):
    k = wire.top_k_count(RESNET, density)
    assert wire.resolve_coding("auto", RESNET, k) == wire.payload_layout(RESNET, k, "auto").coding == coding
    assert [wire.resolve_coding(name, RESNET, k) for name in wire.CODINGS] == list(wire.CODINGS)


def entropy(n, k):
    """log2(C(n, k)) / k: no code of k of n takes fewer bits an index for all of them."""
    nats = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return nats / math.log(2) / k


@pytest.mark.parametrize(
    ("density", "excess"),
    [(1e-5, 0.05), (1e-4, 0.05), (3e-4, 0.05), (0.001, 0.05), (0.01, 0.08), (0.05, 0.25), (0.1, 0.25), (0.25, 0.25)],
)
def test_elias_fano_is_near_the_entropy(density, excess):
    k = wire.top_k_count(RESNET, density)
    bits = 8 * wire.positions_size("elias_fano", RESNET, k) / k
    assert entropy(RESNET, k) <= bits <= (1 + excess) * entropy(RESNET, k)


def test_elias_fano_takes_twelve_bits_an_index_at_a_thousandth():
    assert entropy(RESNET, 25_600) == pytest.approx(11.41, abs=0.01)
    assert 8 * wire.positions_size("elias_fano", RESNET, 25_600) / 25_600 <= 12.0
    indices = np.sort(np.random.default_rng(0).choice(RESNET, 25_600, replace=False))
    assert 8 * reference.encode_elias_fano(indices, RESNET).size / 25_600 <= 12.0


@pytest.mark.parametrize(
    ("value_dtype", "coding", "ratio"),
    [("float32", "run_length", 660), ("float16", "elias_fano", 1130), ("int2", "elias_fano", 2200)],
)
def test_compression_ratios_at_a_thousandth(value_dtype, coding, ratio):
    assert wire.compression_ratio(RESNET, 25_600, coding, value_dtype) >= ratio
    assert wire.compression_ratio(RESNET, 25_600, "auto", value_dtype) >= ratio


@st.composite
def places(draw):
    """Some n and ascending indices: at the front, at the back, spread, anywhere, from one to all."""
    n = draw(st.sampled_from([1, 2, 7, 8, 9, 63, 64, 65, 1000, 65535, 65536, 65537, 131_072, 200_001]))
    k = draw(st.sampled_from([k for k in (1, 2, n // 1000, n // 3, n // 2, n // 2 + 1, n - 1, n) if 1 <= k <= n]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    arrangement = draw(st.sampled_from(["front", "back", "spread", "anywhere"]))
    if arrangement in ("front", "back"):
        return n, np.arange(k) + (n - k) * (arrangement == "back")
    return n, np.arange(k) * n // k if arrangement == "spread" else np.sort(rng.choice(n, k, replace=False))


@given(places(), FITS, st.sampled_from(DTYPES), st.booleans())
@examples(400)
def test_the_same_bytes_and_the_same_entries_read_from_them(case, coding, value_dtype, empty):
    n, indices = case
    k, form = len(indices), (coding, value_dtype)
    values = np.random.default_rng(k).standard_normal(k).astype("f8" if value_dtype == "float64" else "f4")
    if value_dtype != "float64":
        values = reference.quantize(values, value_dtype) if value_dtype != "none" else np.zeros(k, np.float32)
    indices, values = (indices[:0], values[:0]) if empty else (indices, values)
    payload = reference.pack(indices, values, n, k, *form)
    assert payload.size == wire.payload_size(n, k, *form) == ops.payload_size(n, k, *form)
    chosen = wire.resolve_coding(coding, n, k)
    assert payload[5] == wire.CODINGS[chosen]  # a header never contains "auto"
    out = torch.full((payload.size,), 255, dtype=torch.uint8)
    ops.pack(tensor(indices), tensor(values), n, k, out, *form)
    same(out, payload)
    for found in (
        reference.unpack(payload, n, k, *form),
        ops.unpack(out, n, k, *form),
        ops.unpack(out, n, k, chosen, form[1]),
    ):
        for one, wanted in zip(found, (indices, values), strict=True):
            same(torch.as_tensor(one), wanted)


@given(st.booleans().flatmap(sent_entries), FITS, st.sampled_from(LOW_BIT), st.booleans())
@examples(200)
def test_low_bit_values_of_groups_travel_in_every_coding(case, coding, value_dtype, empty):
    n, indices, values, segments = case
    sent, form = reference.quantize(values, value_dtype, "mean", indices, segments), (coding, value_dtype)
    payload = check_payload(n, indices, sent, form, segments)
    nothing = reference.pack([], [], n, len(indices), *form, segments)
    assert nothing.size == payload.size
    out = torch.full((payload.size,), 255, dtype=torch.uint8)
    ops.pack(torch.zeros(0, dtype=torch.int64), torch.zeros(0), n, len(indices), out, *form, tensor(segments))
    same(out, nothing)
    assert not nothing[32:].any() and ops.unpack(out, n, len(indices), *form, tensor(segments))[0].numel() == 0


@given(st.integers(1, 2000), st.integers(1, 2000), FITS, st.sampled_from(DTYPES), st.integers(0, 99))
@examples(100)
def test_size_is_a_pure_function_of_n_and_k(n, k, coding, value_dtype, seed):
    k = min(n, k)
    anywhere = np.sort(np.random.default_rng(seed).choice(n, k, replace=False))
    for indices in (np.arange(k), np.arange(n - k, n), anywhere, []):
        payload = reference.pack(indices, np.ones(len(indices), np.float32), n, k, coding, value_dtype)
        assert payload.size == wire.payload_size(n, k, coding, value_dtype)


def three_ranks(n, k, coding, value_dtype):
    """Return the payloads of three ranks, of which the second sends nothing, segments, and the sum of thirds."""
    rows, sums = [], np.zeros(n, np.float32)
    segments = np.array([[0, (n + 2) // 3]]) if value_dtype in LOW_BIT else None
    rng = np.random.default_rng(n)
    for rank in range(3):
        indices = np.sort(rng.choice(n, k, replace=False))[: 0 if rank == 1 else k]
        values = rng.standard_normal(len(indices)).astype(np.float32)
        sent = reference.quantize(values, value_dtype, "mean", indices, segments)
        rows.append(reference.pack(indices, sent, n, k, coding, value_dtype, segments))
        sums[indices] += np.float32(1 / 3) * sent
    return np.pad(np.stack(rows), ((0, 0), (5, 3)), constant_values=255), segments, sums


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("value_dtype", ["float32", "float16", *LOW_BIT])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (9, 4), (65537, 700), (65537, 40_000), (140_000, 140_000)])
def test_reduce_payloads(n, k, coding, value_dtype):
    gathered, segments, sums = three_ranks(n, k, coding, value_dtype)
    form = (coding, value_dtype)
    same(tensor(reference.reduce_payloads(gathered, 5, n, k, *form, 1 / 3, segments)), sums)
    out = torch.full((n,), math.nan)
    ops.reduce_payloads(tensor(gathered), 5, n, k, out, 1 / 3, *form, tensor(segments))
    same(out, sums)


NS, CHANNELS = [70_000, 5, 1000], [7, 5, 20]
COUNTS = [[30, 0, 1000], [0, 5, 1], [66_000, 2, 17]]  # by rank and member: so "auto" is now one coding, now another


def located_message(coding, value_dtype):
    """The messages of all ranks, the offset of each payload, and the sums of all members, halved."""
    rng, parts, sizes = np.random.default_rng(3), [], []
    sums = [np.zeros(n, np.float32) for n in NS]
    for counts in COUNTS:
        for n, channels, count, total in zip(NS, CHANNELS, counts, sums, strict=True):
            form = (n, max(1, count), coding, value_dtype, [[0, channels]])
            indices = np.sort(rng.choice(n, count, replace=False))
            values = rng.standard_normal(count).astype(np.float32)
            sent = reference.quantize(values, value_dtype, "mean", indices, form[4])
            parts.append(reference.pack(indices, sent, *form))
            sizes.append(wire.payload_size(*form))
            total[indices] += np.float32(0.5) * sent
    ks = [[max(1, count) for count in counts] for counts in COUNTS]
    offsets = np.cumsum([0, *sizes[:-1]]).reshape(3, 3)
    return np.concatenate(parts), np.array([offsets, ks]), sums


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("value_dtype", ["float32", "bfloat16", *LOW_BIT])
def test_found_and_added(coding, value_dtype):
    form = (coding, value_dtype)
    gathered, places, sums = located_message(*form)
    same(tensor(reference.locate_payloads(gathered, NS, 3, *form, CHANNELS)), places)
    same(varying_ops.locate_payloads(tensor(gathered), NS, 3, *form, CHANNELS), places)
    for cut in (gathered[:-8], np.append(gathered, np.zeros(8, np.uint8))):
        for locate in (
            lambda cut=cut: reference.locate_payloads(cut, NS, 3, *form, CHANNELS),
            lambda cut=cut: varying_ops.locate_payloads(tensor(cut), NS, 3, *form, CHANNELS),
        ):
            with pytest.raises(ValueError, match=r"are left|end at"):
                locate()
    for member, (n, total) in enumerate(zip(NS, sums, strict=True)):
        place, segments = places[:, :, member].copy(), [[0, CHANNELS[member]]]
        same(tensor(reference.reduce_located(gathered, place, n, *form, 0.5, segments)), total)
        out = torch.full((n,), 7.0)
        varying_ops.reduce_located(tensor(gathered), tensor(place), n, out, 0.5, *form, tensor(segments))
        same(out, total)
