"""Hundreds of fused all-gathers per step (Horovod issue 2961), in a different order on each rank."""

import time

import horovod.torch as hvd
import numpy as np
import pytest
import tiers
import torch
from gradients import SCOPES, shuffled
from helpers import assert_ranks_agree, distributed, make_parameters, memory_of, step, total

from hvd_sparse.torch import Compression

COUNT = 300
STEPS = 300
LEAST = 20 if tiers.ALL else 10


@pytest.mark.parametrize(("bucket_bytes", "seconds"), [(1, 6.0 if tiers.ALL else 3.0), (4096, 1.5)])
def test_hundreds_of_names_a_step(bucket_bytes, seconds):
    """As many steps as fit into a few seconds, at least LEAST: nothing hangs, nothing is lost, ranks agree."""
    shapes = {f"p{i:03d}": (1 + i * 7 % 50,) for i in range(COUNT)}
    parameters = make_parameters(shapes)
    for parameter in parameters.values():
        parameter.data.round_()
    start = {name: parameter.detach().double() for name, parameter in parameters.items()}
    settings = {"density": 0.1, "min_numel": 2, "bucket_bytes": bucket_bytes}
    compression = Compression.gradient_dropping(parameters.items(), **settings)
    optimizer = distributed(parameters, compression, lr=1.0, op=hvd.Sum)
    fed = {name: np.zeros(shape) for name, shape in shapes.items()}
    deadline, t = time.monotonic() + seconds, 0
    while t < LEAST or (t < STEPS and total(time.monotonic() < deadline) == hvd.size()):
        generator = np.random.default_rng([t, hvd.rank()])
        gradients = {name: generator.integers(-9, 10, shape) * 1.0 for name, shape in shapes.items()}
        for name, gradient in gradients.items():
            fed[name] += gradient
        step(optimizer, parameters, gradients, shuffled(shapes, t, hvd.rank()))
        t += 1
    assert_ranks_agree(parameters)
    assert compression.stats()["steps"] == t
    books = [torch.tensor(fed[name]) - memory_of(compression, parameters, name) for name in shapes]
    moved = torch.cat([start[name] - parameters[name].detach().double() for name in shapes])
    assert torch.equal(total(torch.cat(books)), moved)


@pytest.mark.parametrize("scope", SCOPES)
def test_many_compressors_at_once(scope):
    """Twenty in one process, all steps begun before the first is ended, each rank in its own order."""
    models = []
    for number in range(20):
        parameters = make_parameters({f"{number}.a": (60,), f"{number}.b": (5, 30)})
        compression = Compression.dgc(parameters.items(), density=0.1, min_numel=10, scope=scope)
        models.append((parameters, distributed(parameters, compression), compression))
    shapes = {name: tuple(p.shape) for parameters, _, _ in models for name, p in parameters.items()}
    everything = {name: p for parameters, _, _ in models for name, p in parameters.items()}
    for t in range(15):
        order = range(20) if t == 0 else shuffled(range(20), t, hvd.rank())
        generator = np.random.default_rng([t, hvd.rank()])
        for number in order:
            parameters, optimizer, _ = models[number]
            optimizer.zero_grad()
            gradients = {name: generator.standard_normal(shapes[name]) for name in parameters}
            for name in shuffled(parameters, t, hvd.rank()):
                (parameters[name] * torch.tensor(gradients[name]).float()).sum().backward()
        for number in shuffled(range(20), t + 100, 0):
            models[number][1].step()
    assert_ranks_agree(everything)
    assert {compression.stats()["steps"] for _, _, compression in models} == {15}
