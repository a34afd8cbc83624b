"""hvd_sparse.native_changes against the NumPy twins on what Hypothesis draws; what it refuses."""

import numpy as np
import pytest
from drawn import SIZES, counts, hints
from hypothesis import given
from hypothesis import strategies as st
from test_native import array, check_passed, ones, read_only, same
from tiers import examples

from hvd_sparse import native_changes, reference


@given(st.data(), st.lists(st.integers(0, 40), max_size=6))
@examples(200)
def test_add_entries_and_find_common(data, sizes):
    """Indices of one window of the core's and of many, also beyond 2^32."""
    spread = data.draw(st.sampled_from([60, 70_000, 2**40]))
    places = st.integers(0, spread)
    parts = [np.sort(data.draw(st.lists(places, min_size=m, max_size=m, unique=True))) for m in sizes]
    indices = np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64)
    values = array(data, indices.size + 1)[:-1]
    with np.errstate(all="ignore"):
        expected = reference.add_entries(indices, values, sizes)
    for one, other in zip(
        native_changes.add_entries(indices, values, np.array(sizes, np.int64)), expected, strict=True
    ):
        same(one, other)
    same(native_changes.unite(indices, np.array(sizes, np.int64)), expected[0])
    for one in parts:
        same(native_changes.find_common(expected[0], one.astype(np.int64)), reference.find_common(expected[0], one))
        same(native_changes.find_common(one.astype(np.int64), expected[0]), np.ones(one.size, bool))


@given(st.data(), SIZES, st.integers(0, 2**64 - 1))
@examples(200)
def test_select_top_k_of_difference(data, n, seed):
    """Equal differences are many where both are ties: they are ordered by the same hash."""
    minuend, subtrahend = array(data, n), array(data, n)
    k = data.draw(counts(n))
    expected = reference.select_top_k_of_difference(minuend, subtrahend, k, seed)
    hint = data.draw(hints(expected[2]))
    indices, values, info = native_changes.select_top_k_of_difference(minuend, subtrahend, k, seed, hint)
    same(indices, expected[0])
    with np.errstate(all="ignore"):
        same(values, (minuend - subtrahend)[indices])
        magnitudes = np.abs(minuend - subtrahend).astype(np.float64)
    check_passed(int(info[1]), np.where(np.isnan(magnitudes), 0.0, magnitudes), k, hint)


@given(st.data(), SIZES)
@examples(200)
def test_apply_update_and_changed_after(data, n):
    parameters, clocks = array(data, n), np.random.default_rng(n).integers(0, 9, n).astype(np.uint32)
    chosen = np.sort(np.random.default_rng(n).choice(n, data.draw(counts(n)), replace=False))
    values, clock = array(data, chosen.size), data.draw(st.integers(0, 2**32 - 1))
    twins = parameters.copy(), clocks.copy()
    with np.errstate(all="ignore"):
        reference.apply_update(*twins, chosen, values, clock)
    native_changes.apply_update(parameters, clocks, chosen, values, clock)
    for found, expected in zip((parameters, clocks), twins, strict=True):
        same(found, expected)
    for after in (0, 3, clock, 2**32 - 1):
        same(native_changes.changed_after(clocks, after), reference.changed_after(clocks, after))


CLOCKS = np.zeros(8, np.uint32)
REFUSALS = [
    (native_changes.add_entries, (np.array([2, 1]), ones(2), np.array([2])), {}, "must ascend from 0, got 1 after 2"),
    (native_changes.add_entries, (np.array([-1]), ones(1), np.array([1])), {}, "must ascend from 0, got -1"),
    (native_changes.add_entries, (np.arange(2), ones(3), np.array([2])), {}, "values must have 2 elements, got 3"),
    (native_changes.add_entries, (np.arange(2), ones(2), np.array([3])), {}, r"counts must add up .* 2, got \[3\]"),
    (native_changes.add_entries, (np.arange(2), ones(2), np.array([3, -1])), {}, "counts must add up"),
    (
        native_changes.find_common,
        (np.arange(2), np.arange(2, dtype=np.int32)),
        {},
        "others must be a contiguous array int64",
    ),
    (native_changes.unite, (np.arange(2), np.array([3])), {}, "counts must add up"),
    (native_changes.unite, (np.array([2, 2]), np.array([2])), {}, "must ascend from 0, got 2 after 2"),
    (
        native_changes.apply_update,
        (read_only(), CLOCKS, np.arange(2), ones(2), 1),
        {},
        "parameters is changed in",
    ),
    (native_changes.apply_update, (ones(), CLOCKS[:7], np.arange(2), ones(2), 1), {}, "clocks must have 8 elements"),
    (native_changes.apply_update, (ones(), CLOCKS, np.arange(2), ones(3), 1), {}, "values must have 2 elements, got 3"),
    (native_changes.apply_update, (ones(), CLOCKS, np.array([8]), ones(1), 1), {}, r"must be in \[0, 8\), got 8"),
    (native_changes.apply_update, (ones(), CLOCKS, np.array([0, -1]), ones(2), 1), {}, r"in \[0, 8\), got -1"),
    (native_changes.changed_after, (CLOCKS.astype(np.int64), 1), {}, "clocks must be a contiguous array uint32"),
    (native_changes.select_top_k_of_difference, (ones(), ones(7), 1), {}, "subtrahend must have 8 elements, got 7"),
    (native_changes.select_top_k_of_difference, (ones(), ones(), 9), {}, "k must be in"),
]


@pytest.mark.parametrize(("function", "arguments", "options", "text"), REFUSALS, ids=range(len(REFUSALS)))
def test_refusals_name_the_argument(function, arguments, options, text):
    before = [one.copy() for one in arguments if isinstance(one, np.ndarray)]
    with pytest.raises(ValueError, match=text):
        function(*arguments, **options)
    for one, other in zip([one for one in arguments if isinstance(one, np.ndarray)], before, strict=True):
        assert (one == other).all()
