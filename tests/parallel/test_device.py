"""A step of parameters on a simulated CUDA device: residuals and sums equal the CPU's, bit for bit."""

import contextlib

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from gradients import draw
from helpers import assert_alive, backward, distributed, drive, make_parameters, memory_of, step

from hvd_sparse.torch import Compression, device, gradient_checks, ops, vote
from hvd_sparse.torch import step as step_module
from hvd_sparse.torch.collectives.horovod import HorovodCollectives

SHAPES = {"big": (120, 50), "middle": (2000,), "small": (64,)}
STEPS = 5


class Decoder:
    """What decoders on a device record, as there is none here: an operator of the CPU raises instead."""

    def __init__(self):
        self.status = None  # the first call makes it

    def take(self, like):
        if self.status is None:
            self.status = torch.zeros(2, dtype=torch.int64)
        taken = self.status.clone()
        self.status.zero_()
        return taken


@pytest.fixture(autouse=True)
def decoder(monkeypatch):
    decoder = Decoder()
    monkeypatch.setattr(ops, "take_decode_status", decoder.take)
    return decoder


def as_on_a_device(monkeypatch):
    for module in (device, step_module, vote):
        monkeypatch.setattr(module, "is_cuda", lambda device: True)


def trained(values, spoilt_step, **settings):
    parameters = make_parameters(SHAPES)
    compressor = Compression.dgc(
        parameters.items(), density=0.01, warmup=2, values=values, bucket_bytes=300, **settings
    )
    sums = []
    for t in range(STEPS):
        gradients = {name: values.copy() for name, values in draw(SHAPES, t, hvd.rank()).items()}
        if t == spoilt_step and hvd.rank() == hvd.size() - 1:
            gradients["small"].flat[5] = np.inf
            gradients["big"].flat[7] = np.nan
        sums.append(drive(compressor, parameters, gradients))
    return (
        sums,
        {name: memory_of(compressor, parameters, name) for name in SHAPES},
        compressor.stats()["total"]["payload_bytes"],
    )


@pytest.mark.parametrize("values", ["float32", "bfloat16", "int2"])
@pytest.mark.parametrize("spoilt_step", [None, 0, 3])
@pytest.mark.parametrize(("scope", "min_numel"), [("tensor", 0), ("model", 0), ("model", 1000), ("model", 10_000)])
def test_it_does_what_it_does_on_the_cpu(monkeypatch, values, spoilt_step, scope, min_numel):
    settings = {"scope": scope, "min_numel": min_numel}
    expected = trained(values, spoilt_step, **settings)
    as_on_a_device(monkeypatch)
    found = trained(values, spoilt_step, **settings)
    # Horovod's own all-reduce sends small tensors. From three ranks on, its order of additions varies.
    rounding = 0.0 if hvd.size() <= 2 or min_numel == 0 else 1e-5
    torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding, equal_nan=True)


def test_a_copy_back_to_the_device_is_no_change_of_a_gradient(monkeypatch):
    """A Horovod without NCCL adds dense gradients on the CPU and copies the sums back, which PyTorch counts."""

    def copy_back(tensor, **options):
        torch.autograd.graph.increment_version(tensor)
        return hvd.allreduce_async_(tensor, **options)

    monkeypatch.setattr("horovod.torch.optimizer.allreduce_async_", copy_back)
    for on_device in (False, True):
        monkeypatch.setattr(gradient_checks, "is_cuda", lambda device, answer=on_device: answer)
        parameters = make_parameters(SHAPES)
        compressor = Compression.gradient_dropping(parameters.items(), density=1.0)
        optimizer = distributed(parameters, compressor)
        refused = pytest.raises(RuntimeError, match="the gradient of big was changed")
        with contextlib.nullcontext() if on_device else refused:
            step(optimizer, parameters, draw(SHAPES, 0, hvd.rank()))
    assert_alive()


@pytest.mark.skipif(hvd.size() == 1, reason="Horovod compresses nothing with one process")
def test_a_change_of_a_dense_gradient_on_a_device_is_refused(monkeypatch):
    """DGC sends another tensor than the gradient, so no copy of Horovod's excuses the change."""
    monkeypatch.setattr(gradient_checks, "is_cuda", lambda device: True)
    parameters = make_parameters(SHAPES)
    optimizer = distributed(parameters, Compression.dgc(parameters.items(), density=1.0))
    backward(parameters, draw(SHAPES, 0, hvd.rank()))
    parameters["big"].grad.mul_(0.5)
    with pytest.raises(RuntimeError, match="the gradient of big was changed"):
        optimizer.step()
    assert_alive()


# Methods in which the host waits for the device, and their settings. micro, cltk and random_k have the same code on all
# devices: here they only show that votes of a device work with them, on a GPU tests/gpu compares them with the CPU.
WAITING = {
    "dct": ("dct", {"density": 0.02, "lifespan": 4, "warmup": 2}),
    "drained": ("dct", {"density": 0.02, "lifespan": 4, "drain": 3}),
    "float16": ("dct", {"density": 0.02, "lifespan": 2, "values": "float16", "coding": "elias_fano"}),
    "int2": ("dct", {"density": 0.02, "values": "int2", "granularity": "channel"}),
    "hard_threshold": ("hard_threshold", {"value": 1.5}),
    "nothing": ("hard_threshold", {"value": 1e9}),
    "sidco": ("sidco", {"density": 0.02, "stages": 2}),
    "sidco gamma": ("sidco", {"density": 0.05, "stages": 3, "distribution": "gamma", "values": "int2"}),
    "micro": ("micro", {"density": 0.02}),
    "cltk": ("cltk", {"density": 0.02, "values": "float16"}),
    "random_k": ("random_k", {"density": 0.02, "values": "int2"}),
}


def filtered(name, spoilt_step, frozen):
    parameters = make_parameters(SHAPES)
    method, settings = WAITING[name]
    if method not in ("micro", "cltk", "random_k"):  # these have one bucket
        settings = {"bucket_bytes": 600, **settings}
    compressor = getattr(Compression, method)(parameters.items(), min_numel=0, **settings)
    sums = []
    for t in range(STEPS):
        gradients = {name: values.copy() for name, values in draw(SHAPES, t, hvd.rank()).items()}
        parameters["middle"].requires_grad_(not (frozen and t == 2))
        if t == spoilt_step and hvd.rank() == hvd.size() - 1:
            gradients["big"].flat[7] = np.nan
        sums.append(drive(compressor, parameters, gradients))
    stats = compressor.stats()["total"]
    return sums, {name: memory_of(compressor, parameters, name) for name in SHAPES}, stats["payload_bytes"]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("spoilt_step", [None, 0, 3])
@pytest.mark.parametrize("name", WAITING)
def test_methods_that_wait_do_what_they_do_on_the_cpu(monkeypatch, name, spoilt_step, frozen):
    expected = filtered(name, spoilt_step, frozen)
    as_on_a_device(monkeypatch)
    found = filtered(name, spoilt_step, frozen)
    rounding = 0.0 if hvd.size() <= 2 or name != "micro" else 1e-5  # an all-reduce's order of additions varies
    torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding, equal_nan=True)


def test_a_fit_of_no_use_becomes_an_exact_selection(monkeypatch):
    """Equal magnitudes: every element would reach the fitted threshold."""

    def train():
        parameters = make_parameters({"flat": (5000,)})
        compressor = Compression.sidco(parameters.items(), density=0.01, min_numel=0)
        gradient = {"flat": np.where(np.arange(5000) % 3 == 0, -1.0, 1.0)}
        reduced = [drive(compressor, parameters, gradient) for _ in range(3)]
        return reduced, compressor.stats()["total"]["payload_bytes"]

    expected = train()
    as_on_a_device(monkeypatch)
    torch.testing.assert_close(train(), expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("scope", ["tensor", "model"])
@pytest.mark.parametrize("who", ["the last rank", "all"])
def test_damage_in_a_step_is_raised_by_the_next_one_on_every_rank(monkeypatch, decoder, scope, who):
    """Also where one rank alone received damaged bytes; then training goes on, and nothing is told twice."""
    as_on_a_device(monkeypatch)
    parameters = make_parameters(SHAPES)
    compressor = Compression.gradient_dropping(parameters.items(), density=0.01, scope=scope)
    last = hvd.size() - 1

    def train(t):
        drive(compressor, parameters, draw(SHAPES, t, hvd.rank()))

    train(0)
    train(1)
    if who == "all" or hvd.rank() == last:
        decoder.status = torch.tensor([2, 256 * last + 8])  # as kernels count: the eighth check is of the checksum
    report = f"received 2 of them, the first from rank {last} with the wrong checksum"
    with pytest.raises(RuntimeError, match=f"rank {last} {report}") as raised:
        train(2)
    assert str(raised.value).count(report) == (hvd.size() if who == "all" else 1)
    train(3)
    train(4)


@pytest.mark.parametrize("where", ["cpu", "a device"])
def test_a_reset_in_inference_mode_can_be_trained_from(monkeypatch, where):
    """Before the first step, and after some."""
    if where != "cpu":
        as_on_a_device(monkeypatch)
    parameters = make_parameters(SHAPES)
    compressor = Compression.dgc(parameters.items(), density=0.01, min_numel=0)
    sums = []
    for _ in range(2):
        with torch.inference_mode():
            compressor.reset()
        sums.append([drive(compressor, parameters, draw(SHAPES, t, hvd.rank())) for t in range(2)])
    assert compressor.state_dict()["step"] == 2
    torch.testing.assert_close(sums[1], sums[0], rtol=0.0, atol=0.0)


def test_builds_without_cuda_fall_back_to_the_cpu(monkeypatch):
    monkeypatch.setattr("hvd_sparse.library.has_cuda", lambda framework: True)
    monkeypatch.setattr(hvd, "cuda_built", lambda: True)
    cuda, cpu, ranks = torch.device("cuda", 0), torch.device("cpu"), HorovodCollectives(None)
    assert device.device_of(cuda, ranks) == cuda
    assert device.device_of(cpu, ranks) == cpu
    monkeypatch.setattr(hvd, "cuda_built", lambda: False)
    assert device.device_of(cuda, ranks) == cpu
    monkeypatch.setattr(hvd, "cuda_built", lambda: True)
    monkeypatch.setattr("hvd_sparse.library.has_cuda", lambda framework: False)
    assert device.device_of(cuda, ranks) == cpu


def test_a_gpu_on_which_the_kernels_do_not_run_leaves_compression_to_the_cpu(monkeypatch):
    monkeypatch.setattr("hvd_sparse.library.has_cuda", lambda framework: True)
    monkeypatch.setattr(hvd, "cuda_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda size, device: device)
    cuda, ranks = torch.device("cuda", 0), HorovodCollectives(None)

    def fail(values):
        raise RuntimeError(f"no kernel image is available for {values}")

    for capability, check, says in (
        ((7, 5), lambda values: True, "capability 8.0 or newer"),
        ((9, 0), fail, "do not run on this GPU: no kernel image is available for cuda:0"),
        ((9, 0), lambda values: True, ""),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
            patch.setattr(device.ops, "all_finite", check)
            why = device.why_not(cuda, ranks)
            assert says in why and bool(why) == bool(says), why


def test_parameters_on_two_devices_are_refused():
    parameters = {"here": torch.nn.Parameter(torch.ones(3)), "there": torch.nn.Parameter(torch.ones(3, device="meta"))}
    with pytest.raises(ValueError, match="on the CPU or on CUDA devices, got meta"):
        Compression.dgc(parameters.items())
