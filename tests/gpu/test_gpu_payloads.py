"""Writing, checking, decoding and adding payloads on a GPU: results equal the CPU's, byte for byte."""

import subprocess
import sys

import numpy as np
import torch
from gpu_helpers import CODINGS, SMALL, VALUE_DTYPES, assert_refuses, assert_same, draw_entries, packed

from hvd_sparse import reference
from hvd_sparse.torch import ops, varying_ops

SHAPES = ((1, 1), (7, 3), (1000, 1000), (65_535, 65), (65_536, 65_536), (65_537, 1), (200_001, 70_000))
if SMALL:
    SHAPES = ((7, 3), (1000, 1000), (65_537, 1), (70_001, 700))


def shapes():
    for n, k in SHAPES:
        for coding in (*CODINGS, *(["dense"] if n == k else [])):
            for value_dtype in VALUE_DTYPES:
                yield n, k, coding, value_dtype


def test_pack_writes_the_same_bytes():
    for n, k, coding, value_dtype in (*shapes(), (3_000_001, 3000, "run_length", "float32")):
        for entries in (True, False):
            expected = packed(n, k, coding, value_dtype, entries=entries)
            indices, values = (tensor.cuda() for tensor in draw_entries(n, k, value_dtype))
            if not entries:
                indices, values = indices[:0], values[:0]
            out = torch.full((expected.numel(),), 7, dtype=torch.uint8, device="cuda")
            ops.pack(indices, values, n, k, out, coding, value_dtype)
            assert_same(out, expected, (n, k, coding, value_dtype, entries))


def test_pack_matches_the_reference():
    indices, values = draw_entries(70_001, 700)
    out = torch.empty(ops.payload_size(70_001, 700), dtype=torch.uint8, device="cuda")
    ops.pack(indices.cuda(), values.cuda(), 70_001, 700, out)
    np.testing.assert_array_equal(out.cpu().numpy(), reference.pack(indices.numpy(), values.numpy(), 70_001, 700))


def test_pack_refuses_what_it_can_see_and_spoils_what_it_cannot():
    out = torch.empty(ops.payload_size(100, 3), dtype=torch.uint8, device="cuda")
    values = torch.ones(3, device="cuda")
    good = torch.tensor([1, 2, 3], device="cuda")
    assert_refuses(ops.pack, good, values[:2], 100, 3, out, says="3 indices but 2 values")
    assert_refuses(ops.pack, good[:2], values[:2], 100, 3, out, says="or none, got 2")
    assert_refuses(ops.pack, good, values, 100, 3, out[:-8], says="out must have")
    form = ("run_length", "int1")
    out = torch.empty(ops.payload_size(100, 3, *form), dtype=torch.uint8, device="cuda")
    ops.pack(good, torch.tensor([1.0, -1.0, 2.0], device="cuda"), 100, 3, out, *form)  # more than one magnitude
    assert_refuses(ops.unpack, out, 100, 3, *form, says="checksum")
    for bad in ([1, 1, 2], [5, 4, 6], [-1, 2, 3], [1, 2, 100]):
        for coding in CODINGS:
            out = torch.empty(ops.payload_size(100, 3, coding), dtype=torch.uint8, device="cuda")
            ops.pack(torch.tensor(bad, device="cuda"), values, 100, 3, out, coding)
            assert_refuses(ops.unpack, out, 100, 3, coding, says="checksum")
            assert_refuses(ops.unpack, out.cpu(), 100, 3, coding, says="checksum")


def test_unpack():
    for n, k, coding, value_dtype in shapes():
        for entries in (True, False):
            payload = packed(n, k, coding, value_dtype, entries=entries)
            expected = ops.unpack(payload, n, k, coding, value_dtype)
            room = torch.zeros(payload.numel() + 5, dtype=torch.uint8, device="cuda")
            for begin in (0, 5):  # wherever it lies
                room[begin : begin + payload.numel()] = payload.cuda()
                found = ops.unpack(room[begin : begin + payload.numel()], n, k, coding, value_dtype)
                assert_same(found[0], expected[0], (n, k, coding, value_dtype))
                assert_same(found[1], expected[1], (n, k, coding, value_dtype))


def sealed(payload):
    """Make the checksum right again, so that what is behind it is looked at."""
    payload[24:28] = 0
    checksum = reference.checksum(payload.numpy())
    payload[24:28] = torch.from_numpy(np.array([checksum], np.uint32).view(np.uint8))
    return payload


def test_hostile_bytes_are_refused_as_on_the_cpu():
    rng = np.random.default_rng(0)
    refused = 0
    for n, k, coding in ((1000, 10, "run_length"), (1000, 400, "elias_fano"), (1000, 100, "bitmap"), (50, 50, "dense")):
        for trial in range(60):
            payload = packed(n, k, coding, "float16", entries=trial % 5 > 0)
            for _ in range(1 + trial % 3):
                payload[rng.integers(payload.numel() if trial % 2 else 40)] ^= 1 << rng.integers(8)
            payload = sealed(payload) if trial % 4 else payload
            try:
                expected = ops.unpack(payload, n, k, coding, "float16")
            except ValueError:
                assert_refuses(ops.unpack, payload.cuda(), n, k, coding, "float16")
                refused += 1
                continue
            found = ops.unpack(payload.cuda(), n, k, coding, "float16")
            assert_same(found[0], expected[0])
            assert_same(found[1], expected[1])
    assert refused > 60
    assert_refuses(ops.unpack, packed(1000, 10, "run_length", "float32")[:-8].cuda(), 1000, 10, says="size in bytes")


def gathered_of(n, k, ranks, coding, value_dtype):
    parts = [packed(n, k, coding, value_dtype, rank, rank % 5 != 3) for rank in range(ranks)]
    return torch.stack([torch.cat([torch.zeros(8, dtype=torch.uint8), part]) for part in parts])


def test_sums_are_those_of_the_cpu():
    for n, k, coding, value_dtype in (*shapes(), (3_000_001, 3000, "run_length", "float32")):
        for ranks in (1, 8):
            gathered = gathered_of(n, k, ranks, coding, value_dtype)
            expected, found = torch.full((n,), 9.0), torch.full((n,), 9.0, device="cuda")
            ops.reduce_payloads(gathered, 8, n, k, expected, 0.3, coding, value_dtype)
            ops.reduce_payloads(gathered.cuda(), 8, n, k, found, 0.3, coding, value_dtype)
            assert_same(found, expected, (n, k, coding, value_dtype, ranks))
    gathered = gathered_of(1000, 300, 200, "elias_fano", "float32")
    expected, found = torch.empty(1000), torch.empty(1000, device="cuda")
    ops.reduce_payloads(gathered, 8, 1000, 300, expected, 0.3, "elias_fano")
    ops.reduce_payloads(gathered.cuda(), 8, 1000, 300, found, 0.3, "elias_fano")
    assert_same(found, expected, "200 ranks")
    assert ops.take_decode_status(found).tolist()[0] == 0


def test_a_damaged_payload_makes_the_sum_nan_and_is_recorded():
    n, k = 300_001, 300
    out = torch.empty(n, device="cuda")
    ops.take_decode_status(out)
    for coding in CODINGS:
        gathered = gathered_of(n, k, 4, coding, "float32")
        for rank, at in ((2, 8 + 24), (0, 8), (3, 8 + 50), (1, -9)):
            damaged = gathered.clone()
            damaged[rank, at] ^= 16
            ops.reduce_payloads(damaged.cuda(), 8, n, k, out, 1.0, coding)
            assert bool(out.isnan().all()), (coding, rank, at)
            count, first = ops.take_decode_status(out).tolist()
            assert (count, first // 256) == (1, rank), (coding, rank, at)
            assert 1 <= first % 256 <= len(ops.FAILED_CHECKS)
        ops.reduce_payloads(gathered.cuda(), 8, n, k, out, 1.0, coding)
        assert not out.isnan().any()
    assert ops.take_decode_status(out).tolist() == [0, 0]
    assert_refuses(ops.reduce_payloads, gathered.cuda(), 16, n, k, out, 1.0, coding, says="gathered must be")
    assert_refuses(ops.reduce_payloads, gathered.cuda()[:0], 8, n, k, out, 1.0, coding, says="ranks must be in")


FIRST_IN_INFERENCE_MODE = """
import torch
from hvd_sparse.torch import ops
like = torch.empty(0, device="cuda")
with torch.inference_mode():
    ops.take_decode_status(like)
assert ops.take_decode_status(like).tolist() == [0, 0]
"""


def test_the_record_of_damage_can_be_made_in_inference_mode():
    """The first use makes the record, so this runs in a new process."""
    subprocess.run([sys.executable, "-c", FIRST_IN_INFERENCE_MODE], check=True, timeout=120)


def test_located_payloads():
    sizes = (300_001, 70_000)
    for coding in CODINGS:
        for value_dtype in ("float32", "bfloat16", "int2", "int1"):
            form = (coding, value_dtype)
            parts = [packed(n, k, *form, seed=k) for k in (5, 4000, 1) for n in sizes]
            gathered = torch.cat(parts)
            places = varying_ops.locate_payloads(gathered.cuda(), list(sizes), 3, *form)
            assert torch.equal(places, varying_ops.locate_payloads(gathered, list(sizes), 3, *form))
            for at, n in enumerate(sizes):
                place = places[:, :, at].contiguous()
                expected, out = torch.empty(n), torch.full((n,), 9.0, device="cuda")
                varying_ops.reduce_located(gathered, place, n, expected, 0.5, *form)
                varying_ops.reduce_located(gathered.cuda(), place, n, out, 0.5, *form)
                assert_same(out, expected, (form, n))
    assert ops.take_decode_status(out).tolist() == [0, 0]
    nowhere = torch.empty((2, 0), dtype=torch.long)
    assert_refuses(varying_ops.reduce_located, gathered.cuda(), nowhere, n, out, 0.5, *form, says="ranks must be in")
    beyond = place + torch.tensor([[10**9], [0]])
    assert_refuses(varying_ops.reduce_located, gathered.cuda(), beyond, n, out, 0.5, *form, says="places leave")
