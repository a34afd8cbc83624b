"""Errors for damaged payloads in every coding, for wrong contents with a correct checksum, and for unknown codings."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_codings import CODINGS, sealed
from test_low_bit import tensor
from test_ops import same
from tiers import examples

from hvd_sparse import algorithms, reference, wire
from hvd_sparse.torch import ops


@pytest.mark.parametrize(("n", "k"), [(70_000, 9), (30, 13), (9, 9)])  # "auto": Elias-Fano, a bitmap, dense
@pytest.mark.parametrize("coding", CODINGS)
def test_payloads_flipped_anywhere_or_of_another_coding_are_refused(n, k, coding):
    indices = np.sort(np.random.default_rng(n).choice(n, k, replace=False))
    good = reference.pack(indices, np.ones(k), n, k, coding, "float16")
    chosen = wire.resolve_coding(coding, n, k)
    bits = range(8 * good.size) if good.size < 200 else range(0, 8 * good.size, 331)
    for bit in bits:
        damaged = good.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="payload"):
            reference.unpack(damaged, n, k, coding, "float16")
        out = torch.full((n,), 7.0)
        with pytest.raises(ValueError, match="rank 1"):
            ops.reduce_payloads(tensor(np.stack([good, damaged])), 0, n, k, out, 1.0, coding, "float16")
        assert (out == 7.0).all()
    for other in [*CODINGS, *(["dense"] if k == n else [])]:
        if wire.resolve_coding(other, n, k) == chosen:
            continue
        payload = np.resize(good, wire.payload_size(n, k, other, "float16"))
        with pytest.raises(ValueError, match=r"coding, |size"):
            reference.unpack(payload, n, k, other, "float16")
        with pytest.raises(ValueError, match="coding is"):
            ops.unpack(tensor(payload), n, k, other, "float16")


@given(
    st.sampled_from(["elias_fano", "bitmap"]),
    st.sampled_from([(10, 3), (13, 12), (64, 2), (65, 9), (1000, 5), (1000, 40)]),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 7)), min_size=1, max_size=3),
    st.booleans(),
)
@examples(400)
def test_hostile_positions_are_judged_as_the_reference_does(coding, sizes, flips, empty):
    (n, k), form = sizes, (coding, "none")
    indices = np.sort(np.random.default_rng(n).choice(n, k, replace=False))[: 0 if empty else k]
    payload, section = reference.pack(indices, np.zeros(len(indices)), n, k, *form), wire.positions_size(coding, n, k)
    for byte, bit in flips:
        payload[32 + byte % section] ^= 1 << bit
    payload = np.frombuffer(sealed(payload[4:8], len(indices), n, payload[32:].tobytes()), np.uint8)
    try:
        expected = reference.unpack(payload, n, k, *form)[0]
    except ValueError as error:
        assert "positions" in str(error)
        with pytest.raises(ValueError, match=r"hvd_sparse.unpack: "):
            ops.unpack(tensor(payload.copy()), n, k, *form)
    else:
        assert len(expected) == len(indices) and (np.diff(expected, prepend=-1, append=n) > 0).all()
        same(ops.unpack(tensor(payload.copy()), n, k, *form)[0], expected)


def fano(low, upper):
    """Five entries of 1000: 7 low bits of each, 35 in 5 bytes, then 12 bits in 2 bytes."""
    return sum(bits << 7 * j for j, bits in enumerate(low)).to_bytes(5, "little") + upper.to_bytes(2, "little")


LOW, UPPER = [3, 2, 3, 88, 103], 0b1000_1000_1101  # of 3, 130, 131, 600 and 999, whose rests are 0, 1, 1, 4 and 7


@pytest.mark.parametrize(
    ("coding", "n", "entries", "section", "is_good"),
    [
        ("elias_fano", 1000, 5, fano(LOW, UPPER), True),
        ("elias_fano", 1000, 5, fano([*LOW, 7], UPPER), True),  # padding of the low bits
        ("elias_fano", 1000, 5, fano([3, 2, 3, 88, 104], UPPER), False),  # element 1000
        ("elias_fano", 1000, 5, fano([3, 2, 3, 88, 127], UPPER), False),
        ("elias_fano", 1000, 5, fano([3, 3, 3, 88, 103], UPPER), False),  # twice the same
        ("elias_fano", 1000, 5, fano([3, 3, 2, 88, 103], UPPER), False),  # falling
        ("elias_fano", 1000, 5, fano(LOW, UPPER & ~1), False),  # four
        ("elias_fano", 1000, 5, fano(LOW, UPPER | 2), False),  # six
        ("elias_fano", 1000, 5, fano(LOW, UPPER ^ 0x1001), False),  # the last one in the padding
        ("elias_fano", 1000, 5, fano(LOW, UPPER | 0x8000), False),  # one more in the padding
        ("elias_fano", 1000, 5, bytes(7), False),
        ("elias_fano", 1000, 5, b"\xff" * 7, False),
        ("elias_fano", 1000, 0, bytes(7), True),
        ("elias_fano", 1000, 0, fano([1], 0), False),
        ("elias_fano", 1000, 0, fano([0], 0x8000), False),
        ("bitmap", 13, 3, b"\x12\x10", True),
        ("bitmap", 13, 3, b"\x12\x20", False),  # element 13
        ("bitmap", 13, 3, b"\x12\x90", False),  # one more in the padding
        ("bitmap", 13, 3, b"\x12\x11", False),
        ("bitmap", 13, 3, b"\x10\x10", False),
        ("bitmap", 13, 0, b"\x00\x00", True),
        ("bitmap", 13, 0, b"\x00\x80", False),
    ],
)
def test_positions_that_lie_under_a_right_checksum_are_refused(coding, n, entries, section, is_good):
    k, start = (5, 3)[coding == "bitmap"], [1, wire.CODINGS[coding], 4, 0]
    payload = np.frombuffer(bytearray(sealed(start, entries, n, section + bytes(8 - len(section)))), np.uint8)
    if is_good:
        for found in (
            reference.unpack(payload, n, k, coding, "none"),
            ops.unpack(tensor(payload), n, k, coding, "none"),
        ):
            assert len(found[0]) == entries
        return
    with pytest.raises(ValueError, match="payload positions"):
        reference.unpack(payload, n, k, coding, "none")
    with pytest.raises(ValueError, match=r"hvd_sparse.unpack: (there are|indices)"):
        ops.unpack(tensor(payload), n, k, coding, "none")
    good, out = reference.pack([], [], n, k, coding, "none"), torch.full((n,), 7.0)
    with pytest.raises(ValueError, match=r"hvd_sparse.reduce_payloads: from rank 1: (there are|indices)"):
        ops.reduce_payloads(tensor(np.stack([good, payload])), 0, n, k, out, 1.0, coding, "none")
    assert (out == 7.0).all()


def test_an_unknown_coding_is_told_all_codings():
    everywhere = {*wire.CODINGS, "auto"}
    assert everywhere == {*CODINGS, "dense"} and set(algorithms.CODINGS) == set(CODINGS)
    for call in (
        lambda: wire.payload_size(10, 1, "gzip"),
        lambda: reference.pack([1], [1.0], 10, 1, "gzip"),
        lambda: ops.payload_size(10, 1, "gzip"),
        lambda: ops.pack(torch.tensor([1]), torch.ones(1), 10, 1, torch.zeros(64, dtype=torch.uint8), "gzip"),
        lambda: ops.unpack(torch.zeros(64, dtype=torch.uint8), 10, 1, "Bitmap"),
        lambda: ops.reduce_payloads(torch.zeros(1, 64, dtype=torch.uint8), 0, 10, 1, torch.zeros(10), 1.0, ""),
    ):
        with pytest.raises(ValueError, match="coding must be") as caught:
            call()
        assert all(coding in str(caught.value) for coding in everywhere)
