"""PyTorch's session and optimizer on one co-located rank: parameters, gradients and options of every kind."""

import contextlib
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch_session import SMALL, learn, network, numbers, same

from hvd_sparse.parameter_server import ServerRefused, Simulation
from hvd_sparse.parameter_server.protocol import Reason
from hvd_sparse.parameter_server.server import departures
from hvd_sparse.torch.asynchronous import DGS, MSGD, DCTAsync, DGCAsync, GradientDroppingAsync


def test_one_dense_worker_is_sgd(join):
    ours, theirs = network(), network()
    session = join(ours)
    learn(ours, session.optimizer(lr=0.1, weight_decay=0.01), 30)
    learn(theirs, torch.optim.SGD(theirs.parameters(), 0.1, weight_decay=0.01), 30)
    same(numbers(ours), numbers(theirs), rtol=1e-5, atol=1e-6)
    same(session.global_state_dict(), ours.state_dict())


def test_momentum_sgd_on_one_worker(join):
    for nesterov in (False, True):
        ours, theirs = network(), network()
        session = join(ours, MSGD(momentum=0.9, nesterov=nesterov))
        learn(ours, session.optimizer(lr=0.05), 30)
        learn(theirs, torch.optim.SGD(theirs.parameters(), 0.05, 0.9, nesterov=nesterov), 30)
        same(numbers(ours), numbers(theirs), rtol=1e-4, atol=1e-5)
        session.close()


METHODS = [DGS(**SMALL), DGCAsync(**SMALL), GradientDroppingAsync(**SMALL, pull_density=0.3), DCTAsync(**SMALL)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_it_does_what_the_simulation_does(join, method, threads):
    """Two threads of a server are two servers."""
    model, twin = network(), network()
    session = join(model, method, threads=threads)
    learn(model, session.optimizer(lr=0.1), 40)
    simulation = Simulation(method, {name: p.numpy() for name, p in numbers(twin).items()}, 1, threads)
    random = torch.Generator().manual_seed(0)

    def gradients(worker, theta):
        twin.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in theta.items()})
        twin.zero_grad()
        (twin(torch.randn(5, 6, generator=random)) - 1).square().mean().backward()
        return {name: parameter.grad.numpy() for name, parameter in twin.named_parameters()}

    for _ in range(40):
        simulation.step(0, gradients, 0.1)
    for name, parameter in numbers(model).items():
        assert (parameter.numpy().reshape(-1) == simulation.workers[0].parameters[name]).all()


def test_schedulers_and_groups(join):
    ours, theirs = network(), network()

    def groups(model):
        return [
            {"params": model[0].parameters(), "lr": 0.2, "weight_decay": 0.1},
            {"params": [model[2].weight]},
            {"params": [model[2].bias], "weight_decay": 0.02},
        ]

    session = join(ours)
    optimizers = session.optimizer(groups(ours), lr=0.05), torch.optim.SGD(groups(theirs), lr=0.05)
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        learn(model, optimizer, 20, before=lambda step, scheduler=scheduler: step and scheduler.step())
    assert optimizers[0].param_groups[1]["lr"] == pytest.approx(optimizers[1].param_groups[1]["lr"])
    assert optimizers[0].param_groups[0]["lr"] < 0.01
    same(numbers(ours), numbers(theirs), rtol=1e-5, atol=1e-6)


def test_a_part_of_the_parameters(join):
    model = network()
    before = numbers(model)
    session = join(model)
    learn(model, session.optimizer(model[2].parameters(), lr=0.1), 5)
    after = numbers(model)
    assert torch.equal(before["0.weight"], after["0.weight"]) and not torch.equal(before["2.weight"], after["2.weight"])


def test_closures(join):
    ours, theirs = network(), network()
    x = torch.randn(5, 6)
    losses = []
    for model, optimizer in (
        (ours, join(ours).optimizer(lr=0.1)),
        (theirs, torch.optim.SGD(theirs.parameters(), lr=0.1)),
    ):

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        losses.append([optimizer.step(closure).item() for _ in range(10)])
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types_have_a_float32_master(join, dtype):
    """The parameters are what servers hold, rounded: small updates add up in float32."""
    model = network().to(dtype)
    session = join(model)
    optimizer = session.optimizer(lr=1e-4)
    for _ in range(100):
        model[0].bias.grad = torch.ones(9, dtype=dtype)
        optimizer.step()
    expected = network()[0].bias.detach().to(dtype).float() - 0.01
    master = session.worker.parameters["0.bias"]
    np.testing.assert_allclose(master, expected.numpy(), atol=2e-6)
    assert torch.equal(model[0].bias.detach(), torch.from_numpy(master).to(dtype))
    assert {value.dtype for value in session.global_state_dict().values()} == {dtype}
    state = optimizer.state_dict()["state"]
    assert all(value.dtype == torch.float32 for memory in state.values() for value in memory.values())
    learn(model, optimizer, 3, dtype=dtype)


def test_one_parameter_under_two_names_is_refused(join):
    model = Odd()
    with pytest.raises(ValueError, match=r"words\.weight and out\.weight are one parameter"):
        join(model.named_parameters(remove_duplicate=False), GradientDroppingAsync(min_numel=0))


class Odd(nn.Module):
    """Parameters that are not contiguous, of no dimension, frozen, tied, and one without a gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(16, 5).t())
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.words = nn.Embedding(20, 4)
        self.out = nn.Linear(4, 20, bias=False)
        self.out.weight = self.words.weight

    def forward(self, image, word):
        hidden = self.convolution(image).mean((2, 3)) @ self.turned[:4] * self.scale
        return hidden.sum() + self.out(self.words(word)).square().mean()


def step_odd(model, optimizer, step):
    torch.manual_seed(step)
    optimizer.zero_grad()
    model(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last), torch.arange(6)).backward()
    optimizer.step()


@pytest.mark.parametrize("density", [1.0, 0.1])
def test_odd_parameters(join, density):
    ours, theirs = Odd(), Odd()
    assert not ours.convolution.weight.is_contiguous() and not ours.turned.is_contiguous()
    method = GradientDroppingAsync(density=density, min_numel=0)
    session = join(ours, method)
    optimizer, sgd = session.optimizer(lr=0.01), torch.optim.SGD(theirs.parameters(), lr=0.01)
    for step in range(10):
        step_odd(ours, optimizer, step)
        if density < 1:
            continue
        step_odd(theirs, sgd, step)
        same(numbers(ours), numbers(theirs), rtol=1e-5, atol=1e-6)
    before = Odd()
    assert torch.equal(ours.frozen, before.frozen) and torch.equal(ours.unused, before.unused)
    assert "frozen" not in session.tensors and ours.out.weight is ours.words.weight
    assert not ours.convolution.weight.is_contiguous()
    fresh = Odd()
    fresh.load_state_dict(session.global_state_dict())
    same(numbers(fresh), numbers(ours))
    assert {"out.weight", "words.weight", "frozen"} <= session.global_state_dict().keys()


def test_sparse_gradients(join):
    ours, theirs = (nn.Embedding(30, 4, sparse=sparse) for sparse in (True, False))
    theirs.load_state_dict(ours.state_dict())
    session = join(ours)
    optimizer, sgd = session.optimizer(lr=0.1), torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(5):
        for model, one in ((ours, optimizer), (theirs, sgd)):
            one.zero_grad()
            model(torch.tensor([1, 2, 2, 7])).square().sum().backward()
            one.step()
    assert ours.weight.grad.is_sparse
    same(numbers(ours), numbers(theirs), rtol=1e-6, atol=1e-6)


def test_the_ratio_of_answers_is_without_the_model(join):
    model = network()
    session = join(model)
    dense, first = 4 * sum(one.numel() for one in model.parameters()), session.stats()
    assert first["bytes_model"] == dense < first["bytes_down"]
    learn(model, session.optimizer(lr=0.1), 3)
    session.synchronize()
    stats = session.stats()
    assert stats["bytes_model"] == dense
    assert stats["ratio_down"] == pytest.approx(3 * dense / (stats["bytes_down"] - dense), rel=1e-12)


def test_gradient_scaler(join):
    """It scales back before the step, and leaves a step with infinite gradients out: nothing is pushed."""
    ours, theirs = network(), network()
    session = join(ours)
    optimizer, sgd = session.optimizer(lr=0.1), torch.optim.SGD(theirs.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(10):
        torch.manual_seed(step)
        x = torch.randn(5, 6)
        optimizer.zero_grad()
        factor = float("inf") if step == 4 else 1.0
        scaler.scale((ours(x) - 1).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        if step != 4:
            sgd.zero_grad()
            (theirs(x) - 1).square().mean().backward()
            sgd.step()
    assert session.stats()["pushes"] == 9 and session.stats()["non_finite"] == 0 and scaler.get_scale() == 512.0
    same(numbers(ours), numbers(theirs), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_gradients_are_clipped_before_the_step_as_on_one_device(join, scale):
    ours, theirs = network(), network()
    optimizer, sgd = join(ours).optimizer(lr=0.1), torch.optim.SGD(theirs.parameters(), lr=0.1)
    for model, own in ((ours, optimizer), (theirs, sgd)):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None and own is optimizer)
        for step in range(5):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
            own.zero_grad()
            scaler.scale((model(x) - 1).square().mean()).backward()
            scaler.unscale_(own)
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
            scaler.step(own)
            scaler.update()
    same(numbers(ours), numbers(theirs), rtol=1e-5, atol=1e-6)


def test_gradients_that_are_not_finite_count_as_zero(join):
    model = network()
    session = join(model)
    optimizer, before = session.optimizer(lr=0.1), numbers(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.step()
    same(numbers(model), before)
    assert session.stats()["non_finite"] == 4


@pytest.mark.parametrize("in_turn", [True, False])
def test_several_optimizers_of_one_session_are_warned_of_once(join, in_turn):
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 2))
    session = join(model)
    first, second = (session.optimizer(part.parameters(), lr=0.1) for part in model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for optimizer in (first, second, first, second) if in_turn else (first, first, second, second):
            learn(model, optimizer, 1)
    told = [one for one in caught if "several optimizers of one session step in turn" in str(one.message)]
    assert len(told) == in_turn


@pytest.mark.parametrize(("code", "reason"), [(None, ""), (0, ""), (3, "SystemExit: 3"), ("why", "SystemExit: why")])
def test_leaving_by_sys_exit_is_an_error_if_its_code_is_one(join, code, reason):
    session = join(network())
    server = session._local.servers[0]
    with contextlib.suppress(SystemExit), session:
        sys.exit(code)
    assert departures([server]) == {0: reason}


def test_a_generator_that_ends_leaves_without_an_error(join):
    session = join(network())
    server = session._local.servers[0]

    def batches():
        with session:
            yield

    started = batches()
    next(started)
    started.close()
    assert departures([server]) == {0: ""}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # those of float64 are copies of the worker's
def test_a_backward_pass_through_what_a_step_has_changed_is_refused(join, dtype):
    """Also by torch.optim.SGD. The gradient would be that of neither model."""
    model = network().to(dtype)
    optimizer = join(model).optimizer(lr=0.1)
    outputs = model(torch.ones(2, 6, dtype=dtype))
    outputs.sum().backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.square().sum().backward()


class Versioned(nn.Linear):
    """A layer whose state has more than tensors."""

    version: dict

    def get_extra_state(self):
        return self.version

    def set_extra_state(self, state):
        self.version = state


def test_extra_state_is_in_the_global_state(join):
    model, fresh = Versioned(6, 2), Versioned(6, 2)
    model.version = {"format": [3]}
    session = join(model)
    learn(model, session.optimizer(lr=0.1), 2)
    fresh.load_state_dict(session.global_state_dict())
    same(numbers(fresh), numbers(model))
    assert fresh.version == {"format": [3]} and fresh.version["format"] is not model.version["format"]


def test_a_session_tells_how_many_ranks_train_and_serve(join):
    session = join(network(), threads=2)
    assert (session.rank, session.workers, session.servers) == (0, 1, 1)
    assert session.is_worker and session.is_server


def test_named_parameters_in_place_of_a_model(join):
    model = network()
    session = join(model.named_parameters(), DGS(**SMALL))
    learn(model, session.optimizer(lr=0.1), 5)
    same(session.global_state_dict(), numbers(model))


def test_a_global_state_belongs_to_its_reader(join):
    """Each tensor has memory of its own, not a part of a message; the worker keeps no message."""
    model = network()
    session = join(model, DGS(**SMALL))
    state = session.global_state_dict()
    assert session.worker.answers == {}
    begins = {value.data_ptr() for value in state.values()}
    assert not any(value.data_ptr() + value.nbytes in begins for value in state.values())  # as parts of a message do


def test_overlap_takes_each_answer_one_step_later(join):
    model = network()
    session = join(model, overlap=True)
    optimizer = session.optimizer(lr=0.1)
    before = numbers(model)
    learn(model, optimizer, 1)
    same(numbers(model), before)
    learn(model, optimizer, 1)
    changed = numbers(model)
    assert not torch.equal(changed["0.weight"], before["0.weight"])
    session.synchronize()
    assert not torch.equal(numbers(model)["0.weight"], changed["0.weight"])
    same(session.global_state_dict(), model.state_dict())


@pytest.mark.parametrize("overlap", [False, True])
def test_after_a_late_answer_training_goes_on(join, monkeypatch, overlap):
    """The step that raised TimeoutError has pushed: the next one takes the answer to it first."""
    model = network()
    session, may_answer = join(model, overlap=overlap), threading.Event()
    server, optimizer = session._local.servers[0], session.optimizer(lr=0.1)
    push = server._push
    monkeypatch.setattr(server, "_push", lambda *arguments: (may_answer.wait(20.0), push(*arguments))[1])
    with monkeypatch.context() as impatient, pytest.raises(TimeoutError, match="no answer from the servers"):
        impatient.setattr(session._connection, "_timeout", 0.2)
        learn(model, optimizer, 1 + overlap)
    may_answer.set()
    learn(model, optimizer, 2)
    session.synchronize()
    assert server.statistics.pushes == session.worker.traffic.pushes == 3
    same(session.global_state_dict(), model.state_dict())


@pytest.mark.parametrize("overlap", [False, True])
def test_each_step_after_a_refusal_says_why(join, monkeypatch, overlap):
    model = network()
    session = join(model, overlap=overlap)
    server, optimizer = session._local.servers[0], session.optimizer(lr=0.1)
    monkeypatch.setattr(server, "_push", lambda message, record: server._refusal(Reason.WRONG, message, "no more"))
    for steps in (1 + overlap, 1, 1):
        with pytest.raises(ServerRefused, match="no more"):
            learn(model, optimizer, steps)
    with pytest.raises(ServerRefused, match="no more"):
        session.close()
