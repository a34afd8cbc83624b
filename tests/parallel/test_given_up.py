"""A step that all ranks give up after backward: what some have sent and others have not meets no later message."""

import time

import horovod.torch as hvd
import pytest
import torch
from gradients import SCOPES
from helpers import assert_ranks_agree

from hvd_sparse.torch import Compression

pytestmark = [
    pytest.mark.rank_counts,
    pytest.mark.each_value,
    pytest.mark.skipif(hvd.size() < 2, reason="a rank alone waits for nobody"),
]
MAKERS = {
    "gather": lambda named, scope: Compression.gradient_dropping(named, 0.1, scope=scope, bucket_bytes=1),
    "reduce_scatter": lambda named, scope: Compression.dgc(
        named, 0.1, momentum=0.9, scope=scope, bucket_bytes=1, exchange="reduce_scatter"
    ),
    "hierarchical": lambda named, scope: Compression.gradient_dropping(
        named, 0.1, scope=scope, bucket_bytes=1, exchange="hierarchical", ranks_per_host=1
    ),
    "micro": lambda named, scope: Compression.micro(named, 0.1),
    "cltk": lambda named, scope: Compression.cltk(named, 0.1),
}


class Training:
    """A model of two layers whose last rank is slow, with a step that can be given up after backward."""

    def __init__(self, make, scope):
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 200))
        self.compression = make(self.model.named_parameters(), scope)
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.optimizer = hvd.DistributedOptimizer(sgd, self.model.named_parameters(), compression=self.compression)
        if hvd.rank() == hvd.size() - 1:
            self.model[0].register_full_backward_hook(lambda *_: time.sleep(0.1))

    def backward(self, step, layers=(0, 1)):
        self.optimizer.zero_grad()
        inputs = torch.randn(8, 200, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))
        for layer in layers:
            inputs = self.model[layer](inputs)
        inputs.square().mean().backward()

    def states(self):
        copies = {name: value.clone() for name, value in self.model.state_dict().items()}
        return copies, self.optimizer.state_dict(), self.compression.state_dict()

    def load(self, states):
        for one, state in zip((self.model, self.optimizer, self.compression), states, strict=True):
            one.load_state_dict(state)

    def run(self, steps, given_up=(), layers=(0, 1)):
        """Train; repeat steps that are given up, in which these layers have gradients."""
        for step in range(steps):
            if step in given_up:
                states = self.states()
                self.backward(step, layers)
                self.load(states)
            self.backward(step)
            self.optimizer.step()
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}


@pytest.mark.parametrize("layers", [(0, 1), (1,)], ids=["all", "some"])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("exchange", MAKERS)
def test_the_step_repeated_from_a_state(exchange, scope, layers):
    """As if it had not been given up, bit for bit, whichever layers had gradients in it."""
    make = MAKERS[exchange]
    expected = Training(make, scope).run(5)
    found = Training(make, scope).run(5, given_up=(0, 2, 3), layers=layers)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert_ranks_agree(found)


@pytest.mark.parametrize("exchange", MAKERS)
def test_a_reset(exchange):
    training = Training(MAKERS[exchange], "tensor")
    for _ in range(3):
        training.run(2)
        training.backward(9)
        training.compression.reset()
        training.optimizer.load_state_dict(training.optimizer.state_dict())  # Horovod forgets its own handles
    assert_ranks_agree(training.run(2))
    assert training.compression.stats()["steps"] == 2


def clip(training):
    torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.01)
    training.optimizer.step()


def unscale(training):
    training.compression.loss_scale = scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))  # sets its scale
    scaler.step(training.optimizer)


@pytest.mark.parametrize("mistake", [clip, unscale])
@pytest.mark.parametrize("exchange", MAKERS)
def test_a_step_that_ended_with_an_error_says_how_to_go_on(exchange, mistake):
    """As in a notebook: the same as if the mistake had not been made."""
    training = Training(MAKERS[exchange], "tensor")
    training.backward(0)
    with pytest.raises(RuntimeError, match="Reduce first, then change gradients"):
        mistake(training)
    with pytest.raises(RuntimeError, match=r"optimizer\.load_state_dict\(optimizer\.state_dict\(\)\);"):
        training.optimizer.synchronize()
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    training.optimizer.zero_grad()
    training.compression.reset()
    found, expected = training.run(3), Training(MAKERS[exchange], "tensor").run(3)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert_ranks_agree(found)
