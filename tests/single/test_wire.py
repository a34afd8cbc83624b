"""The wire format: sizes and bytes calculated by hand, wrong arguments, hostile payloads in both decoders."""

import math
import pathlib
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from hvd_sparse import reference, wire
from hvd_sparse.torch import ops

Refused = (RuntimeError, ValueError)


@pytest.mark.parametrize(
    ("n", "k", "value_dtype", "size"),
    [
        (1, 1, "float32", 40),  # 32 + 2 + 2 = 36, values 36..40
        (5, 2, "float32", 48),  # 32 + 2 + 4 = 38 -> 40, values 40..48
        (5, 2, "float64", 56),  # 38 -> 40, values 40..56
        (5, 2, "float16", 48),  # 38, values 38..42 -> 48
        (5, 2, "bfloat16", 48),
        (65536, 3, "float32", 56),  # 32 + 2 + 6 = 40, values 40..52 -> 56
        (65537, 3, "float32", 56),  # one block more: 42 -> 44, values 44..56
        (65537, 3, "float64", 72),  # 42 -> 48, values 48..72
        (65536, 65535, "float32", 131104 + 262140 + 4),  # no bitmap: 34 + 131070 = 131104
        (65536, 65536, "float32", 131108 + 262144 + 4),  # 34, bitmap of 1 byte -> 36, + 131072 = 131108
        (4 * 65536, 65536, "float16", 262192),  # 40, bitmap of 1 byte -> 42, + 131072 + 131072 = 262186
        (9 * 65536, 65536, "float32", 131124 + 262144 + 4),  # 50, bitmap of 2 bytes -> 52, + 131072 = 131124
    ],
)
def test_payload_size_by_hand(n, k, value_dtype, size):
    assert wire.payload_size(n, k, "run_length", value_dtype) == size


def test_resnet_sized_gradient_stays_under_six_bytes_and_a_bit_an_entry():
    n, k = 25_600_000, 25_600
    assert wire.payload_size(n, k) <= 6.05 * k
    assert wire.compression_ratio(n, k) >= 660
    assert wire.compression_ratio(n, k, value_dtype="bfloat16") > 970


@given(st.integers(1, 2**40), st.floats(0, 1), st.sampled_from(sorted(wire.VALUE_DTYPES)))
@settings(deadline=None)
def test_sections_follow_one_another_aligned(n, fraction, value_dtype):
    k = max(1, int(n * fraction))
    layout = wire.payload_layout(n, k, "run_length", value_dtype)
    bits = {"int2": 2, "int1": 1}.get(value_dtype)
    item = 4 if bits else wire.VALUE_BYTES[value_dtype]
    length = 4 * bits + math.ceil(bits * k / 8) if bits else item * k
    multiple = max(1, item)
    assert layout.counts == 32
    assert layout.bitmap == 32 + 2 * math.ceil(n / 65536)
    assert layout.bitmap_bytes == (0 if k < 65536 else math.ceil(layout.blocks / 8))
    assert 0 <= layout.runs - (layout.bitmap + layout.bitmap_bytes) < 2
    assert 0 <= layout.values - (layout.runs + 2 * k) < multiple
    assert 0 <= layout.size - (layout.values + length) < 8
    assert layout.runs % 2 == layout.values % multiple == layout.size % 8 == 0
    assert layout.size == wire.payload_size(n, k, "run_length", value_dtype)


@given(st.data(), st.integers(1, 300_000), st.sampled_from([*wire.CODINGS, "auto"]), st.booleans())
@settings(deadline=None)
def test_no_payload_is_larger_than_the_largest(data, n, coding, is_whole):
    k = n if is_whole or coding == "dense" else data.draw(st.integers(1, n))
    fewer = n if coding == "dense" else data.draw(st.integers(1, k))
    value_dtype = data.draw(st.sampled_from(sorted(wire.VALUE_DTYPES)))
    assert wire.payload_size(n, fewer, coding, value_dtype) <= wire.largest_payload(n, k, coding, value_dtype)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1), "n must be an integer of at least 1, got 0"),
        ((-3, 1), "n must be .* got -3"),
        ((10, 0), "k must be an integer of at least 1, got 0"),
        ((10, 11), "k must be at most n = 10, got 11"),
        ((10, 1, "gzip"), "coding must be one of run_length, dense, elias_fano, bitmap, auto; got 'gzip'"),
        ((10, 9, "dense"), "k must be n = 10 where all are sent, got 9"),
        ((10, 1, "run_length", "int8"), "value_dtype must be one of float32, .*none, int2, int1; got 'int8'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        wire.payload_size(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2.0, 1), "n must be an integer of at least 1, got 2.0 of type float"),
        ((True, 1), "n must be .* got True"),
        ((10, None), "k must be .* got None"),
    ],
)
def test_what_is_no_integer(arguments, message):
    with pytest.raises(TypeError, match=message):
        wire.payload_size(*arguments)


@pytest.mark.parametrize(
    ("n", "density", "k"),
    [
        (1000, 0.001, 1),
        (1499, 0.001, 1),
        (1500, 0.001, 2),  # 1.5 rounds up
        (2500, 0.001, 3),  # and so does 2.5: half up, not to even
        (1, 0.001, 1),
        (400, 0.001, 1),  # 0.4 rounds to 0, but at least one entry is sent
        (7, 1.0, 7),
        (7, 0.99, 7),
        (25_600_000, 0.001, 25_600),
    ],
)
def test_top_k_count(n, density, k):
    assert wire.top_k_count(n, density) == k


@pytest.mark.parametrize("density", [0.0, -0.1, 1.0000001, math.nan, math.inf])
def test_density_out_of_range(density):
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got"):
        wire.top_k_count(10, density)


@pytest.mark.parametrize("density", [True, "0.1", None])
def test_density_of_another_type(density):
    with pytest.raises(TypeError, match="density must be a number"):
        wire.top_k_count(10, density)


def test_no_elements_have_no_top_k():
    with pytest.raises(ValueError, match="n must be an integer of at least 1, got 0"):
        wire.top_k_count(0, 0.5)


@pytest.mark.parametrize("module", ["wire", "schedule"])
def test_needs_no_framework_and_no_numpy(module):
    folder = str(pathlib.Path(wire.__file__).parent)
    program = (
        "import sys, types\n"
        "sys.modules.update(dict.fromkeys(('numpy', 'torch', 'tensorflow', 'horovod')))\n"
        "sys.modules['hvd_sparse'] = package = types.ModuleType('hvd_sparse')\n"
        f"package.__path__ = [{folder!r}]\n"
        f"import hvd_sparse.{module}\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def sealed(payload):
    payload[24:28] = bytes(4)
    payload[24:28] = struct.pack("<I", zlib.crc32(payload))
    return bytes(payload)


TINY = bytes.fromhex(
    "48564453 01 00 00 00 0500000000000000 0200000000000000 00000000 00000000"  # HVDS, n = 5, two entries
    "0200 0100 0200 0000 0000803f 000000c0"  # two in the block; runs 1 and 2; padding; 1.0, -2.0
)


def test_pack_by_hand():
    packed = reference.pack(np.array([1, 4]), np.array([1.0, -2.0], np.float32), 5, 2)
    assert packed.dtype == np.uint8
    assert packed.tobytes() == sealed(bytearray(TINY))


@pytest.mark.parametrize(
    ("value_dtype", "code", "tail"),
    [
        ("float64", 1, "0000 000000000000f03f 00000000000000c0"),
        ("float16", 2, "003c 00c0 000000000000"),
        ("bfloat16", 3, "803f 00c0 000000000000"),
    ],
)
def test_pack_other_value_types_by_hand(value_dtype, code, tail):
    expected = bytearray(TINY[:38] + bytes.fromhex(tail))
    expected[6] = code
    packed = reference.pack(np.array([1, 4]), np.array([1.0, -2.0]), 5, 2, "run_length", value_dtype)
    assert packed.tobytes() == sealed(expected)


def test_pack_nothing_by_hand():
    expected = bytearray(48)
    expected[:24] = TINY[:16] + bytes(8)
    assert reference.pack(np.zeros(0, int), np.zeros(0, np.float32), 5, 2).tobytes() == sealed(expected)


def test_bitmap_marks_the_full_blocks():
    """Ten blocks, of which 1 and 9 are full: bit 1 of byte 0 and bit 1 of byte 1; the runs start at an even byte."""
    n, k = 10 * 65536, 2 * 65536 + 1
    indices = np.concatenate([[7], np.arange(65536, 131072), np.arange(9 * 65536, n)])
    packed = reference.pack(indices, np.ones(k, np.float32), n, k)
    assert packed[32:52].view("<u2").tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert packed[52:54].tolist() == [2, 2]
    assert packed[54:60].view("<u2").tolist() == [7, 0, 0]
    assert reference.unpack(packed, n, k)[0].tolist() == indices.tolist()


def test_pack_refuses():
    one = np.ones(1, np.float32)
    with pytest.raises(ValueError, match="indices must hold k = 2 entries or none, got 1"):
        reference.pack(np.array([1]), one, 5, 2)
    with pytest.raises(ValueError, match="values must hold as many entries as indices, 2; got 1"):
        reference.pack(np.array([1, 2]), one, 5, 2)
    with pytest.raises(ValueError, match="strictly ascending"):
        reference.pack(np.array([5]), one, 5, 1)


N, K = 65540, 3  # two blocks, of which the second has four elements; counts at 32, runs at 36, values at 44, end at 56
GOOD = reference.pack(np.array([65535, 65537, 65539]), np.float32([1, -2, 3]), N, K)


def changed(offset, data, seal=True):
    payload = bytearray(GOOD)
    payload[offset : offset + len(data)] = data
    return np.frombuffer(sealed(payload) if seal else bytes(payload), np.uint8)


def check_refused(payload, message=None, n=N, k=K, reduce=True):
    """No decoder takes the payload, and a sum to which a good rank came first is not begun."""
    with pytest.raises(ValueError, match=message):
        reference.unpack(payload, n, k)
    with pytest.raises(Refused, match=message):
        ops.unpack(torch.tensor(payload), n, k)
    if not reduce:  # a row may be longer than its payload
        return
    gathered = torch.from_numpy(np.stack([np.resize(GOOD, payload.size), payload]))
    out = torch.full((n,), 7.0)
    with pytest.raises(Refused):
        ops.reduce_payloads(gathered, 0, n, k, out)
    assert (out == 7.0).all()


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        *((offset, b"\x07", word) for offset, word in enumerate(("magic", "magic", "magic", "magic", "version"))),
        *((5, b"\x01", "coding"), (6, b"\x01", "dtype"), (7, b"\x01", "reserved"), (28, b"\x01", "reserved")),
        *((31, b"\x80", "reserved"), (8, b"\x05", r"\bn\b"), (15, b"\x80", r"\bn\b"), (16, b"\x02", "entries")),
        *((16, b"\x04", "entries"), (23, b"\x80", "entries"), (16, b"\xff" * 8, "entries"), (16, b"\0", "count")),
        *((34, b"\x01", "count"), (34, b"\x03", "count"), (34, b"\x05", "count"), (32, b"\xff" * 4, "count")),
        *((32, b"\x02\0\x01", "run"), (32, b"\x03\0\0", "run"), (38, b"\x03", "run"), (40, b"\xff\xff", "run")),
    ],
)
def test_hostile_payload_with_a_good_checksum(offset, data, message):
    check_refused(changed(offset, data), message)


def test_hostile_payload_cut_or_flipped_anywhere():
    for size in (*range(GOOD.size), GOOD.size + 1, GOOD.size + 8):
        check_refused(np.resize(GOOD, size), "size", reduce=size < GOOD.size)
    for byte in range(GOOD.size):
        for bit in range(8):
            with pytest.raises(Refused, match="payload"):
                ops.unpack(torch.tensor(changed(byte, bytes([GOOD[byte] ^ 1 << bit]), seal=False)), N, K)
        check_refused(changed(byte, bytes([GOOD[byte] ^ 0xFF]), seal=False))
    for n, k in ((N + 1, K), (N - 1, K), (N, K + 1), (N, K - 1), (5, 1)):
        check_refused(GOOD, "payload", n, k)


def test_hostile_bitmap():
    """Three blocks, the first full. A bitmap that marks another block as full, or has more bits, raises an error."""
    n, k = 131_082, 65_537
    good = reference.pack(np.append(np.arange(65_536), 70_000), np.ones(k, np.float32), n, k)
    assert good[32:39].tolist() == [0, 0, 1, 0, 0, 0, 0b001]
    for bits in range(8):
        payload = bytearray(good)
        payload[38] = bits
        payload = np.frombuffer(sealed(payload), np.uint8)
        if bits == 0b001:
            reference.unpack(payload, n, k)
            ops.unpack(torch.tensor(payload), n, k)
        else:
            check_refused(payload, "count|run", n, k, reduce=False)


def test_reduce_payloads_refuses_and_writes_nothing():
    gathered = torch.from_numpy(np.stack([GOOD, GOOD]))
    for offset in (-1, 1, 2**63 - 1):
        out = torch.full((N,), 7.0)
        with pytest.raises(Refused, match="offset"):
            ops.reduce_payloads(gathered, offset, N, K, out)
        assert (out == 7.0).all()
    for out in (torch.ones(N - 1), torch.ones(N + 1), torch.ones(2 * N)[::2], torch.ones(N, dtype=torch.float64)):
        with pytest.raises(Refused, match="out"):
            ops.reduce_payloads(gathered, 0, N, K, out)
        assert (out == 1.0).all()
    for other in (gathered[0], gathered.to(torch.int8), gathered.repeat(1, 2)[:, ::2]):
        with pytest.raises(Refused, match="gathered"):
            ops.reduce_payloads(other, 0, N, K, torch.empty(N))


@given(st.lists(st.tuples(st.integers(0, 55), st.integers(0, 255)), min_size=1, max_size=4))
@examples(250)
def test_hostile_payload_is_judged_as_the_reference_does(changes):
    payload = bytearray(GOOD)
    for offset, byte in changes:
        payload[offset] = byte
    payload = np.frombuffer(sealed(payload), np.uint8)
    try:
        expected = reference.unpack(payload, N, K)
    except ValueError:
        check_refused(payload)
    else:
        for found, wanted in zip(ops.unpack(torch.tensor(payload), N, K), expected, strict=True):
            np.testing.assert_array_equal(found.numpy(), wanted)  # NaN equals NaN
