"""torch.ops.hvd_sparse.* equal their NumPy twins, bit for bit; hints, threads, fake tensors.

test_wire.py tests hostile payloads.
"""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from hvd_sparse import reference
from hvd_sparse.torch import ops

Refused = (RuntimeError, ValueError)
DTYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}
SIZES = [1, 2, 63, 64, 65, 1023, 65535, 65536, 65537, 131072]
SPECIAL = [0.0, -0.0, math.nan, math.inf, -math.inf, 1.0, -1.0, 1e-45, -1e-45, 1.1754944e-38, 3.4028235e38, 65504.0]


def as_numpy(tensor):
    """The same numbers; bfloat16, which NumPy lacks, widened to float32, which changes neither order nor ties."""
    return tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def raw(tensor):
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def same(tensor, array):
    """Equal dtype, shape and bits (of NaN only the place)."""
    found = tensor.numpy()
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    both_nan = np.isnan(found) & np.isnan(array) if found.dtype.kind == "f" else np.zeros(found.shape, bool)
    assert found[~both_nan].tobytes() == array[~both_nan].tobytes()


def check_selection(values, k, seed, expected, hint=0.0):
    indices, selected, info = ops.select_top_k(values, k, seed, hint)
    same(indices, expected[0])
    assert raw(selected) == raw(values.reshape(-1)[indices])
    assert selected.dtype == values.dtype
    assert (info.dtype, info.shape) == (torch.float64, (2,))
    assert info[0].item() == expected[2]
    return info[1].item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_select_top_k(make, kind, dtype):
    for n in SIZES:
        values = make(kind, n, dtype)
        array = as_numpy(values)
        order = reference.magnitude_order(array, seed=n)
        for k in sorted({1, n, *(max(1, round(density * n)) for density in (0.001, 0.01, 0.1, 0.5, 0.99))}):
            last = abs(float(array[order[k - 1]]))
            check_selection(values, k, n, (np.sort(order[:k]), None, 0.0 if math.isnan(last) else last))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hints_change_nothing(make, kind, dtype):
    n = 65537
    values = make(kind, n, dtype)
    magnitude = reference.magnitudes(as_numpy(values))
    for k in (65, 30_000):
        expected = reference.select_top_k(as_numpy(values), k, 5)
        exact = expected[2]
        for hint in (0.0, 5e-324, exact / 2, exact * 0.98, exact, np.nextafter(exact, np.inf), exact * 2, math.inf):
            passed = check_selection(values, k, 5, expected, hint)
            if 0 < hint < math.inf:
                reached = int((magnitude >= hint).sum())
                assert min(reached, 2 * k) <= passed <= reached


@given(
    st.lists(st.one_of(st.sampled_from(SPECIAL), st.floats(width=32)), min_size=1, max_size=200),
    st.data(),
    st.sampled_from(sorted(DTYPES)),
)
@examples(300)
def test_any_values(numbers, data, dtype):
    values = torch.tensor(numbers, dtype=torch.float32).to(DTYPES[dtype])
    array = as_numpy(values)
    k = data.draw(st.integers(1, len(numbers)))
    seed = data.draw(st.integers(-(2**63), 2**64 - 1))
    threshold = abs(data.draw(st.one_of(st.sampled_from(numbers), st.floats(0, allow_nan=False))))
    hint = data.draw(st.one_of(st.just(threshold), st.floats(0, allow_nan=False)))
    check_selection(values, k, seed, reference.select_top_k(array, k, seed), 0.0 if math.isnan(hint) else hint)
    assert ops.select_threshold(values, k).item() == reference.select_threshold(array, k)
    assert ops.all_finite(values).item() == reference.all_finite(array)
    if not math.isnan(threshold):
        indices, passed = ops.filter_threshold(values, threshold)
        same(indices, reference.filter_threshold(array, threshold)[0])
        assert raw(passed) == raw(values[indices])


@pytest.mark.parametrize("dtype", DTYPES)
def test_filter_and_select_threshold(make, kind, dtype):
    for n in (1, 64, 1023, 65537):
        values = make(kind, n, dtype)
        array = as_numpy(values)
        for k in {1, n, (n + 9) // 10, (n + 999) // 1000}:
            exact = reference.select_threshold(array, k)
            assert ops.select_threshold(values, k).item() == exact
            for threshold in (exact, np.nextafter(exact, np.inf)):
                indices, passed = ops.filter_threshold(values, threshold)
                same(indices, reference.filter_threshold(array, threshold)[0])
                assert raw(passed) == raw(values[indices])
            for fraction, seed in ((0.005, 1), (0.3, -1)):
                sampled = ops.select_threshold(values, k, "sampled", fraction, seed)
                assert (sampled.dtype, sampled.shape) == (torch.float64, ())
                assert sampled.item() == reference.select_threshold(array, k, "sampled", fraction, seed)


@pytest.mark.parametrize("kind", ["normal", "row_scaled", "heavy_tailed", "striped", "constant"])
def test_sampled_threshold_lands_near(make, kind):
    """32 samples of the k largest give the count a relative deviation of 1/sqrt(32) = 0.18: allow four of them."""
    n, k = 1_000_000, 1000
    values = make(kind, n)
    ratios = []
    for seed in range(20):
        threshold = ops.select_threshold(values, k, "sampled", 0.005, seed).item()
        if seed == 0:
            assert threshold == reference.select_threshold(values.numpy(), k, "sampled", 0.005, seed)
        if kind == "constant":
            assert threshold == 0.25
        else:
            ratios.append(ops.filter_threshold(values, threshold)[0].numel() / k)
    if ratios:
        assert all(0.4 < ratio < 1.9 for ratio in ratios)
        assert 0.85 < sum(ratios) / len(ratios) < 1.2


def test_ties_are_cut_evenly():
    """A chi-square sum of 1000 cells has mean 1000 and deviation 45 under an even choice."""
    values, counts = torch.full((1000,), 3.0), torch.zeros(1000)
    for seed in range(400):
        counts[ops.select_top_k(values, 100, seed)[0]] += 1
    assert 730 < ((counts - 40) ** 2 / (400 * 0.1 * 0.9)).sum().item() < 1270
    assert counts[:500].sum().item() == pytest.approx(20_000, rel=0.03)


def test_all_finite_finds_one_anywhere_and_knows_the_limits_of_float32():
    assert ops.all_finite(torch.empty(0)).item() is True
    for position in (0, 4095, 4096, 262_144, 299_999):
        values = torch.ones(300_000)
        values[position] = math.nan
        assert ops.all_finite(values).item() is False
    for number, finite in (
        (1e300, False),
        ((2 - 2**-24) * 2.0**127, False),
        (math.nextafter(3.4028235677973366e38, 0), True),
    ):
        assert ops.all_finite(torch.tensor([1.0, -number], dtype=torch.float64)).item() is finite


def test_threads_change_nothing(make):
    n, k = 1_200_000, 1200
    threads = torch.get_num_threads()
    values = torch.cat([make("normal", n // 2), make("ties", n // 2)])
    chosen = [np.sort(np.random.default_rng(rank).choice(n, k, replace=False)) for rank in range(3)]
    rows = [reference.pack(indices, values.numpy()[indices], n, k) for indices in chosen]
    gathered = torch.from_numpy(np.stack(rows))
    results = []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            out = torch.empty(n)
            ops.reduce_payloads(gathered, 0, n, k, out, 1 / 3)
            found = [ops.select_top_k(values, many, 7, hint)[:2] for many in (k, n // 2) for hint in (0.0, 1.0)]
            filtered = ops.filter_threshold(values, 2.0)
            threshold = ops.select_threshold(values, k)
            results.append([raw(tensor) for tensor in (out, threshold, *filtered, *sum(found, ()))])
    finally:
        torch.set_num_threads(threads)
    assert results[0] == results[1] == results[2]
    same(out, reference.reduce_payloads(gathered.numpy(), 0, n, k, scale=1 / 3))


def test_denormals_count_where_torch_flushes_them(make):
    values = make("denormal", 1023)
    expected = reference.select_top_k(values.numpy(), 100, 0)[0]
    torch.set_flush_denormal(True)  # a processor that cannot has nothing to get wrong
    try:
        indices = ops.select_top_k(values, 100, 0)[0]
    finally:
        torch.set_flush_denormal(False)
    same(indices, expected)


@pytest.mark.parametrize(
    "view", [lambda t: t[::2], lambda t: t.view(40, 25).t(), lambda t: t.view(10, 100), lambda t: t[3:]]
)
def test_values_of_any_stride_are_read_row_major(make, view):
    values = view(make("heavy_tailed", 1000))
    array = values.contiguous().numpy().reshape(-1)
    check_selection(values, 40, 1, reference.select_top_k(array, 40, 1))
    same(ops.filter_threshold(values, 1.0)[0], reference.filter_threshold(array, 1.0)[0])
    assert ops.select_threshold(values, 40).item() == reference.select_threshold(array, 40)
    assert ops.all_finite(values).item() is True


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.select_top_k(torch.empty(0), 0), "k must"),
        (lambda: ops.select_top_k(torch.empty(0), 1), "k must"),
        (lambda: ops.select_top_k(torch.ones(5), 0), "k must"),
        (lambda: ops.select_top_k(torch.ones(5), 6), "k must"),
        (lambda: ops.select_threshold(torch.empty(0), 1), "k must"),
        (lambda: ops.select_threshold(torch.ones(5), -1), "k must"),
        (lambda: ops.select_threshold(torch.ones(5), 1, "laplace"), "method"),
        (lambda: ops.select_threshold(torch.ones(5), 1, "sampled", 0.0), "sample_fraction"),
        (lambda: ops.select_threshold(torch.ones(5), 1, "sampled", math.nan), "sample_fraction"),
        (lambda: ops.filter_threshold(torch.ones(5), -1e-300), "threshold"),
        (lambda: ops.filter_threshold(torch.ones(5), math.nan), "threshold"),
        (lambda: ops.select_top_k(torch.ones(5, dtype=torch.int32), 1), "float32"),
        (lambda: ops.all_finite(torch.ones(5, dtype=torch.int64)), "float32"),
        (lambda: ops.quantize(torch.ones(5), "int8"), "value_dtype"),
        (lambda: ops.payload_size(10, 0), "k must"),
        (lambda: ops.payload_size(10, 11), "k must"),
        (lambda: ops.payload_size(10, 1, "gzip"), "coding"),
        (lambda: ops.payload_size(10, 1, "run_length", "int8"), "value_dtype"),
    ],
)
def test_refusals_name_the_argument(call, message):
    with pytest.raises(Refused, match=message):
        call()


def test_payload_size_that_does_not_fit_64_bits():
    with pytest.raises(Refused):
        ops.payload_size(2**62, 2**62)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": torch.tensor([1])}, "indices|values"),
        ({"indices": torch.tensor([1]), "values": torch.ones(1)}, "entries"),
        ({"indices": torch.tensor([4, 1])}, "ascending"),
        ({"indices": torch.tensor([1, 1])}, "ascending"),
        ({"indices": torch.tensor([-1, 1])}, "ascending"),
        ({"indices": torch.tensor([1, 5])}, "ascending"),
        ({"indices": torch.tensor([1, 4], dtype=torch.int32)}, "indices"),
        ({"indices": torch.tensor([1, 0, 4])[::2]}, "indices"),
        ({"values": torch.ones(2, dtype=torch.float16)}, "values"),
        ({"values": torch.ones(4)[::2]}, "values"),
        ({"coding": "gzip"}, "coding"),
        ({"value_dtype": "int8"}, "value_dtype"),
        ({"k": 6}, "k must"),
        *(({"out": torch.full((size,), 9, dtype=torch.uint8)}, "out") for size in (0, 47, 49)),
        ({"out": torch.full((96,), 9, dtype=torch.uint8)[::2]}, "out"),
        ({"out": torch.full((48,), 9, dtype=torch.int8)}, "out"),
    ],
)
def test_pack_refuses_and_writes_nothing(change, message):
    arguments = {"indices": torch.tensor([1, 4]), "values": torch.ones(2), "n": 5, "k": 2}
    arguments |= {"out": torch.full((48,), 9, dtype=torch.uint8)} | change
    with pytest.raises(Refused, match=message):
        ops.pack(**arguments)
    assert (arguments["out"] == 9).all()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "none"])
def test_quantize(dtype):
    grid = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
    halves = torch.cat([grid.view(torch.float16).float(), grid.view(torch.bfloat16).float()]).numpy()
    with np.errstate(all="ignore"):
        beside = [np.nextafter(halves, np.float32(limit)) for limit in (-np.inf, np.inf)]
        middle = halves + (np.nextafter(np.abs(halves), np.float32(np.inf)) - np.abs(halves)) * np.float32(4096)
    mantissas = np.random.default_rng(0).integers(0, 2**32, 200_000).astype(np.uint32).view(np.float32)
    ties = (np.arange(2**16, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    values = np.concatenate([halves, *beside, middle, mantissas, ties, np.float32(SPECIAL)])
    same(ops.quantize(torch.from_numpy(values), dtype), reference.quantize(values, dtype))


@st.composite
def entries(draw):
    """Some n around a block's edge and indices of it, many at the edges, sometimes a block's every element."""
    n = draw(st.sampled_from([1, 2, 65535, 65536, 65537, 131072, 400_001]))
    edges = [index for index in (0, 65534, 65535, 65536, 131071, n - 1) if index < n]
    chosen = draw(st.sets(st.one_of(st.sampled_from(edges), st.integers(0, n - 1)), min_size=1, max_size=40))
    if n > 65535 and draw(st.booleans()):
        chosen |= set(range(65536 * ((n - 1) // 131072), min(n, 65536 * ((n - 1) // 131072 + 1))))
    return n, np.array(sorted(chosen))


@given(entries(), st.sampled_from(sorted(DTYPES)), st.booleans())
@examples(150)
def test_run_length_pack_and_unpack(case, dtype, empty):
    n, indices = case
    k, form = len(indices), ("run_length", dtype)
    values = np.resize(np.float32([*SPECIAL, 0.1, -70000.0, 1e-7]), k).astype("f8" if dtype == "float64" else "f4")
    indices, values = (indices[:0], values[:0]) if empty else (indices, values)
    payload = reference.pack(indices, values, n, k, *form)
    assert ops.payload_size(n, k, *form) == payload.size
    out = torch.full((payload.size,), 255, dtype=torch.uint8)
    ops.pack(torch.from_numpy(indices), torch.from_numpy(values), n, k, out, *form)
    same(out, payload)
    for found, wanted in zip(ops.unpack(out, n, k, *form), reference.unpack(payload, n, k, *form), strict=True):
        same(found, wanted)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize(("n", "k"), [(1, 1), (65537, 65537), (1_000_003, 1000)])
def test_reduce_payloads(make, n, k, dtype):
    form, rows = ("run_length", dtype), []
    for rank in range(4):
        indices = np.sort(np.random.default_rng(rank).choice(n, k, replace=False))
        selected = make("heavy_tailed", n).roll(rank).numpy()[indices]
        some = 0 if rank == 2 else k
        rows.append(reference.pack(indices[:some], selected[:some], n, k, *form))
    gathered = np.pad(np.stack(rows), ((0, 0), (8, 16)), constant_values=255)
    for scale in (1.0, 1 / 3):
        out = torch.full((n,), math.nan)
        ops.reduce_payloads(torch.from_numpy(gathered), 8, n, k, out, scale, *form)
        same(out, reference.reduce_payloads(gathered, 8, n, k, *form, scale))


@functools.cache
def opcheck_arguments():
    """The arguments of every op, and of those that take segments once more with them."""
    values, n, k = torch.linspace(-1, 1, 1000), 70_000, 10
    indices = torch.arange(0, 7000 * k, 7000)
    payload = torch.empty(ops.payload_size(n, k), dtype=torch.uint8)
    ops.pack(indices, values[:k], n, k, payload)
    form = ("run_length", "float32", None)
    rule = (torch.zeros(1000), torch.zeros(1000), torch.ones(1000), 0.5, 0.9, False, 0.1)
    return {
        "accumulate": (values.half(), *rule),
        "select_top_k": (values.bfloat16(), k, 0, 0.0),
        "filter_threshold": (values.double(), 0.5),
        "select_threshold": (values, k, "exact", 0.005, 0),
        "all_finite": (values.half(),),
        "pack": (indices, values[:k], n, k, torch.empty_like(payload), *form),
        "unpack": (payload, n, k, *form),
        "reduce_payloads": (torch.stack([payload, payload]), 0, n, k, torch.empty(n), 1.0, *form),
        "locate_payloads": (torch.cat([payload, payload]), [n], 2, *form[:2], []),
        "reduce_located": (payload, torch.tensor([[0], [k]]), n, torch.empty(n), 1.0, *form),
        "quantize": (values, "float16", "mean", None, None),
        **low_bit_arguments(values[:k], indices, n, k),
    }


def low_bit_arguments(values, indices, n, k):
    segments = torch.tensor([[0, 3], [60_000, 7]])
    form = ("run_length", "int2", segments)
    sent = ops.quantize(values, "int2", "min", indices, segments)
    payload = torch.empty(ops.payload_size(n, k, *form), dtype=torch.uint8)
    ops.pack(indices, sent, n, k, payload, *form)
    matrix = torch.empty(ops.payload_size(n, k, "run_length", "int1", segments[:1]), dtype=torch.uint8)
    ops.pack(indices, torch.ones(k), n, k, matrix, "run_length", "int1", segments[:1])
    return {
        "pack.segments": (indices, sent, n, k, torch.empty_like(payload), *form),
        "unpack.segments": (payload, n, k, *form),
        "reduce_payloads.segments": (torch.stack([payload, payload]), 0, n, k, torch.empty(n), 1.0, *form),
        "locate_payloads.channels": (torch.cat([matrix, matrix]), [n], 2, "run_length", "int1", [3]),
        "reduce_located.segments": (payload, torch.tensor([[0], [k]]), n, torch.empty(n), 1.0, *form),
        "quantize.segments": (values, "int2", "min", indices, segments),
    }


@pytest.mark.parametrize("name", opcheck_arguments())
def test_opcheck(name):
    """Schema, fake tensors against real ones, and tracing."""
    op = getattr(torch.ops.hvd_sparse, name.split(".")[0])
    torch.library.opcheck(op.default, opcheck_arguments()[name])
