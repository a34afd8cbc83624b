"""torch.ops.hvd_sparse.* equal the NumPy twins on inputs drawn by Hypothesis: accumulation and selection."""

import numpy as np
import torch
from drawn import KINDS, SEEDS, SIZES, SPECIALS, WIDTHS, counts, hints, vectors
from hypothesis import given
from hypothesis import strategies as st
from test_accumulate import accumulate_and_select
from test_ops import as_numpy, raw, same
from tiers import examples

from hvd_sparse import reference
from hvd_sparse.torch import ops

DTYPES = st.sampled_from(sorted(WIDTHS))
WIDE_SEEDS = st.integers(-(2**63), 2**64 - 1)
NUMBERS = st.one_of(st.sampled_from([0.0, -0.0, 0.5, 0.9, 1.0, -2.0, 1e-45, 3e38]), st.floats(-4, 4, width=32))


def check_passed(passed, magnitude, k, hint):
    reached = int((magnitude >= hint).sum())
    assert not 0 < hint < np.inf or min(reached, 2 * k) <= passed <= reached


@given(st.data(), SIZES, DTYPES, WIDE_SEEDS)
@examples(150)
def test_selection(data, n, dtype, seed):
    values, k = data.draw(vectors(n, dtype)), data.draw(counts(n))
    array = as_numpy(values)
    expected = reference.select_top_k(array, k, seed)
    hint = data.draw(hints(expected[2]))
    indices, selected, info = ops.select_top_k(values, k, seed, hint)
    same(indices, expected[0])
    assert raw(selected) == raw(values[indices])
    assert info[0].item() == expected[2]
    check_passed(info[1].item(), reference.magnitudes(array), k, hint)
    indices, passed = ops.filter_threshold(values, hint)
    same(indices, reference.filter_threshold(array, hint)[0])
    assert raw(passed) == raw(values[indices])
    assert ops.all_finite(values).item() == reference.all_finite(array)


@given(st.data(), SIZES, DTYPES, WIDE_SEEDS, st.sampled_from([1e-9, 0.001, 0.005, 0.3, 1.0]))
@examples(100)
def test_thresholds(data, n, dtype, seed, fraction):
    values, k = data.draw(vectors(n, dtype)), data.draw(counts(n))
    assert ops.select_threshold(values, k).item() == reference.select_threshold(as_numpy(values), k)
    expected = reference.select_threshold(as_numpy(values), k, "sampled", fraction, seed)
    assert ops.select_threshold(values, k, "sampled", fraction, seed).item() == expected


@st.composite
def accumulations(draw, n, kinds=("any bits", *KINDS)):
    """A gradient of any type, residual, velocity or None, parameter or None, and the rule."""
    gradient = draw(vectors(n, draw(DTYPES)))
    memory = [draw(vectors(n, kinds=kinds)) for _ in range(3)]
    rule = {"factor": draw(NUMBERS)}
    if draw(st.booleans()):
        rule |= {"momentum": draw(NUMBERS), "nesterov": draw(st.booleans())}
    rule |= {"weight_decay": draw(NUMBERS)} if draw(st.booleans()) else {}
    memory[1] = memory[1] if "momentum" in rule else None
    memory[2] = memory[2] if rule.get("weight_decay") else None
    return gradient, memory, rule


def copies(memory):
    """The memory for the operator and for the twin."""
    ours = [None if part is None else part.clone() for part in memory]
    return ours, [None if part is None else part.numpy().copy() for part in memory]


def check_memory(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            same(ours, theirs)


@given(st.data(), SIZES)
@examples(150)
def test_accumulate(data, n):
    gradient, memory, rule = data.draw(accumulations(n))
    found, expected = copies(memory)
    finite = ops.accumulate(gradient, *found, **rule)
    assert finite.item() is reference.accumulate(as_numpy(gradient), *expected, **rule)
    check_memory(found, expected)


@given(st.data(), SIZES, WIDE_SEEDS)
@examples(150)
def test_accumulate_and_select(data, n, seed):
    gradient, memory, rule = data.draw(accumulations(n))
    (found, expected), k = copies(memory), data.draw(counts(n))
    indices, values, threshold, finite = reference.accumulate_top_k(
        as_numpy(gradient), *expected, k=k, seed=seed, **rule
    )
    hint = data.draw(hints(threshold))
    result = accumulate_and_select(gradient, *found, k=k, seed=seed, hint=hint, **rule)
    same(result[0], indices)
    same(result[1], values)
    assert (result[2][0].item(), result[3]) == (threshold, finite)
    check_passed(result[2][1].item(), reference.magnitudes(expected[0]), k, hint)
    check_memory(found, expected)


@given(st.data(), SIZES, st.sampled_from([*sorted(WIDTHS), "none"]))
@examples(60)
def test_quantize(data, n, value_dtype):
    values = data.draw(vectors(n))
    same(ops.quantize(values, value_dtype), reference.quantize(values.numpy(), value_dtype))


@given(SEEDS, SIZES, st.sampled_from([1, 2, 5, 7]), st.lists(st.sampled_from(SPECIALS), min_size=1, max_size=9))
@examples(60)
def test_values_of_any_layout_are_read_row_major(seed, n, columns, specials):
    values = torch.from_numpy(
        np.resize(np.random.default_rng(seed).permutation(np.float32(specials)), (n, columns % 7 + 1))
    )
    turned = values.t()
    array = np.ascontiguousarray(turned.numpy()).reshape(-1)
    same(ops.select_top_k(turned, 1, seed)[0], reference.select_top_k(array, 1, seed)[0])
    assert ops.select_threshold(turned, 1).item() == reference.select_threshold(array, 1)
    assert ops.all_finite(turned).item() == reference.all_finite(array)
