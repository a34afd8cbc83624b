"""Buckets whose counts vary equal the NumPy twins on single tensors, bit for bit, in both frameworks."""

import math

import numpy as np
import pytest
import tensorflow as tf
import torch
from test_bucket import FORMS, RULES
from test_ops import raw, same
from test_tensorflow_ops import Invalid, from_torch

from hvd_sparse import reference
from hvd_sparse.tensorflow import bucket_ops as tensorflow_bucket_ops
from hvd_sparse.tensorflow import ops as tensorflow_ops
from hvd_sparse.tensorflow import varying_ops as tensorflow_varying_ops
from hvd_sparse.torch import ops, varying_ops

SIZES = (1, 7, 1000, 65_537, 70_000)
CHANNELS = [1 + n // 100 for n in SIZES]
THRESHOLDS = [0.5, 0.0, 2.5, math.inf, -1.0]  # the last threshold is renewed
KS = [0, 0, 0, 0, 700]
SMALLEST = 2.0**-149


class Drawn:
    """Gradients and memories of all sizes, and what the twins make of them."""

    def __init__(self, rule, form, dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)
        draw = [torch.randn((4, n), generator=generator) for n in SIZES]
        self.rule, self.level = rule, form.get("level", "mean")
        self.dtype, self.coding = form.get("value_dtype", "float32"), form.get("coding", "run_length")
        self.channels = CHANNELS if self.dtype.startswith("int") else []
        self.gradients = [one[0].to(dtype) for one in draw]
        self.residuals = [one[1].clone() for one in draw]
        self.velocities = [one[2].clone() for one in draw] if rule else []
        self.parameters = [one[3].clone() for one in draw] if "weight_decay" in rule else []

    def segments(self, i):
        return np.array([[0, self.channels[i]]]) if self.channels else None

    def expected(self, thresholds=THRESHOLDS, ks=KS, is_active=True):
        """Change the memories; return payloads, thresholds, counts, and finite, of each member."""
        rows = []
        for i, n in enumerate(SIZES):
            gradient = self.gradients[i].float().numpy()
            memory = [part[i].numpy() if part else None for part in (self.residuals, self.velocities, self.parameters)]
            finite = reference.all_finite(gradient)
            if is_active:
                finite = reference.accumulate(gradient, *memory, factor=0.5, **self.rule)
            threshold = thresholds[i]
            if ks[i]:
                threshold = max(SMALLEST, reference.select_threshold(memory[0], ks[i]))
            indices, values = reference.filter_threshold(memory[0], threshold)
            segments = self.segments(i)
            sent = reference.quantize(values, self.dtype, self.level, indices, segments)
            k = max(1, len(indices))
            payload = reference.pack(indices, sent, n, k, self.coding, self.dtype, segments)
            rows.append((payload, threshold, len(indices), finite))
        return [list(channel) for channel in zip(*rows, strict=True)]

    def form(self):
        return {"coding": self.coding, "value_dtype": self.dtype, "channels": self.channels}

    def torch(self, **changes):
        """Call torch's operator."""
        lists = (self.gradients, self.residuals, self.velocities, self.parameters)
        options = {"factors": [0.5] * len(SIZES), "thresholds": THRESHOLDS, "ks": KS, "level": self.level}
        return varying_ops.filter_bucket(*lists, **{**self.rule, **self.form(), **options, **changes})


class Variables:
    """The same in TensorFlow."""

    def __init__(self, drawn, traced):
        self.drawn, self.traced = drawn, traced
        self.gradients = [from_torch(gradient) for gradient in drawn.gradients]
        self.parameters = [from_torch(parameter) for parameter in drawn.parameters]
        self.residuals, self.velocities = (
            [tf.Variable(memory.numpy()) for memory in memories] for memories in (drawn.residuals, drawn.velocities)
        )

    def call(self, thresholds=THRESHOLDS, ks=KS, is_active=True, factors=(0.5,) * 5, **changes):
        """Call the operator with everything that may change from step to step as tensors."""
        lists = (self.gradients, self.residuals, self.velocities, self.parameters)
        options = {**self.drawn.rule, **self.drawn.form(), "level": self.drawn.level, **changes}

        def run(thresholds, ks, is_active, factors):
            """Be traced."""
            numbers = {"thresholds": thresholds, "ks": ks, "is_active": is_active, "factors": factors}
            return tensorflow_varying_ops.filter_bucket(*lists, **numbers, **options)

        run = tf.function(run, autograph=False) if self.traced else run
        numbers = ((thresholds, tf.float64), (ks, tf.int64), (is_active, tf.bool), (factors, tf.float32))
        return run(*(tf.constant(value, dtype) for value, dtype in numbers))


@pytest.fixture(params=RULES)
def rule(request):
    return RULES[request.param]


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


def same_memory(ours, theirs):
    for found, expected in zip(ours, theirs, strict=True):
        assert raw(torch.as_tensor(found.numpy())) == raw(expected)


@pytest.mark.parametrize("is_active", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_torch_is_its_tensors_one_by_one(rule, form, dtype, is_active):
    drawn, twin = Drawn(rule, form, dtype), Drawn(rule, form, dtype)
    message, info, finite = drawn.torch(is_active=is_active)
    payloads, thresholds, counts, are_finite = twin.expected(is_active=is_active)
    same(message, np.concatenate(payloads))
    offsets = np.cumsum([0, *(len(payload) for payload in payloads)])[:-1]
    same(info, np.stack([thresholds, counts, offsets], axis=1).astype(np.float64))
    assert finite.tolist() == are_finite
    same_memory(drawn.residuals + drawn.velocities, twin.residuals + twin.velocities)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("is_active", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensorflow_is_its_variables_one_by_one(rule, form, dtype, is_active, traced):
    twin = Drawn(rule, form, dtype)
    variables = Variables(Drawn(rule, form, dtype), traced)
    message, finite, info = variables.call(is_active=is_active)
    payloads, thresholds, counts, are_finite = twin.expected(is_active=is_active)
    same(message, np.concatenate(payloads))
    same(info, np.stack([thresholds, counts], axis=1).astype(np.float64))
    assert finite.numpy().tolist() == are_finite
    same_memory([*variables.residuals, *variables.velocities], twin.residuals + twin.velocities)


GUESSES = [0.0, 2.5, 0.7, 1e-30, 50.0, -1.0, math.inf, math.nan]


@pytest.mark.parametrize("is_active", [True, False])
@pytest.mark.parametrize("shape", ["normal", "ties", "mostly zeros", "zeros"])
@pytest.mark.parametrize("guess", GUESSES)
def test_a_guess_at_a_threshold_that_is_taken_anew_changes_nothing(guess, shape, is_active):
    drawn, twin = Drawn({}, {}), Drawn({}, {})
    for one in (drawn, twin):
        for parts in (one.gradients, one.residuals):
            for part in parts:
                if shape == "ties":
                    part.mul_(2.0).round_()
                elif shape != "normal":
                    part[3 if shape == "mostly zeros" else 0 :] = 0.0
    variables, options = Variables(drawn, traced=False), {"ks": [1, 7, 20, 60_000, 700], "is_active": is_active}
    payloads, thresholds, counts, are_finite = twin.expected(**options)
    ours, theirs = (call(thresholds=[guess] * 5, **options) for call in (drawn.torch, variables.call))
    for message, info, finite in (ours, (theirs[0], theirs[2], theirs[1])):
        same(message, np.concatenate(payloads))
        same(info[:, :2], np.stack([thresholds, counts], axis=1).astype(np.float64))
        assert finite.numpy().tolist() == are_finite
    for residuals in (drawn.residuals, variables.residuals):
        same_memory(residuals, twin.residuals)


def test_what_is_not_finite_is_told_of_its_tensor():
    drawn = Drawn({}, {})
    drawn.gradients[2][5] = math.nan
    variables = Variables(drawn, traced=False)
    for finite in (variables.call()[1].numpy(), drawn.torch()[2].numpy()):
        assert finite.tolist() == [True, True, False, True, True]
    assert all(bool(torch.isfinite(residual).all()) for residual in drawn.residuals)
    same_memory(variables.residuals, drawn.residuals)


def test_a_k_of_zeros_sends_what_is_not_zero():
    """A threshold of zero would send everything."""
    gradient, residual = torch.zeros(10), torch.zeros(10)
    gradient[3] = 2.0
    message, info, _ = varying_ops.filter_bucket([gradient], [residual], factors=[1.0], thresholds=[0.0], ks=[4])
    assert info.tolist() == [[SMALLEST, 1.0, 0.0]]
    assert ops.unpack(message, 10, 1)[0].tolist() == [3]


def messages(drawn, ranks=3):
    """Return the messages of several ranks, uint8[bytes], and the sum of each member in rank order."""
    parts, sums = [], [np.zeros(n, np.float32) for n in SIZES]
    for rank in range(ranks):
        thresholds = [0.1 * rank, 3.0, 2.5 - rank, 4.0, 2.0 + rank]
        payloads, _, counts, _ = Drawn({}, drawn, seed=rank).expected(thresholds, [0] * len(SIZES))
        one = Drawn({}, drawn)
        for i, (n, payload, count) in enumerate(zip(SIZES, payloads, counts, strict=True)):
            at, values = reference.unpack(payload, n, max(1, count), one.coding, one.dtype, one.segments(i))
            sums[i][at] += np.float32(0.5) * values
        parts += payloads
    return np.concatenate(parts), sums


def test_messages_are_found_and_added(form):
    drawn = Drawn({}, form)
    gathered, sums = messages(form)
    for places in ([0, 1, 2, 3, 4], [3, 1], []):
        outs = [torch.full((SIZES[place],), 7.0) for place in places]
        varying_ops.reduce_located_bucket(torch.from_numpy(gathered), SIZES, 3, outs, places, 0.5, **drawn.form())
        for out, place in zip(outs, places, strict=True):
            same(out, sums[place])
    for traced in (False, True):

        def call(gathered, ranks, scale):
            """Trace with a message of any size."""
            return tensorflow_varying_ops.reduce_located_bucket(gathered, SIZES, ranks, scale, **drawn.form())

        function = tf.function(call, autograph=False) if traced else call
        found = function(tf.constant(gathered), tf.constant(3, tf.int64), tf.constant(0.5))
        for total, expected in zip(found, sums, strict=True):
            same(total, expected)


@pytest.mark.parametrize("where", ["cut off", "first", "last"])  # the last value of the first or the last member
def test_a_damaged_message_is_refused(where):
    gathered, _ = messages({})
    damaged = gathered[:-1] if where == "cut off" else gathered.copy()
    if where != "cut off":
        damaged[36 if where == "first" else -12] ^= 1
    outs = [torch.full((n,), 7.0) for n in SIZES]
    with pytest.raises(ValueError, match="reduce_located_bucket: from rank"):
        varying_ops.reduce_located_bucket(torch.from_numpy(damaged), SIZES, 3, outs, range(5))
    assert all(bool((out == 7.0).all()) for out in outs)
    with pytest.raises(Invalid, match="reduce_located_bucket: from rank"):
        tensorflow_varying_ops.reduce_located_bucket(damaged, SIZES, 3)


WRONG = [
    ({"ks": [0] * 4}, "ks must have 5 entries, one a member; got 4"),
    ({"thresholds": [0.0] * 6}, "thresholds must have 5 entries"),
    ({"factors": [1.0]}, "factors must have 5 entries"),
    ({"thresholds": [math.nan] * 5, "ks": [0] * 5}, "threshold must be a number >= 0, got nan"),
    ({"thresholds": [-1.0] * 5, "ks": [0] * 5}, "threshold must be a number >= 0, got -1"),
    ({"ks": [0, 8, 0, 0, 0]}, r"k must be in \[1, 7\], the number of values; got 8"),
    ({"ks": [0, -1, 0, 0, 0]}, r"k must be in \[1, 7\], the number of values; got -1"),
    ({"ks": [0, -(2**63), 0, 0, 0]}, r"k must be in \[1, 7\], the number of values; got -9223372036854775808"),
    ({"channels": [1, 2]}, "channels must have 5 entries, one a member; got 2"),
    ({"channels": [1, 1, 1, 1, 0], "value_dtype": "int2"}, "channels"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_wrong_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=f"hvd_sparse.filter_bucket: .*{message}"):
        Drawn({}, {}).torch(**changes)
    with pytest.raises(Invalid, match=f"hvd_sparse.filter_bucket: .*{message}"):
        Variables(Drawn({}, {}), traced=False).call(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"ks": [0, 0, 0, 0, 70_001]},
        {"ks": [0, 0, 0, 0, -1]},
        {"ks": [0] * 5, "thresholds": [*THRESHOLDS[:4], math.nan]},
        {"ks": [1, 1, 1, 1, 70_001], "stages": [1] * 5},
    ],
)
def test_a_wrong_argument_of_the_last_member_changes_no_other(changes):
    drawn, expected = Drawn({}, {}), Drawn({}, {})
    variables = Variables(drawn, traced=False)
    with pytest.raises(Invalid, match=r"hvd_sparse.filter_bucket: (k|threshold) must be"):
        variables.call(**changes)
    same_memory(variables.residuals, expected.residuals)
    with pytest.raises(ValueError, match=r"hvd_sparse.filter_bucket: (k|threshold) must be"):
        drawn.torch(**changes)
    same_memory(drawn.residuals, expected.residuals)


def test_wrong_sums_are_named():
    gathered = torch.from_numpy(messages({})[0])
    outs = [torch.empty(SIZES[0])]
    for arguments, message in (
        ((SIZES, 3, outs, [5]), r"places must be in \[0, 5\), got 5"),
        ((SIZES, 3, outs, [-1]), r"places must be in \[0, 5\), got -1"),
        ((SIZES, 3, 2 * outs, [0, 0]), "place 0 must be given once"),
        ((SIZES, 3, outs, [1]), "out must have 7 elements, got 1"),
        ((SIZES, 3, outs, []), "places must have 1 entries, one a sum; got 0"),
        ((SIZES, 0, outs, [0]), r"ranks must be in \[1, 2\^23\], got 0"),
        ((SIZES, 2**62, outs, [0]), r"ranks must be in \[1, 2\^23\], got 4611686018427387904"),
        ((SIZES, 3, [torch.empty(1, dtype=torch.int64)], [0]), "out must be Float"),
    ):
        with pytest.raises(ValueError, match=f"hvd_sparse.reduce_located_bucket: .*{message}"):
            varying_ops.reduce_located_bucket(gathered, *arguments)
    for ranks in (0, 2**62):
        message = rf"ranks must be in \[1, 2\^23\], got {ranks}"
        with pytest.raises(Invalid, match=message):
            tensorflow_varying_ops.reduce_located_bucket(gathered.numpy(), SIZES, ranks)
        with pytest.raises(Invalid, match=message):
            tensorflow_varying_ops.locate_payloads(gathered.numpy(), SIZES, ranks)
        with pytest.raises(Invalid, match=message):
            tensorflow_bucket_ops.reduce_bucket(gathered.numpy(), [5], ranks, [1])
    numbers = {"ranks": tf.constant(3, tf.int64), "scale": 1.0, "coding": "run_length", "value_dtype": "float32"}
    for name, more in (("reduce_located_bucket", {}), ("reduce_bucket", {"ks": [1], "joint": False})):
        call = getattr(tensorflow_ops._ops, f"hvd_sparse_{name}")
        with pytest.raises(Invalid, match=f"hvd_sparse.{name}: M must be the number of ns"):
            call(gathered=gathered.numpy(), ns=[5], channels=[], M=2, **numbers, **more)
    with pytest.raises(Invalid, match="channels must have 5 entries, one a member; got 1"):
        tensorflow_varying_ops.reduce_located_bucket(gathered.numpy(), SIZES, 3, channels=[1])


def test_shapes_are_known_while_tracing():
    variables, shapes = Variables(Drawn({}, {}), traced=False), {}

    @tf.function(autograph=False)
    def step(gathered):
        """Look at shapes only."""
        message, finite, info = variables.call()
        shapes["filter"] = [message.shape.as_list(), finite.shape.as_list(), info.shape.as_list()]
        sums = tensorflow_varying_ops.reduce_located_bucket(gathered, SIZES, 3)
        shapes["sums"] = [total.shape.as_list() for total in sums]
        return message

    step.get_concrete_function(tf.TensorSpec([None], tf.uint8))
    assert shapes == {"filter": [[None], [5], [5, 2]], "sums": [[n] for n in SIZES]}


def test_opcheck():
    lists = ([torch.randn(50)], [torch.randn(50)], [], [])
    form = ("run_length", "float32", "mean", [])
    arguments = (*lists, [1.0], 0.0, False, [0.0], True, [1.0], [0], *form, [], "exponential", 0)
    torch.library.opcheck(torch.ops.hvd_sparse.filter_bucket, arguments)
    message, *_ = torch.ops.hvd_sparse.filter_bucket(*arguments)
    places = ([50], 1, [torch.empty(50)], [0], 1.0, "run_length", "float32", [])
    torch.library.opcheck(torch.ops.hvd_sparse.reduce_located_bucket, (message, *places))
