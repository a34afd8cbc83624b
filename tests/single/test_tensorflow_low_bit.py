"""Low-bit and dense payloads by the TensorFlow ops, eagerly and traced, equal the NumPy twins' and PyTorch's."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from test_low_bit import CHANNELS, FORMS, LOW_BIT, NS, SUMS, VALUES, gathered_rows, located_message, sent_entries
from test_low_bit_refusals import BAD_SEGMENTS, PAYLOADS
from test_ops import same
from test_tensorflow_ops import BYTES, FLOAT, INTEGER, Invalid, spec
from tiers import examples

from hvd_sparse import reference, wire
from hvd_sparse.tensorflow import ops, varying_ops

INDICES, VECTOR, SEGMENTS = spec("int64", None), spec("float32", None), spec("int64", None, 2)

pytestmark = pytest.mark.each_value  # the core and its twin are compared elsewhere, pair by pair
CALLS = {
    "quantize": (
        lambda form, values, indices, segments: ops.quantize(values, *form, indices, segments),
        (VECTOR, INDICES, SEGMENTS),
    ),
    "pack": (
        lambda form, indices, values, n, k, segments: ops.pack(indices, values, n, k, *form, segments),
        (INDICES, VECTOR, INTEGER, INTEGER, SEGMENTS),
    ),
    "unpack": (
        lambda form, payload, n, k, segments: ops.unpack(payload, n, k, *form, segments),
        (BYTES, INTEGER, INTEGER, SEGMENTS),
    ),
    "reduce_payloads": (
        lambda form, rows, offset, n, k, scale, segments: ops.reduce_payloads(
            rows, offset, n, k, scale, *form, segments
        ),
        (spec("uint8", None, None), INTEGER, INTEGER, INTEGER, FLOAT, SEGMENTS),
    ),
}


@functools.cache
def traced(name, form):
    call, specs = CALLS[name]
    return tf.function(lambda *arguments: call(form, *arguments), input_signature=specs, autograph=False)


def both(name, form, *arguments, segments):
    """The results of an op called eagerly, and as a graph that was traced for segments of any number."""
    call, specs = CALLS[name]
    yield call(form, *arguments, segments)
    rows = np.zeros((0, 2), np.int64) if segments is None else segments
    tensors = [tf.constant(value, each.dtype) for value, each in zip((*arguments, rows), specs, strict=True)]
    yield traced(name, form)(*tensors)
    assert traced(name, form).experimental_get_tracing_count() == 1


def check_payload(n, indices, sent, form, segments):
    k = len(indices)
    payload = reference.pack(indices, sent, n, k, *form, segments)
    assert wire.payload_size(n, k, *form, segments) == payload.size
    for packed in both("pack", form, indices, sent, n, k, segments=segments):
        same(packed, payload)
    for found in both("unpack", form, payload, n, k, segments=segments):
        for one, wanted in zip(found, (indices, sent), strict=True):
            same(one, wanted)


@given(st.booleans().flatmap(sent_entries), FORMS)
@examples(100)
def test_quantized_packed_and_unpacked_as_the_reference_does(case, form):
    n, indices, values, segments = case
    sent = reference.quantize(values, *form, indices, segments)
    for found in both("quantize", form, values, indices, segments=segments):
        same(found, sent)
    check_payload(n, indices, sent, ("run_length", form[0]), segments)
    if len(indices) == n:
        check_payload(n, indices, sent, ("dense", form[0]), segments)


@pytest.mark.parametrize("value_dtype", ["float32", "float16", "bfloat16", *LOW_BIT])
@pytest.mark.parametrize("n", [1, 9, 65537])
def test_all_elements_travel_without_places(make, n, value_dtype):
    sent = reference.quantize(make("heavy_tailed", n).numpy(), value_dtype)
    check_payload(n, np.arange(n), sent, ("dense", value_dtype), None)


@pytest.mark.parametrize("value_dtype", LOW_BIT)
def test_values_of_any_shape_keep_it(value_dtype):
    values = np.float32(VALUES)
    expected = reference.quantize(values, value_dtype, "min", np.arange(6), [[0, 2]])
    for shape in ((6,), (2, 3), (1, 6, 1)):
        found = ops.quantize(tf.reshape(values, shape), value_dtype, "min", np.arange(6), [[0, 2]])
        same(found, expected.reshape(shape))
    same(ops.quantize(tf.zeros([0]), value_dtype), np.zeros(0, np.float32))
    same(ops.quantize(tf.zeros([2, 0]), value_dtype, "mean", [], [[0, 2]]), np.zeros((2, 0), np.float32))


@pytest.mark.parametrize(("n", "k", "coding", "segments"), SUMS)
@pytest.mark.parametrize("value_dtype", LOW_BIT)
def test_reduce_payloads(n, k, coding, segments, value_dtype):
    form = (coding, value_dtype)
    gathered, sums = gathered_rows(np.random.default_rng(n), n, k, form, "mean", segments)
    for found in both("reduce_payloads", form, gathered, 8, n, k, 1 / 3, segments=segments):
        same(found, sums)


@pytest.mark.parametrize("value_dtype", LOW_BIT)
def test_denormals_survive_the_threads_that_flush_them(value_dtype):
    n, units = 16 * 65536, 2.0**-149
    values = np.float32(units) * np.tile(np.float32([1, -3, 8, 0]), n // 4)
    for level in reference.LEVELS:
        sent = reference.quantize(values, value_dtype, level)
        assert np.count_nonzero(sent) >= n / 2 and np.abs(sent).max() <= 8 * units
        for found in both("quantize", (value_dtype, level), values, np.arange(n), segments=None):
            same(found, sent)
    form = ("dense", value_dtype)
    payload = reference.pack(np.arange(n), sent, n, n, *form)
    for found in both("reduce_payloads", form, payload[None], 0, n, n, 1.0, segments=None):
        same(found, sent + np.float32(0))  # a sum from 0 has no -0.0


@pytest.mark.parametrize("value_dtype", LOW_BIT)
def test_payloads_of_matrices_are_found_and_added(value_dtype):
    form = ("run_length", value_dtype)
    gathered, places, sums = located_message(value_dtype)
    locate = functools.partial(varying_ops.locate_payloads, ns=NS, ranks=3, coding=form[0], value_dtype=value_dtype)
    same(locate(gathered, channels=CHANNELS), places)
    graph = tf.function(lambda bytes_: locate(bytes_, channels=CHANNELS), input_signature=[BYTES], autograph=False)
    same(graph(tf.constant(gathered)), places)
    with pytest.raises(Invalid, match=r"hvd_sparse.locate_payloads: .*(checksum|are left|end at|entries)"):
        locate(gathered)
    add = functools.partial(varying_ops.reduce_located_bucket, ns=NS, ranks=3, scale=0.5, channels=CHANNELS)
    add = functools.partial(add, coding=form[0], value_dtype=value_dtype)
    for call in (add, tf.function(lambda bytes_: add(bytes_), input_signature=[BYTES], autograph=False)):
        for found, total in zip(call(tf.constant(gathered)), sums, strict=True):
            same(found, total)


def test_sizes_known_while_tracing():
    """Of payloads without segments; what segments say may change from step to step."""
    with tf.Graph().as_default():
        indices, values = tf.raw_ops.Placeholder(dtype=tf.int64), tf.raw_ops.Placeholder(dtype=tf.float32)
        segments = tf.raw_ops.Placeholder(dtype=tf.int64, shape=[None, 2])
        for form in (("run_length", "int2"), ("run_length", "int1"), ("dense", "int2"), ("dense", "float32")):
            assert ops.pack(indices, values, 9, 9, *form).shape == (wire.payload_size(9, 9, *form),)
        assert ops.pack(indices, values, 9, 9, "run_length", "int1", segments).shape.as_list() == [None]
        assert ops.pack(indices, values, 9, 9, "dense", "float32", segments).shape == (72,)
        assert ops.quantize(tf.reshape(values, [2, 3]), "int1", "min", indices, segments).shape == (2, 3)


@pytest.mark.parametrize("segments", BAD_SEGMENTS)
@pytest.mark.parametrize("value_dtype", LOW_BIT)
def test_segments_that_do_not_fit_are_refused(segments, value_dtype):
    n, k, form, payload = 6, 2, ("run_length", value_dtype), np.zeros(64, np.uint8)
    for name, arguments in {
        "pack": (np.array([1, 4]), np.ones(2, np.float32), n, k),
        "unpack": (payload, n, k),
        "reduce_payloads": (payload[None], 0, n, k, 1.0),
    }.items():
        with pytest.raises(Invalid, match=rf"hvd_sparse.{name}: segment \d from -?\d to -?\d of n = 6"):
            list(both(name, form, *arguments, segments=segments))
    with pytest.raises(ValueError, match="segments: from"):
        wire.payload_size(n, k, *form, segments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.quantize(VALUES, "int1", "median"), "level"),
        (lambda: ops.quantize(VALUES, "int4"), "value_dtype"),
        (lambda: ops.quantize(VALUES, "int1", "min", None, [[0, 2]]), "hvd_sparse.quantize: 0 indices but 6 values"),
        (lambda: ops.quantize(VALUES, "int1", "min", [[1]]), "hvd_sparse.quantize: indices must have one dimension"),
        (lambda: ops.quantize(VALUES, "int1", "min", range(-1, 5), [[0, 2]]), "hvd_sparse.quantize: indices must"),
        (
            lambda: ops.quantize(VALUES, "int1", "min", [0] * 6, [[0, 2]]),
            "hvd_sparse.quantize: indices must be strictly ascending",
        ),
        (lambda: ops.quantize(VALUES, "int1", "min", range(6), [[1, 2]]), "hvd_sparse.quantize: segment 0 from 1"),
        (lambda: ops.quantize(VALUES, "int1", "min", range(6), [0, 2]), r"hvd_sparse.quantize: segments must be \["),
        (lambda: ops.quantize(VALUES, "int1", "min", range(6), [[0, 2, 1]]), "hvd_sparse.quantize: segments must be"),
        (lambda: ops.pack([0, 1], [1.0, 2.0], 2, 2, "dense", "int1"), "hvd_sparse.pack: .*quantize them first"),
        (lambda: ops.pack([0], [1.0], 5, 1, "dense"), "hvd_sparse.pack: .*all n = 5 entries, got k = 1"),
        (lambda: ops.pack([0], [1.0], 5, 1, "run_length", "int1", [[1]]), "hvd_sparse.pack: segments must be"),
        (lambda: varying_ops.locate_payloads([], [5, 5], 1, channels=[2]), "channels must have 2 entries, one a"),
        (lambda: varying_ops.locate_payloads(np.zeros(64, np.uint8), [5], 1, "run_length", "int1", [6]), "6 channels"),
    ],
)
def test_refusals_name_the_argument(call, message):
    with pytest.raises(Invalid, match=message):
        call()


@pytest.mark.parametrize(("n", "indices", "coding", "value_dtype", "segments"), PAYLOADS)
def test_damaged_payloads_are_refused(n, indices, coding, value_dtype, segments):
    k, form, places = len(indices), (coding, value_dtype), np.array(indices)
    sent = reference.quantize(np.float32([-3, 1, 2, -6, 5][:k]), value_dtype, "mean", places, segments)
    good = reference.pack(places, sent, n, k, *form, segments)
    for size in (*range(good.size), good.size + 8):
        with pytest.raises(Invalid, match=r"hvd_sparse.unpack: payload size"):
            ops.unpack(np.resize(good, size), n, k, *form, segments)
    for byte in range(good.size):
        damaged = good.copy()
        damaged[byte] ^= 1 << byte % 8
        with pytest.raises(Invalid, match=r"hvd_sparse.unpack: payload"):
            ops.unpack(damaged, n, k, *form, segments)
        with pytest.raises(Invalid, match=r"hvd_sparse.reduce_payloads: from rank 1: payload"):
            ops.reduce_payloads(np.stack([good, damaged]), 0, n, k, 1.0, *form, segments)
