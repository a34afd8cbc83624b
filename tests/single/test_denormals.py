"""Denormals count, whatever torch.set_flush_denormal says: it holds for the calling thread alone."""

import numpy as np
import pytest
import torch

from hvd_sparse import native, reference
from hvd_sparse.algorithms import Settings
from hvd_sparse.buckets import BucketLayout
from hvd_sparse.torch import bucket_ops, ops
from hvd_sparse.torch.error_feedback import make_error_feedback
from hvd_sparse.units import Units

N = 3 * 2**18 + 5  # enough for three threads

pytestmark = pytest.mark.skipif(not torch.set_flush_denormal(False), reason="the processor cannot flush denormals")


def denormals(n=N, seed=0):
    bits = np.random.default_rng(seed).integers(1, 2**22, n, np.uint32)  # the sum of two is below 2**-126
    return (bits | (np.arange(n, dtype=np.uint32) % 2 << 31)).view(np.float32)


def flushing(function, *arguments, **options):
    torch.set_flush_denormal(True)
    try:
        found = function(*arguments, **options)
        assert torch.tensor(2.0**-149).mul(1.0).gt(0.0).item() is False, "the thread's setting is restored"
        return found
    finally:
        torch.set_flush_denormal(False)


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    torch.ones(2**20).add_(1.0)  # the pool starts
    yield
    torch.set_num_threads(before)


def test_what_is_accumulated(threads):
    gradient, residual, velocity = (denormals(seed=seed) for seed in range(3))
    expected = [residual.copy(), velocity.copy()]
    reference.accumulate(gradient, *expected, factor=0.5, momentum=0.75)
    assert np.count_nonzero(expected[0]) > N // 2
    tensors = [torch.from_numpy(array.copy()) for array in (gradient, residual, velocity)]
    flushing(ops.accumulate, *tensors, factor=0.5, momentum=0.75)
    for found, wanted in zip(tensors[1:], expected, strict=True):
        assert (found.numpy().view(np.uint32) == wanted.view(np.uint32)).all()
    flushing(native.accumulate, gradient, residual, velocity, factor=0.5, momentum=0.75)
    for found, wanted in zip((residual, velocity), expected, strict=True):
        assert (found.view(np.uint32) == wanted.view(np.uint32)).all()


def test_what_is_summed(threads):
    indices, k = np.arange(0, N, 3), -(-N // 3)
    gathered = np.stack([reference.pack(indices, denormals(k, seed), N, k) for seed in range(2)])
    expected = reference.reduce_payloads(gathered, 0, N, k, scale=0.5)
    assert np.count_nonzero(expected) > k // 2
    out = torch.empty(N)
    flushing(ops.reduce_payloads, torch.from_numpy(gathered), 0, N, k, out, 0.5)
    assert (out.numpy().view(np.uint32) == expected.astype(np.float32).view(np.uint32)).all()


def test_what_is_rounded_and_cleared():
    n, k = 1000, 100
    residual, indices = denormals(n), np.arange(0, n, 10)
    sent = reference.quantize(residual[indices], "bfloat16")
    expected = residual.copy()
    expected[indices] -= sent
    assert np.count_nonzero(expected[indices]) > 0
    found = flushing(ops.quantize, torch.from_numpy(residual[indices]), "bfloat16")
    assert (found.numpy().view(np.uint32) == sent.view(np.uint32)).all()
    message = torch.from_numpy(reference.pack(indices, sent, n, k, value_dtype="bfloat16"))
    tensor = torch.from_numpy(residual)
    layout = BucketLayout([n], [k])
    flushing(bucket_ops.clear_bucket, message, [tensor], layout=layout, value_dtype="bfloat16")
    assert (residual.view(np.uint32) == expected.view(np.uint32)).all()


@pytest.mark.parametrize(
    ("method", "settings", "buffer"),
    [("samomentum", {}, "residual"), ("dgc", {}, "velocity"), ("dgc", {"nesterov": True}, "velocity")],
)
def test_what_dense_steps_keep_decays_to_zero(method, settings, buffer):
    """0.7 times the smallest denormal rounds to itself, and processors multiply denormals slowly."""
    algorithm = getattr(Settings, method)(None, momentum=0.7, min_numel=0, **settings)
    feedback = make_error_feedback(algorithm, torch.zeros(8), torch.device("cpu"))
    kept = feedback.buffer(buffer)
    kept.copy_(torch.tensor([1.0, -1.0, 1e-38, -1e-38, 2.0**-149, 0.0, 1e30, -3e38]))
    units = Units(world_size=2)
    for step in range(500):
        dense = feedback.take_all(torch.zeros(8), 1.0, units)
        dense.commit()
        if step == 0:
            assert kept.tolist() == pytest.approx([0.7, -0.7, 0, 0, 0, 0, 0.7e30, -2.1e38], rel=1e-6)
    assert not kept.any() and dense.finite
