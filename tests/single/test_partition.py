"""The selection in a rank's partition, and its sketch: both frameworks equal the NumPy twin, bit for bit."""

import math

import numpy as np
import pytest
import tensorflow as tf
import torch

from hvd_sparse import reference
from hvd_sparse.tensorflow import varying_ops as tensorflow_varying_ops
from hvd_sparse.torch import varying_ops

DRAWN = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "zeros": lambda rng, n: np.zeros(n),
    "equal": lambda rng, n: np.full(n, 0.25),
    "ties": lambda rng, n: np.round(rng.standard_normal(n)),
    "denormals": lambda rng, n: rng.standard_normal(n) * 1e-41,
    "bad": lambda rng, n: np.where(rng.random(n) < 0.01, np.nan, np.where(rng.random(n) < 0.01, np.inf, 1e-3)),
}
SIZES = {"one": [1], "odd": [7, 1, 1000], "edge": [65_535, 65_537], "whole": [65_536]}
CASES = [  # threshold, share, sample
    (2.0, -1.0, 0),
    (2.0, 800.0, 10**9),
    (2.5, 300.0, 3000),
    (math.inf, 37.4, 3000),
    (1e-3, 50.0, 5000),
    (0.0, 0.3, 100),
    (1e30, 12.0, 100),
    (2.0**-149, 10**9, 2000),
]


def draw(kind, sizes, seed):
    rng = np.random.default_rng(seed)
    gradients = [DRAWN[kind](rng, n).astype(np.float32) for n in sizes]
    return gradients, [np.zeros(n, np.float32) if kind != "normal" else gradients[i] * 0.5 for i, n in enumerate(sizes)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", DRAWN)
def test_both_do_as_the_twin(kind, sizes):
    sizes = SIZES[sizes]
    n, begins = sum(sizes), np.cumsum([0, *sizes[:-1]]).tolist()
    for seed, (threshold, share, sample) in enumerate(CASES):
        for begin, end in ((0, n), (n // 3, 2 * n // 3), (n // 2, n // 2)):
            options = {"begin": begin, "end": end, "threshold": threshold, "share": share, "sample": sample}
            options |= {"seed": seed - 3}
            gradients, residuals = draw(kind, sizes, seed)
            factors = [0.5] * len(sizes)
            wanted = [one.copy() for one in residuals]
            indices, sketch, bar, finite = reference.accumulate_partition(
                gradients, wanted, factors=factors, begins=begins, **options
            )
            tensors = [torch.from_numpy(one.copy()) for one in residuals]
            ours = varying_ops.accumulate_partition(
                [torch.from_numpy(one) for one in gradients], tensors, factors=factors, begins=begins, **options
            )
            where = f"{options}"
            for received, expected in zip(ours, (indices, sketch, bar, finite), strict=True):
                np.testing.assert_array_equal(received.numpy(), expected, err_msg=where)
            variables = [tf.Variable(one) for one in residuals]
            theirs = tensorflow_varying_ops.accumulate_partition(
                gradients, variables, factors=tf.constant(factors), **options
            )
            for received, expected in zip(theirs, (indices, sketch, finite), strict=True):
                np.testing.assert_array_equal(received.numpy(), expected, err_msg=where)
            for memory, tensor, variable in zip(wanted, tensors, variables, strict=True):
                np.testing.assert_array_equal(tensor.numpy(), memory, err_msg=where)
                np.testing.assert_array_equal(variable.numpy(), memory, err_msg=where)


def test_what_no_tensor_covers_counts_as_zeros():
    gradients = [np.full(10, 2.0, np.float32), np.full(20, 3.0, np.float32)]
    residuals = [torch.zeros(10), torch.zeros(20)]
    indices, sketch, threshold, finite = varying_ops.accumulate_partition(
        [torch.from_numpy(one) for one in gradients], residuals, factors=[1.0, 1.0], begins=[5, 40], begin=0, end=50,
        threshold=2.0, share=20.0, sample=50,
    )  # fmt: skip
    assert indices.tolist() == [*range(5, 15), *range(40, 50)] and threshold == 2.0 and bool(finite.all())
    assert sketch[1:].sum() == 20.0 and residuals[1].tolist() == [3.0] * 20


@pytest.mark.parametrize(
    "change",
    [{"threshold": -1.0}, {"threshold": math.nan}, {"share": math.nan}, {"begin": -1}, {"end": -1}, {"begins": [0]},
     {"end": 2**48 + 1}, {"begins": [0, 2**63 - 5]}, {"begins": [0, 2**48 - 9]}],
)  # fmt: skip
def test_what_cannot_be_is_refused(change):
    given = {"factors": [1.0, 1.0], "begins": [0, 5], "begin": 0, "end": 15, "threshold": 1.0, "share": 3.0, **change}
    residuals = [torch.zeros(5), torch.zeros(10)]
    with pytest.raises(ValueError, match="accumulate_partition"):
        varying_ops.accumulate_partition([torch.ones(5), torch.ones(10)], residuals, **given)
    assert not any(residual.any() for residual in residuals)


def test_parts_that_overlap_are_refused():
    with pytest.raises(ValueError, match="ascend and not overlap"):
        varying_ops.accumulate_partition(
            [torch.ones(5), torch.ones(10)], [torch.zeros(5), torch.zeros(10)], factors=[1.0, 1.0], begins=[0, 4],
            begin=0, end=15, threshold=1.0,
        )  # fmt: skip
