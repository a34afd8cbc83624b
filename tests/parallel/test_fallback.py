"""Parameters on a device, compression on the CPU: results equal those of parameters on the CPU, bit for bit.

The tests neither need nor use a GPU: see `simulated_device`.
"""

import contextlib
import re
import warnings

import horovod.torch as hvd
import horovod.torch.optimizer
import numpy as np
import pytest
import torch
from gradients import draw
from helpers import alone_as_elastic, distributed, drive, make_parameters
from simulated_device import DeviceTensor

from hvd_sparse.schedule import WarmUp
from hvd_sparse.torch import Compression

SHAPES = {"body": (60, 40), "middle": (700,), "bias": (40,), "scale": ()}
FROM_DENSE = WarmUp(0.05, steps=2, initial=1.0)
METHODS = {
    "dgc": ("dgc", {"bucket_bytes": 300}),
    "dgc, weights decay": ("dgc", {"weight_decay": 0.1, "nesterov": True, "clip_norm": 9.0, "min_numel": 100}),
    "dgc, model": ("dgc", {"scope": "model", "weight_decay": 0.1, "clip_norm": 9.0, "clip_scope": "model"}),
    "dgc, model, small ones": ("dgc", {"scope": "model", "values": "bfloat16", "min_numel": 100}),
    "samomentum": ("samomentum", {"weight_decay": 0.1, "min_numel": 100}),
    "samomentum, model": ("samomentum", {"scope": "model", "weight_decay": 0.1, "min_numel": 100}),
    "gradient_dropping": ("gradient_dropping", {"values": "int2", "granularity": "channel"}),
    "topk": ("topk", {"min_numel": 100}),
    "dct": ("dct", {"min_numel": 100, "lifespan": 2}),
    "dct, int1": ("dct", {"values": "int1"}),
    "hard_threshold": ("hard_threshold", {"value": 1.5, "min_numel": 100}),
    "sidco": ("sidco", {"bucket_bytes": 300}),
    "cltk": ("cltk", {"min_numel": 100}),
    "random_k": ("random_k", {"values": "float16"}),
    "micro": ("micro", {"min_numel": 100}),
    "micro, scaling": ("micro", {"controller": "scaling", "values": "int2"}),
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch):
    """Have every method fall back, however hvd_sparse was built."""
    monkeypatch.setattr("hvd_sparse.library.has_cuda", lambda framework: False)


def build(parameters, method, process_set=None):
    """Return the compressor; the warnings are another test's."""
    name, settings = METHODS[method]
    settings = {"min_numel": 0, **settings}
    if name != "hard_threshold":
        settings["density"] = FROM_DENSE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(Compression, name)(parameters.items(), process_set=process_set, **settings)


def on_device(parameters):
    return {name: torch.nn.Parameter(DeviceTensor(parameter.detach())) for name, parameter in parameters.items()}


def held(tensor):
    return tensor.held if isinstance(tensor, DeviceTensor) else tensor


def counts(compressor):
    """Return the numbers of `stats` without the seconds."""
    stats = compressor.stats()
    stats["dense_fallback"].pop("rule")
    for part in ("step", "total"):
        stats[part] = {key: value for key, value in stats[part].items() if key != "seconds"}
    return stats


class Run:
    """A run of a compressor with parameters here, or on a device, that notes all there is to see."""

    def __init__(self, method, dtype, place, process_set=hvd.global_process_set):
        self.parameters = place(make_parameters(SHAPES, dtype=dtype))
        self.process_set = process_set
        self.compressor = build(self.parameters, method, process_set)
        self.seen = []

    def step(self, t, frozen=(), spoilt=()):
        """Make a step with new weights and gradients, some of them not finite on one rank."""
        drawn, gradients = draw(SHAPES, t, rank=0, seed=7), draw(SHAPES, t, hvd.rank())
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(name not in frozen)
            with torch.no_grad():
                parameter.copy_(torch.tensor(drawn[name]).to(parameter.dtype))
        if self.process_set.rank() == 0:
            for name in spoilt:
                gradients[name] = np.array(gradients[name])
                gradients[name].flat[0] = np.nan
        reduced = drive(self.compressor, self.parameters, gradients, process_set=self.process_set)
        for name, result in reduced.items():
            parameter = self.parameters[name]
            assert type(result) is type(parameter.grad) and result.device == parameter.device
            assert result.dtype == parameter.dtype and result.shape == parameter.shape
        self.note({name: held(result).clone() for name, result in reduced.items()})

    def note(self, seen):
        for one in (seen, self.compressor.state_dict(), counts(self.compressor)):
            self.seen.append({name: value for name, value in one.items() if name != "method"})  # numbers are compared

    def train(self):
        """Use every feature of a compressor."""
        for t in range(4):
            self.step(t, frozen=["middle"] if t == 2 else [])
        state = self.compressor.state_dict()
        self.step(4, spoilt=["bias", "body"])
        self.compressor.loss_scale = 2.0
        self.step(5)
        self.compressor.load_state_dict({**state, "step": 0})  # everything is sent dense, and there is a residual
        self.step(6, spoilt=["scale"])
        self.step(7)
        summed = self.compressor.state_dict(summed=True)
        self.compressor.reset()
        self.note(summed)
        self.compressor.load_state_dict(summed)
        self.step(8)
        return self.seen


def assert_same(found, expected, process_set=hvd.global_process_set):
    """Compare bits; from three ranks on, sums by Horovod's own allreduce are added in an order that varies."""
    rounding = {"rtol": 0.0, "atol": 0.0} if process_set.size() <= 2 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(found, expected, equal_nan=True, **rounding)
    if process_set.size() <= 2:
        assert bits(found) == bits(expected)


def bits(seen):
    """Return the same with bytes in place of tensors: zeros have a sign, too."""
    if isinstance(seen, dict):
        return {key: bits(value) for key, value in seen.items()}
    if isinstance(seen, list):
        return [bits(value) for value in seen]
    return seen.reshape(-1).view(torch.uint8).numpy().tobytes() if isinstance(seen, torch.Tensor) else seen


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_a_run_is_that_of_parameters_on_the_cpu(method, dtype):
    expected = Run(method, dtype, dict).train()
    assert_same(Run(method, dtype, on_device).train(), expected)


@pytest.mark.skipif(hvd.size() < 2, reason="a part of a job needs two processes")
@pytest.mark.parametrize("method", ["dgc, weights decay", "sidco", "cltk"])
def test_a_process_set_is_unchanged(method):
    part = hvd.add_process_set(list(range(hvd.size() - 1)))
    try:
        if part.included():
            runs = [Run(method, torch.float32, place, part).train() for place in (on_device, dict)]
            assert_same(*runs, part)
    finally:
        assert hvd.remove_process_set(part)


def expect_all(optimizer):
    """Have `synchronize` reduce every gradient itself: an autograd node of a device that is not there has no hooks."""
    optimizer._requires_update.update(optimizer._parameter_names)


@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize("method", ["dgc", "dgc, model, small ones", "dct", "micro"])
def test_horovods_optimizer_finds_results_in_place_of_its_gradients(monkeypatch, method, spoilt):
    monkeypatch.setattr(horovod.torch.optimizer._DistributedOptimizer, "_register_hooks", expect_all)

    def synchronized(place):
        parameters = place(make_parameters(SHAPES))
        optimizer = distributed(parameters, build(parameters, method))
        seen = []
        for t in range(3):
            for name, values in draw(SHAPES, t, hvd.rank()).items():
                gradient = torch.tensor(values if t != 1 or not spoilt else values * np.inf).to(torch.float32)
                parameters[name].grad = gradient if place is dict else DeviceTensor(gradient)
            optimizer.synchronize()
            seen.append({name: held(parameter.grad).clone() for name, parameter in parameters.items()})
        return seen

    assert_same(synchronized(on_device), synchronized(dict))


def warnings_of(make, elastic=True):
    with warnings.catch_warnings(record=True) as caught, alone_as_elastic() if elastic else contextlib.nullcontext():
        warnings.simplefilter("always")
        make()
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("method", "built", "advice"),
    [
        ("dgc", True, "Horovod was built without CUDA.*HOROVOD_GPU_OPERATIONS=NCCL"),
        ("dgc", False, "built without CUDA.*HVD_SPARSE_WITH_CUDA=1"),
        ("topk", False, "built without CUDA.*HVD_SPARSE_WITH_CUDA=1"),
        ("sidco", False, "built without CUDA.*HVD_SPARSE_WITH_CUDA=1"),
        ("micro", True, "Horovod was built without CUDA.*HOROVOD_GPU_OPERATIONS=NCCL"),
    ],
)
def test_a_compressor_warns_once_that_gradients_cross(monkeypatch, method, built, advice):
    monkeypatch.setattr("hvd_sparse.library.has_cuda", lambda framework: built)
    monkeypatch.setattr(hvd, "cuda_built", lambda: False)
    here = make_parameters(SHAPES)
    there, make = on_device(here), getattr(Compression, method)
    found = warnings_of(lambda: make(there.items()))
    assert len(found) == (hvd.rank() == 0), found
    assert not found or re.search("cross to the CPU and back: .*" + advice, found[0]), found
    assert not warnings_of(lambda: make(here.items()))


def test_a_hierarchical_exchange_warns_of_crossings_however_it_was_built(monkeypatch):
    monkeypatch.setattr("hvd_sparse.library.has_cuda", lambda framework: True)
    monkeypatch.setattr(hvd, "cuda_built", lambda: True)
    there = on_device(make_parameters(SHAPES))
    found = warnings_of(lambda: Compression.micro(there.items(), exchange="hierarchical"), elastic=False)
    is_told = hvd.rank() == 0 and hvd.size() > 1
    assert [one.rpartition(": ")[2] for one in found] == ['exchange="hierarchical" works on the CPU'] * is_told


@pytest.mark.rank_counts
@pytest.mark.skipif(hvd.size() > 1, reason="alone")
def test_a_lone_process_is_not_told_of_crossings_as_there_are_none():
    there = on_device(make_parameters(SHAPES))
    assert not warnings_of(lambda: Compression.sidco(there.items()), elastic=False)
    assert len(warnings_of(lambda: Compression.dgc(there.items()), elastic=False)) == 1  # its momentum
