"""Codings of positions by the TensorFlow ops, eagerly and traced, equal those of the NumPy twins and of PyTorch."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from test_codings import (
    BITMAP,
    CHANNELS,
    CODINGS,
    DTYPES,
    FANO,
    FITS,
    INDICES,
    NS,
    located_message,
    places,
    three_ranks,
)
from test_low_bit import LOW_BIT, sent_entries
from test_ops import same
from test_tensorflow_low_bit import both, check_payload
from test_tensorflow_ops import BYTES, INTEGER, Invalid, spec
from tiers import examples

from hvd_sparse import reference, wire
from hvd_sparse.tensorflow import ops, varying_ops

pytestmark = pytest.mark.each_value  # the core and its twin are compared elsewhere, pair by pair


@functools.cache
def packer(coding, value_dtype, wide):
    """`pack` as a graph, traced once for entries of any number and any n and k."""
    specs = (spec("int64", None), spec(wide, None), INTEGER, INTEGER)
    form = (coding, value_dtype)
    return tf.function(lambda *arguments: ops.pack(*arguments, *form), input_signature=specs, autograph=False)


@functools.cache
def unpacker(coding, value_dtype):
    specs, form = (BYTES, INTEGER, INTEGER), (coding, value_dtype)
    return tf.function(lambda *arguments: ops.unpack(*arguments, *form), input_signature=specs, autograph=False)


@pytest.mark.parametrize(("coding", "number", "section"), [("elias_fano", 2, FANO), ("bitmap", 3, BITMAP)])
def test_positions_worked_out_by_hand(coding, number, section):
    payload = ops.pack(INDICES, np.ones(3, np.float32), 10, 3, coding, "none").numpy()
    assert payload[5] == number
    assert payload[32:].tobytes() == bytes.fromhex(section) + bytes(6)
    same(ops.unpack(payload, 10, 3, coding, "none")[0], np.array(INDICES))


@given(places(), FITS, st.sampled_from(DTYPES), st.booleans())
@examples(120)
def test_the_same_bytes_and_the_same_entries_read_from_them(case, coding, value_dtype, empty):
    n, indices = case
    k, form = len(indices), (coding, value_dtype)
    wide = "float64" if value_dtype == "float64" else "float32"
    values = np.random.default_rng(k).standard_normal(k).astype(wide)
    indices, values = (indices[:0], values[:0]) if empty else (indices, values)
    payload = reference.pack(indices, values, n, k, *form)
    assert wire.payload_size(n, k, *form) == payload.size
    numbers = [tf.constant(number, tf.int64) for number in (n, k)]
    same(ops.pack(indices, values, n, k, *form), payload)
    same(packer(*form, wide)(tf.constant(indices, tf.int64), tf.constant(values), *numbers), payload)
    expected = reference.unpack(payload, n, k, *form)
    for found in (ops.unpack(payload, n, k, *form), unpacker(*form)(tf.constant(payload), *numbers)):
        for one, wanted in zip(found, expected, strict=True):
            same(one, wanted)
    assert packer(*form, wide).experimental_get_tracing_count() == 1


@given(st.booleans().flatmap(sent_entries), FITS, st.sampled_from(LOW_BIT))
@examples(60)
def test_low_bit_values_of_groups_travel_in_every_coding(case, coding, value_dtype):
    n, indices, values, segments = case
    sent = reference.quantize(values, value_dtype, "mean", indices, segments)
    check_payload(n, indices, sent, (coding, value_dtype), segments)


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("value_dtype", ["float32", "float16", *LOW_BIT])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (9, 4), (65537, 700), (65537, 40_000), (65537, 65537)])
def test_reduce_payloads(n, k, coding, value_dtype):
    gathered, segments, sums = three_ranks(n, k, coding, value_dtype)
    for found in both("reduce_payloads", (coding, value_dtype), gathered, 5, n, k, 1 / 3, segments=segments):
        same(found, sums)


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("value_dtype", ["float32", "bfloat16", *LOW_BIT])
def test_found_and_added(coding, value_dtype):
    form = (coding, value_dtype)
    gathered, where, sums = located_message(*form)

    def locate(message):
        return varying_ops.locate_payloads(message, NS, 3, *form, CHANNELS)

    same(locate(gathered), where)
    same(tf.function(locate, input_signature=[BYTES], autograph=False)(tf.constant(gathered)), where)
    with pytest.raises(Invalid, match=r"hvd_sparse.locate_payloads: .*(are left|end at)"):
        locate(gathered[:-8])

    def add(message):
        return varying_ops.reduce_located_bucket(message, NS, 3, 0.5, *form, CHANNELS)

    for call in (add, tf.function(add, input_signature=[BYTES], autograph=False)):
        for found, total in zip(call(tf.constant(gathered)), sums, strict=True):
            same(found, total)


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("value_dtype", [*DTYPES, *LOW_BIT])
def test_sizes_known_while_tracing(coding, value_dtype):
    wide = tf.float64 if value_dtype == "float64" else tf.float32
    with tf.Graph().as_default():
        indices, values = tf.raw_ops.Placeholder(dtype=tf.int64), tf.raw_ops.Placeholder(dtype=wide)
        unknown = tf.raw_ops.Placeholder(dtype=tf.int64, shape=[])
        for n, k in ((1, 1), (30, 13), (1000, 1), (65537, 700), (65537, 65537), (2**33, 5)):
            size = wire.payload_size(n, k, coding, value_dtype)
            assert ops.pack(indices, values, n, k, coding, value_dtype).shape == (size,)
            assert ops.pack(indices, values, unknown, k, coding, value_dtype).shape.as_list() == [None]
            assert ops.pack(indices, values, n, unknown, coding, value_dtype).shape.as_list() == [None]
        assert ops.reduce_payloads(tf.zeros([2, 64], tf.uint8), 0, 30, 13, 1.0, coding, value_dtype).shape == (30,)


@pytest.mark.parametrize(("n", "k"), [(70_000, 9), (30, 13), (9, 9)])  # "auto": Elias-Fano, a bitmap, dense
@pytest.mark.parametrize("coding", CODINGS)
def test_damaged_payloads_and_those_of_another_coding_are_refused(n, k, coding):
    indices = np.sort(np.random.default_rng(n).choice(n, k, replace=False))
    good = reference.pack(indices, np.ones(k), n, k, coding, "float16")
    for byte in range(0, good.size, 1 if good.size < 200 else 97):
        damaged = good.copy()
        damaged[byte] ^= 1 << byte % 8
        with pytest.raises(Invalid, match=r"hvd_sparse.unpack: payload"):
            ops.unpack(damaged, n, k, coding, "float16")
        with pytest.raises(Invalid, match=r"hvd_sparse.reduce_payloads: from rank 1: payload"):
            ops.reduce_payloads(np.stack([good, damaged]), 0, n, k, 1.0, coding, "float16")
    for other in CODINGS:
        if wire.resolve_coding(other, n, k) != wire.resolve_coding(coding, n, k):
            payload = np.resize(good, wire.payload_size(n, k, other, "float16"))
            with pytest.raises(Invalid, match=r"hvd_sparse.unpack: payload coding is"):
                ops.unpack(payload, n, k, other, "float16")


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.pack([1], [1.0], 5, 1, "gzip"),
        lambda: ops.unpack(np.zeros(40, np.uint8), 5, 1, "gzip"),
        lambda: ops.reduce_payloads(np.zeros((1, 40), np.uint8), 0, 5, 1, 1.0, "gzip"),
        lambda: varying_ops.locate_payloads(np.zeros(40, np.uint8), [5], 1, "gzip"),
    ],
)
def test_an_unknown_coding_is_told_all_codings(call):
    with pytest.raises(Invalid, match="coding") as caught:
        call()
    assert all(f'"{coding}"' in str(caught.value) for coding in [*wire.CODINGS, "auto"])
