"""Warnings of loops with `reduce_gradients` whose optimizers apply what no rank has reduced."""

import re
import weakref

import pytest
import torch
import torch.distributed as dist
from told import told
from torch import nn

from hvd_sparse.torch import optimizer_checks
from hvd_sparse.torch.ddp import Compression

NOT_REDUCED = r"steps with gradients that reduce_gradients\(\) has not reduced, as it had before earlier steps"


class Loop:
    """Two layers, of which the compressor may lack the second."""

    def __init__(self, compressed=("0", "1"), **settings):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 10))
        named = [(name, one) for name, one in self.model.named_parameters() if name.split(".")[0] in compressed]
        self.compression = Compression.gradient_dropping(named, 0.05, min_numel=100)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def backward(self):
        inputs = torch.randn(8, 40, generator=torch.Generator().manual_seed(dist.get_rank()))
        self.model(inputs).square().mean().backward()

    def step(self, *does, set_to_none=True):
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.backward()
        for do in does or (self.compression.reduce_gradients, self.optimizer.step):
            do()


def assert_told(found, pattern):
    """Assert that the first of several ranks was warned of this alone, once."""
    assert len(found) == (dist.get_rank() == 0 and dist.get_world_size() > 1), found
    assert all(re.search(pattern, one) for one in found), found


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clips", [True, False])
def test_a_step_without_a_call_is_warned_of_once(clips, set_to_none):
    loop = Loop()

    def training():
        for t in range(6):
            clip = [lambda: nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)] * clips
            calls = [loop.compression.reduce_gradients] * (t % 2 == 0)
            loop.step(*calls, *clip, loop.optimizer.step, set_to_none=set_to_none)

    assert_told(told(training), NOT_REDUCED)


def test_a_step_without_a_call_is_warned_of_where_the_gradients_of_steps_before_are_kept():
    loop, kept = Loop(), []

    def training():
        for t in range(4):
            loop.step(*[loop.compression.reduce_gradients] * (t % 2 == 0), loop.optimizer.step)
            kept.append([one.grad for one in loop.model.parameters()])

    assert_told(told(training), NOT_REDUCED)


def test_a_step_without_a_call_is_warned_of_where_other_layers_had_gradients_before():
    loop = Loop()

    def training():
        loop.model[1](torch.ones(8, 30)).square().mean().backward()
        loop.compression.reduce_gradients()
        loop.optimizer.step()
        loop.step(loop.optimizer.step, set_to_none=False)

    assert_told(told(training), NOT_REDUCED)


def test_an_inner_optimizer_of_local_steps_reduces_nothing():
    """Local SGD whose outer step has the parameters of the inner ones; its gradient is the change of the weights."""
    loop = Loop()
    outer = torch.optim.SGD(loop.model.parameters(), lr=1.0)

    def training():
        for _ in range(3):
            common = [one.detach().clone() for one in loop.model.parameters()]
            for _ in range(4):
                loop.step(loop.optimizer.step)
            for one, before in zip(loop.model.parameters(), common, strict=True):
                one.grad = before - one.detach()
                one.data.copy_(before)
            loop.compression.reduce_gradients()
            outer.step()

    assert not [one for one in told(training) if "its compressor has not seen" not in one]


class Around(torch.optim.Optimizer):
    """An optimizer around another one, as Lookahead."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self):
        self.inner.step()


def test_right_loops_are_left_in_peace():
    around, missing, overflow, closures, zeros = (Loop() for _ in range(5))
    wrapper = Around(around.optimizer)

    def empty():  # rank 0 has no batch
        missing.optimizer.zero_grad()
        if dist.get_rank() != 0:
            missing.backward()
        missing.compression.reduce_gradients()
        missing.optimizer.step()

    def closure():
        closures.optimizer.zero_grad()
        closures.backward()
        closures.compression.reduce_gradients()

    def training():
        for t in range(4):
            around.step(around.compression.reduce_gradients, wrapper.step)
            missing.step() if t % 2 or dist.get_world_size() == 1 else empty()
            overflow.step(
                lambda: overflow.model[0].bias.grad.fill_(float("inf")),
                overflow.compression.reduce_gradients,
                overflow.optimizer.step,
            )
            closures.optimizer.step(closure)
            zeros.step()
            zeros.optimizer.zero_grad(set_to_none=False)
            zeros.optimizer.step()

    assert not told(training)


@pytest.mark.parametrize("keeps", [True, False])
def test_an_optimizer_around_another_one_may_step_from_some_step_on(keeps):
    """As Lookahead after a warm-up."""
    loop, kept = Loop(), []
    wrapper = Around(loop.optimizer)

    def training():
        for t in range(4):
            loop.step(loop.compression.reduce_gradients, (loop.optimizer if t < 2 else wrapper).step)
            kept.append([one.grad for one in loop.model.parameters()] if keeps else None)

    assert not told(training)


def test_what_the_compressor_lacks_is_warned_of_once():
    loop = Loop(compressed="0")
    assert_told(told(lambda: [loop.step() for _ in range(4)]), r"also trains a parameter of shape \(10, 30\), which no")


def test_looking_for_what_no_compressor_has_asks_each_of_them_once_a_step(monkeypatch):
    """With many parameters, once for each of them took milliseconds of every step."""
    both, asked = Loop(compressed="0"), []
    other = Compression.gradient_dropping(both.model[1], 0.05, min_numel=100)
    both.step(both.compression.reduce_gradients, other.reduce_gradients)

    class Asked(weakref.WeakSet):
        def __iter__(self):
            asked.append(1)
            return super().__iter__()

    monkeypatch.setattr(optimizer_checks, "_all", Asked(optimizer_checks._all))
    both.optimizer.step()
    assert len(asked) == 2  # compressors


def test_a_parameter_of_another_compressor_or_without_a_gradient_is_not_alone():
    both, frozen = Loop(compressed="0"), Loop(compressed="0")
    other = Compression.gradient_dropping(both.model[1], 0.05, min_numel=100)
    frozen.model[1].requires_grad_(False)

    def training():
        for _ in range(3):
            both.step(both.compression.reduce_gradients, other.reduce_gradients, both.optimizer.step)
            frozen.step()

    assert not told(training)


@pytest.mark.parametrize("before", [0, 3], ids=["from the first step on", "after other steps"])
def test_a_new_compressor_in_each_step_is_warned_of_once(before):
    loop = Loop()

    def training():
        for _ in range(before):
            loop.step()
        for _ in range(5):
            loop.compression = Compression.gradient_dropping(loop.model.named_parameters(), 0.05, min_numel=100)
            loop.step()

    assert_told(told(training), "a new compressor is built in each step: its residual, what has not been sent, is lost")


def test_a_new_compressor_now_and_then_is_not():
    """With the state of the one before, as when layers are frozen, or for another phase of several steps."""
    loop = Loop()

    def training():
        for t in range(4):
            state = loop.compression.state_dict() if t > 0 else None
            loop.compression = Compression.gradient_dropping(loop.model.named_parameters(), 0.05, min_numel=100)
            if state:
                loop.compression.load_state_dict(state)
            loop.step()
        for _ in range(4):
            loop.compression = Compression.gradient_dropping(loop.model.named_parameters(), 0.05, min_numel=100)
            for _ in range(2):
                loop.step()

    assert told(training) == []
