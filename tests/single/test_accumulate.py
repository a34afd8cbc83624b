"""Accumulation: the NumPy twin equals the equations, element by element, and the operators equal the twin."""

import itertools
import math

import numpy as np
import pytest
import torch
from hinted import as_hints
from test_ops import DTYPES, as_numpy, same

from hvd_sparse import native, reference
from hvd_sparse.buckets import BucketLayout
from hvd_sparse.torch import bucket_ops, ops

SIZES = [1, 63, 64, 65, 2049, 300_000]
RULES = {
    "residual": {},
    "residual, clipped": {"factor": 0.3},
    "momentum": {"momentum": 0.9},
    "no momentum": {"momentum": 0.0},
    "momentum, clipped, decay": {"momentum": 0.9, "factor": 0.7, "weight_decay": 0.01},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "nesterov, decay": {"momentum": 0.5, "nesterov": True, "weight_decay": 0.01},
}


@pytest.fixture(params=RULES)
def rule(request):
    """Every rule in turn."""
    return RULES[request.param]


def draw(n, seed):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def buffers(n, rule):
    """Return residual, velocity (None without momentum) and parameter (None without decay), as NumPy arrays."""
    velocity = draw(n, 2) if "momentum" in rule else None
    return draw(n, 1), velocity, draw(n, 3) if "weight_decay" in rule else None


def rounded(number):
    return float(np.float32(number))


def without_denormal(velocity):
    return velocity if abs(velocity) >= 2.0**-126 else 0.0


def by_element(gradient, residual, velocity, parameter, factor=1.0, momentum=0.0, nesterov=False, weight_decay=0.0):
    """The equations in Python's floats, each product and sum rounded; returns (residual, velocity) of one element."""
    g = rounded((gradient if math.isfinite(rounded(gradient)) else 0.0) * rounded(factor))
    if weight_decay:
        g = rounded(g + rounded(parameter * rounded(weight_decay)))
    if velocity is None:
        return rounded(residual + g), None
    if nesterov:
        velocity = without_denormal(rounded(rounded(momentum) * rounded(velocity + g)))
        return rounded(rounded(residual + velocity) + g), velocity
    velocity = without_denormal(rounded(rounded(rounded(momentum) * velocity) + g))
    return rounded(residual + velocity), velocity


@pytest.mark.filterwarnings("ignore:overflow")
def test_the_twin_follows_the_equations(rule):
    gradient = draw(500, 0).astype(np.float64)
    gradient[:4] = math.nan, math.inf, -math.inf, 1e300
    residual, velocity, parameter = buffers(500, rule)
    rest = ([None] * 500 if each is None else each.tolist() for each in (velocity, parameter))
    expected = [by_element(*each, **rule) for each in zip(gradient.tolist(), residual.tolist(), *rest, strict=True)]
    assert reference.accumulate(gradient, residual, velocity, parameter, **rule) is False
    np.testing.assert_array_equal(residual, np.float32([each[0] for each in expected]))
    if velocity is not None:
        np.testing.assert_array_equal(velocity, np.float32([each[1] for each in expected]))
    assert reference.accumulate(gradient[4:], residual[4:], **{"factor": 0.5}) is True


def test_what_overflows_on_its_way_into_the_memory_stays_out_of_it():
    """As what was never finite: a residual that is not finite would stay so for ever."""
    gradient, parameter = np.float32([1e38, 1, 1, 1, math.nan]), np.float32([0, 2, math.inf, math.nan, 1])
    for changes, expected in (
        ({"factor": 4.0}, [0, 4, 4, 4, 0]),
        ({"weight_decay": 2.0}, [1e38, 5, 0, 0, 2]),
        ({"weight_decay": 3e38}, [1e38, 0, 0, 0, 3e38]),
        ({"weight_decay": 1e-60}, [1e38, 1, 1, 1, 0]),  # none, as a float32
    ):
        ours, theirs = np.zeros(5, np.float32), torch.zeros(5)
        assert reference.accumulate(gradient, ours, None, parameter, **changes) is False
        assert not ops.accumulate(torch.from_numpy(gradient), theirs, None, torch.from_numpy(parameter), **changes)
        same(theirs, np.float32(expected))
        same(torch.from_numpy(ours), np.float32(expected))


def tensors(arrays):
    return [None if array is None else torch.from_numpy(array.copy()) for array in arrays]


def accumulate_and_select(gradient, residual, velocity, parameter, *, k, hint, seed=0, factor=1.0, **rule):
    """A bucket of one tensor: indices, values, float64[2], and whether the gradient was finite."""
    n, lists = residual.numel(), [[] if one is None else [one] for one in (velocity, parameter)]
    form = {"layout": BucketLayout([n], [k]), "factors": [factor], "hints": as_hints([hint], [k]), "seed": seed}
    out = torch.empty(ops.payload_size(n, min(k, n)), dtype=torch.uint8)
    info, finite = bucket_ops.accumulate_bucket([gradient], [residual], *lists, out=out, **form, **rule)
    return *ops.unpack(out, n, k), info[0], finite.item()


def assert_same_memory(found, expected):
    for tensor, array in zip(found, expected, strict=True):
        if array is not None:
            same(tensor, array)


@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulate(make, kind, dtype, rule):
    for n in SIZES[:-1]:
        gradient = make(kind, n, dtype)
        expected = buffers(n, rule)
        found = tensors(expected)
        finite = ops.accumulate(gradient, *found, **rule)
        assert finite.item() is reference.accumulate(as_numpy(gradient), *expected, **rule)
        assert_same_memory(found, expected)


@pytest.mark.parametrize("hint", [0.0, 0.5, 0.98, 1.0, 1.01, math.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_accumulate_and_select(make, kind, dtype, hint, rule):
    for n in (65, 2049):
        gradient, expected = make(kind, n, dtype), buffers(n, rule)
        found, k = tensors(expected), (n + 49) // 50
        indices, values, threshold, finite = reference.accumulate_top_k(
            as_numpy(gradient), *expected, k=k, seed=3, **rule
        )
        result = accumulate_and_select(gradient, *found, k=k, seed=3, hint=threshold * hint, **rule)
        same(result[0], indices)
        same(result[1], values)
        assert (result[2].dtype, result[2].shape) == (torch.float64, (2,))
        assert (result[2][0].item(), result[3]) == (threshold, finite)
        assert (result[2][1] < k) == (hint > 1.0 and threshold > 0.0 and math.isfinite(hint))
        assert_same_memory(found, expected)


def test_threads_change_nothing(rule):
    n, results = SIZES[-1] * 4, []
    for threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            memory = tensors(buffers(n, rule))
            gradient = torch.from_numpy(draw(n, 5))
            *selected, info, _ = accumulate_and_select(gradient, *memory, k=999, hint=2.0, **rule)
            results.append([*selected, info[:1], *memory])  # how many passed is exact up to 2k only
        finally:
            torch.set_num_threads(before)
    for one, three in itertools.zip_longest(*results):
        assert one is three is None or torch.equal(one, three)


def test_many_steps_with_last_step_s_threshold():
    """Steps follow one another as in training: what is sent leaves, and the hint is a little below the last edge."""
    n, k, hint = 50_000, 50, 0.0
    expected = [np.zeros(n, np.float32), np.zeros(n, np.float32), None]
    found = tensors(expected)
    for step in range(60):
        gradient = draw(n, step)
        indices, values, threshold, _ = reference.accumulate_top_k(gradient, *expected, k=k, seed=step, momentum=0.9)
        result = accumulate_and_select(torch.from_numpy(gradient), *found, k=k, seed=step, hint=hint, momentum=0.9)
        same(result[0], indices)
        same(result[1], values)
        for buffer, tensor in zip(expected[:2], found[:2], strict=True):
            buffer[indices] = 0.0
            tensor[result[0]] = 0.0
        assert_same_memory(found, expected)
        hint = 0.98 * threshold


@pytest.mark.parametrize("nesterov", [False, True])
def test_velocities_of_elements_without_gradients_become_zero(nesterov):
    """Denormals would stay: 0.9 times the smallest few rounds to themselves."""
    n, rule = 100, {"momentum": 0.9, "nesterov": nesterov}
    start = np.linspace(-2, 2, n, dtype=np.float32)
    arrays = [(np.zeros(n, np.float32), start.copy()) for _ in range(2)]
    memory = torch.zeros(n), torch.from_numpy(start.copy())
    for _ in range(900):
        reference.accumulate(np.zeros(n), *arrays[0], **rule)
        native.accumulate(np.zeros(n, np.float32), *arrays[1], **rule)
        ops.accumulate(torch.zeros(n), *memory, **rule)
    for residual, velocity in (*arrays, [tensor.numpy() for tensor in memory]):
        assert (velocity == 0.0).all()
        np.testing.assert_allclose(residual, start * 9.0, rtol=1e-5)


def test_gradients_of_any_layout():
    gradient = torch.arange(12.0).view(3, 4)
    found = []
    for layout in (gradient, gradient.t().contiguous().t(), gradient.view(12)):
        residual = torch.zeros(12)
        ops.accumulate(layout, residual)
        found.append(residual)
    assert all(torch.equal(residual, torch.arange(12.0)) for residual in found)


FIVE, MEMORY = torch.ones(5), (torch.zeros(5), None, None)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.accumulate(FIVE, torch.zeros(4)), "residual must have 5 elements.* got 4"),
        (lambda: ops.accumulate(FIVE, torch.zeros(5), torch.zeros(6)), "velocity must have 5"),
        (lambda: ops.accumulate(FIVE, torch.zeros(5, dtype=torch.float64)), "residual must be Float"),
        (lambda: ops.accumulate(FIVE, torch.zeros(10)[::2]), "residual must be contiguous"),
        (lambda: ops.accumulate(FIVE, torch.zeros(5), weight_decay=0.1), "weight_decay needs the parameter"),
        (lambda: ops.accumulate(FIVE, torch.zeros(5), None, torch.zeros(4), weight_decay=0.1), "parameter must have 5"),
        (lambda: ops.accumulate(FIVE.int(), torch.zeros(5)), "float32, float64, float16 or bfloat16"),
        (lambda: accumulate_and_select(FIVE, *MEMORY, k=6, hint=0.0), r"k must be in \[1, n = 5\], got 6"),
        (lambda: reference.accumulate_top_k(FIVE.numpy(), np.zeros(5, np.float32), k=6), "k must"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_refusal_leaves_the_memory():
    for hint in (0.0, 0.5):
        with pytest.raises(ValueError, match="k must"):
            accumulate_and_select(FIVE, *MEMORY, k=6, hint=hint)
    assert not MEMORY[0].any()
