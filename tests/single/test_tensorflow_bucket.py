"""TensorFlow's operators on buckets equal those on single or joined variables, eagerly and traced.

Their payloads equal PyTorch's. Also: errors, and shapes that are known while tracing.
"""

import math

import numpy as np
import pytest
import tensorflow as tf
import torch
from test_bucket import FORMS, RULES, SIZES, Bucket, Joint, accumulated_by_the_twin
from test_ops import same
from test_tensorflow_ops import Invalid, from_torch

from hvd_sparse import reference
from hvd_sparse.tensorflow import bucket_ops, ops
from hvd_sparse.torch import bucket_ops as torch_bucket_ops

pytestmark = pytest.mark.each_value  # the core and its twin are compared elsewhere, pair by pair
RETAINED = 0.7  # of what was sent, in the residual


@pytest.fixture(params=RULES)
def rule(request):
    return RULES[request.param]


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


@pytest.fixture(params=[False, True], ids=["separate", "joint"])
def joint(request):
    """Whether the members share a selection."""
    return request.param


def bucket_of(joint, rule, form, dtype=torch.float32):
    """Torch's bucket, the specification of ours."""
    return (Joint if joint else Bucket)(rule, form, dtype=dtype)


def same_as_torch(found, expected):
    same(found, expected.numpy())


class Variables:
    """The same tensors as variables, and the same calls."""

    def __init__(self, bucket, joint, traced):
        self.gradients = [from_torch(gradient) for gradient in bucket.gradients]
        self.parameters = [from_torch(parameter) for parameter in bucket.parameters]
        self.residuals, self.velocities = (
            [tf.Variable(memory.numpy()) for memory in memories] for memories in (bucket.residuals, bucket.velocities)
        )
        self.rule, self.level, self.ks = bucket.rule, bucket.form.get("level", "mean"), list(bucket.layout.ks)
        self.wire = {**bucket.wire, "joint": joint, "channels": bucket.channels}
        self.traced = traced

    def call(self, function, *arguments):
        """Call a function of tensors, as a graph if traced."""
        arguments = [tf.constant(value, dtype) for value, dtype in arguments]
        return tf.function(function, autograph=False)(*arguments) if self.traced else function(*arguments)

    def accumulate(self, hint=2.0, is_active=True):
        lists = (self.gradients, self.residuals, self.velocities, self.parameters)

        def call(factors, ks, hints, is_active):
            """Pass all values that may change from step to step as tensors."""
            numbers = {"factors": factors, "ks": ks, "threshold_hints": hints, "is_active": is_active, "seed": 3}
            return bucket_ops.accumulate_bucket(*lists, **numbers, **self.rule, level=self.level, **self.wire)

        numbers = [([0.5] * len(SIZES), tf.float32), (self.ks, tf.int64), ([hint] * len(self.ks), tf.float64)]
        return self.call(call, *numbers, (is_active, tf.bool))

    def clear(self, message, is_skipped=False):
        def call(message, ks, is_skipped):
            """Return something: a graph needs an output to be called for."""
            with tf.control_dependencies(_operations(self._clear(message, ks, is_skipped))):
                return tf.constant(0)

        self.call(call, (message, tf.uint8), (self.ks, tf.int64), (is_skipped, tf.bool))

    def _clear(self, message, ks, is_skipped):
        return bucket_ops.clear_bucket(
            message, ks, is_skipped, self.residuals, self.velocities, **self.wire, retained=RETAINED
        )

    def reduce(self, gathered, ranks, scale):
        def call(gathered, ranks, ks, scale):
            """Trace with a message of any size."""
            return bucket_ops.reduce_bucket(gathered, SIZES, ranks, ks, scale, **self.wire)

        return self.call(call, (gathered, tf.uint8), (ranks, tf.int64), (self.ks, tf.int64), (scale, tf.float32))

    def check_memory(self, bucket):
        ours = [*self.residuals, *self.velocities]
        for found, expected in zip(ours, bucket.residuals + bucket.velocities, strict=True):
            same_as_torch(found.read_value(), expected)


def _operations(result):
    """What a graph waits for; nothing where the call has run already."""
    return [] if result is None else [result]


@pytest.fixture(params=[False, True], ids=["eager", "traced"])
def traced(request):
    """Whether the operators are called in a graph."""
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_payloads_memories_and_sums_are_those_of_torch(rule, form, joint, traced, dtype):
    bucket = bucket_of(joint, rule, form, dtype)
    variables = Variables(bucket, joint, traced)
    for hint in (0.0, 2.0, 50.0):  # none, a good one, one that misses; the error feedback continues
        message, finite, info = variables.accumulate(hint)
        expected = bucket.accumulate(hint)
        for found, wanted in zip((message, info, finite), (bucket.out, *expected), strict=True):
            same_as_torch(found, wanted)
        variables.check_memory(bucket)
        variables.clear(message)
        memory = (bucket.residuals, bucket.velocities)
        torch_bucket_ops.clear_bucket(bucket.out, *memory, layout=bucket.layout, **bucket.wire, retained=RETAINED)
        variables.check_memory(bucket)
    outs = [torch.full((n,), 9.0) for n in SIZES]
    torch_bucket_ops.reduce_bucket(torch.stack([bucket.out] * 3), outs, 0.5, layout=bucket.layout, **bucket.wire)
    for found, wanted in zip(variables.reduce(np.tile(message, 3), 3, 0.5), outs, strict=True):
        same_as_torch(found, wanted)


def test_separate_members_are_single_variables_one_by_one(rule):
    variables, single = Variables(bucket_of(False, rule, {}), False, False), bucket_of(False, rule, {})
    message, _, info = variables.accumulate()
    payloads, sums = [], variables.reduce(message, 1, 1.0)
    for i, n in enumerate(SIZES):
        memory = [part[i] if part else None for part in (single.residuals, single.velocities, single.parameters)]
        indices, values, expected = accumulated_by_the_twin(single.gradients[i], *memory, k=single.ks[i], **rule)
        payloads.append(reference.pack(indices.numpy(), values.numpy(), n, single.ks[i]))
        expected.check(info[i].numpy(), 2.0)
        same(sums[i], reference.reduce_payloads(payloads[-1][None], 0, n, single.ks[i]))
    same(message, np.concatenate(payloads))


def test_inactive_it_only_looks(rule, form, joint, traced):
    bucket = bucket_of(joint, rule, form)
    variables = Variables(bucket, joint, traced)
    variables.gradients[2] = tf.fill([SIZES[2]], math.inf)
    message, finite, info = variables.accumulate(is_active=False)
    variables.check_memory(bucket)
    assert finite.numpy().tolist() == [True, True, False, True, True]
    still = bucket_of(joint, {}, form)  # a gradient of zeros also selects from the stored residuals
    still.gradients = [torch.zeros(n) for n in SIZES]
    same_as_torch(info, still.accumulate()[0])
    same_as_torch(message, still.out)


def test_void_nothing_is_cleared(rule, form, joint, traced):
    bucket = bucket_of(joint, rule, form)
    variables = Variables(bucket, joint, traced)
    message = variables.accumulate()[0]
    bucket.accumulate()
    variables.clear(message, is_skipped=True)
    variables.clear(np.zeros(3, np.uint8), is_skipped=True)  # nor even read
    variables.check_memory(bucket)


def test_an_empty_contribution_clears_nothing():
    residual, message = tf.Variable(tf.ones([50])), ops.pack(tf.zeros([0], tf.int64), tf.zeros([0]), 50, 3)
    bucket_ops.clear_bucket(message, [3], False, [residual])
    assert residual.numpy().sum() == 50


def test_a_value_that_was_read_stays_what_it_was(joint):
    variables = Variables(bucket_of(joint, {}, {}), joint, False)
    before = [residual.read_value() for residual in variables.residuals]
    copies = [value.numpy().copy() for value in before]
    variables.clear(variables.accumulate()[0])
    for value, copy in zip(before, copies, strict=True):
        same(value, copy)


def test_shapes_are_known_while_tracing(joint):
    variables = Variables(bucket_of(joint, {}, {}), joint, False)
    selections, shapes = 1 if joint else len(SIZES), {}

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.float32)])
    def step(ks, token):
        """Look at static shapes."""
        hints = tf.zeros_like(ks, tf.float64)
        lists = (variables.gradients, variables.residuals)
        factors = tf.ones([len(SIZES)])
        message, finite, info = bucket_ops.accumulate_bucket(
            *lists, factors=factors, ks=ks, threshold_hints=hints, joint=joint
        )
        sums = bucket_ops.reduce_bucket(message, SIZES, 1, ks, joint=joint)
        gradient = ops.take_sum(sums[2], token, 1.0, False, tf.TensorShape([10, 100]))
        shapes.update(message=message.shape, finite=finite.shape, info=info.shape, gradient=gradient.shape)
        shapes["sums"] = [one.shape.as_list() for one in sums]
        return gradient

    assert step(variables.ks, [1.0, 2.0]).shape == (10, 100)
    assert shapes["message"].as_list() == [None]
    assert (shapes["finite"].as_list(), shapes["info"].as_list()) == ([5], [selections, 2])
    assert (shapes["sums"], shapes["gradient"].as_list()) == ([[n] for n in SIZES], [10, 100])


def accumulate(**changes):
    """A call for two members, but for the changes."""
    options = {"factors": [1.0, 1.0], "ks": [1, 2], "threshold_hints": tf.zeros([2], tf.float64)}
    lists = {"gradients": [tf.ones([5]), tf.ones([6])], "residuals": [zeros(5), zeros(6)]}
    return bucket_ops.accumulate_bucket(**{**lists, **options, **changes})


def zeros(*shape, dtype=tf.float32):
    return tf.Variable(tf.zeros(shape, dtype))


REAL = tf.float64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ks": [1]}, "ks must have 2 entries, one a selection; got 1"),
        ({"joint": True}, "ks must have 1 entries, one a selection; got 2"),
        ({"ks": [[1, 2]]}, "ks must have one dimension"),
        ({"ks": [0, 2]}, r"k must be in \[1, n = 5\], got 0"),
        ({"ks": [1, 7]}, r"k must be in \[1, n = 6\], got 7"),
        ({"ks": [12], "joint": True}, r"k must be in \[1, n = 11\], got 12"),
        ({"ks": [1], "joint": True}, "threshold_hints must have 1 entries, one a selection; got 2"),
        ({"threshold_hints": tf.zeros([3], REAL)}, "threshold_hints must have 2 entries, one a selection; got 3"),
        ({"threshold_hints": tf.zeros([], REAL)}, "threshold_hints must have one dimension"),
        ({"factors": [1.0]}, "factors must have 2 entries, one a member; got 1"),
        ({"factors": [[1.0, 1.0]]}, "factors must have one dimension"),
        ({"residuals": [zeros(5)]}, "residuals must have 2 entries"),
        ({"velocities": [zeros(5)]}, "velocities must have 2 entries"),
        ({"parameters": [tf.ones([5])]}, "parameters must have 2 entries"),
        ({"residuals": [zeros(5), zeros(7)]}, "residual must have 6 elements, as many as the gradient; got 7"),
        ({"velocities": [zeros(4), zeros(6)]}, "velocity must have 5 elements"),
        ({"parameters": [tf.ones([5]), tf.ones([1])], "weight_decay": 0.1}, "parameter must have 6 elements"),
        ({"weight_decay": 0.1}, "weight_decay needs the parameter"),
        ({"residuals": [zeros(5), zeros(6, 1)]}, "float32 with one dimension"),
        ({"residuals": [zeros(5), zeros(6, dtype=REAL)]}, "float32 with one dimension"),
        ({"is_active": [True]}, "is_active must be a scalar"),
        ({"seed": tf.zeros([2], tf.int64)}, "seed must be a scalar"),
        ({"channels": [1]}, "channels must have 2 entries, one a member; got 1"),
        ({"channels": [6, 1], "value_dtype": "int2"}, "segment"),
        ({"coding": "dense"}, "k"),
    ],
)
def test_wrong_arguments_of_accumulate_are_named(changes, message):
    with pytest.raises(Invalid, match=f"hvd_sparse.accumulate_bucket: .*{message}"):
        accumulate(**changes)
    with pytest.raises(Invalid, match="level"):
        accumulate(level="median")


def packed(n=5, k=2):
    return ops.pack(tf.range(k, dtype=tf.int64), tf.ones([k]), n, k)


def test_wrong_arguments_of_joint_members_touch_nothing():
    residuals = [zeros(5), zeros(7)]
    with pytest.raises(Invalid, match="residual must have 6"):
        accumulate(residuals=residuals, ks=[3], threshold_hints=tf.zeros([1], REAL), joint=True)
    assert not residuals[0].numpy().any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bucket_ops.clear_bucket(packed(), [2, 2], False, [zeros(5)]), "clear_bucket: ks must have 1 entries"),
        (lambda: bucket_ops.clear_bucket(packed(), [3], False, [zeros(5)]), "clear_bucket: message must have .* bytes"),
        (lambda: bucket_ops.clear_bucket(packed(), [2], False, [zeros(5)], [zeros(6)]), "velocity and residual differ"),
        (lambda: bucket_ops.clear_bucket(packed(), [2], False, [zeros(5)], [zeros(5), zeros(5)]), "2 velocities but 1"),
        (
            lambda: bucket_ops.clear_bucket(packed(), [2], [False], [zeros(5)]),
            "bucket: is_skipped must be a scalar",
        ),
        (lambda: bucket_ops.clear_bucket(packed()[None], [2], False, [zeros(5)]), "message must have one dimension"),
        (lambda: bucket_ops.clear_bucket(packed(6), [2], False, [zeros(5)]), "clear_bucket: payload"),
        (lambda: bucket_ops.reduce_bucket(packed(), [5], 1, [2, 2]), "reduce_bucket: ks must have 1 entries"),
        (lambda: bucket_ops.reduce_bucket(packed(), [5], 2, [2]), "gathered must be a message of .* 2 ranks"),
        (lambda: bucket_ops.reduce_bucket(packed(), [5], 0, [2]), r"ranks must be in \[1, 2\^23\], got 0"),
        (lambda: bucket_ops.reduce_bucket(packed(), [5], -1, [2]), r"ranks must be in \[1, 2\^23\], got -1"),
        (lambda: bucket_ops.reduce_bucket(packed()[None], [5], 1, [2]), "gathered must have one dimension"),
        (lambda: bucket_ops.reduce_bucket(packed(), [5], [1], [2]), "ranks must be a scalar"),
        (lambda: bucket_ops.reduce_bucket(packed(), [5], 1, [2], tf.ones([2])), "scale must be a scalar"),
        (lambda: bucket_ops.reduce_bucket(packed(), [-5], 1, [2]), "ns must be >= 0"),
        (lambda: bucket_ops.reduce_bucket(packed(), [6], 1, [2]), "reduce_bucket: from rank 0: payload"),
    ],
)
def test_wrong_arguments_of_the_others_are_named(call, message):
    with pytest.raises(Invalid, match=message):
        call()


def test_a_damaged_payload_names_its_rank_and_clears_nothing(joint):
    variables = Variables(bucket_of(joint, {}, {}), joint, False)
    message = variables.accumulate()[0].numpy()
    damaged, before = message.copy(), [residual.numpy() for residual in variables.residuals]
    damaged[34] ^= 1
    with pytest.raises(Invalid, match="reduce_bucket: from rank 1: payload checksum"):
        variables.reduce(np.concatenate([message, damaged]), 2, 1.0)
    with pytest.raises(Invalid, match="clear_bucket: payload checksum"):
        variables.clear(damaged)
    for residual, array in zip(variables.residuals, before, strict=True):
        same(residual.read_value(), array)


def test_sums_are_taken_without_a_copy(traced):
    total = tf.random.stateless_normal([600], [1, 2])

    def take(total, token, expected, is_skipped):
        """Take the sum of three ranks."""
        return ops.take_sum(total, token, expected, is_skipped, tf.TensorShape([20, 30]))

    call = tf.function(take, autograph=False) if traced else take
    found = call(total, tf.constant([3.0, 6.0]), 3.0, tf.constant(False))
    same(found, total.numpy().reshape(20, 30))
    if not traced:
        assert np.shares_memory(*(np.asarray(memoryview(values)) for values in (found, total)))  # numpy() copies
    void = call(total, tf.constant([3.0, 6.0]), 3.0, tf.constant(True))
    assert void.shape == (20, 30) and np.isnan(void.numpy()).all() and np.isfinite(total.numpy()).all()


@pytest.mark.parametrize(
    ("token", "expected", "message"),
    [
        ([1.0], 2.0, "turned a token of 1 into another value than its op says: 1 in place of 2"),
        ([math.nan], 1.0, "in place of 1"),
        ([math.inf], 1.0, "in place of 1"),
        ([-1.0, 1.0], 1.0, "-1 in place of 1"),
        ([], 1.0, "in place of 1"),
        ([[1.0]], 1.0, "token must have one dimension"),
        ([1.0], [1.0], "expected must be a scalar"),
    ],
)
@pytest.mark.parametrize("is_skipped", [False, True])
def test_a_sum_with_a_wrong_token_is_refused(token, expected, message, is_skipped):
    with pytest.raises(Invalid, match=f"hvd_sparse.take_sum: .*{message}"):
        ops.take_sum(
            tf.ones([6]), tf.constant(token, tf.float32), tf.constant(expected), is_skipped, tf.TensorShape([6])
        )


def test_a_token_may_be_rounded():
    """A third of a third of ... in float16, say."""
    ops.take_sum(tf.ones([6]), [0.3333], 1 / 3, False, tf.TensorShape([6]))
    with pytest.raises(Invalid):
        ops.take_sum(tf.ones([6]), [0.334], 1 / 3, False, tf.TensorShape([6]))


@pytest.mark.parametrize("is_skipped", [False, True])
def test_a_sum_of_another_size_is_refused(is_skipped):
    with pytest.raises(Invalid, match=r"take_sum: a sum of 6 elements does not fit shape \[2,4\]"):
        ops.take_sum(tf.ones([6]), [1.0], 1.0, is_skipped, tf.TensorShape([2, 4]))
    with pytest.raises(Invalid, match="is_skipped must be a scalar"):
        ops.take_sum(tf.ones([6]), [1.0], 1.0, [is_skipped], tf.TensorShape([6]))


@pytest.mark.parametrize(("shape", "text"), [([None, 2], r"\[\?,2\]"), (None, "<unknown>")])
def test_a_sum_of_an_unknown_shape_is_refused_eagerly_and_while_tracing(shape, text):
    def take():
        return ops.take_sum(tf.ones([6]), [1.0], 1.0, False, tf.TensorShape(shape))

    message = f"hvd_sparse.take_sum: shape must be fully known, got {text}"
    with pytest.raises(Invalid, match=message):
        take()
    with pytest.raises(ValueError, match=message):
        tf.function(take, autograph=False)()
