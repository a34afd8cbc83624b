"""The operators on buckets equal the NumPy twins on single tensors, bit for bit."""

import resource
import statistics
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hinted import as_hints
from test_ops import as_numpy

from hvd_sparse import reference, wire
from hvd_sparse.buckets import BucketLayout
from hvd_sparse.threshold import ThresholdHint
from hvd_sparse.torch import bucket_ops, ops

SIZES = (1, 7, 1000, 65_537, 70_000)
RULES = {
    "residual": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.7, "nesterov": True, "weight_decay": 0.01},
}
FORMS = {
    "float32": {},
    "float16": {"value_dtype": "float16", "coding": "elias_fano"},
    "int2": {"value_dtype": "int2", "coding": "auto"},
    "int1": {"value_dtype": "int1", "level": "min"},
}


def accumulated_by_the_twin(gradient, *memory, k, **rule):
    """Indices, values and threshold of tensors of torch, and the magnitudes that hints are compared with."""
    arrays = [None if one is None else one.numpy() for one in memory]  # the same memory: changed in place
    indices, values, threshold, _ = reference.accumulate_top_k(
        as_numpy(gradient), *arrays, k=k, seed=3, factor=0.5, **rule
    )
    info = Expected(threshold, reference.magnitudes(arrays[0]), k)
    return torch.from_numpy(indices), torch.from_numpy(values), info


class Expected(NamedTuple):
    """What the info of a selection must be."""

    threshold: float
    magnitudes: np.ndarray
    k: int

    def check(self, info, hint):
        """How many reached the hint is exact up to 2k."""
        threshold, passed = info.tolist()
        assert threshold == self.threshold
        if hint > 0.0:
            reached = int((self.magnitudes >= hint).sum())
            assert min(reached, 2 * self.k) <= passed <= reached


class Bucket:
    """Tensors of all sizes, with memories, and where their payloads go."""

    def __init__(self, rule, form, seed=0, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        self.rule, self.form = rule, form
        draw = [torch.randn((4, n), generator=generator) for n in SIZES]
        self.gradients = [one[0].to(dtype) for one in draw]
        self.residuals = [one[1].clone() for one in draw]
        self.velocities = [one[2].clone() for one in draw] if rule else []
        self.parameters = [one[3].clone() for one in draw] if "weight_decay" in rule else []
        self.ks = [max(1, n // 50) for n in SIZES]
        self.channels = [1 + n // 100 for n in SIZES] if form.get("value_dtype", "").startswith("int") else []
        self.segments = [torch.tensor([[0, count]]) for count in self.channels] or [None] * len(SIZES)
        self.wire = {name: value for name, value in form.items() if name != "level"}
        pairs = zip(SIZES, self.ks, self.segments, strict=True)
        sizes = [ops.payload_size(n, k, **self.wire, segments=segments) for n, k, segments in pairs]
        self.offsets = np.cumsum([0, *sizes])[:-1].tolist()
        self.layout = BucketLayout(SIZES, self.ks, self.channels)
        self.out = torch.full((sum(sizes),), 7, dtype=torch.uint8)

    def accumulate(self, guess=2.0, **changes):
        lists = (self.gradients, self.residuals, self.velocities, self.parameters)
        layout = self.layout._replace(**{name: changes.pop(name) for name in BucketLayout._fields if name in changes})
        options = {"factors": [0.5] * len(SIZES), "hints": as_hints([guess] * len(layout.ks), layout.ks), "seed": 3}
        options |= {"layout": layout, "out": self.out} | changes
        return bucket_ops.accumulate_bucket(*lists, **{**self.rule, **self.form, **options})

    def one_by_one(self):
        """Return payloads, thresholds and residuals, and what is left at the indices, of one tensor after the other."""
        payloads, infos, lefts = [], [], []
        for i, n in enumerate(SIZES):
            memory = [part[i] if part else None for part in (self.residuals, self.velocities, self.parameters)]
            indices, values, info = accumulated_by_the_twin(self.gradients[i], *memory, k=self.ks[i], **self.rule)
            dtype, level = self.form.get("value_dtype", "float32"), self.form.get("level", "mean")
            sent = ops.quantize(values, dtype, level, indices, self.segments[i])
            size = ops.payload_size(n, self.ks[i], **self.wire, segments=self.segments[i])
            payload = torch.empty(size, dtype=torch.uint8)
            ops.pack(indices, sent, n, self.ks[i], payload, **self.wire, segments=self.segments[i])
            payloads.append(payload)
            infos.append(info)
            lefts.append((indices, values - sent))
        return torch.cat(payloads), infos, lefts


@pytest.fixture(params=RULES)
def rule(request):
    return RULES[request.param]


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


@pytest.mark.parametrize("retained", [0.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bucket_is_its_tensors_one_by_one(rule, form, dtype, retained):
    bucket, single = Bucket(rule, form, dtype=dtype), Bucket(rule, form, dtype=dtype)
    info, finite = bucket.accumulate()
    payloads, infos, lefts = single.one_by_one()
    assert torch.equal(bucket.out, payloads) and bool(finite.all())
    for one, expected in zip(info, infos, strict=True):
        expected.check(one, 2.0)
    for ours, theirs in zip(bucket.residuals + bucket.velocities, single.residuals + single.velocities, strict=True):
        assert torch.equal(ours, theirs)
    bucket_ops.clear_bucket(
        bucket.out, bucket.residuals, bucket.velocities, layout=bucket.layout, **bucket.wire, retained=retained
    )
    for i, (indices, left) in enumerate(lefts):
        left = left + retained * (single.residuals[i][indices] - left)
        torch.testing.assert_close(
            bucket.residuals[i],
            single.residuals[i].index_copy(0, indices, left),
            rtol=1e-6 if retained else 0.0,
            atol=0.0,
        )
        if rule:
            assert torch.equal(bucket.velocities[i], single.velocities[i].index_fill(0, indices, 0.0))
    gathered = torch.stack([bucket.out, bucket.out])
    outs, expected = ([torch.full((n,), 9.0) for n in SIZES] for _ in range(2))
    bucket_ops.reduce_bucket(gathered, outs, 0.5, layout=bucket.layout, **bucket.wire)
    for i, n in enumerate(SIZES):
        where = (bucket.offsets[i], n, bucket.ks[i], expected[i], 0.5)
        ops.reduce_payloads(gathered, *where, **bucket.wire, segments=bucket.segments[i])
        assert torch.equal(outs[i], expected[i])


def test_settled_steps_take_no_memory_from_the_system():
    """What a step allocates, malloc has from the steps before: no page of it is new."""
    n, ranks = 1_000_000, 8
    k = n // 1000
    gradient, residual, velocity, total = (torch.zeros(n) for _ in range(4))
    gathered = torch.zeros((ranks, wire.payload_size(n, k)), dtype=torch.uint8)
    layout, hints, generator = BucketLayout([n], [k]), bucket_ops.new_hints(1), torch.Generator().manual_seed(0)
    faults = []
    for _ in range(24):
        gradient.normal_(generator=generator)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        bucket_ops.accumulate_bucket(
            [gradient], [residual], [velocity], layout=layout, out=gathered[0], factors=[1.0], hints=hints, momentum=0.9
        )
        bucket_ops.clear_bucket(gathered[0], [residual], [velocity], layout=layout)
        gathered[1:] = gathered[0]
        bucket_ops.reduce_bucket(gathered, [total], layout=layout)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert statistics.median(faults[8:]) == 0, faults


def test_what_is_not_finite_is_told_of_its_tensor():
    bucket = Bucket({}, {})
    bucket.gradients[2][5] = float("nan")
    assert bucket.accumulate()[1].tolist() == [True, True, False, True, True]
    assert all(bool(torch.isfinite(residual).all()) for residual in bucket.residuals)


def test_an_empty_contribution_clears_nothing():
    residual, message = torch.ones(50), torch.empty(wire.payload_size(50, 3), dtype=torch.uint8)
    ops.pack(torch.empty(0, dtype=torch.int64), torch.empty(0), 50, 3, message)
    bucket_ops.clear_bucket(message, [residual], layout=BucketLayout([50], [3]))
    assert residual.sum() == 50


def test_hints_learn_in_place():
    """Hints on the operator's tensor equal those of `ThresholdHint`, step by step, and so do the selections."""
    found, expected = Bucket({"momentum": 0.9}, {}), Bucket({"momentum": 0.9}, {})
    hints, oracle = bucket_ops.new_hints(len(SIZES)), [ThresholdHint() for _ in SIZES]
    for step in range(12):
        shrink = 0.01 if step == 6 else 1.0  # what was left is far below the hints: they miss
        for bucket in (found, expected):
            if step == 9:  # another density: last step's thresholds say nothing
                bucket.ks = [max(1, k // 2) for k in bucket.ks]
            generator = torch.Generator().manual_seed(step)
            bucket.gradients = [torch.randn(n, generator=generator) for n in SIZES]
            for memory in bucket.residuals + bucket.velocities:
                memory.mul_(shrink)
            bucket.layout = bucket.layout._replace(ks=bucket.ks)
            size = sum(ops.payload_size(n, k) for n, k in zip(SIZES, bucket.ks, strict=True))
            bucket.out = torch.empty(size, dtype=torch.uint8)
        guesses = [hint.value(k) for hint, k in zip(oracle, expected.ks, strict=True)]
        ours, _ = found.accumulate(hints=hints)
        theirs, _ = expected.accumulate(hints=as_hints(guesses, expected.ks))
        for hint, k, (threshold, passed) in zip(oracle, expected.ks, theirs.tolist(), strict=True):
            hint.update(k, threshold, int(passed))
        assert torch.equal(ours, theirs) and torch.equal(found.out, expected.out)
        assert hints.tolist() == [[hint.threshold, hint.margin, hint.k] for hint in oracle]
        for bucket in (found, expected):
            bucket_ops.clear_bucket(bucket.out, bucket.residuals, bucket.velocities, layout=bucket.layout)
    assert len({margin for _, margin, _ in hints.tolist()}) > 1, "a hint must have missed"


def test_hints_of_a_wrong_shape_are_refused():
    for hints in (torch.zeros(4, 3, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"accumulate_bucket: hints must be \[5, 3\], got "):
            Bucket({}, {}).accumulate(hints=hints)
    with pytest.raises(ValueError, match="accumulate_bucket: hints must be Double"):
        Bucket({}, {}).accumulate(hints=torch.zeros(5, 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ks": [1, 1]}, "ks must have 5 entries, one a selection; got 2"),
        ({"ks": [1, 1], "is_joint": True}, "ks must have 1 entries, one a selection; got 2"),
        ({"sizes": [1, 7]}, "ks must have 2 entries, one a selection; got 5"),
        ({"sizes": [1, 7, 1000, 65_537, 69_999]}, "gradient 4 must have 69999 elements, got 70000"),
        ({"sizes": [1, 7, 1000, 65_537, -1]}, r"sizes must be in \[0, 2\^48\], got -1"),
        ({"channels": [1, 1]}, "channels must have 5 entries, one a member; got 2"),
        ({"members": [0, 1, 2, 3]}, "gradients must have 4 entries, one a member; got 5"),
        ({"members": [0, 1, 2, 4, 3]}, r"members must ascend in \[0, 5\), got 3 after 4"),
        ({"members": [0, 1, 2, 3, 3]}, r"members must ascend in \[0, 5\), got 3 after 3"),
        ({"members": [-1, 1, 2, 3, 4]}, r"members must ascend in \[0, 5\), got -1 after -1"),
        ({"members": [0, 1, 2, 3, 5]}, r"members must ascend in \[0, 5\), got 5 after 3"),
        ({"factors": [1.0] * 6}, "factors must have 5 entries"),
        ({"ks": [2, 1, 1, 1, 1]}, r"k must be in \[1, n = 1\], got 2"),
        ({"ks": [1, 0, 1, 1, 1]}, r"k must be in \[1, n = 7\], got 0"),
        ({"out": torch.zeros(9, dtype=torch.uint8)}, "out must have [0-9]+ bytes a rank, got 9"),
        ({"out": torch.zeros(9)}, "out must be Byte"),
        ({"level": "median"}, "level must be mean or min, got median"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=f"hvd_sparse.accumulate_bucket: .*{message}"):
        Bucket({}, {}).accumulate(**changes)


@pytest.mark.parametrize("member", [0, 4])
def test_a_damaged_payload_names_its_rank_and_touches_nothing(member):
    bucket = Bucket({}, {})
    bucket.accumulate()
    gathered = torch.stack([bucket.out, bucket.out])
    gathered[1, bucket.offsets[member] + 34] ^= 1
    outs = [torch.full((n,), 9.0) for n in SIZES]
    with pytest.raises(ValueError, match="reduce_bucket: from rank 1: payload checksum"):
        bucket_ops.reduce_bucket(gathered, outs, layout=bucket.layout)
    assert all(bool((out == 9.0).all()) for out in outs)


def test_a_wrong_residual_of_the_last_member_changes_no_other():
    bucket, before = Bucket({}, {}), Bucket({}, {})
    bucket.residuals[4] = torch.zeros(3)
    with pytest.raises(ValueError, match="accumulate_bucket: residual must have 70000 elements"):
        bucket.accumulate()
    with pytest.raises(ValueError, match="clear_bucket: residual must have 70000 elements"):
        bucket_ops.clear_bucket(before.one_by_one()[0], bucket.residuals, layout=bucket.layout)
    assert all(map(torch.equal, bucket.residuals[:4], Bucket({}, {}).residuals))


def test_opcheck():
    n, k, size = 50, 3, wire.payload_size(50, 3)
    torch.manual_seed(0)
    lists, code = ([torch.randn(n)], [torch.randn(n)], [torch.randn(n)], []), ("run_length", "float32")
    whole, none = ([n], [k], [], False, [0]), ([n], [k], [], True, [])
    choice = (0, bucket_ops.new_hints(1), torch.zeros(size, dtype=torch.uint8))
    operators = torch.ops.hvd_sparse
    torch.library.opcheck(
        operators.accumulate_bucket, (*lists, [1.0], 0.9, False, [0.0], *choice, *whole, *code, "mean")
    )
    torch.library.opcheck(
        operators.accumulate_bucket, ([], [], [], [], [], 0.9, False, [], *choice, *none, *code, "mean")
    )
    message = torch.empty(size, dtype=torch.uint8)
    ops.pack(torch.arange(k), torch.ones(k), n, k, message)
    memory = ([torch.randn(n)], [torch.randn(n)])
    torch.library.opcheck(operators.clear_bucket, (message, *memory, *whole, *code, 0.7))
    torch.library.opcheck(operators.reduce_bucket, (message[None], [torch.empty(n)], 1.0, *whole, *code))


class Joint(Bucket):
    """The same tensors with one selection in all of them."""

    K = 1500

    def __init__(self, rule, form, **options):
        super().__init__(rule, form, **options)
        self.n, begins = sum(SIZES), np.cumsum([0, *SIZES])[:-1].tolist()
        segments = torch.tensor([*zip(begins, self.channels, strict=True)]) if self.channels else None
        self.segments = segments
        size = ops.payload_size(self.n, self.K, **self.wire, segments=segments)
        self.out = torch.full((size,), 7, dtype=torch.uint8)
        self.layout = BucketLayout(SIZES, [self.K], self.channels, True)


@pytest.mark.parametrize("hint", [0.0, 2.0, 50.0], ids=["no hint", "a good hint", "a hint that misses"])
@pytest.mark.parametrize("contiguous", [True, False])
def test_tensors_that_share_a_selection_are_one_tensor(rule, form, hint, contiguous):
    bucket = Joint(rule, form)
    if contiguous:
        bucket.residuals = list(torch.cat(bucket.residuals).split(SIZES))
    whole = {
        name: torch.cat(getattr(bucket, name)) if getattr(bucket, name) else None
        for name in ("gradients", "residuals", "velocities", "parameters")
    }
    indices, values, info = accumulated_by_the_twin(*whole.values(), k=bucket.K, **rule)
    sent = ops.quantize(values, form.get("value_dtype", "float32"), form.get("level", "mean"), indices, bucket.segments)
    expected = torch.empty_like(bucket.out)
    ops.pack(indices, sent, bucket.n, bucket.K, expected, **bucket.wire, segments=bucket.segments)

    found, finite = bucket.accumulate(guess=hint)
    assert torch.equal(bucket.out, expected) and bool(finite.all())
    info.check(found[0], hint)
    assert torch.equal(torch.cat(bucket.residuals), whole["residuals"])

    bucket_ops.clear_bucket(bucket.out, bucket.residuals, bucket.velocities, layout=bucket.layout, **bucket.wire)
    assert torch.equal(torch.cat(bucket.residuals), whole["residuals"].index_copy(0, indices, values - sent))
    if rule:
        assert torch.equal(torch.cat(bucket.velocities), whole["velocities"].index_fill(0, indices, 0.0))

    outs, total = [torch.full((n,), 9.0) for n in SIZES], torch.empty(bucket.n)
    gathered = torch.stack([bucket.out] * 3)
    bucket_ops.reduce_bucket(gathered, outs, 0.5, layout=bucket.layout, **bucket.wire)
    ops.reduce_payloads(gathered, 0, bucket.n, bucket.K, total, 0.5, **bucket.wire, segments=bucket.segments)
    assert torch.equal(torch.cat(outs), total)


def test_members_may_be_missing_from_a_joint_selection():
    """What is missing counts as zeros, is not written, and its memory stays."""
    bucket, whole = Joint({}, {}), Joint({}, {})
    frozen = whole.residuals[3].clone()
    for values in (whole.gradients, whole.residuals):
        values[3] = torch.zeros(SIZES[3])
    whole.accumulate(guess=0.0)
    there = [0, 1, 2, 4]
    places = {"layout": bucket.layout, "members": there}
    lists = [[values[i] for i in there] for values in (bucket.gradients, bucket.residuals)]
    for hint in (0.0, 50.0):  # accumulates once: the gradients are zero the second time
        hints = as_hints([hint], [bucket.K])
        bucket_ops.accumulate_bucket(*lists, **places, out=bucket.out, factors=[0.5] * 4, hints=hints, seed=3)
        assert torch.equal(bucket.out, whole.out)
        lists[0] = [torch.zeros_like(gradient) for gradient in lists[0]]
    bucket_ops.clear_bucket(bucket.out, lists[1], **places)
    bucket_ops.clear_bucket(whole.out, whole.residuals, layout=whole.layout)
    for i in there:
        assert torch.equal(bucket.residuals[i], whole.residuals[i])
    assert torch.equal(bucket.residuals[3], frozen)
    outs, expected = ([torch.full((n,), 9.0) for n in SIZES] for _ in range(2))
    bucket_ops.reduce_bucket(bucket.out[None], [outs[i] for i in there], **places)
    bucket_ops.reduce_bucket(bucket.out[None], expected, layout=whole.layout)
    assert all(torch.equal(outs[i], expected[i]) for i in there) and bool((outs[3] == 9.0).all())


def test_members_with_a_selection_each_may_be_missing():
    """The payload of what is missing is left alone, and so are its memory and its hint."""
    bucket, whole, there = Bucket({}, {}), Bucket({}, {}), [1, 4]
    whole.accumulate()
    hints, places = as_hints([2.0] * len(SIZES), bucket.ks), {"layout": bucket.layout, "members": there}
    lists = [[values[i] for i in there] for values in (bucket.gradients, bucket.residuals)]
    info, finite = bucket_ops.accumulate_bucket(
        *lists, **places, out=bucket.out, factors=[0.5] * 2, hints=hints, seed=3
    )
    assert info.shape == (2, 2) and finite.shape == (2,)
    ends = [*bucket.offsets[1:], bucket.out.numel()]
    for i, (begin, end) in enumerate(zip(bucket.offsets, ends, strict=True)):
        part = bucket.out[begin:end]
        assert torch.equal(part, whole.out[begin:end]) if i in there else bool((part == 7).all())
        assert (hints[i].tolist() == [2.0, 1.0, bucket.ks[i]]) == (i not in there)
    bucket_ops.clear_bucket(bucket.out, lists[1], **places)
    bucket_ops.clear_bucket(whole.out, whole.residuals, layout=whole.layout)
    outs, expected = ([torch.full((n,), 9.0) for n in SIZES] for _ in range(2))
    bucket_ops.reduce_bucket(whole.out[None], [outs[i] for i in there], **places)
    bucket_ops.reduce_bucket(whole.out[None], expected, layout=whole.layout)
    for i in range(len(SIZES)):
        assert torch.equal(bucket.residuals[i], whole.residuals[i] if i in there else Bucket({}, {}).residuals[i])
        assert torch.equal(outs[i], expected[i]) if i in there else bool((outs[i] == 9.0).all())


def test_a_joint_selection_without_members_selects_zeros():
    out, layout = torch.empty(wire.payload_size(50, 3), dtype=torch.uint8), BucketLayout([30, 20], [3], (), True)
    info, finite = bucket_ops.accumulate_bucket(
        [], [], layout=layout, members=[], out=out, factors=[], hints=as_hints([1.0], [3])
    )
    indices, values = ops.unpack(out, 50, 3)
    assert indices.tolist() == [0, 1, 2] and values.tolist() == [0.0] * 3 and info[0, 0] == 0 and finite.numel() == 0
