"""`reduce_gradients` reduces the gradients of a loop without DistributedDataParallel as that would, bit for bit."""

import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ddp_helpers import ALONE, Balance, Trainer, assert_alive, assert_ranks_agree
from gradients import SHAPES, draw
from oracle import Method, train_without_ties
from terms import Terms
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_sparse.torch.ddp import Compression

FEW = {"density": 0.05, "min_numel": 100, "dense_fallback": None}  # two of the four tensors are small, and sent dense
METHODS = {
    "dgc": ("dgc", {**FEW, "momentum": 0.9, "weight_decay": 0.1, "clip_norm": 5.0}),
    "dgc, joint": ("dgc", {**FEW, "momentum": 0.9, "scope": "model", "clip_norm": 5.0, "clip_scope": "model"}),
    "reduce-scatter": ("gradient_dropping", {**FEW, "exchange": "reduce_scatter"}),
    "hierarchical": ("gradient_dropping", {**FEW, "exchange": "hierarchical", "ranks_per_host": 1}),
    "micro": ("micro", FEW),
    "dct": ("dct", FEW),
    "hard_threshold": ("hard_threshold", {"value": 2.0, "min_numel": 100}),
    "dense": ("dgc", {**FEW, "momentum": 0.9, "density": 1.0}),
}


class Loop(Trainer):
    """A `Trainer` without DistributedDataParallel."""

    def __init__(self, method="gradient_dropping", dtype=torch.float32, group=None, shapes=SHAPES, **settings):
        self.model, self.lr = Terms(draw(shapes, step=0, rank=0, seed=1), dtype), 0.1
        self.compression = getattr(Compression, method)(self.model.named(), process_set=group, **settings)
        self.ddp = SimpleNamespace(process_group=group)  # for Balance

    def reduced(self, gradients):
        self.model.zero_grad(set_to_none=True)
        if gradients:
            self.model(gradients).backward()
        self.compression.reduce_gradients()
        return {name: parameter.grad for name, parameter in self.model.named()}


def assert_equal(one, other):
    """Assert that two trainers have the same parameters, residuals and velocities, bit for bit, and residuals."""
    assert any(bool(one.buffer(name).any()) for name in SHAPES)
    for name in SHAPES:
        assert torch.equal(one.model[name], other.model[name]), name
        for kind in one.KINDS:
            assert torch.equal(one.buffer(name, kind), other.buffer(name, kind)), (name, kind)


@pytest.mark.parametrize("method", METHODS)
def test_bits_and_bytes_are_those_of_ddp(method):
    """But for 8 bytes a parameter, which tell who has a gradient."""
    if method == "dense" and dist.get_world_size() > 2:
        pytest.skip("an all-reduce adds three numbers in an order that depends on what else is in the message")
    name, settings = METHODS[method]
    ddp, own = Trainer(name, **settings), Loop(name, **settings)
    for step in range(6):
        gradients = draw(SHAPES, step, dist.get_rank())
        expected, found = ddp.step(gradients), own.step(gradients)
        assert all(torch.equal(expected[key], found[key]) for key in SHAPES)
    if method != "dense":
        assert_equal(ddp, own)
    expected, found = ddp.compression.stats()["total"], own.compression.stats()["total"]
    assert found["payload_bytes"] == expected["payload_bytes"] + 6 * 8 * len(SHAPES)
    assert found["density"] == expected["density"] and found["dense_bytes"] == expected["dense_bytes"]
    assert found["seconds"]["exchange"] > 0.0
    assert_ranks_agree(own.model)


@pytest.mark.rank_counts
def test_dgc_is_that_of_the_paper():
    """Against the oracle in NumPy."""
    settings, steps = {"density": 0.05, "momentum": 0.9, "nesterov": True, "clip_norm": 8.0, "min_numel": 100}, 20
    trainer, rank, ranks = Loop("dgc", **settings), dist.get_rank(), dist.get_world_size()
    start = {key: parameter.detach().double().numpy().copy() for key, parameter in trainer.model.named()}
    expected, seed = train_without_ties(
        Method(**settings), start, lambda step, k, seed: draw(SHAPES, step, k, seed), ranks, steps, 0.1
    )
    for step in range(steps):
        trainer.step(draw(SHAPES, step, rank, seed))
    for key, parameter in trainer.model.named():
        for found, wanted in (
            (parameter.detach(), expected.parameters[key]),
            (trainer.buffer(key), expected.v[rank][key].reshape(-1)),
            (trainer.buffer(key, "velocity"), expected.u[rank][key].reshape(-1)),
        ):
            np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5, err_msg=key)
    assert_ranks_agree(trainer.model)


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_lost_if_ranks_lack_gradients(method):
    name, settings = METHODS[method]
    settings = {key: value for key, value in settings.items() if key in ("density", "exchange", "ranks_per_host")}
    name = "gradient_dropping" if name == "dgc" else name
    settings |= {"value": 60.0} if name == "hard_threshold" else {"dense_fallback": None}
    balance = Balance(trainer := Loop(name, min_numel=100, **settings))
    names, before = sorted(SHAPES), {}
    for step in range(12):
        kind = step % 4
        here = names if kind == 0 else names[:2] if kind == 1 else names[(step + dist.get_rank()) % 2 :: 2]
        before = {key: trainer.buffer(key) for key in names} if step else {}
        reduced = trainer.reduced(balance.gradients(step, here))
        for key in names[2:] if kind == 1 else ():
            assert reduced[key] is None and torch.equal(trainer.buffer(key), before[key])
        balance.deliver(reduced)
    balance.check()
    assert any(bool(one.any()) for one in before.values()) or method == "dense"


@ALONE
def test_a_rank_without_a_gradient_counts_with_zeros_and_keeps_its_residual():
    trainer, first = Loop(**FEW), dist.get_rank() == 0
    trainer.reduced(draw(SHAPES, 0, dist.get_rank()))
    before = trainer.buffer("head.weight")
    assert bool(before.any())
    reduced = trainer.reduced({"head.weight": 1000.0 * torch.ones(500), "scale": 4.0} if first else {"scale": 4.0})
    assert torch.equal(trainer.buffer("head.weight"), before) != first
    assert float(reduced["head.weight"].max()) > 900.0 / dist.get_world_size()
    assert reduced["body.weight"] is reduced["body.bias"] is None
    assert float(reduced["scale"]) == 4.0  # small: sent dense


def test_half_precision_is_that_of_ddp():
    dtypes = dict(zip(SHAPES, (torch.float16, torch.float32, torch.bfloat16, torch.float16), strict=True))
    ddp, own = (kind("dgc", dtype=dtypes, momentum=0.9, **FEW) for kind in (Trainer, Loop))
    for step in range(5):
        gradients = draw(SHAPES, step, dist.get_rank())
        expected, found = ddp.step(gradients), own.step(gradients)
        assert all(found[name].dtype == dtypes[name] and torch.equal(expected[name], found[name]) for name in SHAPES)
    assert_equal(ddp, own)


@pytest.mark.parametrize("settings", [{}, {"exchange": "hierarchical", "ranks_per_host": 1}], ids=["gather", "hosts"])
def test_gradients_of_another_type_than_their_parameters(settings):
    """bfloat16 weights with float32 gradients. A rank without a gradient sends zeros of the others' type."""
    model = nn.Sequential(nn.Linear(20, 30, bias=False), nn.Linear(30, 5, bias=False)).to(torch.bfloat16)
    if not hasattr(model[0].weight, "grad_dtype"):
        pytest.skip("this PyTorch has gradients of their parameters' type only")
    compression = Compression.gradient_dropping(
        model.named_parameters(), density=0.5, min_numel=1, dense_fallback=None, **settings
    )
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    draws = torch.Generator().manual_seed(1)
    every = [torch.randn(30, 20, generator=draws) for _ in range(dist.get_world_size())]
    if len(every) > 1:
        every[0] *= 0.0  # the first rank has no gradient
    if dist.get_rank() > 0 or len(every) == 1:
        model[0].weight.grad = every[dist.get_rank()].clone()
    model[1].weight.grad = torch.ones(5, 30)
    compression.reduce_gradients()
    assert [one.grad.dtype for one in model.parameters()] == [torch.float32] * 2
    expected = sum(every) / len(every)
    found, buffers = model[0].weight.grad, compression.state_dict()["memory"]["0.weight"]
    rest = buffers["residual"].view(30, 20).clone() if buffers else torch.zeros(30, 20)
    dist.all_reduce(rest)
    torch.testing.assert_close(found + rest / len(every), expected, rtol=1e-6, atol=1e-7)
    delivered = found[found != 0.0]
    assert delivered.numel() > 200 and not torch.equal(delivered, delivered.bfloat16().float())


@ALONE
def test_a_process_group_reduces_for_itself():
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    balance = Balance(trainer := Loop(group=groups[dist.get_rank()], **FEW))
    for step in range(3):
        balance.deliver(trainer.reduced(balance.gradients(step)))
    balance.check()
    assert bool(trainer.buffer("head.weight").any())
    with pytest.raises(ValueError, match=r"the model exchanges over a process group of . ranks, its compressor over"):
        Compression.dgc(named := nn.Linear(4, 4), process_set=groups[dist.get_rank()]).register(
            DistributedDataParallel(named)
        )


class Scaled:
    """A linear model, and a loop with a loss scaler; None: without."""

    def __init__(self, scale=None, **settings):
        torch.manual_seed(0)
        self.model = nn.Linear(40, 30)
        self.compression = Compression.dgc(self.model, 0.05, momentum=0.9, clip_norm=0.1, min_numel=100, **settings)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)

    def step(self, factor=1.0):
        self.optimizer.zero_grad()
        inputs = torch.randn(8, 40, generator=torch.Generator().manual_seed(dist.get_rank()))
        self.scaler.scale(self.model(inputs).square().mean() * factor).backward()
        self.compression.reduce_gradients()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def test_a_loss_scale_changes_nothing_and_an_overflow_skips_the_step_on_all_ranks():
    plain, scaled = Scaled(), Scaled(64.0)
    scaled.compression.loss_scale = scaled.scaler
    for _ in range(3):
        plain.step(), scaled.step()
    before = scaled.model.weight.detach().clone()
    assert torch.equal(plain.model.weight, before)
    scaled.step(float("inf") if dist.get_rank() == 0 else 1.0)
    assert all(bool(parameter.grad.isnan().all()) for parameter in scaled.model.parameters())
    assert torch.equal(scaled.model.weight, before) and scaled.scaler.get_scale() == 32.0
    scaled.step()
    assert not torch.equal(scaled.model.weight, before) and bool(scaled.model.weight.isfinite().all())
    assert_ranks_agree(scaled.model)


def test_a_loss_scale_that_was_not_set_is_an_error():
    with pytest.raises(RuntimeError, match=r"before training: compression\.loss_scale = scaler"):
        Scaled(64.0).step()


def test_a_checkpoint_continues_bit_for_bit_also_under_ddp():
    settings = {**FEW, "momentum": 0.9}
    whole = Loop("dgc", **settings)
    for step in range(3):
        whole.step(draw(SHAPES, step, dist.get_rank()))
    weights, state = whole.model.state_dict(), whole.compression.state_dict()
    weights = {name: weight.clone() for name, weight in weights.items()}
    resumed = [Loop("dgc", **settings), Trainer("dgc", **settings)]
    for other in resumed:
        other.model.load_state_dict(weights)
        other.compression.load_state_dict(state)
    for step in range(3, 6):
        for one in (whole, *resumed):
            one.step(draw(SHAPES, step, dist.get_rank()))
    for other in resumed:
        assert_equal(whole, other)


def test_frozen_parameters_are_left_alone_and_copies_that_do_not_train_are_reduced():
    """Outer steps keep copies of the weights, give them their changes as gradients, and step with another optimizer."""
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 10))
    model[1].requires_grad_(False)
    compression = Compression.gradient_dropping(model, 0.05, min_numel=100)
    copies = [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]
    outer = Compression.gradient_dropping(copies, 0.05, min_numel=100)
    model(torch.ones(8, 40)).square().mean().backward()
    given = model[0].weight.grad.clone()
    for _, copied in copies:
        copied.grad = torch.ones(1).expand(copied.shape)  # PyTorch does not write to such a tensor
    compression.reduce_gradients()
    outer.reduce_gradients()
    assert model[1].weight.grad is None and 0 < int(model[0].weight.grad.count_nonzero()) < given.numel()
    assert copies[1][1].grad.tolist() == [1.0] * 30  # small: sent dense
    assert int(copies[0][1].grad.count_nonzero()) == round(0.05 * given.numel())
    model[1].requires_grad_(True)  # it may train later
    model(torch.ones(8, 40)).square().mean().backward()
    compression.reduce_gradients()
    assert bool(model[1].weight.grad.any())


def test_parameters_in_channels_last_order():
    def step(layout):
        torch.manual_seed(0)
        model = nn.Conv2d(6, 8, 3).to(memory_format=layout)
        compression = Compression.gradient_dropping(model, 0.1, min_numel=100, dense_fallback=None)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(3):
            gradient = torch.randn(8, 6, 3, 3, generator=generator)  # contiguous
            model.weight.grad, model.bias.grad = gradient, torch.ones(8)
            compression.reduce_gradients()
            assert model.weight.grad.data_ptr() == gradient.data_ptr(), "it may be a view of a buffer"
        return model.weight.grad, compression.state_dict()["memory"]["weight"]["residual"]

    for plain, other in zip(step(torch.contiguous_format), step(torch.channels_last), strict=True):
        assert torch.equal(plain, other) and bool(plain.any())


def linear():
    model = nn.Linear(40, 30)
    return model, Compression.dgc(model, momentum=0.9)


def test_a_registered_compressor_and_a_registration_afterwards_are_refused():
    model, compression = linear()
    wrapped = DistributedDataParallel(model)
    compression.register(wrapped)
    with pytest.raises(RuntimeError, match=r"loops without DistributedDataParallel, but this compressor is registered"):
        compression.reduce_gradients()
    model, compression = linear()
    model(torch.ones(8, 40)).sum().backward()
    compression.reduce_gradients()
    with pytest.raises(ValueError, match=r"reduces gradients by reduce_gradients\(\) already: build a new one"):
        compression.register(DistributedDataParallel(model))


def test_a_call_without_any_gradient_is_refused_on_all_ranks():
    model, compression = linear()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"found no gradient on any rank: call it after backward\(\)"):
            compression.reduce_gradients()
    model(torch.ones(8, 40)).sum().backward()
    compression.reduce_gradients()
    assert compression.stats()["steps"] == 1 and bool(model.weight.grad.any())


@ALONE
def test_a_sparse_gradient_of_one_rank_is_refused_on_all_ranks():
    model = nn.Embedding(40, 30, sparse=dist.get_rank() == 1)
    compression = Compression.dgc(model)
    model(torch.arange(3)).sum().backward()
    with pytest.raises(ValueError, match=r"does not compress sparse gradients .*sparse on at least one rank: weight"):
        compression.reduce_gradients()
    assert_alive()


@ALONE
def test_settings_that_differ_are_refused_on_all_ranks():
    trainer = Loop(density=0.1 if dist.get_rank() == 0 else 0.2)
    with pytest.raises(ValueError, match="the ranks do not agree on model or settings: rank 1 has"):
        trainer.reduced(draw(SHAPES, 0, 0))
    assert_alive()


def test_two_calls_for_a_step_are_warned_of_once():
    loop = Scaled()
    loop.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            loop.step()
        assert not caught
        for _ in range(3):
            loop.compression.reduce_gradients()
            loop.compression.reduce_gradients()
    told = [one for one in caught if re.search(r"two calls of reduce_gradients\(\) without", str(one.message))]
    assert len(told) == len(caught) == (dist.get_rank() == 0)


def test_before_init_process_group(monkeypatch):
    model, compression = linear()
    model(torch.ones(8, 40)).sum().backward()
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialised; call torch\.distributed\.init_pro"):
        compression.reduce_gradients()
    monkeypatch.undo()
    compression.reduce_gradients()
    assert compression.stats()["steps"] == 1
