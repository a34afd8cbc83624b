"""ThresholdBoundary in PyTorch: masks, values and gradients equal autograd through the reference's mask."""

import copy
import math

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hvd_sparse import reference
from hvd_sparse.torch.model_parallel import ThresholdBoundary

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SHAPES = [(1, 1), (1, 7), (5, 1), (33, 129), (2, 3, 31), (0, 8)]


def drawn(shape, dtype=torch.float32, kind="normal", seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if kind == "ties":
        x = torch.randint(-2, 3, shape, generator=generator).float()
    elif kind == "zeros":
        x[::2] = 0.0
    elif kind == "relu":
        x = x.relu()
    return x.to(dtype)


def rows_of(x, start_dim=1):
    start = start_dim % x.dim()
    return x.detach().double().flatten(start).flatten(0, start - 1).numpy()


def expected_mask(x, density, threshold, start_dim=1, seed=0):
    rows = rows_of(x, start_dim)
    if threshold == "topk":
        mask, _ = reference.select_top_k_rows(rows, max(1, int(density * rows.shape[1] + 0.5)), seed)
    else:
        mask = reference.filter_threshold_rows(rows, reference.laplace_threshold_rows(rows, density))
    return torch.from_numpy(mask).view(x.shape)


@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "relu"])
@pytest.mark.parametrize("threshold", ["topk", "laplace"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_and_backward_are_those_of_a_mask(shape, dtype, threshold, kind):
    x = drawn(shape, dtype, kind).requires_grad_()
    boundary = ThresholdBoundary(0.3, threshold)
    weights = drawn(shape, dtype, seed=1)
    out = boundary(x)
    (out * weights).sum().backward()
    mask = expected_mask(x, 0.3, threshold)
    assert torch.equal(out, torch.where(mask, x, torch.zeros_like(x)))
    assert torch.equal(x.grad, torch.where(mask, weights, torch.zeros_like(x)))
    assert out.dtype == dtype
    assert boundary.stats()["occupancy"] == mask.double().mean().nan_to_num(0.0)
    if threshold == "topk":
        assert mask.flatten(1).sum(1).eq(max(1, int(0.3 * math.prod(shape[1:]) + 0.5))).all()


def test_the_seed_orders_equal_magnitudes():
    x = drawn((20, 40), kind="ties")
    masks = [expected_mask(x, 0.3, "topk", seed=seed) for seed in (0, 5)]
    assert not torch.equal(*masks)
    for seed, mask in zip((0, 5), masks, strict=True):
        assert torch.equal(ThresholdBoundary(0.3, seed=seed)(x), torch.where(mask, x, torch.zeros_like(x)))


@pytest.mark.parametrize(("start_dim", "rows"), [(1, 2), (2, 6), (-1, 30), (-3, 2)])
def test_start_dim_says_what_a_row_is(start_dim, rows):
    x = drawn((2, 3, 5, 7))
    boundary = ThresholdBoundary(0.2, start_dim=start_dim)
    assert boundary.mask(x).shape == (rows, 210 // rows)
    assert torch.equal(boundary(x) != 0, expected_mask(x, 0.2, "topk", start_dim))


@pytest.mark.parametrize("threshold", ["topk", "laplace"])
def test_density_one_changes_nothing(threshold):
    x = drawn((4, 9), kind="zeros").requires_grad_()
    boundary = ThresholdBoundary(1.0, threshold)
    assert boundary(x) is x
    boundary.eval()
    assert boundary(x) is x and boundary.mask(x).all()
    assert boundary.stats()["occupancy"] == 1.0


def test_a_row_does_not_depend_on_the_others():
    x = drawn((40, 65), kind="ties")
    boundary = ThresholdBoundary(0.1)
    parts = torch.cat([boundary(part) for part in x.split([1, 20, 19])])
    assert torch.equal(boundary(x), parts)


def test_gradients_are_right_by_finite_differences():
    x = drawn((6, 11), torch.float64).requires_grad_()
    boundary = ThresholdBoundary(0.4)
    assert torch.autograd.gradcheck(lambda x: torch.sin(boundary(x)), x, eps=1e-6)
    assert torch.autograd.gradgradcheck(lambda x: torch.sin(boundary(x)), x, eps=1e-6)


def test_laplace_evaluates_with_the_threshold_of_training():
    boundary = ThresholdBoundary(0.05, "laplace", momentum=0.25)
    x = drawn((8, 100))
    boundary.eval()
    assert torch.equal(boundary(x), x)  # nothing is known yet
    boundary.train()
    running = None
    for seed in range(5):
        batch = drawn((8, 100), seed=seed) * (1 + seed)
        boundary(batch)
        mean = reference.laplace_threshold_rows(batch.numpy(), 0.05).mean()
        running = mean if running is None else running + 0.25 * (mean - running)
    assert boundary.stats()["threshold"] == pytest.approx(running, rel=1e-5)
    assert boundary.stats()["batches"] == 5
    boundary.eval()
    bar = float(boundary.running_threshold)
    assert torch.equal(boundary(x), torch.where(x.abs() >= bar, x, torch.zeros_like(x)))
    assert boundary.stats()["batches"] == 5


def test_the_state_travels_in_a_state_dict():
    boundary = ThresholdBoundary(0.05, "laplace")
    boundary(drawn((8, 100)))
    other = ThresholdBoundary(0.05, "laplace")
    other.load_state_dict(boundary.state_dict())
    assert set(boundary.state_dict()) == {"running_threshold", "batches"}
    x = drawn((3, 100), seed=4)
    assert torch.equal(boundary.eval()(x), other.eval()(x))
    assert repr(copy.deepcopy(boundary)) == "ThresholdBoundary(density=0.05, threshold='laplace', start_dim=1)"


def test_the_density_that_laplace_achieves_is_measured():
    boundary = ThresholdBoundary(0.05, "laplace")
    laplace = np.random.default_rng(0).laplace(size=(64, 2000)).astype(np.float32)
    boundary(torch.from_numpy(laplace))
    assert boundary.stats()["occupancy"] == pytest.approx(0.05, rel=0.05)
    boundary(torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, (64, 2000)).astype(np.float32)))
    assert boundary.stats()["occupancy"] == 0.0  # no uniform number is so far from the mean
    assert boundary.stats()["mean_occupancy"] == pytest.approx(0.025, rel=0.05)


@pytest.mark.parametrize("threshold", ["topk", "laplace"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays(threshold, value):
    x = drawn((5, 50))
    x[2, 3] = value
    for boundary in (ThresholdBoundary(0.02, threshold), ThresholdBoundary(0.02, threshold).eval()):
        out = boundary(x)
        assert torch.equal(out[2, 3], x[2, 3]) or out[2, 3].isnan()
        assert out[[0, 1, 3, 4]].isfinite().all() and boundary.running_threshold.isfinite()


@pytest.mark.each_value
@pytest.mark.parametrize("threshold", ["topk", "laplace"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_without_a_graph_break(threshold, dynamic):
    torch._dynamo.reset()
    network = torch.nn.Sequential(torch.nn.Linear(16, 48), ThresholdBoundary(0.1, threshold), torch.nn.Linear(48, 4))
    plain = copy.deepcopy(network)
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (5, 5, 9):
        x = drawn((rows, 16), seed=rows)
        compiled(x).square().sum().backward()
        plain(x).square().sum().backward()
    for ours, theirs in zip(network.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    assert network[1].stats() == pytest.approx(plain[1].stats())
    assert network[1].stats()["batches"] == 3


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("threshold", ["topk", "laplace"])
def test_activation_checkpoints_count_a_batch_once(threshold, use_reentrant):
    network = torch.nn.Sequential(torch.nn.Linear(16, 48), ThresholdBoundary(0.1, threshold), torch.nn.Linear(48, 4))
    plain = copy.deepcopy(network)
    x = drawn((5, 16)).requires_grad_()
    checkpoint(network, x, use_reentrant=use_reentrant).sum().backward()
    plain(x).sum().backward()
    for ours, theirs in zip(network.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert network[1].stats() == plain[1].stats() and network[1].stats()["batches"] == 1


def test_under_autocast_activations_stay_what_they_are():
    network = torch.nn.Sequential(torch.nn.Linear(16, 48), ThresholdBoundary(0.1, "laplace"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = network(drawn((5, 16)))
    assert out.dtype == torch.bfloat16 and 0 < (out != 0).sum() < out.numel()
    out.float().sum().backward()
    network.to(torch.bfloat16)(drawn((5, 16), torch.bfloat16))
    assert network[1].stats()["batches"] == 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"density": 0.0}, ValueError, r"density must be in \(0, 1\], got 0.0"),
        ({"density": 1.2}, ValueError, "density must be in"),
        ({"density": "5 %"}, TypeError, "density must be a number"),
        ({"density": 0.1, "threshold": "sort"}, ValueError, "threshold must be one of 'topk', 'laplace'; got 'sort'"),
        ({"density": 0.1, "start_dim": 0}, ValueError, "start_dim must not be 0"),
        ({"density": 0.1, "start_dim": 1.0}, TypeError, "start_dim must be an integer, got 1.0 of type float"),
        ({"density": 0.1, "momentum": 0.0}, ValueError, "momentum must be in"),
        ({"density": 0.1, "seed": None}, TypeError, "seed must be an integer"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        ThresholdBoundary(**arguments)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.zeros(5), {}, r"activations must have dimensions before and from start_dim=1 on, got shape \[5\]"),
        (torch.zeros(5, 4), {"start_dim": 2}, "start_dim=2"),
        (torch.zeros(5, 0), {}, "at least one feature"),
        (torch.zeros(5, 4, dtype=torch.int64), {}, "activations must be of real numbers, got torch.int64"),
    ],
)
def test_wrong_activations_are_refused(x, options, message):
    with pytest.raises(ValueError, match=message):
        ThresholdBoundary(0.5, **options)(x)
