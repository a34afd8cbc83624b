"""The scopes of parameters on a CUDA device, driven on the CPU: memories and sums are those of the CPU, to the bit."""

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from gradients import draw
from helpers import drive, make_parameters, memory_of

from hvd_sparse.algorithms import Settings
from hvd_sparse.torch import Compression, compression, device_scope

SHAPES = {"big": (120, 50), "middle": (2000,), "small": (64,)}
STEPS = 5


class Decoder:
    """What decoders on a device record, as there is none here: an operator of the CPU raises instead."""

    def __init__(self):
        self.status = torch.zeros(2, dtype=torch.int64)

    def take(self, like):
        taken, self.status = self.status, torch.zeros(2, dtype=torch.int64)
        return taken


@pytest.fixture(autouse=True)
def decoder(monkeypatch):
    decoder = Decoder()
    monkeypatch.setattr(device_scope.ops, "take_decode_status", decoder.take)
    return decoder


def trained(values, spoilt_step, **settings):
    parameters = make_parameters(SHAPES)
    compressor = Compression.dgc(
        parameters.items(), density=0.01, warmup=2, values=values, bucket_bytes=300, **settings
    )
    sums = []
    for step in range(STEPS):
        gradients = {name: values.copy() for name, values in draw(SHAPES, step, hvd.rank()).items()}
        if step == spoilt_step and hvd.rank() == hvd.size() - 1:
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
def test_it_does_what_the_scope_of_the_cpu_does(monkeypatch, values, spoilt_step, scope, min_numel):
    settings = {"scope": scope, "min_numel": min_numel}
    expected = trained(values, spoilt_step, **settings)
    monkeypatch.setitem(compression.SCOPES, scope, device_scope.LAYOUTS[scope])
    found = trained(values, spoilt_step, **settings)
    # Small tensors travel by Horovod's own allreduce, which from three ranks on adds in an order that varies.
    rounding = 0.0 if hvd.size() <= 2 or min_numel == 0 else 1e-5
    torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding, equal_nan=True)


THRESHOLDS = {
    "dct": {"density": 0.02, "lifespan": 4, "warmup": 2},
    "drained": {"density": 0.02, "lifespan": 4, "drain": 3},
    "float16": {"density": 0.02, "lifespan": 2, "values": "float16", "coding": "elias_fano"},
    "int2": {"density": 0.02, "values": "int2", "centre_scope": "column"},
    "hard_threshold": {"value": 1.5},
    "nothing": {"value": 1e9},
}


def filtered(name, spoilt_step, frozen):
    parameters = make_parameters(SHAPES)
    make = Compression.hard_threshold if "value" in THRESHOLDS[name] else Compression.dct
    compressor = make(parameters.items(), bucket_bytes=600, min_numel=0, **THRESHOLDS[name])
    sums = []
    for step in range(STEPS):
        gradients = {name: values.copy() for name, values in draw(SHAPES, step, hvd.rank()).items()}
        parameters["middle"].requires_grad_(not (frozen and step == 2))
        if step == spoilt_step and hvd.rank() == hvd.size() - 1:
            gradients["big"].flat[7] = np.nan
        sums.append(drive(compressor, parameters, gradients))
    stats = compressor.stats()["total"]
    return sums, {name: memory_of(compressor, parameters, name) for name in SHAPES}, stats["payload_bytes"]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("spoilt_step", [None, 0, 3])
@pytest.mark.parametrize("name", THRESHOLDS)
def test_thresholds_do_what_they_do_on_the_cpu(monkeypatch, name, spoilt_step, frozen):
    expected = filtered(name, spoilt_step, frozen)
    monkeypatch.setitem(compression.SCOPES, "threshold", device_scope.DeviceVaryingScope)
    found = filtered(name, spoilt_step, frozen)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("scope", ["tensor", "model"])
@pytest.mark.parametrize("who", ["the last rank", "all"])
def test_damage_in_a_step_is_raised_by_the_next_one_on_every_rank(monkeypatch, decoder, scope, who):
    """Also where one rank alone received damaged bytes; then training goes on, and nothing is told twice."""
    monkeypatch.setitem(compression.SCOPES, scope, device_scope.LAYOUTS[scope])
    parameters = make_parameters(SHAPES)
    compressor = Compression.gradient_dropping(parameters.items(), density=0.01, scope=scope)
    last = hvd.size() - 1

    def train(step):
        drive(compressor, parameters, draw(SHAPES, step, hvd.rank()))

    train(0)
    train(1)
    if who == "all" or hvd.rank() == last:
        decoder.status = torch.tensor([2, 256 * last + 8])  # as kernels count: the eighth check is of the checksum
    report = f"met 2 of them, the first that of rank {last} with the wrong checksum"
    with pytest.raises(RuntimeError, match=f"rank {last} {report}") as raised:
        train(2)
    assert str(raised.value).count(report) == (hvd.size() if who == "all" else 1)
    train(3)
    train(4)


def test_what_there_is_not_on_a_device_yet_falls_back_to_the_cpu(monkeypatch):
    monkeypatch.setattr(device_scope, "has_cuda", lambda framework: True)
    monkeypatch.setattr(hvd, "cuda_built", lambda: True)
    assert device_scope.device_layout(Settings.dgc(None)) is device_scope.DeviceTensorScope
    assert device_scope.device_layout(Settings.topk(None)) is device_scope.DeviceModelScope
    assert device_scope.device_layout(Settings.dgc(None, values="int1")) is device_scope.DeviceTensorScope
    assert device_scope.device_layout(Settings.hard_threshold(None, 1.0)) is device_scope.DeviceVaryingScope
    assert device_scope.device_layout(Settings.sidco(None)) is device_scope.device_layout(Settings.micro(None)) is None
    monkeypatch.setattr(hvd, "cuda_built", lambda: False)
    assert device_scope.device_layout(Settings.dgc(None)) is None
    monkeypatch.setattr(hvd, "cuda_built", lambda: True)
    monkeypatch.setattr(device_scope, "has_cuda", lambda framework: False)
    assert device_scope.device_layout(Settings.dgc(None)) is None


def test_parameters_on_two_devices_are_refused():
    parameters = {"here": torch.nn.Parameter(torch.ones(3)), "there": torch.nn.Parameter(torch.ones(3, device="meta"))}
    with pytest.raises(ValueError, match="on the CPU or on CUDA devices, got meta"):
        Compression.dgc(parameters.items())
