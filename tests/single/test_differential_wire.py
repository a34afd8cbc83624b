"""torch.ops.hvd_sparse.* for payloads and buckets equal the NumPy twins on inputs drawn by Hypothesis.

For damaged payloads, both raise an error, or both read the same.
"""

from typing import NamedTuple

import numpy as np
import torch
from drawn import DAMAGE, Form, contents, damaged, forms, hints, messages, sealed, vectors, verdict
from hinted import as_hints
from hypothesis import given
from hypothesis import strategies as st
from test_differential import NUMBERS, WIDE_SEEDS, as_numpy, check_memory, copies
from test_ops import same
from tiers import examples

from hvd_sparse import reference, wire
from hvd_sparse.buckets import BucketLayout
from hvd_sparse.torch import bucket_ops, ops, varying_ops

SCALES = st.sampled_from([1.0, 0.5, 1 / 3, -1e-30, 0.0])


def tensor(array):
    return None if array is None else torch.from_numpy(np.array(array))


def agree(found, expected):
    """Both refused, or gave the same arrays."""
    assert (found is None) == (expected is None)
    for one, wanted in zip(found or (), expected or (), strict=True):
        same(one, wanted)


@given(st.data(), forms())
@examples(200)
def test_packed_and_unpacked(data, form):
    indices, values, payload = data.draw(contents(form))
    segments = tensor(form.segments)
    assert ops.payload_size(*form[:4], segments) == form.size == payload.size
    out = torch.full((form.size,), 255, dtype=torch.uint8)
    ops.pack(tensor(indices), tensor(values), form.n, form.k, out, *form.code, segments)
    same(out, payload)
    agree(ops.unpack(out, *form[:4], segments), reference.unpack(payload, *form))


@given(st.data(), forms(), st.integers(1, 4), st.integers(0, 9), SCALES)
@examples(150)
def test_reduce_payloads(data, form, ranks, offset, scale):
    rows = np.stack([data.draw(contents(form))[2] for _ in range(ranks)])
    gathered = np.pad(rows, ((0, 0), (offset, 3)), constant_values=255)
    out = torch.full((form.n,), np.nan)
    ops.reduce_payloads(tensor(gathered), offset, form.n, form.k, out, scale, *form.code, tensor(form.segments))
    with np.errstate(all="ignore"):
        expected = reference.reduce_payloads(gathered, offset, *form[:4], scale, form.segments)
    same(out, expected)


@given(messages(), SCALES)
@examples(100)
def test_located(case, scale):
    ranks, ns, channels, placed, gathered = case
    code = placed[0, 0].code
    places = reference.locate_payloads(gathered, ns, ranks, *code, channels)
    same(varying_ops.locate_payloads(tensor(gathered), ns, ranks, *code, channels), places)
    for member, n in enumerate(ns):
        where, segments = places[:, :, member].copy(), placed[0, member].segments
        out = torch.full((n,), np.nan)
        varying_ops.reduce_located(tensor(gathered), tensor(where), n, out, scale, *code, tensor(segments))
        with np.errstate(all="ignore"):
            same(out, reference.reduce_located(gathered, where, n, *code, scale, segments))


@given(st.data(), forms(), DAMAGE, st.booleans())
@examples(400)
def test_damaged_payloads(data, form, damage, seal):
    good = data.draw(contents(form))[2]
    payload = damaged(good, damage)
    payload = sealed(payload) if seal and payload.size >= wire.HEADER_BYTES else payload
    expected = verdict(lambda: reference.unpack(payload, *form))
    agree(verdict(lambda: ops.unpack(tensor(payload), *form[:4], tensor(form.segments))), expected)
    if payload.size != good.size:
        return
    gathered, out = np.stack([good, payload]), torch.full((form.n,), 7.0)
    arguments = (0, form.n, form.k, out, 1.0, *form.code, tensor(form.segments))
    added = verdict(lambda: ops.reduce_payloads(tensor(gathered), *arguments) or True)
    assert (added is None) == (expected is None)
    with np.errstate(all="ignore"):
        sums = expected and reference.reduce_payloads(gathered, 0, *form[:4], segments=form.segments)
    same(out, np.full(form.n, 7, np.float32) if expected is None else sums)


@given(messages(), DAMAGE)
@examples(150)
def test_damaged_messages(case, damage):
    ranks, ns, channels, placed, gathered = case
    code, message = placed[0, 0].code, damaged(gathered, damage)
    places = verdict(lambda: reference.locate_payloads(message, ns, ranks, *code, channels))
    found = verdict(lambda: varying_ops.locate_payloads(tensor(message), ns, ranks, *code, channels))
    agree(found if found is None else (found,), places if places is None else (places,))
    for member, n in enumerate(ns if places is not None else ()):
        where, segments = places[:, :, member].copy(), placed[0, member].segments
        out = torch.full((n,), 7.0)
        arguments = (tensor(where), n, out, 0.5, *code, tensor(segments))
        added = verdict(lambda arguments=arguments: varying_ops.reduce_located(tensor(message), *arguments) or True)
        with np.errstate(all="ignore"):
            twin = (where, n, *code, 0.5, segments)
            sums = verdict(lambda twin=twin: reference.reduce_located(message, *twin))
        assert (added is None) == (sums is None)
        same(out, np.full(n, 7, np.float32) if sums is None else sums)


COUNTS = st.lists(st.sampled_from([0, 1, 2, 3, 65_535]), max_size=4)
RUNS = st.lists(st.sampled_from([0, 1, 2, 9, 65_533, 65_535]), min_size=1, max_size=6)


@given(COUNTS, RUNS, st.integers(6, 200_000))
@examples(150)
def test_any_counts_and_runs(numbers, runs, n):
    """Under a right checksum, of as many entries as runs."""
    blocks, k = wire.block_count(n), len(runs)
    layout = wire.payload_layout(n, k, "run_length", "none")
    for counts in (np.resize([*numbers, 0], blocks), [k, *[0] * (blocks - 1)], [*[0] * (blocks - 1), k]):
        payload = reference.pack(np.arange(k), np.zeros(k), n, k, "run_length", "none")
        for at, section in ((layout.counts, counts), (layout.runs, runs)):
            payload[at : at + 2 * len(section)] = np.array(section, "<u2").view(np.uint8)
        form, payload = (n, k, "run_length", "none"), sealed(payload)
        expected = verdict(lambda payload=payload, form=form: reference.unpack(payload, *form))
        agree(verdict(lambda payload=payload, form=form: ops.unpack(tensor(payload), *form)), expected)


@given(st.lists(st.integers(-2, 70_000), max_size=8), st.booleans(), st.integers(1, 70_000))
@examples(100)
def test_any_indices(indices, ascending, n):
    indices = np.array(sorted(set(indices)) if ascending else indices, np.int64)
    values, k = np.ones(indices.size, np.float32), max(1, indices.size)
    out = torch.zeros(wire.payload_size(max(n, k), k), dtype=torch.uint8)
    expected = verdict(lambda: reference.pack(indices, values, n, k))
    found = verdict(lambda: ops.pack(tensor(indices), tensor(values), n, k, out) or out)
    assert (found is None) == (expected is None)
    assert found is None or found.numpy().tobytes() == expected.tobytes()


FINITE = ("normal", "ties", "zeros", "equal", "denormal", "sparse")


class Member(NamedTuple):
    """A tensor that takes part in a selection, where its elements follow `begin` others."""

    begin: int
    gradient: torch.Tensor
    memory: list[torch.Tensor | None]
    factor: float

    @property
    def place(self):
        return slice(self.begin, self.begin + self.gradient.numel())


@st.composite
def bucket_members(draw, rule, begin, n):
    memory = [draw(vectors(n, kinds=FINITE)) for _ in range(3)]
    memory[1] = memory[1] if "momentum" in rule else None
    memory[2] = memory[2] if "weight_decay" in rule else None
    gradient = draw(vectors(n, draw(st.sampled_from(["float32", "float16", "bfloat16"])), FINITE))
    if n > 0 and draw(st.booleans()):
        gradient[draw(st.integers(0, n - 1))] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    return Member(begin, gradient, memory, draw(st.sampled_from([1.0, 0.5])))


class DrawnBucket(NamedTuple):
    """A layout; the members that take part; the form of each selection, and its members that take part, in order."""

    rule: dict
    level: str
    layout: BucketLayout
    present: list[int]
    selections: list[tuple[Form, list[Member]]]


@st.composite
def buckets(draw):
    """A rule, and tensors in one selection or one each, some of which take no part."""
    rule = {"momentum": draw(NUMBERS), "nesterov": draw(st.booleans())} if draw(st.booleans()) else {}
    rule |= {"weight_decay": 0.25} if draw(st.booleans()) else {}
    coding = draw(st.sampled_from([*wire.CODINGS, "auto"]))
    dtype = draw(st.sampled_from([one for one in wire.VALUE_DTYPES if one not in ("none", "float64")]))
    is_joint, grouped = draw(st.booleans()), dtype in wire.LOW_BITS
    smallest = [0] if is_joint and not grouped else []  # a member with its own selection or groups has elements
    sizes = st.lists(st.sampled_from([*smallest, 1, 2, 63, 64, 65, 500, 2049, 65_537]), min_size=1, max_size=4)
    sizes = draw(sizes.filter(any))
    channels = [draw(st.integers(1, min(n, 700))) for n in sizes] if grouped else []
    wholes = [range(len(sizes))] if is_joint else [[i] for i in range(len(sizes))]
    selections, ks, present = [], [], []
    for whole in wholes:
        n, members, segments = 0, [], []
        for i in whole:
            if draw(st.integers(0, 3)) > 0:
                present.append(i)
                members.append(draw(bucket_members(rule, n, sizes[i])))
            segments += [[n, channels[i]]] if grouped else []
            n += sizes[i]
        form = draw(forms(n, [coding], [dtype]))._replace(segments=np.array(segments) if grouped else None)
        selections.append((form, members))
        ks.append(form.k)
    layout = BucketLayout(sizes, ks, channels, is_joint)
    return DrawnBucket(rule, draw(st.sampled_from(wire.LEVELS)), layout, present, selections)


def accumulated_by_the_twins(rule, level, selections, seed):
    """The payloads, the thresholds, which gradients were finite, and the memories before and after what is sent."""
    payloads, thresholds, finite, before, after = [], [], [], [], []
    for form, members in selections:
        joined = [np.zeros(form.n, np.float32) for _ in range(2)]
        for member in members:
            memory = copies(member.memory)[1]
            finite.append(reference.accumulate(as_numpy(member.gradient), *memory, factor=member.factor, **rule))
            before.append(memory[:2])
            for whole, part in zip(joined, memory, strict=False):
                whole[member.place] = 0.0 if part is None else part
        indices, values, threshold = reference.select_top_k(joined[0], form.k, seed)
        sent = reference.quantize(values, form.value_dtype, level, indices, form.segments)
        payloads.append(reference.pack(indices, sent, *form))
        thresholds.append(threshold)
        with np.errstate(all="ignore"):  # overflowed values may be sent, too
            joined[0][indices] = 0.0 if form.value_dtype == "float32" else values - sent
        joined[1][indices] = 0.0
        for member in members:
            left, velocity = (whole[member.place] for whole in joined)
            after.append([left, velocity if "momentum" in rule else None])
    return payloads, thresholds, finite, before, after


@given(st.data(), buckets(), WIDE_SEEDS, st.booleans())
@examples(150)
def test_buckets(data, bucket, seed, contiguous):
    rule, layout = bucket.rule, bucket.layout
    selected = [layout.is_joint or bool(members) for _, members in bucket.selections]
    made = [one for one, is_made in zip(bucket.selections, selected, strict=True) if is_made]
    payloads, thresholds, finite, before, after = accumulated_by_the_twins(rule, bucket.level, made, seed)
    members = [member for _, some in made for member in some]
    sizes = [member.gradient.numel() for member in members]
    memories = [copies(member.memory)[0] for member in members]
    residuals, velocities, parameters = ([memory[i] for memory in memories if memory[i] is not None] for i in range(3))
    if contiguous and members:  # then nothing need be joined where nothing is missing
        residuals = list(torch.cat(residuals).split(sizes))
    found = [[residual, memory[1]] for residual, memory in zip(residuals, memories, strict=True)]
    form = {"layout": layout, "members": bucket.present}
    form |= dict(zip(("coding", "value_dtype"), bucket.selections[0][0].code, strict=True))

    whole = whole_message(bucket.selections, selected, payloads)
    out = torch.full((whole.size,), 255, dtype=torch.uint8)
    exact = iter(thresholds)
    hinted = as_hints([data.draw(hints(next(exact))) if is_made else 1.0 for is_made in selected], layout.ks)
    unused = hinted[[not is_made for is_made in selected]]
    options = {"factors": [member.factor for member in members], "level": bucket.level, "seed": seed}
    lists = ([member.gradient for member in members], residuals, velocities, parameters)
    info, is_finite = bucket_ops.accumulate_bucket(*lists, out=out, hints=hinted, **rule, **options, **form)
    same(out, whole)
    assert torch.equal(hinted[[not is_made for is_made in selected]], unused)
    assert (info[:, 0].tolist(), is_finite.tolist()) == (thresholds, finite)
    for ours, theirs in zip(found, before, strict=True):
        check_memory(ours, theirs)
    bucket_ops.clear_bucket(out, residuals, velocities, **form)
    for ours, theirs in zip(found, after, strict=True):
        check_memory(ours, theirs)
    outs = [torch.full((n,), np.nan) for n in sizes]
    bucket_ops.reduce_bucket(torch.stack([out, out]), outs, 0.5, **form)
    check_sums(made, payloads, outs)


def whole_message(selections, selected, payloads):
    """The payloads, and untouched bytes where no selection is made."""
    payloads = iter(payloads)
    parts = [
        next(payloads) if is_made else np.full(form.size, 255, np.uint8)
        for (form, _), is_made in zip(selections, selected, strict=True)
    ]
    return np.concatenate(parts)


def check_sums(selections, payloads, outs):
    found = iter(outs)
    for (form, members), payload in zip(selections, payloads, strict=True):
        with np.errstate(all="ignore"):
            total = reference.reduce_payloads(np.stack([payload, payload]), 0, *form[:4], 0.5, form.segments)
        for member in members:
            same(next(found), total[member.place])
