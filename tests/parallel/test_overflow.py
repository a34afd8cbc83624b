"""NaN and infinity: the step is skipped on every rank, error feedback stays finite, no finite element is lost."""

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from gradients import SCOPES, SHAPES, draw, shuffled, whole_numbers
from helpers import assert_ranks_agree, backward, distributed, drive, make_parameters, memory_of, step, total
from horovod.torch import mpi_ops

from hvd_sparse.schedule import Schedule
from hvd_sparse.torch import Compression

SPARSE = ("body.weight", "head.weight")  # the others are small and sent dense
BAD = {"nan": np.nan, "inf": np.inf, "minus_inf": -np.inf}


def spoilt(gradients, name, value):
    """Return the gradients with one element of one tensor replaced."""
    damaged = {key: np.array(gradient) for key, gradient in gradients.items()}
    damaged[name].reshape(-1)[-1] = value
    return damaged


def all_memories_are_finite(compression):
    buffers = [b for memory in compression.state_dict()["memory"].values() for b in memory.values()]
    return all(bool(buffer.isfinite().all()) for buffer in buffers)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("method", ["gradient_dropping", "dgc"])
def test_one_bad_gradient_voids_the_step_on_every_rank(method, bad, scope):
    """In every tensor in turn, on one rank or the other; the first step too. Then the books balance."""
    parameters = make_parameters()
    settings = {"momentum": 0.0} if method == "dgc" else {}
    make = getattr(Compression, method)
    compression = make(parameters.items(), density=0.05, scope=scope, min_numel=100, **settings)
    balance = {name: np.zeros(SHAPES[name]) for name in SPARSE}
    for t in range(12):
        gradients = whole_numbers(SHAPES, t, hvd.rank())
        victim = sorted(SHAPES)[t // 2 % 4] if t % 2 == 0 else None
        hit = victim is not None and hvd.rank() == t // 2 % hvd.size()
        fed = spoilt(gradients, victim, BAD[bad]) if hit else gradients
        reduced = drive(compression, parameters, fed, order=shuffled(SHAPES, t, hvd.rank()))
        for name, result in reduced.items():
            assert result.shape == SHAPES[name] and result.dtype == torch.float32
            assert bool(result.isnan().all()) if victim else bool(result.isfinite().all()), (t, name)
        assert all_memories_are_finite(compression)
        for name in SPARSE:
            balance[name] += total(
                spoilt(gradients, name, 0.0)[name] if hit and name == victim else gradients[name]
            ).numpy()
            balance[name] -= 0.0 if victim else reduced[name].double().numpy()
    for name in SPARSE:
        residual = total(memory_of(compression, parameters, name)).numpy()
        assert (balance[name].reshape(-1) == residual).all(), name
    stats = compression.stats()
    assert (stats["steps"], stats["skipped"]) == (12, 6)
    compression.reset()
    assert compression.stats()["skipped"] == 0


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_of_every_type(dtype, scope):
    parameters = make_parameters(dtype=dtype)
    compression = Compression.dgc(parameters.items(), density=0.05, scope=scope, min_numel=100)
    for t in range(4):
        fed = draw(SHAPES, t, hvd.rank())
        if t == 2 and hvd.rank() == hvd.size() - 1:
            fed = spoilt(fed, "body.weight", np.inf)
        reduced = drive(compression, parameters, fed)
        for result in reduced.values():
            assert result.dtype == dtype and bool(result.isnan().all() if t == 2 else result.isfinite().all())
    assert all_memories_are_finite(compression)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_float64_gradient_beyond_float32_never_enters_a_memory(scope):
    parameters = make_parameters(dtype=torch.float64)
    compression = Compression.gradient_dropping(parameters.items(), density=0.05, scope=scope, min_numel=100)
    drive(compression, parameters, draw(SHAPES, 0, hvd.rank()))
    reduced = drive(compression, parameters, spoilt(draw(SHAPES, 1, hvd.rank()), "head.weight", 1e300))
    assert all(bool(result.isnan().all()) for result in reduced.values())
    assert all_memories_are_finite(compression)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("groups", [None, 1])
def test_with_a_loss_scaler(groups, scope):
    """torch.amp.GradScaler skips the step on every rank alike; the residual is that of the gradients without the scale.

    All scales are powers of two, gradients whole numbers, lr 1: the parameters are an exact ledger.
    """
    parameters = {n: torch.nn.Parameter(p.detach().round()) for n, p in make_parameters().items()}
    start = {name: parameter.detach().double() for name, parameter in parameters.items()}
    compression = Compression.gradient_dropping(parameters.items(), density=0.05, scope=scope, min_numel=100)
    optimizer = distributed(parameters, compression, lr=1.0, op=hvd.Sum, groups=groups)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    fed = {name: np.zeros(SHAPES[name]) for name in SPARSE}
    scales = [scaler.get_scale()]
    compression.loss_scale = scaler.get_scale()
    for t in range(12):
        optimizer.zero_grad()
        gradients = whole_numbers(SHAPES, t, hvd.rank())
        hit = t in (3, 7) and hvd.rank() == t % hvd.size()
        scaled = {name: gradient * scaler.get_scale() for name, gradient in gradients.items()}
        scaler.scale(torch.zeros(()))  # the scaler wants to have been asked
        backward(parameters, spoilt(scaled, "head.weight", np.inf) if hit else scaled)
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(before[name], parameters[name]) for name in SHAPES)
        assert moved == (t not in (3, 7))
        compression.loss_scale = scaler.get_scale()
        scales.append(scaler.get_scale())
        for name in SPARSE:
            fed[name] += spoilt(gradients, name, 0.0)[name] if hit and name == "head.weight" else gradients[name]
    assert (np.diff(scales) < 0).sum() == 2 and (np.diff(scales) > 0).any()
    assert_ranks_agree(parameters)
    for name in SPARSE:
        sent = (start[name] - parameters[name].detach().double()).reshape(-1)
        waiting = total(memory_of(compression, parameters, name))
        assert torch.equal(total(fed[name]).reshape(-1), sent + waiting), name


@pytest.mark.parametrize("clip_scope", SCOPES)
def test_a_huge_finite_gradient_is_clipped_to_the_bound(clip_scope):
    """Its squares are beyond float32; it still has a direction."""
    parameters = make_parameters()
    settings = {"momentum": 0.0, "clip_norm": 3.0, "clip_scope": clip_scope, "scope": "model"}
    compression = Compression.dgc(parameters.items(), density=1.0, **settings)
    gradients = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    gradients["head.weight"] = draw(SHAPES, 0, 0)["head.weight"] * 1e25
    reduced = drive(compression, parameters, gradients, op=hvd.Average)
    assert float(reduced["head.weight"].norm()) == pytest.approx(3.0 * hvd.size() ** 0.5, rel=1e-4)


class DenseOnce(Schedule):
    """Sparse, but for step 1."""

    def density(self, step):
        return 1.0 if step == 1 else 0.1

    def describe(self):
        return "dense once"


@pytest.mark.parametrize("scope", SCOPES)
def test_a_void_dense_step_loses_no_residual(scope):
    parameters = make_parameters()
    compression = Compression.gradient_dropping(parameters.items(), density=DenseOnce(), scope=scope, min_numel=100)
    drive(compression, parameters, whole_numbers(SHAPES, 0, hvd.rank()))
    waiting = total(memory_of(compression, parameters, "body.weight"))
    gradients = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    drive(compression, parameters, spoilt(gradients, "head.weight", np.nan) if hvd.rank() == 0 else gradients)
    kept = total(memory_of(compression, parameters, "body.weight"))
    everyone = total(float(torch.equal(waiting, kept) and bool(waiting.any())))
    assert everyone == hvd.size()


@pytest.mark.parametrize("scope", SCOPES)
def test_a_void_step_at_density_one_is_the_one_that_sgd_skips(scope):
    """Density 1 is Horovod, loss scaling included: as if the step had not been."""
    parameters, plain = make_parameters(), make_parameters({f"plain.{name}": shape for name, shape in SHAPES.items()})
    for name, parameter in plain.items():
        parameter.data.copy_(parameters[name.removeprefix("plain.")])
    compression = Compression.dgc(parameters.items(), density=1.0, momentum=0.9, scope=scope)
    ours = distributed(parameters, compression)
    inner = torch.optim.SGD(list(plain.values()), lr=0.1, momentum=0.9)
    expected = distributed(plain, optimizer=inner)
    for t in range(6):
        gradients = draw(SHAPES, t, hvd.rank())
        ours.zero_grad()
        bad = t == 3 and hvd.rank() == 0
        backward(parameters, spoilt(gradients, "head.weight", np.nan) if bad else gradients)
        ours.synchronize()
        if t != 3:
            with ours.skip_synchronize():
                ours.step()
            step(expected, plain, {f"plain.{name}": gradient for name, gradient in gradients.items()})
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter, plain[f"plain.{name}"], rtol=1e-5, atol=1e-6)


KINDS = {"sparse": {"density": 0.05}, "dense": {"density": 1.0}, "small": {"min_numel": 10**6}}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_collective_is_left_pending(kind, scope):
    """Horovod keeps a handle and its tensors until someone waits for it: after each step there must be none."""
    before = len(mpi_ops._handle_map)
    parameters = make_parameters()
    compression = Compression.dgc(parameters.items(), **{"min_numel": 100, **KINDS[kind]}, scope=scope)
    for t in range(4):
        gradients = draw(SHAPES, t, hvd.rank())
        drive(compression, parameters, spoilt(gradients, "body.weight", np.nan) if t == 2 else gradients)
        assert len(mpi_ops._handle_map) == before, f"after step {t}"
