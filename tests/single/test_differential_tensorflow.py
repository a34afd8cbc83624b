"""The TensorFlow operators, run eagerly, equal the NumPy twins on inputs drawn by Hypothesis.

For damaged payloads, both raise an error, or both read the same. test_tensorflow_ops.py tests graphs.
"""

import numpy as np
import tensorflow as tf
from drawn import (
    DAMAGE,
    SEEDS,
    SIZES,
    WIDTHS,
    contents,
    counts,
    damaged,
    forms,
    hints,
    messages,
    sealed,
    vectors,
    verdict,
)
from hypothesis import given
from hypothesis import strategies as st
from test_differential import DTYPES, WIDE_SEEDS, accumulations, check_passed
from test_differential_wire import SCALES, agree
from test_ops import same
from test_tensorflow_accumulate import accumulate_and_select
from test_tensorflow_ops import Invalid, from_torch
from tiers import examples

from hvd_sparse import reference, wire
from hvd_sparse.tensorflow import ops, varying_ops


def bits(values):
    return np.asarray(values).tobytes()


@given(st.data(), SIZES, DTYPES, WIDE_SEEDS)
@examples(80)
def test_selection(data, n, dtype, seed):
    values, k = from_torch(data.draw(vectors(n, dtype))), data.draw(counts(n))
    array = values.numpy()
    expected = reference.select_top_k(array, k, seed)
    hint = data.draw(hints(expected[2]))
    indices, selected, info = ops.select_top_k(values, k, seed, hint)
    same(indices, expected[0])
    assert bits(selected) == bits(expected[1])
    assert info[0] == expected[2]
    check_passed(float(info[1]), reference.magnitudes(array), k, hint)
    assert bool(ops.all_finite(values)) == reference.all_finite(array)


@given(st.data(), SIZES, WIDE_SEEDS, st.booleans(), st.booleans())
@examples(80)
def test_accumulate(data, n, seed, selects, is_active):
    gradient, memory, rule = data.draw(accumulations(n))
    gradient, k = from_torch(gradient), data.draw(counts(n))
    expected = [None if part is None else part.numpy().copy() for part in memory]
    found = [None if part is None else tf.Variable(part) for part in expected[:2]]
    found.append(None if expected[2] is None else tf.constant(expected[2]))
    before = [None if part is None else part.copy() for part in expected]
    finite = reference.accumulate(gradient.numpy(), *expected, **rule)
    if "factor" in rule:  # of Python's numbers TensorFlow keeps constants, and gives 0.0 for -0.0
        rule["factor"] = tf.constant(np.array(rule["factor"], np.float32))
    if not is_active:  # looks at the gradient alone
        finite, expected = reference.all_finite(gradient.numpy()), before
    if selects:
        indices, values, threshold = reference.select_top_k(expected[0], k, seed)
        choice = {"k": k, "seed": seed, "hint": data.draw(hints(threshold))}
        result = accumulate_and_select(gradient, *found, **choice, is_active=is_active, **rule)
        for one, wanted in zip(ops.unpack(result[1], n, k), (indices, values), strict=True):
            same(one, wanted)
        assert result[2][0] == threshold
    else:
        result = [ops.accumulate(gradient, *found, is_active=is_active, **rule)]
    assert bool(result[0]) is finite
    for variable, array in zip(found[:2], expected[:2], strict=True):
        if array is not None:
            same(variable.read_value(), array)


@given(st.data(), SIZES, st.sampled_from([*sorted(WIDTHS), "none"]))
@examples(40)
def test_quantize(data, n, value_dtype):
    values = data.draw(vectors(n)).numpy()
    same(ops.quantize(values, value_dtype), reference.quantize(values, value_dtype))


@given(st.data(), forms(), st.integers(1, 3), st.integers(0, 9), SCALES)
@examples(120)
def test_packed_unpacked_and_added(data, form, ranks, offset, scale):
    cases = [data.draw(contents(form)) for _ in range(ranks)]
    for indices, values, payload in cases:
        same(ops.pack(indices, values, form.n, form.k, *form.code, form.segments), payload)
        agree(ops.unpack(payload, *form), reference.unpack(payload, *form))
    gathered = np.pad(np.stack([payload for *_, payload in cases]), ((0, 0), (offset, 3)), constant_values=255)
    with np.errstate(all="ignore"):
        expected = reference.reduce_payloads(gathered, offset, *form[:4], scale, form.segments)
    same(ops.reduce_payloads(gathered, offset, form.n, form.k, scale, *form.code, form.segments), expected)


@given(st.data(), forms(), DAMAGE, st.booleans())
@examples(150)
def test_damaged_payloads(data, form, damage, seal):
    good = data.draw(contents(form))[2]
    payload = damaged(good, damage)
    payload = sealed(payload) if seal and payload.size >= wire.HEADER_BYTES else payload
    expected = verdict(lambda: reference.unpack(payload, *form))
    agree(verdict(lambda: ops.unpack(payload, *form), Invalid), expected)
    if payload.size != good.size:
        return
    gathered = np.stack([good, payload])
    rest = (*form.code, form.segments)
    added = verdict(lambda: ops.reduce_payloads(gathered, 0, form.n, form.k, 1.0, *rest), Invalid)
    with np.errstate(all="ignore"):
        sums = verdict(lambda: reference.reduce_payloads(gathered, 0, *form[:4], 1.0, form.segments))
    agree(added if added is None else (added,), sums if sums is None else (sums,))


@given(messages(), DAMAGE, st.booleans())
@examples(80)
def test_located_and_damaged_messages(case, damage, whole):
    ranks, ns, channels, placed, gathered = case
    code, message = placed[0, 0].code, gathered if whole else damaged(gathered, damage)
    places = verdict(lambda: reference.locate_payloads(message, ns, ranks, *code, channels))
    found = verdict(lambda: varying_ops.locate_payloads(message, ns, ranks, *code, channels), Invalid)
    agree(found if found is None else (found,), places if places is None else (places,))
    added = verdict(lambda: varying_ops.reduce_located_bucket(message, ns, ranks, 0.5, *code, channels), Invalid)
    with np.errstate(all="ignore"):
        agree(added, verdict(lambda: sums_by_the_twin(message, places, case)))


def sums_by_the_twin(message, places, case):
    """What the ranks' payloads of each member add up to; ValueError if one of them is refused."""
    _, ns, _, placed, _ = case
    if places is None:
        raise ValueError("nothing was found")
    return [
        reference.reduce_located(message, places[:, :, i].copy(), n, *placed[0, i].code, 0.5, placed[0, i].segments)
        for i, n in enumerate(ns)
    ]


@given(st.data(), SIZES, SEEDS)
@examples(40)
def test_scatter_update(data, n, seed):
    rng, (before, values) = np.random.default_rng(seed), (data.draw(vectors(n)).numpy().copy() for _ in range(2))
    variable, indices = tf.Variable(before), rng.choice(n, data.draw(counts(n)), replace=False)
    ops.scatter_update(variable, indices, values[: indices.size])
    before[indices] = values[: indices.size]
    same(variable.read_value(), before)
