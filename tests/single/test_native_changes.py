"""hvd_sparse.native_changes against the NumPy twins on what Hypothesis draws; what it refuses."""

import zlib

import numpy as np
import pytest
from drawn import SEEDS, SIZES, counts, hints
from hypothesis import given
from hypothesis import strategies as st
from test_native import array, check_passed, ones, read_only, same
from tiers import examples

from hvd_sparse import native, native_changes, reference
from hvd_sparse.native_changes import Changed, make_marks
from hvd_sparse.threshold import SMALLEST
from hvd_sparse.wire import payload_size


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


def drawn_indices(data, n):
    many = data.draw(st.one_of(st.just(0), counts(n)))
    return np.sort(np.random.default_rng(data.draw(SEEDS)).choice(n, many, replace=False))


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_difference_that_overflows_is_infinite_without_a_warning():
    largest = np.float32(3e38)
    minuend, subtrahend = np.array([largest, 1.0, np.inf], np.float32), np.array([-largest, 0.0, np.inf], np.float32)
    indices, values, _ = native_changes.select_top_k_of_difference(minuend, subtrahend, 3)
    assert indices.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(values, np.float32([np.inf, 1.0, np.nan]))


@given(st.data(), SIZES)
@examples(200)
def test_updates_are_applied_and_marked(data, n):
    parameters, clocks, marks, updates = array(data, n), np.zeros(n, np.uint32), make_marks(n), []
    twin, twin_clocks, twin_marks = parameters.copy(), clocks.copy(), marks.copy()
    for _ in range(data.draw(st.integers(0, 4))):
        indices, clock = drawn_indices(data, n), data.draw(st.integers(0, 2**32 - 1))
        values = array(data, indices.size + 1)[:-1]
        with np.errstate(all="ignore"):
            expected = reference.apply_update(twin, indices, values)
        updates.append(native_changes.apply_update(parameters, indices, values))
        native_changes.set_clocks(updates[-1], clocks, clock)
        reference.set_clocks(expected, twin_clocks, clock)
        for found, other in zip((parameters, clocks, *updates[-1]), (twin, twin_clocks, *expected), strict=True):
            same(found, other)
    assert native_changes.mark_updates(updates, n, marks) == reference.mark_updates(updates, n, twin_marks)
    same(marks, twin_marks)
    for after in (0, 3, 2**31, 2**32 - 1):
        found = native_changes.mark_changed_after(clocks, after, marks)
        assert found == reference.mark_changed_after(clocks, after, twin_marks)
        same(marks, twin_marks)


@given(st.data(), SIZES, st.sampled_from(["auto", "run_length", "elias_fano", "bitmap"]))
@examples(200)
def test_pack_marked(data, n, coding):
    indices, values = drawn_indices(data, n), array(data, n)
    if indices.size == 0:
        return
    marks, payload = reference.marks_of(indices, n), np.empty(payload_size(n, indices.size, coding), np.uint8)
    native_changes.pack_marked(marks, values, indices.size, coding, payload)
    same(payload, reference.pack_marked(marks, values, indices.size, coding))
    assert native_changes.sealed_crc(payload) == reference.sealed_crc(payload) == native.crc32(payload)


@given(st.data(), SIZES, st.integers(0, 2**64 - 1))
@examples(100)
def test_select_and_add_marked(data, n, seed):
    """Also where fewer than k, or far more, reach the floor; where many have equal magnitudes; in a part."""
    minuend, subtrahend = array(data, n), array(data, n)
    begin = data.draw(st.integers(0, n - 1))
    end = data.draw(st.integers(begin + 1, n))
    k, indices = data.draw(counts(end - begin)), drawn_indices(data, n)
    magnitude = data.draw(st.sampled_from([0.0, 1.0, 0.25, 3.0, float(abs(minuend[begin]))]))
    floor = max(SMALLEST, magnitude) if np.isfinite(magnitude) else 1.0
    marks = reference.marks_of(indices, n)
    twin_marks, twin_subtrahend = marks.copy(), subtrahend.copy()
    expected = reference.select_marked(minuend, subtrahend, twin_marks, k, (begin, end), seed, floor)
    found = native_changes.select_marked(minuend, subtrahend, marks, k, (begin, end), seed, floor)
    same(found.indices, expected[0])
    same(found.values, expected[1])
    assert found[2:] == expected[2:]
    same(marks, twin_marks)
    reference.add_marked(twin_subtrahend, minuend, twin_marks, begin + expected[0], expected[1], floor)
    native_changes.add_marked(subtrahend, minuend, marks, begin + found.indices, found.values, floor)
    same(subtrahend, twin_subtrahend)
    same(marks, twin_marks)


@pytest.mark.parametrize("size", [0, 1, 15, 16, 63, 64, 65, 1000, 65_537])
def test_crc32_is_that_of_zlib(size):
    data = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    assert native.crc32(data) == zlib.crc32(data)


MARKS = np.zeros(1, np.uint64)
TOO_FAR = Changed(np.array([1], np.uint32), np.array([8], np.uint16))
SHORT = Changed(np.array([2], np.uint32), np.array([1], np.uint16))
CLOCKS = np.zeros(8, np.uint32)
CHANGED = Changed(np.zeros(1, np.uint32), np.zeros(0, np.uint16))
BEYOND = np.array([0b1111111111, 0b111111 << 6], np.uint64)  # of 70 elements, 10 are marked, and 6 bits after them
FIXED = np.frombuffer(bytes(32), np.uint32)
REFUSALS = [
    (native_changes.set_clocks, (CHANGED, FIXED, 3), {}, "clocks is changed in place, got an array that is read-only"),
    (
        native_changes.pack_marked,
        (MARKS, ones(), 1, "run_length", np.frombuffer(bytes(payload_size(8, 1, "run_length")), np.uint8)),
        {},
        "payload is changed in place",
    ),
    (native_changes.add_entries, (np.array([2, 1]), ones(2), np.array([2])), {}, "strictly ascending .* got 1 after 2"),
    (native_changes.add_entries, (np.array([-1]), ones(1), np.array([1])), {}, "strictly ascending .* got -1"),
    (native_changes.add_entries, (np.arange(2), ones(3), np.array([2])), {}, "values must have 2 elements, got 3"),
    (native_changes.add_entries, (np.arange(2), ones(2), np.array([3])), {}, r"counts must add up .* 2, got \[3\]"),
    (native_changes.add_entries, (np.arange(2), ones(2), np.array([3, -1])), {}, "counts must add up"),
    (
        native_changes.find_common,
        (np.arange(2), np.arange(2, dtype=np.int32)),
        {},
        "others must be a contiguous array int64",
    ),
    (
        native_changes.apply_update,
        (read_only(), np.arange(2), ones(2)),
        {},
        "parameters is changed in",
    ),
    (native_changes.apply_update, (ones(), np.arange(2), ones(3)), {}, "values must have 2 elements, got 3"),
    (native_changes.apply_update, (ones(), np.array([8]), ones(1)), {}, r"ascending in \[0, 8\), got 8"),
    (native_changes.apply_update, (ones(), np.array([0, -1]), ones(2)), {}, r"in \[0, 8\), got -1"),
    (native_changes.apply_update, (ones(), np.array([2, 2]), ones(2)), {}, "ascending .* got 2 after 2"),
    (native_changes.set_clocks, (TOO_FAR, CLOCKS, 1), {}, "places in the last block must be below 8, got 8"),
    (native_changes.set_clocks, (SHORT, CLOCKS, 1), {}, "places must have 2 elements, got 1"),
    (native_changes.set_clocks, (SHORT, CLOCKS.astype(np.int64), 1), {}, "clocks must be a contiguous array"),
    (native_changes.set_clocks, (CHANGED, CLOCKS, 2**32), {}, "clock must be .* from 0 to 4294967295, got 4294967296"),
    (native_changes.mark_changed_after, (CLOCKS, -1, MARKS), {}, "clock must be .* from 0 to 4294967295, got -1"),
    (native_changes.sealed_crc, (np.zeros(31, np.uint8),), {}, "payload must have at least 32 bytes, got 31"),
    (native_changes.mark_changed_after, (CLOCKS.astype(np.int64), 1, MARKS), {}, "clocks must be a contiguous array"),
    (native_changes.mark_changed_after, (CLOCKS, 1, np.zeros(2, np.uint64)), {}, "marks must have 1 elements, got 2"),
    (native_changes.mark_updates, ([TOO_FAR], 8, MARKS), {}, "places in the last block must be below 8, got 8"),
    (native_changes.mark_updates, ([SHORT], 8, MARKS), {}, "places must have 2 elements, got 1"),
    (native_changes.pack_marked, (MARKS, ones(), 1, "auto", np.zeros(40, np.uint8)), {}, "number of marks, 0, got 1"),
    (native_changes.pack_marked, (MARKS, ones(), 1, "auto", np.zeros(9, np.uint8)), {}, "payload must have 40"),
    *[
        (
            native_changes.pack_marked,
            (BEYOND, ones(70), k, coding, np.zeros(size, np.uint8)),
            {},
            "n = 70 on are marked",
        )
        for coding in ("run_length", "elias_fano", "bitmap")
        for k in (10, 16)
        for size in [payload_size(70, k, coding)]
    ],
    (native_changes.select_marked, (ones(), ones(7), MARKS, 1), {}, "subtrahend must have 8 elements, got 7"),
    (native_changes.select_marked, (ones(), ones(), MARKS, 1, (2, 9)), {}, r"part must lie in \[0, 8\), got"),
    (native_changes.select_marked, (ones(), ones(), MARKS, 3, (2, 4)), {}, "k must be in"),
    (native_changes.select_marked, (ones(), ones(), MARKS, 1, None, 0, -1.0), {}, "threshold must be"),
    (native_changes.add_marked, (read_only(), ones(), MARKS, np.arange(2), ones(2)), {}, "subtrahend is changed in"),
    (native_changes.add_marked, (ones(), ones(), MARKS, np.array([8]), ones(1)), {}, r"must be in \[0, 8\), got 8"),
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
