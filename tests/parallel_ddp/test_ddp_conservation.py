"""DDP loses no gradient: in every kind of step, delivered gradients and residuals add up to the input."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ddp_helpers import Balance, Trainer, assert_alive, assert_ranks_agree, everywhere
from gradients import SHAPES, draw, whole_numbers
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
MOMENTUM = {"density": 0.03, "min_numel": 100, "weight_decay": 0.1, "dense_fallback": None}  # two tensors are small
WITH_MOMENTUM = {
    "dgc": ("dgc", {**MOMENTUM, "momentum": 0.9}),
    "dgc, joint": ("dgc", {**MOMENTUM, "momentum": 0.9, "scope": "model", "clip_norm": 5.0, "clip_scope": "model"}),
    "dgc, reduce-scatter": ("dgc", {**MOMENTUM, "momentum": 0.9, "exchange": "reduce_scatter"}),
    "dgc, dense": ("dgc", {**MOMENTUM, "momentum": 0.9, "density": 1.0}),
    "samomentum": ("samomentum", {**MOMENTUM, "momentum": 0.7}),
    "samomentum, joint": ("samomentum", {**MOMENTUM, "momentum": 0.7, "scope": "model"}),
}


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


@pytest.mark.parametrize("method", METHODS)
def test_parameters_that_a_rank_or_all_freeze(method):
    """Only some ranks know that a parameter is frozen. What is frozen on all ranks sends nothing after one step."""
    name, settings = METHODS[method]
    balance = Balance(trainer := Trainer(name, ddp={"find_unused_parameters": True}, **settings))
    sent = []
    for step in range(12):
        frozen = {"body.weight"} if step % 4 > 1 or (step % 4 == 1 and dist.get_rank() == 0) else set()
        for one in SHAPES:
            trainer.model[one].requires_grad_(one not in frozen)
        balance.deliver(trainer.reduced(balance.gradients(step, [one for one in SHAPES if one not in frozen])))
        sent.append(trainer.compression.stats()["step"]["payload_bytes"])
    balance.check()
    first = 10 if dist.get_world_size() > 1 else 9  # step of the last ones in which all ranks freeze
    assert method not in ("tensor", "dense") or sent[first + 1] < sent[first]


@pytest.mark.parametrize("method", WITH_MOMENTUM)
def test_residual_and_velocity_of_a_parameter_that_a_rank_leaves_out_stay(method):
    """Bit for bit, though other ranks use it, and though it has weight decay; those of the others change."""
    name, settings = WITH_MOMENTUM[method]
    trainer = Trainer(name, ddp={"find_unused_parameters": True}, **settings)
    names, rank = sorted(SHAPES), dist.get_rank()
    kinds = ("residual", "velocity") if name == "dgc" else ("residual",)
    for step in range(12):
        left_out = [] if step < 2 else names[2:] if step % 4 == 3 else names[(step + rank) % 3 :: 3]
        here = [one for one in names if one not in left_out]
        before = {one: trainer.buffers(one) for one in names}
        trainer.step(draw({one: SHAPES[one] for one in here}, step, rank))
        for one in names:
            stayed = [torch.equal(before[one][kind], buffer) for kind, buffer in trainer.buffers(one).items()]
            assert all(stayed) == (one not in here), (step, one)
    is_dense = method.endswith("dense")
    for kind in kinds:
        assert any(bool(trainer.buffer(one, kind).any()) for one in names) or (is_dense and kind == "residual")
    assert_ranks_agree(trainer.model)


def test_a_static_graph_that_leaves_out_a_parameter():
    balance = Balance(trainer := Trainer(ddp={"static_graph": True}, **SETTINGS))
    for step in range(6):
        reduced = trainer.reduced(balance.gradients(step, ["body.weight", "scale"]))
        balance.deliver(reduced)
    balance.check()


@pytest.mark.parametrize("method", ["dgc", "dgc, joint", "dgc, dense"])
@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_a_gradient_of_zeros_is_that_of_a_parameter_that_was_used(option, method):
    """As of a hinge loss: residual and velocity decay and are sent, as they are without the option."""
    name, settings = WITH_MOMENTUM[method]
    trainers = Trainer(name, **settings), Trainer(name, ddp={option: True}, **settings)
    for step in range(8):
        gradients = draw(SHAPES, step, dist.get_rank())
        if step % 3 == 2:
            gradients |= {one: np.zeros(SHAPES[one]) for one in SHAPES if dist.get_rank() == 0 or one == "body.bias"}
        for trainer in trainers:
            trainer.step(gradients)
    plain, other = (dict(trainer.model.named()) for trainer in trainers)
    for one in SHAPES:  # the option changes DDP's buckets, in which dense sums of three ranks and more are rounded
        torch.testing.assert_close(other[one], plain[one], rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_a_layer_that_was_frozen_at_register_trains_later(option):
    plain, other = Trainer(**SETTINGS), Trainer(ddp={option: True}, freezes="body.weight", **SETTINGS)
    other.model["body.weight"].requires_grad_(True)
    for step in range(6):
        gradients = draw(SHAPES, step, dist.get_rank())
        for trainer in (plain, other):
            trainer.step(gradients)
    for (name, one), (_, found) in zip(plain.model.named(), other.model.named(), strict=True):
        torch.testing.assert_close(found, one, rtol=0.0, atol=1e-5, msg=name)


@pytest.mark.parametrize("method", ["dgc", "dgc, joint", "dgc, dense", "samomentum"])
def test_what_the_grad_of_an_unused_parameter_still_has_is_not_sent(method):
    """As of two networks in one DDP whose optimizers set only their own gradients to zero."""
    name, settings = WITH_MOMENTUM[method]
    trainers = [Trainer(name, ddp={"find_unused_parameters": True}, **settings) for _ in range(2)]
    for step in range(8):
        here = sorted(SHAPES)[step % 2 :: 2]
        gradients = draw({one: SHAPES[one] for one in here}, step, dist.get_rank())
        for trainer, cleared in zip(trainers, (SHAPES, here), strict=True):
            for one in cleared:
                trainer.model[one].grad = None
            trainer.backward(gradients)
            with torch.no_grad():
                for one in here:
                    trainer.model[one].sub_(0.1 * trainer.model[one].grad)
    for one in SHAPES:
        assert torch.equal(trainers[0].model[one], trainers[1].model[one]), one
        for kind, buffer in trainers[0].buffers(one).items():
            assert torch.equal(buffer, trainers[1].buffer(one, kind)), (one, kind)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("method", ["dgc", "dgc, joint", "dgc, dense", "samomentum"])
def test_the_grad_of_a_parameter_that_no_rank_used_stays(method, view):
    """Where it is a view of a bucket, too; one that another rank has used gets the mean, on all ranks."""
    name, settings = WITH_MOMENTUM[method]
    ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
    trainer = Trainer(name, ddp=ddp, **settings)
    names, rank = sorted(SHAPES), dist.get_rank()
    for step in range(6):
        used = names if step == 0 else names[step % 2 :: 2]
        here = used if rank == 0 else used[1:]
        before = {one: None if step == 0 else trainer.model[one].grad.clone() for one in names}
        gradients = draw({one: SHAPES[one] for one in here}, step, rank)
        if step == 4 and rank == 0:
            gradients = {**gradients, used[1]: np.full(SHAPES[used[1]], np.nan)}  # the step is skipped
        for one in here:
            if step > 0:
                trainer.model[one].grad.zero_()
        trainer.backward(gradients)
        for one in names:
            grad = trainer.model[one].grad
            if one not in used:
                torch.testing.assert_close(grad, before[one], rtol=0.0, atol=0.0, equal_nan=True)
            else:
                assert grad.isnan().all() if step == 4 else grad.isfinite().all(), (step, one)
                every = [torch.zeros_like(grad) for _ in range(dist.get_world_size())]
                dist.all_gather(every, grad.contiguous())
                assert all(torch.equal(every[0].nan_to_num(7.0), theirs.nan_to_num(7.0)) for theirs in every), one


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


@pytest.mark.parametrize("option", [None, "find_unused_parameters", "static_graph"])
def test_uneven_inputs(option):
    """In join(), a rank without further inputs continues to send its residuals.

    Where parameters may be left out, its residuals stay, bit for bit.
    """
    trainer = Trainer(ddp={option: True} if option else {}, **SETTINGS)
    balance, ranks, rank = Balance(trainer), dist.get_world_size(), dist.get_rank()
    with Join([trainer.ddp]):
        for step in range(4 + 3 * rank):
            balance.deliver(trainer.step(balance.gradients(step)))
        left = {name: trainer.buffer(name) for name in SHAPES}
    stayed = all(torch.equal(left[name], trainer.buffer(name)) for name in SHAPES)
    assert stayed == (option is not None or rank == ranks - 1)
    assert any(bool(residual.any()) for residual in left.values())
    assert trainer.compression.stats()["steps"] == 4 + 3 * (ranks - 1)
    # The last rank has all steps.
    balance.delivered = {name: everywhere(delivered)[-1] for name, delivered in balance.delivered.items()}
    balance.check()
    assert_ranks_agree(trainer.model)


def test_a_backward_pass_that_fails_on_all_ranks():
    """DistributedDataParallel accepts no further one; a new model continues with the state of the compressor."""

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
