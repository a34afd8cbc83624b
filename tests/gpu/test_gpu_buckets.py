"""Buckets of CUDA tensors: results equal the CPU's, nothing waits for the device, and hints stay on it."""

import torch
from gpu_helpers import CAN_CAPTURE, CANNOT_CAPTURE, SMALL, assert_refuses, assert_same, make, need
from hinted import as_hints

from hvd_sparse.buckets import BucketLayout
from hvd_sparse.threshold import ThresholdHint
from hvd_sparse.torch import bucket_ops, ops

NUMELS = (1, 7, 1000, 65_537) if SMALL else (1, 7, 1000, 65_537, 1_000_003)
HINTS = (2.0, 1e6) if SMALL else (2.0, 1e-6, 1e6)
RULES = ({}, {"momentum": 0.9}, {"momentum": 0.7, "nesterov": True, "weight_decay": 0.01})
FORMS = (
    {},
    {"value_dtype": "float16", "coding": "elias_fano"},
    {"value_dtype": "bfloat16", "coding": "auto"},
    {"coding": "bitmap"},
    {"value_dtype": "int2", "coding": "auto"},
    {"value_dtype": "int1"},
)


class Bucket:
    """Tensors of all sizes on a device, with memories, and where their payloads go."""

    def __init__(self, device, rule, form, dtype=torch.float32, joint=False):
        self.device, self.rule, self.form, self.dtype, self.joint = device, rule, form, dtype, joint
        self.residuals = [make("normal", n, seed=1).to(device) for n in NUMELS]
        self.velocities = [make("normal", n, seed=2).to(device) for n in NUMELS] if rule else []
        decays = "weight_decay" in rule
        self.parameters = [make("normal", n, seed=3).to(device) for n in NUMELS] if decays else []
        sizes = [*NUMELS, 10] if joint else NUMELS  # the last 10 elements take no part
        ns = [sum(sizes)] if joint else sizes
        self.ks = [max(1, n // 100) for n in ns]
        self.sizes = [ops.payload_size(n, k, **form) for n, k in zip(ns, self.ks, strict=True)]
        self.offsets = [sum(self.sizes[:i]) for i in range(len(ns))]
        self.out = torch.full((sum(self.sizes),), 7, dtype=torch.uint8, device=device)
        self.sums = [torch.full((n,), 9.0, device=device) for n in NUMELS]
        self.places = {"layout": BucketLayout(sizes, self.ks, (), joint), "members": list(range(len(NUMELS)))}
        self.hints = bucket_ops.new_hints(len(ns), device)

    def gradients(self, step):
        return [make("normal", n, self.dtype, seed=10 + step).to(self.device) for n in NUMELS]

    def arguments(self, gradients):
        lists = (gradients, self.residuals, self.velocities, self.parameters)
        return lists, {"factors": [0.5] * len(NUMELS), "out": self.out, **self.places, **self.rule, **self.form}

    def accumulate(self, gradients, guesses=None, seed=3):
        lists, options = self.arguments(gradients)
        hints = self.hints if guesses is None else as_hints(guesses, self.ks).to(self.device)
        return bucket_ops.accumulate_bucket(*lists, hints=hints, seed=seed, **options)

    def clear(self):
        bucket_ops.clear_bucket(self.out, self.residuals, self.velocities, **self.places, **self.form)

    def reduce(self, gathered):
        bucket_ops.reduce_bucket(gathered, self.sums, 0.5, **self.places, **self.form)


def assert_equal(found, expected, context):
    assert_same(found.out, expected.out, context)
    for name in ("residuals", "velocities", "sums"):
        for mine, theirs in zip(getattr(found, name), getattr(expected, name), strict=True):
            assert_same(mine, theirs, (name, context))


def test_a_bucket_is_that_of_the_cpu():
    for joint in (False, True):
        check_buckets(joint)
    assert ops.take_decode_status(torch.empty(0, device="cuda")).tolist() == [0, 0]


def check_buckets(joint):
    for rule in RULES[1:2] if SMALL else RULES:
        for form in FORMS:
            for dtype in (torch.float32,) if SMALL else (torch.float32, torch.bfloat16):
                found, expected = (Bucket(device, rule, form, dtype, joint) for device in ("cuda", "cpu"))
                for hint in HINTS:
                    guesses = [hint] * len(found.ks)
                    infos = [bucket.accumulate(bucket.gradients(0), guesses) for bucket in (found, expected)]
                    (info, finite), (expected_info, expected_finite) = infos
                    assert info[:, 0].tolist() == expected_info[:, 0].tolist(), (rule, form)
                    assert finite.tolist() == expected_finite.tolist(), (rule, form)
                    for bucket in (found, expected):
                        bucket.clear()
                        bucket.reduce(torch.stack([bucket.out, bucket.out, bucket.out]))
                    assert_equal(found, expected, (rule, form, dtype, hint, joint))


def test_many_small_tensors():
    gradients = [make("normal", 20_000, seed=i) for i in range(160)]
    k, size = 20, ops.payload_size(20_000, 20)
    messages = []
    for device in ("cuda", "cpu"):
        residuals = [torch.zeros(20_000, device=device) for _ in gradients]
        out = torch.zeros(160 * size, dtype=torch.uint8, device=device)
        layout, hints = BucketLayout([20_000] * 160, [k] * 160), as_hints([3.0] * 160, [k] * 160).to(device)
        ones = [gradient.to(device) for gradient in gradients]
        bucket_ops.accumulate_bucket(ones, residuals, layout=layout, out=out, factors=[1.0] * 160, hints=hints)
        messages.append(out)
    assert_same(*messages)


def test_hints_that_stay_on_the_device_follow_the_rule():
    found, expected = Bucket("cuda", RULES[1], {}), Bucket("cpu", RULES[1], {})
    hints = [ThresholdHint() for _ in NUMELS]
    for step in range(12):
        guesses = [hint.value(k) for hint, k in zip(hints, expected.ks, strict=True)]
        info, finite = found.accumulate(found.gradients(step), seed=step)
        expected_info, expected_finite = expected.accumulate(expected.gradients(step), guesses, seed=step)
        assert finite.tolist() == expected_finite.tolist()
        for hint, k, row, mine in zip(hints, expected.ks, expected_info.tolist(), info.tolist(), strict=True):
            assert mine[0] == row[0]
            hint.update(k, mine[0], int(mine[1]))
        for bucket in (found, expected):
            bucket.clear()
        assert_equal(found, expected, step)
        kept = [[hint.threshold, hint.margin, float(hint.k)] for hint in hints]
        assert found.hints.tolist() == kept, step


def test_nothing_waits():
    bucket = Bucket("cuda", RULES[1], {})
    gradients = bucket.gradients(0)
    bucket.accumulate(gradients, [2.0] * len(NUMELS))
    bucket.reduce(torch.stack([bucket.out] * 4))  # warm: the allocator may wait for memory the first time
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        bucket.accumulate(gradients)
        bucket.clear()
        bucket.reduce(torch.stack([bucket.out] * 4))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_graph_holds_a_whole_step():
    need(CAN_CAPTURE, CANNOT_CAPTURE)
    found, expected = Bucket("cuda", RULES[1], {}), Bucket("cuda", RULES[1], {})
    gradients = found.gradients(0)

    def step(bucket):
        bucket.accumulate(gradients)
        bucket.clear()
        bucket.reduce(torch.stack([bucket.out] * 3))

    step(Bucket("cuda", RULES[1], {}))  # what is made once must not be made in a graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # refuses whatever waits or allocates behind the allocator's back
        step(found)
    for _ in range(3):
        graph.replay()
        step(expected)
        assert_equal(found, expected, "replayed")


def test_a_damaged_message_of_ones_own_clears_nothing():
    bucket = Bucket("cuda", RULES[1], {})
    bucket.accumulate(bucket.gradients(0), [2.0] * len(NUMELS))
    ops.take_decode_status(bucket.out)
    before = [tensor.clone() for tensor in (*bucket.residuals, *bucket.velocities)]
    for offset in bucket.offsets:
        bucket.out[offset + 33] ^= 1
    bucket.clear()
    for tensor, was in zip((*bucket.residuals, *bucket.velocities), before, strict=True):
        assert_same(tensor, was)
    assert ops.take_decode_status(bucket.out).tolist() == [len(NUMELS), 8]
    bucket.reduce(torch.stack([bucket.out] * 2))
    assert all(bool(total.isnan().all()) for total in bucket.sums)
    assert ops.take_decode_status(bucket.out).tolist()[0] == len(NUMELS)


def test_what_a_bucket_refuses():
    bucket = Bucket("cuda", {}, {})
    gradients = bucket.gradients(0)
    none, on_cpu = [0.0] * len(NUMELS), [gradient.cpu() for gradient in gradients]
    assert_refuses(bucket.accumulate, gradients[:-1], none, says="one a member")
    assert_refuses(bucket.accumulate, on_cpu, none, says="gradient must be on")
    places, bucket.places = bucket.places, {**bucket.places, "members": [*range(len(NUMELS) - 1), len(NUMELS) - 2]}
    assert_refuses(bucket.accumulate, gradients, none, says="members must ascend")
    bucket.places = places
    bucket.form = {"value_dtype": "float64"}
    assert_refuses(bucket.accumulate, gradients, none, says="float32")
