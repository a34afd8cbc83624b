"""hvd_sparse.native equals the NumPy twins on inputs drawn by Hypothesis; its errors; it needs no framework."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from drawn import (
    DAMAGE,
    KINDS,
    SEEDS,
    SIZES,
    contents,
    counts,
    damaged,
    forms,
    hints,
    sealed,
    vectors,
    verdict,
)
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from hvd_sparse import native, reference, wire

NUMBERS = st.one_of(st.sampled_from([0.0, -0.0, 0.5, 0.9, 1.0, -2.0, 1e-45, 3e38]), st.floats(-4, 4, width=32))
WIDE_SEEDS = st.integers(0, 2**64 - 1)


def array(data, n, kinds=("any bits", *KINDS)):
    return data.draw(vectors(n, kinds=kinds)).numpy()


def same(found, expected):
    """Equal bit for bit, but for the bits of a NaN."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    if found.dtype.kind == "f":
        bits = f"u{found.itemsize}"
        alike = (found.view(bits) == expected.view(bits)) | (np.isnan(found) & np.isnan(expected))
        assert alike.all(), (found[~alike][:5], expected[~alike][:5])
    else:
        assert (found == expected).all()


def check_passed(passed, magnitudes, k, hint):
    reached = int((magnitudes >= hint).sum())
    assert not 0 < hint < np.inf or min(reached, 2 * k) <= passed <= reached


@given(st.data(), SIZES, WIDE_SEEDS)
@examples(200)
def test_select_top_k(data, n, seed):
    values = array(data, n)
    k, before = data.draw(counts(n)), values.copy()
    expected = reference.select_top_k(values, k, seed)
    hint = data.draw(hints(expected[2]))
    indices, selected, info = native.select_top_k(values, k, seed, hint)
    same(indices, expected[0])
    same(selected, values[indices])
    assert info.dtype == np.float64 and info[0] == expected[2]
    check_passed(info[1], reference.magnitudes(values), k, hint)
    same(values, before)


@given(st.data(), SIZES, st.one_of(NUMBERS, st.just(np.inf)))
@examples(200)
def test_filter_threshold(data, n, threshold):
    values = array(data, n)
    if threshold < 0.0:
        with pytest.raises(ValueError, match="threshold"):
            native.filter_threshold(values, threshold)
        return
    for found, expected in zip(
        native.filter_threshold(values, threshold), reference.filter_threshold(values, threshold), strict=True
    ):
        same(found, expected)


def draw_rule(data, n):
    """A gradient, a residual, a velocity or None, a parameter or None, and the rule."""
    gradient, *memory = (array(data, n) for _ in range(4))
    rule = {"factor": data.draw(NUMBERS)}
    if data.draw(st.booleans()):
        rule |= {"momentum": data.draw(NUMBERS), "nesterov": data.draw(st.booleans())}
    rule |= {"weight_decay": data.draw(NUMBERS)} if data.draw(st.booleans()) else {}
    memory[1] = memory[1] if "momentum" in rule else None
    memory[2] = memory[2] if rule.get("weight_decay") else None
    return gradient, memory, rule


def copies(memory):
    return [None if part is None else part.copy() for part in memory]


def check_memory(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            same(ours, theirs)


@given(st.data(), SIZES)
@examples(200)
def test_accumulate(data, n):
    gradient, memory, rule = draw_rule(data, n)
    found, expected, before = copies(memory), copies(memory), gradient.copy()
    with np.errstate(all="ignore"):
        finite = reference.accumulate(gradient, *expected, **rule)
    assert native.accumulate(gradient, *found, **rule) is finite
    check_memory(found, expected)
    same(gradient, before)


@given(st.data(), SIZES, WIDE_SEEDS)
@examples(200)
def test_accumulate_top_k(data, n, seed):
    gradient, memory, rule = draw_rule(data, n)
    found, expected, k = copies(memory), copies(memory), data.draw(counts(n))
    with np.errstate(all="ignore"):
        indices, values, threshold, finite = reference.accumulate_top_k(gradient, *expected, k=k, seed=seed, **rule)
    hint = data.draw(hints(threshold))
    result = native.accumulate_top_k(gradient, *found, k=k, seed=seed, threshold_hint=hint, **rule)
    same(result[0], indices)
    same(result[1], values)
    assert result[2][0] == threshold and result[3] is finite
    check_passed(result[2][1], reference.magnitudes(expected[0]), k, hint)
    check_memory(found, expected)


@given(st.data(), forms(), st.sampled_from(wire.LEVELS))
@examples(300)
def test_quantize(data, form, level):
    values = array(data, form.k)
    indices = np.sort(np.random.default_rng(data.draw(SEEDS)).choice(form.n, form.k, replace=False))
    segments = form.segments
    if form.value_dtype in wire.LOW_BITS:
        values = np.where(np.isnan(values), np.float32(0), values)
    if form.value_dtype == "float64":
        return
    with np.errstate(all="ignore"):
        expected = reference.quantize(values, form.value_dtype, level, indices, segments)
        same(native.quantize(values, form.value_dtype, level, indices, segments), expected)
        if segments is None:
            same(native.quantize(values, form.value_dtype, level), expected)


@given(st.data(), forms())
@examples(300)
def test_pack_and_unpack(data, form):
    indices, values, payload = data.draw(contents(form))
    same(native.pack(indices, values, *form), payload)
    for ours, theirs in zip(native.unpack(payload, *form), reference.unpack(payload, *form), strict=True):
        same(ours, theirs)


@given(st.data(), forms(), DAMAGE, st.booleans())
@examples(400)
def test_damaged_payloads(data, form, damage, seal):
    """Both refuse, or both read the same."""
    payload = damaged(data.draw(contents(form))[2], damage)
    payload = sealed(payload) if seal and payload.size >= wire.HEADER_BYTES else payload
    expected = verdict(lambda: reference.unpack(payload, *form))
    found = verdict(lambda: native.unpack(payload, *form))
    assert (found is None) == (expected is None)
    for ours, theirs in zip(found or (), expected or (), strict=True):
        same(ours, theirs)


@given(st.data(), st.integers(1, 2000), st.lists(st.integers(-5, 2005), max_size=9))
@examples(100)
def test_any_indices_are_packed_or_refused_as_by_the_twin(data, n, indices):
    indices = np.array(sorted(indices) if data.draw(st.booleans()) else indices, np.int64)
    values, k = np.ones(indices.size, np.float32), max(1, min(n, indices.size))
    coding = data.draw(st.sampled_from(["run_length", "elias_fano", "bitmap", "auto"]))
    expected = verdict(lambda: reference.pack(indices, values, n, k, coding))
    found = verdict(lambda: native.pack(indices, values, n, k, coding))
    if expected is not None:
        same(found, expected)
    elif found is not None:  # what is refused may be seen by the one that unpacks, but must be
        with pytest.raises(ValueError):
            native.unpack(found, n, k, coding)


@pytest.mark.parametrize("value_dtype", wire.VALUE_DTYPES)
@pytest.mark.parametrize("coding", [*wire.CODINGS, "auto"])
@pytest.mark.parametrize("n", [1, 65_535, 65_536, 65_537, 200_001])
def test_sizes_around_a_block(n, coding, value_dtype):
    random = np.random.default_rng(n)
    k = n if coding == "dense" else max(1, n // 3)
    segments = np.array([[0, 1], [n // 2, min(3, n - n // 2)]]) if n > 1 and value_dtype in wire.LOW_BITS else None
    indices = np.sort(random.choice(n, k, replace=False))
    values = random.standard_normal(k).astype(np.float64 if value_dtype == "float64" else np.float32)
    if value_dtype != "float64":
        values = native.quantize(values, value_dtype, "mean", indices, segments)
    form = (n, k, coding, value_dtype, segments)
    payload = native.pack(indices, values, *form)
    same(payload, reference.pack(indices, values, *form))
    found = native.unpack(payload, *form)
    same(found[0], indices)
    assert value_dtype == "none" or (found[1] == values).all()


def ones(n=8, dtype=np.float32):
    return np.ones(n, dtype)


def read_only(n=8):
    array = ones(n)
    array.flags.writeable = False
    return array


def unaligned(n=8, dtype=np.float32):
    return np.frombuffer(bytearray(np.dtype(dtype).itemsize * n + 1), dtype, offset=1)


PAYLOAD = reference.pack([1, 3], ones(2), 8, 2)
REFUSALS = [
    (native.accumulate, (ones(dtype=np.float64), ones()), {}, "gradient must be a contiguous array float32"),
    (native.accumulate, (ones(16)[::2], ones()), {}, r"gradient must be .* got float32\[8\]"),
    (native.accumulate, (ones().reshape(2, 4), ones()), {}, r"gradient must be .* got float32\[2, 4\]"),
    (native.accumulate, ([1.0], ones(1)), {}, "gradient must be .* got list"),
    (native.accumulate, (unaligned(), ones()), {}, r"gradient must begin at a multiple of 4 bytes.*gradient.copy\(\)"),
    (native.accumulate, (ones(), unaligned()), {}, "residual must begin at a multiple of 4 bytes"),
    (native.pack, (unaligned(2, np.int64), ones(2), 8, 2), {}, "indices must begin at a multiple of 8 bytes"),
    (native.accumulate, (ones(), ones(7)), {}, "residual must have 8 elements, got 7"),
    (native.accumulate, (ones(), ones(16)[::2]), {}, "residual must be a contiguous array"),
    (native.accumulate, (ones(), read_only()), {}, "residual is changed in place, got an array that is read-only"),
    (native.accumulate, (ones(), ones(), read_only()), {}, "velocity is changed in place"),
    (native.accumulate, (ones(), ones(), ones(9)), {}, "velocity must have 8 elements, got 9"),
    (native.accumulate, (ones(), None), {}, "residual"),
    (native.accumulate, (ones(), ones()), {"weight_decay": 0.1}, "weight_decay needs the parameter"),
    (native.accumulate, (ones(), ones(), None, ones(7)), {"weight_decay": 0.1}, "parameter must have 8 elements"),
    (native.accumulate_top_k, (ones(), ones()), {"k": 0}, r"k must be in \[1, n = 8\], got 0"),
    (native.accumulate_top_k, (ones(), ones()), {"k": 9}, r"k must be in \[1, n = 8\], got 9"),
    (native.accumulate_top_k, (ones(), read_only()), {"k": 2}, "residual is changed in place"),
    (native.accumulate_top_k, (ones(), None), {"k": 2}, "residual"),
    (native.select_top_k, (ones(dtype=np.float16), 2), {}, "values must be a contiguous array float32"),
    (native.select_top_k, (ones(), 9), {}, "k must be in"),
    (native.select_top_k, (ones(0), 1), {}, "k must be in"),
    (native.quantize, (ones(), "int3"), {}, "value_dtype must be one of .* got 'int3'"),
    (native.quantize, (ones(), "int2", "median"), {}, "level must be one of mean, min; got 'median'"),
    (native.quantize, (ones(), "int2", "mean", None, [(0, 1)]), {}, "indices must be a contiguous array int64"),
    (native.quantize, (ones(), "int2", "mean", np.arange(7), [(0, 1)]), {}, "indices must have 8 elements, got 7"),
    (native.quantize, (ones(2), "int2", "mean", np.arange(2), [(0, 0)]), {}, "cannot have 0 channels"),
    (native.quantize, (ones(2), "int2", "mean", np.arange(2), [(1, 1)]), {}, "segment 0 from 1"),
    (native.quantize, (ones(2), "int2", "mean", np.arange(2), [(0, 1, 2)]), {}, "segments must be pairs"),
    (native.quantize, (ones(2), "int2", "mean", np.array([1, 0]), [(0, 1)]), {}, "got 0 after 1"),
    (native.quantize, (ones(2), "int2", "mean", np.array([-1, 0]), [(0, 1)]), {}, "got -1 after -1"),
    (native.pack, (np.arange(2, dtype=np.int32), ones(2), 8, 2), {}, "indices must be a contiguous array int64"),
    (native.pack, (np.arange(2), ones(3), 8, 2), {}, "values must have 2 elements, got 3"),
    (native.pack, (np.arange(2), ones(2, np.float64), 8, 2), {}, "values must be a contiguous array float32"),
    (native.pack, (np.arange(2), ones(2), 8, 2, "auto", "float64"), {}, "values must be a contiguous array float64"),
    (native.pack, (np.arange(3), ones(3), 8, 2), {}, "entries"),
    (native.pack, (np.array([3, 1]), ones(2), 8, 2), {}, "ascend"),
    (native.pack, (np.array([3, 8]), ones(2), 8, 2), {}, "ascend"),
    (native.pack, (np.arange(2), ones(2), 8, 2, "zip"), {}, "coding must be one of .* got 'zip'"),
    (native.pack, (np.arange(2), ones(2), 8, 2, "dense"), {}, "k must be n = 8"),
    (native.pack, (np.arange(2), ones(2), 8, 2, "auto", "int2", [(0, 9)]), {}, "segments"),
    (native.pack, (np.arange(2), ones(2), 8, 9), {}, "k must be at most n = 8"),
    (native.unpack, (PAYLOAD.view(np.int8), 8, 2), {}, "payload must be a contiguous array uint8"),
    (native.unpack, (PAYLOAD[:-1], 8, 2), {}, "size"),
    (native.unpack, (PAYLOAD, 9, 2), {}, "payload"),
    (native.unpack, (PAYLOAD, 8, 2, "bitmap"), {}, "payload"),
    (native.unpack, (PAYLOAD, 8, 2, "run_length", "float16"), {}, "payload"),
    (native.unpack, (PAYLOAD, 8, 10**12), {}, "k must be at most n"),
]


@pytest.mark.parametrize(("function", "arguments", "options", "text"), REFUSALS, ids=range(len(REFUSALS)))
def test_refusals_name_the_argument(function, arguments, options, text):
    before = [one.copy() if isinstance(one, np.ndarray) else one for one in arguments]
    with pytest.raises(ValueError, match=text):
        function(*arguments, **options)
    for one, other in zip(arguments, before, strict=True):
        assert not isinstance(one, np.ndarray) or (one == other).all()


@pytest.mark.parametrize("hint", [float("nan"), -1.0, float("inf"), 1e300])
def test_a_hint_of_any_kind_changes_no_result(hint):
    values = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    same(native.select_top_k(values, 40, 0, hint)[0], reference.select_top_k(values, 40)[0])
    found = native.accumulate_top_k(values, np.zeros_like(values), k=40, threshold_hint=hint)
    same(found[1], reference.select_top_k(values, 40)[1])


def test_empty_arrays():
    same(native.quantize(ones(3), "int2", segments=[]), ones(3))
    nothing = ones(0)
    assert native.accumulate(nothing, ones(0)) is True
    assert native.quantize(nothing, "float16").size == 0
    same(native.pack(np.empty(0, np.int64), nothing, 8, 2), reference.pack([], [], 8, 2))
    assert [part.size for part in native.unpack(native.pack(np.empty(0, np.int64), nothing, 8, 2), 8, 2)] == [0, 0]


@given(st.data(), st.lists(st.tuples(st.integers(1, 200), st.integers(1, 30)), max_size=5))
@pytest.mark.parametrize("coding", [*wire.CODINGS, "auto"])
@examples(100)
def test_unpack_payloads(coding, data, sizes):
    """As one after the other; a message that is cut short or damaged anywhere is refused."""
    forms = [(n, n if coding == "dense" else min(n, k)) for n, k in sizes]
    packed = []
    for n, k in forms:
        entries = data.draw(st.sampled_from([0, k]))
        indices = np.sort(np.random.default_rng(n).choice(n, entries, replace=False))
        packed.append(native.pack(indices, array(data, k)[:entries], n, k, coding))
    message = np.concatenate([np.empty(0, np.uint8), *packed])
    ns, ks = [n for n, _ in forms], [k for _, k in forms]
    expected = reference.unpack_payloads(message, ns, ks, coding)
    for one, other in zip(native.unpack_payloads(message, ns, ks, coding), expected, strict=True):
        same(one, other)
    if forms:
        with pytest.raises(ValueError, match="payloads must have"):
            native.unpack_payloads(message[:-1], ns, ks, coding)
        message[data.draw(st.integers(0, message.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
        with pytest.raises(ValueError, match="payload"):
            native.unpack_payloads(message, ns, ks, coding)


def test_threads_do_not_disturb_each_other():
    def work(seed):
        random = np.random.default_rng(seed)
        gradient, residual = (random.standard_normal(100_000, np.float32) for _ in range(2))
        twin = residual.copy()
        indices, values, *_ = native.accumulate_top_k(gradient, residual, k=1000)
        payload = native.pack(indices, values, 100_000, 1000, "auto")
        expected = reference.accumulate_top_k(gradient, twin, k=1000)
        found = native.unpack(payload, 100_000, 1000, "auto")
        return [(one == other).all() for one, other in zip(found, expected[:2], strict=True)]

    with ThreadPoolExecutor(8) as pool:
        assert all(all(same) for same in pool.map(work, range(16)))


def test_no_framework_is_needed():
    """Servers and workers run where there is neither PyTorch nor TensorFlow nor Horovod."""
    script = """
import sys
for name in ("torch", "tensorflow", "horovod", "mpi4py"):
    sys.modules[name] = None  # an import of it fails
import numpy as np
from hvd_sparse import native
from hvd_sparse.parameter_server import DGS, Simulation, in_turn
start = {"a": np.ones((50, 40), np.float32)}
for settings in ({}, {"values": "int2", "pull_density": 0.1, "pull_values": "float16"}):
    simulation = Simulation(DGS(density=0.1, min_numel=0, **settings), start, 2)
    simulation.run(in_turn(2), 40, lambda worker, theta: theta, lr=0.01)
    assert np.abs(simulation.parameters()["a"]).mean() < 1.0
print("worked", [name for name in ("torch", "tensorflow", "horovod", "mpi4py") if sys.modules[name] is not None])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "worked []" in done.stdout, done.stderr


LITTLE_MEMORY = """
import resource, sys
import numpy as np
if sys.argv[1] == "numpy":
    from hvd_sparse import native
    large = 2**44  # the payload takes 1/2 GiB, the counts of its blocks 1 GiB more
    def attempt(n):
        return native.pack(np.array([5]), np.ones(1, np.float32), n, 1)
    Refused = MemoryError
else:
    import tensorflow as tf
    from hvd_sparse.tensorflow import ops
    large = 2**46  # counts of its blocks take 4 GiB
    payloads = {n: ops.pack(tf.constant([5], tf.int64), tf.ones([1]), n, 1, "elias_fano") for n in (2**20, large)}
    def attempt(n):
        return ops.unpack(payloads[n], n, 1, "elias_fano")
    Refused = tf.errors.ResourceExhaustedError
attempt(2**20)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, resource.RLIM_INFINITY))
try:
    attempt(large)
except Refused as error:
    assert "pack: out of memory" in str(error), error
else:
    sys.exit("not refused")
attempt(2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
@pytest.mark.parametrize("framework", ["numpy", pytest.param("tensorflow", marks=pytest.mark.exhaustive)])
def test_want_of_memory_does_not_end_the_process(framework):
    done = subprocess.run([sys.executable, "-c", LITTLE_MEMORY, framework], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
