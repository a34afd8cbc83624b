"""The reference equals brute force: sorting in pure Python, loops over elements, exhaustive rounding.

test_wire.py tests the bytes of payloads.
"""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiers import examples

from hvd_sparse import reference, wire

SPECIAL = [0.0, -0.0, math.nan, math.inf, -math.inf, 1.0, -1.0, 1e-45, -1e-45, 1.1754944e-38, 3.4028235e38]
FLOATS = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32))
DTYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def python_hash(seed, index):
    z = (seed * 0x9E3779B97F4A7C15 + index) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def python_order(values, seed):
    def key(index):
        magnitude = abs(float(values[index]))
        if math.isnan(magnitude):
            return (2, 0, index)
        return (0, -magnitude, python_hash(seed, index)) if magnitude else (1, 0, index)

    return sorted(range(len(values)), key=key)


def test_hash_is_splitmix64():
    """The published first outputs of splitmix64 from state 0: its state steps by the same constant as our seeds."""
    outputs = [int(reference.hash_index(seed, 0)) for seed in (1, 2, 3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**64 - 1))
@settings(deadline=None)
def test_hash_wraps(seed, index):
    assert int(reference.hash_index(seed, np.uint64(index))) == python_hash(seed, index)


@given(st.lists(FLOATS, min_size=1, max_size=60), st.data(), st.sampled_from(sorted(DTYPES)))
@examples(300)
def test_select_top_k(numbers, data, dtype):
    with np.errstate(over="ignore"):
        values = np.array(numbers, np.float32).astype(DTYPES[dtype])
    k = data.draw(st.integers(1, len(values)))
    seed = data.draw(st.integers(-5, 5))
    indices, selected, threshold = reference.select_top_k(values, k, seed)
    order = python_order(values, seed)[:k]
    last = abs(float(values[order[-1]]))
    assert indices.tolist() == sorted(order)
    assert indices.dtype == np.int64
    assert selected.dtype == values.dtype
    assert selected.tobytes() == values[sorted(order)].tobytes()
    assert threshold == (0.0 if math.isnan(last) else last)


def test_ties_go_by_seed_not_by_position():
    values = np.ones(1000, np.float32)
    chosen = [set(reference.select_top_k(values, 500, seed)[0].tolist()) for seed in (0, 1)]
    assert chosen[0] != chosen[1]
    assert all(200 < len([index for index in indices if index < 500]) < 300 for indices in chosen)


def test_zeros_and_nan_come_last_lowest_index_first():
    values = np.array([math.nan, 0.0, 5.0, -0.0, math.nan, -math.inf], np.float32)
    picks = [reference.select_top_k(values, k, 3) for k in range(1, 7)]
    assert [indices.tolist() for indices, _, _ in picks] == [
        [5],
        [2, 5],
        [1, 2, 5],
        [1, 2, 3, 5],
        [0, 1, 2, 3, 5],
        [0, 1, 2, 3, 4, 5],
    ]
    assert [threshold for _, _, threshold in picks] == [math.inf, 5.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(("n", "k"), [(0, 0), (0, 1), (5, 0), (5, 6), (5, -1)])
@pytest.mark.parametrize("function", [reference.select_top_k, reference.select_threshold])
def test_k_out_of_range(function, n, k):
    with pytest.raises(ValueError, match="k must be between 1 and"):
        function(np.ones(n, np.float32), k)


def test_values_of_another_type():
    with pytest.raises(ValueError, match=r"values must be of dtype float32.*got int64"):
        reference.all_finite(np.arange(3))


@given(st.lists(FLOATS, max_size=50), FLOATS.map(abs))
@settings(deadline=None)
def test_filter_threshold(numbers, threshold):
    values = np.array(numbers, np.float32)
    if math.isnan(threshold):
        threshold = 0.5
    indices, selected = reference.filter_threshold(values, threshold)
    assert indices.tolist() == [i for i, value in enumerate(values.tolist()) if abs(value) >= threshold]
    assert selected.tobytes() == values[indices].tobytes()


def test_filter_threshold_is_not_rounded_to_the_values_type():
    values = np.array([0.1], np.float32)  # 0.100000001490116..., above 0.1 in double
    assert reference.filter_threshold(values, 0.1)[0].size == 1
    assert reference.filter_threshold(values, 0.1000000015)[0].size == 0


@pytest.mark.parametrize("threshold", [-1e-300, -math.inf, math.nan])
def test_filter_threshold_refuses(threshold):
    with pytest.raises(ValueError, match="threshold must be at least 0"):
        reference.filter_threshold(np.ones(2, np.float32), threshold)


def cleaned_magnitudes(values):
    return sorted((0.0 if math.isnan(value) else abs(value) for value in values), reverse=True)


@given(st.lists(FLOATS, min_size=1, max_size=50), st.data())
@settings(deadline=None)
def test_exact_threshold(numbers, data):
    values = np.array(numbers, np.float32)
    k = data.draw(st.integers(1, len(values)))
    for method in ("exact", "sampled"):  # so few values are never worth sampling
        threshold = reference.select_threshold(values, k, method)
        assert threshold == cleaned_magnitudes(values.tolist())[k - 1]


@pytest.mark.parametrize(
    ("n", "k", "fraction", "size"),
    [
        (2049, 100, 0.005, 1024),  # 2 * 1024 < 2049: sampled
        (2048, 100, 0.005, None),  # half of the values: exact
        (100_000, 100, 0.005, 32_000),  # 32 of the k largest
        (100_000, 101, 0.005, 31_684),  # ceil(31683.2)
        (100_000, 64, 0.005, None),
        (100_001, 9_000, 0.1, 10_001),  # ceil(10000.1)
        (100_001, 99_999, 0.001, 1024),
        (1_000_000, 100_000, 0.005, 5_000),
    ],
)
def test_sampled_threshold(n, k, fraction, size):
    values = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    values[::7] = math.nan
    seed = 2**63 + n
    if size is None:
        expected = cleaned_magnitudes(values.tolist())[k - 1]
    else:
        bounds = [j * n // size for j in range(size + 1)]
        picks = [
            start + python_hash(seed, j) % (end - start) for j, (start, end) in enumerate(itertools.pairwise(bounds))
        ]
        rank = max(1, math.floor(k * size / n + 0.5))
        expected = cleaned_magnitudes(values[picks].tolist())[rank - 1]
    assert reference.select_threshold(values, k, "sampled", fraction, seed) == expected


def test_threshold_refuses():
    values = np.ones(3, np.float32)
    with pytest.raises(ValueError, match='method must be "exact" or "sampled"'):
        reference.select_threshold(values, 1, "laplace")
    for fraction in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match="sample_fraction must be in"):
            reference.select_threshold(values, 1, "sampled", fraction)


@pytest.mark.parametrize(
    ("numbers", "dtype", "finite"),
    [
        ([], "float32", True),
        ([1.0, -3.4028235e38, 1e-45], "float32", True),
        ([1.0, math.nan], "float32", False),
        ([-math.inf], "float16", False),
        ([1e300], "float64", False),
        ([math.nextafter((2 - 2**-24) * 2.0**127, 0)], "float64", True),  # rounds down to the largest float32
        ([(2 - 2**-24) * 2.0**127], "float64", False),  # half way: rounds to infinity
        ([65504.0], "float16", True),
        ([3.3895e38], "bfloat16", True),
    ],
)
def test_all_finite(numbers, dtype, finite):
    assert reference.all_finite(np.array(numbers, DTYPES[dtype])) is finite


def python_run_length(indices, n):
    counts, runs = [], []
    for start in range(0, n, 65536):
        inside = [index for index in indices if start <= index < min(start + 65536, n)]
        counts.append(len(inside))
        runs += [index - previous - 1 for previous, index in zip([start - 1, *inside], inside, strict=False)]
    return counts, runs


@st.composite
def index_sets(draw):
    n = draw(st.sampled_from([1, 2, 65535, 65536, 65537, 131072, 131073, 400_000]))
    edges = [0, 1, 65534, 65535, 65536, 65537, 131071, 131072, n - 1]
    element = st.one_of(st.sampled_from(edges), st.integers(0, n - 1)).filter(lambda index: index < n)
    return sorted(draw(st.sets(element, max_size=30))), n


@given(index_sets())
@settings(deadline=None)
@example(([0], 65537))
@example((list(range(65530, 131072)), 131073))
def test_run_length(case):
    indices, n = case
    counts, runs = reference.encode_run_length(np.array(indices, np.int64), n)
    assert (counts.dtype, runs.dtype) == (np.uint32, np.uint16)
    assert (counts.tolist(), runs.tolist()) == python_run_length(indices, n)
    decoded = reference.decode_run_length(counts, runs, n)
    assert decoded.dtype == np.int64
    assert decoded.tolist() == indices


@pytest.mark.parametrize("indices", [[2, 1], [1, 1], [-1, 3], [3, 10], [0.5, 1.5]])
def test_encode_run_length_refuses(indices):
    with pytest.raises(ValueError, match="indices must be"):
        reference.encode_run_length(np.array(indices), 10)


@pytest.mark.parametrize(
    ("counts", "runs", "n", "message"),
    [
        ([2], [0], 10, "counts must sum to the number of runs, 1; got 2"),
        ([1], [0, 0], 10, "counts must sum"),
        ([11], [0] * 11, 10, "above its block's length"),
        ([0, 2], [0, 0], 65537, "above its block's length"),
        ([-1, 1], [], 65537, "negative"),
        ([1], [10], 10, "a run leaves its block"),
        ([2], [5, 4], 10, "a run leaves its block"),
        ([2, 0], [65535, 0], 65538, "a run leaves its block"),  # into the next block, yet inside the tensor
        ([0, 1], [2], 65538, "a run leaves its block"),
        ([1, 0], [0], 10, "counts must have one entry for each of 1 blocks, got 2"),
    ],
)
def test_decode_run_length_refuses(counts, runs, n, message):
    with pytest.raises(ValueError, match=message):
        reference.decode_run_length(np.array(counts), np.array(runs, np.uint16), n)


@given(index_sets().filter(lambda case: case[0]), st.sampled_from(sorted(DTYPES)), st.booleans())
@settings(deadline=None)
def test_pack_and_unpack(case, value_dtype, empty):
    indices, n = np.array(case[0]), case[1]
    values = np.random.default_rng(len(indices)).standard_normal(len(indices)).astype(np.float32)
    k = len(indices)
    if empty:
        indices, values = indices[:0], values[:0]
    packed = reference.pack(indices, values, n, k, "run_length", value_dtype)
    assert packed.size == wire.payload_size(n, k, "run_length", value_dtype)
    decoded_indices, decoded_values = reference.unpack(packed, n, k, "run_length", value_dtype)
    assert decoded_indices.tolist() == indices.tolist()
    assert decoded_values.dtype == (np.float64 if value_dtype == "float64" else np.float32)
    assert decoded_values.tolist() == reference.quantize(values, value_dtype).tolist()


def representables(dtype):
    """Every finite number of a 16-bit type that is not negative, ascending, as float64; the index is its bits."""
    with np.errstate(invalid="ignore"):
        numbers = np.arange(2**15, dtype=np.uint16).view(DTYPES[dtype]).astype(np.float64)
    return numbers[np.isfinite(numbers)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_quantize_rounds_to_nearest_even(dtype):
    """Against a search among all numbers of the type; each number, each midpoint and both its neighbours are tried."""
    grid = representables(dtype)
    middle = ((grid[1:] + grid[:-1]) / 2).astype(np.float32)  # exact in float32
    beside = [np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))]
    noise = np.exp(np.random.default_rng(0).uniform(-104, 88.7, 50_000)).astype(np.float32)
    tried = np.concatenate([grid.astype(np.float32), middle, *beside, noise, np.float32([3.4028235e38, 65520])])
    exact = tried.astype(np.float64)
    above = np.clip(np.searchsorted(grid, exact), 1, len(grid) - 1)
    low, high = exact - grid[above - 1], grid[above] - exact
    nearest = np.where((high < low) | ((high == low) & (above % 2 == 0)), above, above - 1)
    for sign in (np.float32(1), np.float32(-1)):
        rounded = reference.quantize(sign * tried, dtype)
        assert rounded.dtype == np.float32
        np.testing.assert_array_equal(sign * rounded, grid[nearest])
        np.testing.assert_array_equal(np.signbit(rounded), sign < 0)


@pytest.mark.parametrize(
    ("dtype", "largest"), [("float16", 65504.0), ("bfloat16", 3.3895313892515355e38), ("float32", None)]
)
def test_quantize_saturates_but_keeps_infinity_and_nan(dtype, largest):
    values = np.float32([math.inf, -math.inf, math.nan, 3.4028235e38, -3.4028235e38])
    rounded = reference.quantize(values, dtype).tolist()
    top = largest or float(values[3])
    assert rounded[:2] == [math.inf, -math.inf]
    assert math.isnan(rounded[2])
    assert rounded[3:] == [top, -top]


@pytest.mark.parametrize(("value_dtype", "bits"), [("float16", 0x7E00), ("bfloat16", 0x7FC0)])
def test_of_a_nan_the_sign_alone_travels(value_dtype, bits):
    values = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000, 0xFF812345], np.uint32).view(np.float32)
    expected = [bits, bits | 0x8000, bits, bits | 0x8000]
    assert reference.encode_values(values, value_dtype).view(np.uint16).tolist() == expected
    tail = reference.pack(np.arange(4), values, 4, 4, "dense", value_dtype)[32:]
    assert tail.view("<u2").tolist() == expected


def test_quantize_leaves_wide_types_alone():
    values = np.float32([*SPECIAL, 0.1])
    assert reference.quantize(values, "float32").tobytes() == values.tobytes()
    assert reference.quantize(values, "float64").tobytes() == values.tobytes()
    with pytest.raises(ValueError, match="value_dtype must be one of"):
        reference.quantize(values, "int8")


@pytest.mark.parametrize("value_dtype", sorted(DTYPES))
def test_reduce_payloads(value_dtype):
    n, k, offset, scale = 131_073, 40, 16, np.float64(1 / 3)
    rng = np.random.default_rng(5)
    size = wire.payload_size(n, k, "run_length", value_dtype)
    gathered = rng.integers(0, 256, (4, offset + size + 9)).astype(np.uint8)
    expected = {}
    for rank in range(4):
        entries = 0 if rank == 2 else k
        indices = np.sort(rng.choice(60, entries, replace=False)) + 65_510  # around the end of a block, overlapping
        values = rng.standard_normal(entries).astype(np.float32)
        gathered[rank, offset : offset + size] = reference.pack(indices, values, n, k, "run_length", value_dtype)
        for index, value in zip(indices.tolist(), reference.quantize(values, value_dtype), strict=True):
            product = np.float32(np.float32(scale) * value)
            expected[index] = np.float32(expected.get(index, np.float32(0)) + product)
    out = reference.reduce_payloads(gathered, offset, n, k, "run_length", value_dtype, scale)
    assert out.dtype == np.float32
    assert {index: out[index] for index in np.flatnonzero(out).tolist()} == expected


def test_reduce_payloads_adds_in_rank_order():
    ranks = [reference.pack(np.array([0]), np.float32([value]), 1, 1) for value in (1e8, 1.0, -1e8)]
    assert reference.reduce_payloads(np.stack(ranks), 0, 1, 1).tolist() == [0.0]  # 1e8 + 1 is 1e8 in float32
    assert reference.reduce_payloads(np.stack(ranks)[[0, 2, 1]], 0, 1, 1).tolist() == [1.0]


def test_reduce_payloads_refuses():
    payload = reference.pack(np.array([1, 4]), np.float32([1.0, -2.0]), 5, 2)
    gathered = np.stack([payload, payload])
    for offset in (-1, 1):
        with pytest.raises(ValueError, match="offset must leave 48 bytes in a row of 48"):
            reference.reduce_payloads(gathered, offset, 5, 2)
    gathered[1, 40] ^= 1
    with pytest.raises(ValueError, match="rank 1: payload: wrong checksum"):
        reference.reduce_payloads(gathered, 0, 5, 2)
    with pytest.raises(ValueError, match="gathered must be uint8 of two dimensions"):
        reference.reduce_payloads(payload, 0, 5, 2)
