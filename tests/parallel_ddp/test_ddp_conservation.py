"""DDP loses no gradient: in every kind of step, delivered gradients and residuals add up to the input."""

import pytest
import torch
import torch.distributed as dist
from ddp_helpers import Trainer, assert_alive, assert_ranks_agree, everywhere
from gradients import SHAPES, whole_numbers
from torch.distributed.algorithms.join import Join

SETTINGS = {"density": 0.03, "min_numel": 0, "bucket_bytes": 100}
METHODS = {
    "tensor": ("gradient_dropping", SETTINGS),
    "model": ("gradient_dropping", {**SETTINGS, "scope": "model"}),
    "threshold": ("hard_threshold", {"value": 60.0, "min_numel": 100, "bucket_bytes": 100}),
    "micro": ("micro", {"density": 0.03, "min_numel": 0, "dense_fallback": None}),
    "reduce-scatter": ("gradient_dropping", {**SETTINGS, "exchange": "reduce_scatter", "dense_fallback": None}),
    "hierarchical": ("gradient_dropping", {**SETTINGS, "exchange": "hierarchical", "ranks_per_host": 2}),
    "reduce-scatter between hosts": (
        "gradient_dropping",
        {**SETTINGS, "exchange": "hierarchical", "ranks_per_host": 1, "between_hosts": "reduce_scatter"},
    ),
    "dense": ("gradient_dropping", {**SETTINGS, "density": 1.0}),
}


class Balance:
    """What went in on this rank, and what came out; gradients are whole numbers times world size: means are exact."""

    def __init__(self, trainer):
        self.trainer, self.ranks = trainer, dist.get_world_size()
        self.given = {name: torch.zeros(SHAPES[name], dtype=torch.float64) for name in SHAPES}
        self.delivered = {name: torch.zeros(SHAPES[name], dtype=torch.float64) for name in SHAPES}

    def gradients(self, step, names=tuple(SHAPES)):
        drawn = whole_numbers({name: SHAPES[name] for name in names}, step, dist.get_rank())
        drawn = {name: self.ranks * value for name, value in drawn.items()}
        for name, value in drawn.items():
            self.given[name] += torch.as_tensor(value, dtype=torch.float64)
        return drawn

    def deliver(self, reduced):
        for name, gradient in reduced.items():
            if gradient is not None:
                self.delivered[name] += gradient.double()

    def check(self):
        summed = self.trainer.compression.state_dict(summed=True)["memory"]
        for name, shape in SHAPES.items():
            given = torch.stack(everywhere(self.given[name].reshape(-1))).sum(0)
            waits = summed[name]["residual"].double()
            assert torch.equal(self.ranks * self.delivered[name].reshape(-1) + waits, given), (name, shape)
        assert_alive()


@pytest.mark.parametrize("method", METHODS)
def test_step_by_step(method):
    name, settings = METHODS[method]
    balance = Balance(trainer := Trainer(name, **settings))
    for step in range(8):
        balance.deliver(trainer.reduced(balance.gradients(step)))
    balance.check()
    summed = trainer.compression.state_dict(summed=True)["memory"]
    assert method == "dense" or any(bool(buffers["residual"].any()) for buffers in summed.values())


@pytest.mark.parametrize("method", METHODS)
def test_parameters_that_some_ranks_or_all_leave_out(method):
    """What no rank uses DDP does not deliver: nothing may have been sent of it."""
    name, settings = METHODS[method]
    balance = Balance(trainer := Trainer(name, ddp={"find_unused_parameters": True}, **settings))
    used = sorted(SHAPES)
    for step in range(12):
        here = used if step % 4 == 0 else used[:2] if step % 4 == 1 else used[(step + dist.get_rank()) % 2 :: 2]
        reduced = trainer.reduced(balance.gradients(step, here))
        if step % 4 == 1:
            assert all(reduced[name] is None for name in used[2:])
        balance.deliver(reduced)
    balance.check()


def test_a_static_graph_that_leaves_out_a_parameter():
    balance = Balance(trainer := Trainer(ddp={"static_graph": True}, **SETTINGS))
    for step in range(6):
        reduced = trainer.reduced(balance.gradients(step, ["body.weight", "scale"]))
        balance.deliver(reduced)
    balance.check()


@pytest.mark.parametrize("view", [False, True])
def test_accumulation_without_synchronization(view):
    balance = Balance(trainer := Trainer(ddp={"gradient_as_bucket_view": view}, **SETTINGS))
    for step in range(6):
        trainer.ddp.zero_grad(set_to_none=not view)
        with trainer.ddp.no_sync():
            for part in range(2):
                trainer.backward(balance.gradients(3 * step + part))
        trainer.backward(balance.gradients(3 * step + 2))
        balance.deliver({name: parameter.grad for name, parameter in trainer.model.named()})
    assert trainer.compression.stats()["steps"] == 6
    balance.check()


def test_uneven_inputs():
    """In join(), a rank without further inputs continues to send its residuals."""
    balance = Balance(trainer := Trainer(**SETTINGS))
    ranks, rank = dist.get_world_size(), dist.get_rank()
    start = {name: parameter.detach().clone() for name, parameter in trainer.model.named()}
    with Join([trainer.ddp]):
        for step in range(4 + 3 * rank):
            trainer.step(balance.gradients(step))
    assert_ranks_agree(trainer.model)
    assert trainer.compression.stats()["steps"] == 4 + 3 * (ranks - 1)
    assert all(not torch.equal(parameter, start[name]) for name, parameter in trainer.model.named())
    summed = trainer.compression.state_dict(summed=True)["memory"]
    for name, parameter in trainer.model.named():
        given = torch.stack(everywhere(balance.given[name].reshape(-1))).sum(0)
        moved = (start[name] - parameter.detach()).double().reshape(-1) * ranks / trainer.lr
        torch.testing.assert_close(moved + summed[name]["residual"].double(), given, rtol=1e-4, atol=1e-2)


def test_a_backward_pass_that_fails_on_all_ranks():
    """DistributedDataParallel accepts no further one; a new model continues with the state of the compression."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("on purpose")

    trainer = Trainer(**SETTINGS)
    gradients = {name: value.tolist() for name, value in whole_numbers(SHAPES, 0, dist.get_rank()).items()}
    for _ in range(2):
        trainer.step(gradients)
    handle = trainer.model["head.weight"].register_hook(lambda gradient: Broken.backward(None, gradient))
    with pytest.raises(ArithmeticError, match="on purpose"):
        trainer.step(gradients)
    handle.remove()
    assert trainer.compression.stats()["steps"] == 2
    assert_alive()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
        trainer.step(gradients)
    resumed = Trainer(**SETTINGS)
    resumed.compression.load_state_dict(trainer.compression.state_dict())
    resumed.step(gradients)
    assert resumed.compression.state_dict()["step"] == 3
    assert_ranks_agree(resumed.model)
