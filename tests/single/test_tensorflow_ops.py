"""The TensorFlow ops equal their NumPy twins and PyTorch's, bit for bit, eagerly and traced; errors; shapes.

test_ops.py and test_wire.py test the core with awkward values; this file tests that all of them reach the core.
"""

import functools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorflow.python.framework.ops import gradient_registry
from test_ops import DTYPES, SPECIAL, entries, same
from test_wire import GOOD, K, N, changed
from tiers import examples

from hvd_sparse import reference, wire
from hvd_sparse.tensorflow import ops
from hvd_sparse.torch import ops as torch_ops

Invalid = tf.errors.InvalidArgumentError

pytestmark = pytest.mark.each_value  # the core and its twin are compared elsewhere, pair by pair
SIZES = [1, 63, 65535, 65536, 65537]


def from_torch(tensor):
    """The same bits as a TensorFlow tensor."""
    if tensor.dtype == torch.bfloat16:
        return tf.bitcast(tensor.view(torch.int16).numpy(), tf.bfloat16)
    return tf.constant(tensor.numpy())


def spec(dtype, *shape):
    return tf.TensorSpec(shape, dtype)


@functools.cache
def traced(name, *specs, **options):
    """An op as a graph for tensors of these specs, which refuses to be traced for any others."""
    function = functools.partial(getattr(ops, name), **options)
    return tf.function(lambda *arguments: function(*arguments), input_signature=specs, autograph=False)


INTEGER, REAL, FLOAT, BYTES = spec("int64"), spec("float64"), spec("float32"), spec("uint8", None)


def both(name, specs, *arguments, **options):
    """The results of an op called eagerly, and as a graph."""
    yield getattr(ops, name)(*arguments, **options)
    tensors = [tf.constant(value, each.dtype) for value, each in zip(arguments, specs, strict=True)]
    function = traced(name, *specs, **options)
    yield function(*tensors)
    assert function.experimental_get_tracing_count() == 1


def check_selection(values, k, seed, expected, hint=0.0):
    specs = (spec(values.dtype, None), INTEGER, INTEGER, REAL)
    results = []
    for indices, selected, info in both("select_top_k", specs, values, k, seed, hint):
        same(indices, expected[0])
        assert selected.dtype == values.dtype
        assert selected.numpy().tobytes() == values.numpy()[expected[0]].tobytes()
        assert (info.dtype, info.shape) == (tf.float64, (2,))
        assert info[0] == expected[2]
        results.append(float(info[1]))
    assert results[0] == results[1]
    return results[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_select_top_k(make, kind, dtype):
    for n in SIZES:
        values = from_torch(make(kind, n, dtype))
        order = reference.magnitude_order(values.numpy(), seed=n)
        for k in sorted({1, n, max(1, n // 1000), (n + 1) // 2}):
            last = abs(float(values[order[k - 1]]))
            check_selection(values, k, n, (np.sort(order[:k]), None, 0.0 if math.isnan(last) else last))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hints_change_nothing(make, kind, dtype):
    k, values = 300, from_torch(make(kind, 20_001, dtype))
    magnitude = reference.magnitudes(values.numpy())
    expected = reference.select_top_k(values.numpy(), k, 5)
    for hint in (0.0, 5e-324, expected[2] * 0.98, np.nextafter(expected[2], np.inf), math.inf):
        passed = check_selection(values, k, 5, expected, hint)
        if 0 < hint < math.inf:
            assert min(np.sum(magnitude >= hint), 2 * k) <= passed <= np.sum(magnitude >= hint)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_finite(make, kind, dtype):
    for n in (1, 1023, 65537):
        values = from_torch(make(kind, n, dtype))
        for finite in both("all_finite", (spec(values.dtype, None),), values):
            assert (finite.dtype, finite.shape, bool(finite)) == (tf.bool, (), reference.all_finite(values.numpy()))


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63 - 1, 2**63, 2**64 - 1])
def test_seeds_of_64_bits(make, seed):
    ties = make("ties", 1000).numpy()
    same(ops.select_top_k(ties, 100, seed)[0], reference.select_top_k(ties, 100, seed)[0])


def test_no_values_and_values_of_any_shape(make):
    for dtype in DTYPES:
        assert ops.all_finite(tf.zeros([0], dtype))
    values = from_torch(make("heavy_tailed", 1000))
    for shape in ([10, 100], [1000, 1], [2, 5, 100]):
        found, expected = (ops.select_top_k(each, 40) for each in (tf.reshape(values, shape), values))
        assert [one.numpy().tobytes() for one in found] == [one.numpy().tobytes() for one in expected]
    assert ops.all_finite(tf.constant(1.0))


@pytest.mark.parametrize(
    "number",
    [np.int32, np.int64, tf.constant, tf.Variable, functools.partial(tf.constant, dtype=tf.int16)],
)
def test_numbers_of_any_integer_type(number):
    values = tf.constant([1.0, -5.0, 3.0])
    same(ops.select_top_k(values, number(2), number(7))[0], np.array([1, 2]))
    payload = ops.pack(tf.constant([1, 2], tf.int64), values[1:], number(3), number(2))
    same(ops.reduce_payloads(payload[None], number(0), number(3), number(2)), np.float32([0, -5, 3]))


@given(entries(), st.sampled_from(sorted(DTYPES)), st.booleans())
@examples(80)
def test_run_length_pack_and_unpack(case, dtype, empty):
    n, indices = case
    k, form = len(indices), {"coding": "run_length", "value_dtype": dtype}
    values = np.resize(np.float32([*SPECIAL, 0.1, -70000.0, 1e-7]), k).astype("f8" if dtype == "float64" else "f4")
    indices, values = (indices[:0], values[:0]) if empty else (indices, values)
    payload = reference.pack(indices, values, n, k, **form)
    assert wire.payload_size(n, k, **form) == payload.size
    from_pytorch = torch.zeros(payload.size, dtype=torch.uint8)
    torch_ops.pack(torch.from_numpy(indices), torch.from_numpy(values), n, k, from_pytorch, **form)
    specs = (spec("int64", None), spec(values.dtype, None), INTEGER, INTEGER)
    for packed in both("pack", specs, indices, values, n, k, **form):
        same(packed, payload)
        same(packed, from_pytorch.numpy())
    for found in both("unpack", (BYTES, INTEGER, INTEGER), payload, n, k, **form):
        for one, wanted in zip(found, reference.unpack(payload, n, k, **form), strict=True):
            same(one, wanted)


def test_more_elements_than_32_bits_count():
    n = 2**33
    payload = ops.pack(tf.constant([n - 1], tf.int64), [2.0], n, 1)
    same(payload, reference.pack(np.array([n - 1]), np.float32([2]), n, 1))
    assert ops.unpack(payload, n, 1)[0] == n - 1


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize(("n", "k"), [(1, 1), (65537, 65537), (1_000_003, 1000)])
def test_reduce_payloads(make, n, k, dtype):
    form, rows = {"coding": "run_length", "value_dtype": dtype}, []
    for rank in range(4):
        indices = np.sort(np.random.default_rng(rank).choice(n, k, replace=False))
        selected = make("heavy_tailed", n).roll(rank).numpy()[indices]
        some = 0 if rank == 2 else k
        rows.append(reference.pack(indices[:some], selected[:some], n, k, **form))
    gathered = np.pad(np.stack(rows), ((0, 0), (8, 16)), constant_values=255)
    specs = (spec("uint8", None, None), INTEGER, INTEGER, INTEGER, FLOAT)
    for scale in (1.0, 1 / 3):
        expected = reference.reduce_payloads(gathered, 8, n, k, *form.values(), scale)
        for found in both("reduce_payloads", specs, gathered, 8, n, k, scale, **form):
            same(found, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_denormals_survive_the_threads_that_flush_them(dtype):
    """TensorFlow's own threads flush denormals; 16 blocks of 65,536 are enough for several of them."""
    n = k = 16 * 65536
    values = np.arange(-8 * 65536, 8 * 65536) * (2.0**-126 / n if dtype != "bfloat16" else 2.0**-133)
    payload = reference.pack(np.arange(n), values, n, k, value_dtype=dtype)
    expected = reference.reduce_payloads(payload[None], 0, n, k, value_dtype=dtype, scale=0.5)
    assert np.count_nonzero(expected) > n / 2 and np.abs(expected).max() < 2.0**-110
    specs = (spec("uint8", None, None), INTEGER, INTEGER, INTEGER, FLOAT)
    for found in both("reduce_payloads", specs, payload[None], 0, n, k, 0.5, value_dtype=dtype):
        same(found, expected)


def test_large_tensors_shared_among_threads(make):
    """The oracle here is torch, which test_ops.py holds to the reference: NumPy would sort for seconds."""
    k, values = 1200, torch.cat([make("normal", 600_000), make("ties", 600_000)])
    specs, shared = (spec("float32", None), INTEGER, INTEGER, REAL), from_torch(values)
    for many, hint in ((k, 0.0), (k, 1.0), (400_000, 0.0)):
        expected = torch_ops.select_top_k(values, many, 7, hint)
        for indices, selected, info in both("select_top_k", specs, shared, many, 7, hint):
            same(indices, expected[0].numpy())
            same(selected, expected[1].numpy())
            assert info[0] == expected[2][0].item()
            assert min(info[1], 2 * many) == min(expected[2][1].item(), 2 * many)
    for position in (0, 599_999, 600_000, 1_199_999):
        assert not ops.all_finite(tf.tensor_scatter_nd_update(shared, [[position]], [math.nan]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize(dtype):
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000).astype(np.uint32)
    ties = np.arange(2**16, dtype=np.uint32) << 16 | 0x8000
    values = np.concatenate([bits.view(np.float32), ties.view(np.float32), np.float32(SPECIAL)])
    for found in both("quantize", (spec("float32", None),), values, value_dtype=dtype):
        same(found, reference.quantize(values, dtype))
    for shape in ((), (0,), (2, 0), (3, 4)):
        same(ops.quantize(tf.ones(shape), dtype), np.ones(shape, np.float32).reshape(shape))


def test_a_whole_step_is_traced_once(make):
    """Numbers that change, of all sorts, and values of several sizes."""

    @tf.function(autograph=False, input_signature=[spec("float32", None), INTEGER, INTEGER, REAL, FLOAT])
    def step(values, k, seed, hint, scale):
        n = tf.size(values, tf.int64)
        indices, selected, _ = ops.select_top_k(values, k, seed, hint)
        payload = ops.pack(indices, ops.quantize(selected, "bfloat16"), n, k, value_dtype="bfloat16")
        return ops.reduce_payloads(tf.stack([payload, payload]), 0, n, k, scale, value_dtype="bfloat16")

    for n, k, seed, hint, scale in ((100, 3, 0, 0.0, 0.5), (100, 99, -1, 1e9, 1.0), (65537, 66, 2**62, 0.1, 1 / 3)):
        array = make("heavy_tailed", n).numpy()
        indices, values, _ = reference.select_top_k(array, k, seed)
        row = reference.pack(indices, values, n, k, value_dtype="bfloat16")
        expected = reference.reduce_payloads(np.stack([row, row]), 0, n, k, value_dtype="bfloat16", scale=scale)
        numbers = (tf.constant(k, tf.int64), tf.constant(seed, tf.int64), tf.constant(hint, tf.float64))
        same(step(tf.constant(array), *numbers, tf.constant(scale)), expected)
    assert step.experimental_get_tracing_count() == 1


def test_shapes_known_while_tracing():
    with tf.Graph().as_default():
        values, count = tf.raw_ops.Placeholder(dtype=tf.float32), tf.raw_ops.Placeholder(dtype=tf.int64)
        indices, selected, info = ops.select_top_k(values, 5)
        payload = ops.pack(indices, selected, 100, 5)
        known = (indices, selected, info, payload, ops.all_finite(values))
        assert [list(tensor.shape) for tensor in known] == [[5], [5], [2], [64], []]
        assert ops.reduce_payloads([payload], 0, 100, 5).shape == (100,)
        unknown = [
            *(*ops.unpack(payload, 100, 5), ops.select_top_k(values, count)[0]),
            *(ops.pack(indices, selected, count, 5), ops.pack(indices, selected, 100, -1)),
            ops.reduce_payloads([payload], 0, count, 5),
        ]
        assert [tensor.shape.as_list() for tensor in unknown] == [[None]] * 6
        assert ops.quantize(tf.raw_ops.Placeholder(dtype=tf.float32, shape=[2, 3]), "float16").shape == (2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.reduce_payloads(BYTE, 0, 5, 2), "rank 2"),
        (lambda: ops.unpack(BYTE[None], 5, 2), "rank 1"),
        (lambda: ops.pack([[1]], [1.0], 5, 1), "rank 1"),
        (lambda: ops.pack([1], [[1.0]], 5, 1), "rank 1"),
        (lambda: ops.select_top_k([1.0], tf.constant([1])), "rank 0"),
        (lambda: ops.token(tf.constant([1])), "rank 0"),
    ],
)
def test_wrong_ranks_are_refused_eagerly_and_while_tracing(call, message):
    with pytest.raises(ValueError, match=message):
        tf.function(call, autograph=False).get_concrete_function()
    with pytest.raises(Invalid, match=r"hvd_sparse\."):
        call()


BYTE = tf.zeros([48], tf.uint8)
ONES = tf.ones([5])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.select_top_k(tf.zeros([0]), 0), r"hvd_sparse.select_top_k: k must"),
        (lambda: ops.select_top_k(ONES, 0), r"hvd_sparse.select_top_k: k must"),
        (lambda: ops.select_top_k(ONES, 6), r"hvd_sparse.select_top_k: k must"),
        (lambda: ops.pack([1, 1], [1.0, 2.0], 5, 2), "hvd_sparse.pack: .*ascending"),
        (lambda: ops.pack([4, 5], [1.0, 2.0], 5, 2), "hvd_sparse.pack: .*ascending"),
        (lambda: ops.pack([1, 4], [1.0], 5, 2), "hvd_sparse.pack: 2 indices but 1 values"),
        (lambda: ops.pack([1], [1.0], 5, 2), "hvd_sparse.pack: .*entries"),
        (lambda: ops.pack([4, 1], [1.0, 2.0], 5, 2), "hvd_sparse.pack: .*ascending"),
        (lambda: ops.pack([-1, 1], [1.0, 2.0], 5, 2), "hvd_sparse.pack: .*ascending"),
        (lambda: ops.pack([1, 4], [1.0, 2.0], 5, 6), "hvd_sparse.pack: .*k must"),
        (lambda: ops.pack([1, 4], [1.0, 2.0], 2**62, 2), "hvd_sparse.pack"),
        (lambda: ops.pack([1], tf.constant([1.0], tf.float64), 5, 1), "hvd_sparse.pack: values must be float32"),
        (lambda: ops.pack([1], [1.0], 5, 1, value_dtype="float64"), "hvd_sparse.pack: values must be float64"),
        (lambda: ops.pack([1], [1.0], 5, 1, coding="gzip"), "coding"),
        (lambda: ops.unpack(BYTE, 5, 2, value_dtype="int8"), "value_dtype"),
        (lambda: ops.quantize(ONES, "int8"), "value_dtype"),
        (lambda: ops.all_finite(tf.ones([5], tf.int32)), "int32"),
    ],
)
def test_refusals_name_the_argument(call, message):
    with pytest.raises(Invalid, match=message):
        call()


def test_kernels_of_a_graph_refuse_as_eager_ones_do():
    select = traced("select_top_k", spec("float32", None), INTEGER, INTEGER, REAL)
    numbers = tf.constant(0, tf.int64), tf.constant(0.0, tf.float64)
    with pytest.raises(Invalid, match=r"hvd_sparse.select_top_k: k must be in \[1, 5\]"):
        select(ONES, tf.constant(6, tf.int64), *numbers)
    same(select(ONES, tf.constant(5, tf.int64), *numbers)[0], np.arange(5))


def check_refused(payload, message, n=N, k=K):
    with pytest.raises(Invalid, match=f"hvd_sparse.unpack: .*{message}"):
        ops.unpack(payload, n, k)
    if payload.size == GOOD.size and (n, k) == (N, K):
        with pytest.raises(Invalid, match=f"hvd_sparse.reduce_payloads: from rank 1: .*{message}"):
            ops.reduce_payloads(np.stack([GOOD, payload]), 0, n, k)


def test_hostile_payloads():
    for size in (*range(GOOD.size), GOOD.size + 1, GOOD.size + 8):
        check_refused(np.resize(GOOD, size), "size")
    for byte in range(GOOD.size):
        for bit in range(8):
            check_refused(changed(byte, bytes([GOOD[byte] ^ 1 << bit]), seal=False), "payload")
    for offset, data, message in (
        *((0, b"\x07", "magic"), (4, b"\x07", "version"), (7, b"\x01", "reserved"), (16, b"\x04", "entries")),
        *((34, b"\x05", "count"), (32, b"\xff" * 4, "count"), (38, b"\x03", "run"), (40, b"\xff\xff", "run")),
    ):
        check_refused(changed(offset, data), message)
    for n, k in ((N + 1, K), (N - 1, K), (N, K + 1), (N, K - 1), (5, 1)):
        check_refused(GOOD, "payload", n, k)
    for offset in (-1, 1, 2**63 - 1):
        with pytest.raises(Invalid, match=r"hvd_sparse.reduce_payloads: gathered .* offset"):
            ops.reduce_payloads(np.stack([GOOD, GOOD]), offset, N, K)


def test_only_tokens_are_stateful():
    """TensorFlow may fold a pure function of a constant and ops that depend on it; a token is sent in every step."""
    with tf.Graph().as_default() as graph:
        values = tf.ones([5])
        ops.token(3)
        indices, selected, _ = ops.select_top_k(values, 2)
        payload = ops.pack(indices, selected, 5, 2)
        ops.unpack(payload, 5, 2)
        ops.reduce_payloads([payload], 0, 5, 2)
        ops.all_finite(ops.quantize(values, "float16"))
        found = {op.type: op.op_def.is_stateful for op in graph.get_operations() if op.type.startswith("HvdSparse")}
    assert len(found) == 7
    assert [name for name, stateful in found.items() if stateful] == ["HvdSparseToken"]


def test_token():
    for token in both("token", (INTEGER,), 3):
        same(token, np.float32([1, 4]))


def test_no_operator_lacks_an_entry_in_the_registry_of_gradients():
    """Without one, a tape that is active during a reduction raises LookupError."""
    sources = (Path(__file__).resolve().parents[2] / "csrc" / "tensorflow").glob("*ops.cc")
    types = [name for source in sources for name in re.findall(r'REGISTER_OP\("(\w+)"\)', source.read_text())]
    assert {"HvdSparseToken", "HvdSparseTakeSum", "HvdSparseFilterBucket"} <= set(types)
    assert [gradient_registry.lookup(name) for name in types] == [None] * len(types)
