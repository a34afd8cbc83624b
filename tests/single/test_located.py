"""Payloads whose numbers of entries differ between ranks: both frameworks locate and add them like the NumPy twins."""

import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given
from test_ops import entries, same
from tiers import examples

from hvd_sparse import reference
from hvd_sparse.tensorflow import ops as tensorflow_ops
from hvd_sparse.tensorflow import varying_ops as tensorflow_varying_ops
from hvd_sparse.torch import ops, varying_ops
from hvd_sparse.wire import payload_size

NS = [70_000, 5, 1000]
COUNTS = [[30, 0, 1000], [0, 5, 1], [66_000, 2, 17]]  # by rank and member


def message(form, seed=0):
    """Return the messages of all ranks, uint8[bytes], and the dense sum of each member in rank order."""
    rng, parts = np.random.default_rng(seed), []
    sums = [np.zeros(n, np.float32) for n in NS]
    for counts in COUNTS:
        for n, count, total in zip(NS, counts, sums, strict=True):
            indices = np.sort(rng.choice(n, count, replace=False))
            values = rng.standard_normal(count).astype(np.float32)
            parts.append(reference.pack(indices, values, n, max(1, count), *form))
            total[indices] += np.float32(0.5) * reference.quantize(values, form[1])
    return np.concatenate(parts), sums


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_found_and_added(dtype):
    form = ("run_length", dtype)
    gathered, sums = message(form)
    places = reference.locate_payloads(gathered, NS, 3, *form)
    sizes = [payload_size(n, max(1, count), *form) for counts in COUNTS for n, count in zip(NS, counts, strict=True)]
    assert places[0].reshape(-1).tolist() == [0, *np.cumsum(sizes)[:-1]]
    assert places[1].tolist() == [[max(1, count) for count in counts] for counts in COUNTS]
    found = varying_ops.locate_payloads(torch.from_numpy(gathered), NS, 3, *form)
    same(found, places)
    same(tensorflow_varying_ops.locate_payloads(gathered, NS, 3, *form), places)
    traced = tf.function(lambda bytes_: tensorflow_varying_ops.locate_payloads(bytes_, NS, 3, *form), autograph=False)
    same(traced(tf.constant(gathered)), places)
    for member, (n, total) in enumerate(zip(NS, sums, strict=True)):
        place = places[:, :, member]
        same(torch.from_numpy(reference.reduce_located(gathered, place, n, *form, 0.5)), total)
        out = torch.full((n,), 7.0)
        varying_ops.reduce_located(torch.from_numpy(gathered), found[:, :, member].contiguous(), n, out, 0.5, *form)
        same(out, total)
    for found, total in zip(
        tensorflow_varying_ops.reduce_located_bucket(gathered, NS, 3, 0.5, *form), sums, strict=True
    ):
        same(found, total)


def hostile():
    """Yield damaged messages and what is said of them."""
    gathered, _ = message(("run_length", "float32"))
    yield gathered[:-8], "payload needs [0-9]+ bytes, only [0-9]+ are left"
    yield gathered[:31], "bytes, only 31 are left"
    yield gathered[:0], "bytes, only 0 are left"
    yield np.append(gathered, np.zeros(8, np.uint8)), f"bytes, but their payloads end at {gathered.size}"
    for many in (70_001, 2**63, 2**64 - 1):
        damaged = gathered.copy()
        damaged[16:24] = np.frombuffer(many.to_bytes(8, "little"), np.uint8)
        yield damaged, "entries"


@pytest.mark.parametrize(("gathered", "what"), list(hostile()))
def test_hostile_messages_are_refused(gathered, what):
    with pytest.raises(ValueError, match=what):
        reference.locate_payloads(gathered, NS, 3)
    with pytest.raises(ValueError, match=f"hvd_sparse.locate_payloads: .*{what}"):
        varying_ops.locate_payloads(torch.from_numpy(gathered), NS, 3)
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"hvd_sparse.locate_payloads: .*{what}"):
        tensorflow_varying_ops.locate_payloads(gathered, NS, 3)


def test_every_flipped_bit_is_found_before_anything_is_added():
    n, form = 50, ("run_length", "float32")
    good = np.concatenate([reference.pack([1, 9], [1.0, 2.0], n, 2, *form), reference.pack([], [], n, 1, *form)])
    places = reference.locate_payloads(good, [n], 2, *form)[:, :, 0]
    for byte in range(good.size):
        for bit in range(8):
            damaged = good.copy()
            damaged[byte] ^= 1 << bit
            out = torch.full((n,), 7.0)
            with pytest.raises(ValueError, match="rank"):
                varying_ops.reduce_located(torch.from_numpy(damaged), torch.from_numpy(places.copy()), n, out)
            assert (out == 7.0).all()


@pytest.mark.parametrize(
    ("places", "n", "message"),
    [
        ([[0, 64]], 5, "places"),
        ([[0], [6]], 5, "k must"),
        ([[0], [0]], 5, "k must"),
        ([[-8], [1]], 5, "places leave"),
        ([[8], [1]], 5, "places leave"),
        ([[2**62], [1]], 5, "places leave"),
    ],
)
def test_places_out_of_the_message(places, n, message):
    gathered = reference.pack([1], [1.0], 5, 1)
    with pytest.raises(ValueError, match=message):
        varying_ops.reduce_located(torch.from_numpy(gathered), torch.tensor(places), n, torch.empty(n))


@given(entries())
@examples(60)
def test_indices_alone_travel_in_two_bytes_each(case):
    """The value type "none": a set of indices, packed and checked like any payload, the same bytes everywhere."""
    n, indices = case
    k = max(1, indices.size)
    expected = reference.pack(indices, np.zeros(indices.size, np.float32), n, k, value_dtype="none")
    assert expected.size == payload_size(n, k, value_dtype="none") == ops.payload_size(n, k, value_dtype="none")
    assert expected.size <= payload_size(n, k) - 4 * k + 8
    values, out = torch.zeros(indices.size), torch.empty(expected.size, dtype=torch.uint8)
    ops.pack(torch.from_numpy(indices), values, n, k, out, value_dtype="none")
    same(out, expected)
    same(tensorflow_ops.pack(indices, values.numpy(), n, k, value_dtype="none"), expected)
    np.testing.assert_array_equal(reference.unpack(expected, n, k, value_dtype="none")[0], indices)
    same(ops.unpack(out, n, k, value_dtype="none")[0], indices)
    same(tensorflow_ops.unpack(expected, n, k, value_dtype="none")[0], indices)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_indices_alone_are_no_values(dtype):
    payload = reference.pack([1, 4], [1.0, 2.0], 5, 2, value_dtype=dtype)
    for unpack in (lambda: reference.unpack(payload, 5, 2, value_dtype="none"), lambda: unpack_torch(payload)):
        with pytest.raises(ValueError, match=r"size|dtype"):
            unpack()


def unpack_torch(payload):
    return ops.unpack(torch.from_numpy(payload), 5, 2, value_dtype="none")
