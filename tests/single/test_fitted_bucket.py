"""Thresholds fitted by an operator on buckets equal the NumPy twin's for each tensor, and so do the selections."""

import numpy as np
import pytest
import tensorflow as tf
import torch
from test_ops import raw, same
from test_tensorflow_ops import Invalid, from_torch

from hvd_sparse import reference
from hvd_sparse.tensorflow import varying_ops as tensorflow_varying_ops
from hvd_sparse.torch import varying_ops

SIZES = (1, 15, 16, 17, 1000, 65_537, 90_000, 300_007)  # of the last two a sample is fitted to, at these k
KS = (1, 1, 2, 1, 10, 1000, 900, 3000)
STAGES = (1, 2, 3, 1, 4, 2, 3, 1)
SEED, FACTOR, SMALLEST = 7, 0.5, 2.0**-149
SHAPES = ["normal", "heavy", "zeros", "equal", "two sizes", "mostly zeros", "odd"]
DISTRIBUTIONS = ["exponential", "gamma", "pareto"]


class Drawn:
    """Gradients and residuals of all sizes."""

    def __init__(self, shape, dtype):
        generator = torch.Generator().manual_seed(3)
        draw = [torch.randn((2, n), generator=generator) for n in SIZES]
        if shape == "heavy":
            draw = [one.sign() * one.abs() ** 3 for one in draw]
        elif shape in ("zeros", "equal"):
            draw = [torch.full_like(one, float(shape == "equal")) for one in draw]
        elif shape == "two sizes":
            draw = [torch.where(one > 1.0, 2.0 + 0.1 * one, 1e-3) for one in draw]
        elif shape == "mostly zeros":
            draw = [torch.where(one > 2.0, one, 0.0) for one in draw]
        self.gradients = [one[0].to(dtype) for one in draw]
        self.residuals = [one[1].clone() for one in draw]
        if shape == "odd":
            for gradient, residual in zip(self.gradients, self.residuals, strict=True):
                gradient[0] = float("nan")
                gradient[5:6], residual[7:8], gradient[7:8] = float("inf"), 3e38, 3e38  # more than float32 holds
                residual[9:10] = 1e-41

    def expected(self, distribution):
        """Change the residuals; return payloads and info, of each member."""
        payloads, rows = [], []
        for n, k, stages, gradient, residual in zip(SIZES, KS, STAGES, self.gradients, self.residuals, strict=True):
            values = residual.numpy()
            reference.accumulate(gradient.float().numpy(), values, factor=FACTOR)
            found = reference.fit_tail(values, k, stages, distribution, SEED)
            threshold = found.threshold
            if found.is_misfit:
                indices, sent, threshold = reference.select_top_k(values, k)
                indices, sent, threshold = indices[sent != 0.0], sent[sent != 0.0], max(threshold, SMALLEST)
            else:
                indices, sent = reference.filter_threshold(values, threshold)
            payloads.append(reference.pack(indices, sent, n, max(1, len(indices))))
            rows.append([threshold, len(indices)])
        return np.concatenate(payloads), np.array(rows)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_thresholds_are_those_of_the_twin(shape, distribution, dtype):
    drawn, other, twin = (Drawn(shape, dtype) for _ in range(3))
    payloads, rows = twin.expected(distribution)
    options = {"thresholds": [0.0] * len(SIZES), "ks": KS, "stages": STAGES, "factors": [FACTOR] * len(SIZES)}
    message, info, _ = varying_ops.filter_bucket(
        drawn.gradients, drawn.residuals, distribution=distribution, seed=SEED, **options
    )
    np.testing.assert_allclose(info[:, :2].numpy(), rows, rtol=1e-9)
    same(message, payloads)
    variables = [tf.Variable(residual.numpy()) for residual in other.residuals]
    types = {"thresholds": tf.float64, "ks": tf.int64, "stages": tf.int64, "factors": tf.float32}
    numbers = {name: tf.constant(options[name], kind) for name, kind in types.items()}
    gradients = [from_torch(gradient) for gradient in other.gradients]
    theirs, _, table = tensorflow_varying_ops.filter_bucket(
        gradients, variables, distribution=distribution, seed=SEED, **numbers
    )
    same(theirs, payloads)
    assert table.numpy().tolist() == info[:, :2].tolist()
    for torchs, variable, residual in zip(drawn.residuals, variables, twin.residuals, strict=True):
        assert raw(torchs) == raw(residual) == raw(torch.from_numpy(variable.numpy()))


@pytest.mark.parametrize("guess", [1e-30, 0.5, 1.0, 1.02, 1.1, 50.0, np.inf, -1.0])
def test_a_guess_at_a_fitted_threshold_changes_nothing(guess):
    """Given as a part of the threshold that is found."""
    options = {"ks": KS, "stages": STAGES, "factors": [FACTOR] * len(SIZES), "seed": SEED}
    drawn, other = Drawn("normal", torch.float32), Drawn("normal", torch.float32)
    message, info, _ = varying_ops.filter_bucket(
        drawn.gradients, drawn.residuals, thresholds=[0.0] * len(SIZES), **options
    )
    guesses = (guess * info[:, 0]).tolist()
    again, same_info, _ = varying_ops.filter_bucket(other.gradients, other.residuals, thresholds=guesses, **options)
    same(again, message.numpy())
    assert same_info.tolist() == info.tolist()
    for one, two in zip(drawn.residuals, other.residuals, strict=True):
        assert raw(one) == raw(two)


def test_what_is_not_active_is_fitted_as_it_is():
    drawn, still = Drawn("normal", torch.float32), Drawn("normal", torch.float32)
    options = {"thresholds": [0.0] * len(SIZES), "ks": KS, "stages": STAGES, "factors": [FACTOR] * len(SIZES)}
    _, info, finite = varying_ops.filter_bucket(drawn.gradients, drawn.residuals, is_active=False, **options)
    for row, k, stages, own, other in zip(info.tolist(), KS, STAGES, drawn.residuals, still.residuals, strict=True):
        found = reference.fit_tail(own.numpy(), k, stages, "exponential", 0)
        assert row[0] == pytest.approx(found.threshold, rel=1e-9) or found.is_misfit
        assert raw(own) == raw(other)
    assert bool(finite.all())


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("shape", SHAPES[:-1])
def test_fits_alone_are_those_of_the_twin(shape, distribution):
    residuals = Drawn(shape, torch.float32).residuals
    fits = varying_ops.fit_thresholds(residuals, KS, STAGES, distribution, SEED)
    for k, stages, residual, (threshold, misfit) in zip(KS, STAGES, residuals, fits, strict=True):
        found = reference.fit_tail(residual.numpy(), k, stages, distribution, SEED)
        assert threshold == pytest.approx(found.threshold, rel=1e-9)
        assert misfit == found.is_misfit


WRONG = [
    ({"stages": [-1]}, "stages must be >= 0, got -1"),
    ({"stages": [1, 1]}, "stages must have 1 entries, one a member; got 2"),
    ({"ks": [0]}, r"k must be in \[1, 9\]"),
    ({"ks": [10]}, r"k must be in \[1, 9\]"),
    ({"momentum": 0.9}, "neither momentum nor weight decay"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_what_cannot_be_fitted_is_refused(changes, message):
    options = {"thresholds": [0.0], "ks": [1], "stages": [1], "factors": [1.0], **changes}
    residual = torch.ones(9)
    velocities = [torch.zeros(9)] if "momentum" in changes else []
    with pytest.raises(ValueError, match=message):
        varying_ops.filter_bucket([torch.ones(9)], [residual], velocities, **options)
    types = {"thresholds": tf.float64, "ks": tf.int64, "stages": tf.int64, "factors": tf.float32}
    options |= {name: tf.constant(options[name], kind) for name, kind in types.items()}
    variables = [[tf.Variable(one.numpy()) for one in buffers] for buffers in ([residual], velocities)]
    with pytest.raises(Invalid, match=message):
        tensorflow_varying_ops.filter_bucket([tf.ones(9)], *variables, **options)
    assert residual.tolist() == [1.0] * 9


def test_a_distribution_that_is_unknown_is_refused():
    with pytest.raises(ValueError, match="distribution must be exponential, gamma or pareto, got normal"):
        varying_ops.filter_bucket(
            [torch.ones(9)], [torch.ones(9)], factors=[1.0], thresholds=[0.0], ks=[1], distribution="normal"
        )


@pytest.mark.parametrize(
    ("ks", "stages", "message"),
    [
        ([1, 1], [1], "ks must have 1 entries, one a member; got 2"),
        ([10], [1], r"k must be in \[1, 9\]"),
        ([1], [0], "stages must be >= 1, got 0"),
    ],
)
def test_fits_alone_that_cannot_be_are_refused(ks, stages, message):
    with pytest.raises(ValueError, match=message):
        varying_ops.fit_thresholds([torch.ones(9)], ks, stages)
