"""Checkpoints under DistributedDataParallel, skipped steps, loss scales, 16-bit types."""

import gc
import itertools
import math
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_helpers import ALONE, Balance, Trainer, assert_alive, assert_ranks_agree, everywhere, shared_folder
from gradients import SCOPES, SHAPES, draw, whole_numbers

SETTINGS = {"density": 0.03, "min_numel": 100}
# Nothing is sent dense: on three ranks, gloo's order of a sum depends on what else is in the message.
SPARSE = {"density": 0.03, "min_numel": 0, "dense_fallback": None}
METHODS = {
    "dgc": ("dgc", {**SPARSE, "momentum": 0.9}),
    "dct": ("dct", {**SPARSE, "lifespan": 3}),
    "reduce-scatter": ("gradient_dropping", {**SPARSE, "exchange": "reduce_scatter"}),
    "hierarchical": ("dgc", {**SPARSE, "momentum": 0.9, "exchange": "hierarchical", "ranks_per_host": 2}),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_state_continues_bit_for_bit(method):
    name, settings = METHODS[method]
    trainer, rank = Trainer(name, **settings), dist.get_rank()
    for step in range(4):
        trainer.step(draw(SHAPES, step, rank))
    state = trainer.compression.state_dict()
    other = Trainer(name, **settings)
    other.model.load_state_dict(trainer.model.state_dict())
    other.compression.load_state_dict(state)
    for step in range(4, 8):
        expected, found = (one.step(draw(SHAPES, step, rank)) for one in (trainer, other))
        assert all(torch.equal(expected[key], found[key]) for key in SHAPES)
    waits = any(bool(buffer.any()) for buffers in state["memory"].values() for buffer in buffers.values())
    assert any(bool(one) for one in everywhere(torch.tensor([waits])))  # a rank that keeps no shard has nothing


def test_a_summed_state_has_all_residuals():
    trainer, rank, ranks = Trainer(**SETTINGS), dist.get_rank(), dist.get_world_size()
    for step in range(3):
        trainer.step(whole_numbers(SHAPES, step, rank))
    own = {name: trainer.buffer(name) for name in SHAPES}
    summed = trainer.compression.state_dict(summed=True)
    for name in SHAPES:
        assert torch.equal(summed["memory"][name]["residual"], torch.stack(everywhere(own[name])).sum(0))
    other = Trainer(**SETTINGS)
    other.compression.load_state_dict(summed)
    for name in SHAPES:
        torch.testing.assert_close(other.buffer(name) * ranks, summed["memory"][name]["residual"])


def test_a_state_that_one_rank_cannot_load_is_refused_on_all():
    trainer = Trainer(**SETTINGS)
    trainer.step(draw(SHAPES, 0, dist.get_rank()))
    state = trainer.compression.state_dict()
    if dist.get_rank() == dist.get_world_size() - 1:
        del state["memory"]["head.weight"]
    before = trainer.buffer("head.weight")
    with pytest.raises(ValueError, match=r"head\.weight"):
        trainer.compression.load_state_dict(state)
    assert torch.equal(trainer.buffer("head.weight"), before)
    assert_alive()


@pytest.mark.parametrize("method", ["dgc", "dct"])
def test_a_distributed_checkpoint_of_the_sum_has_all_residuals(method, tmp_path):
    """torch.distributed.checkpoint writes into a state of the new compressor."""
    trainer, path = Trainer(method, **SETTINGS), shared_folder(tmp_path)
    for step in range(3):
        trainer.step(whole_numbers(SHAPES, step, dist.get_rank()))
    summed = trainer.compression.state_dict(summed=True)
    dcp.save({"compression": summed}, checkpoint_id=path)
    other = Trainer(method, **SETTINGS)
    found = {"compression": other.compression.state_dict(summed=True)}
    dcp.load(found, checkpoint_id=path)
    other.compression.load_state_dict(found["compression"])
    again = other.compression.state_dict(summed=True)
    assert again["step"] == 3 and bool(summed["memory"]["head.weight"]["residual"].any())
    for name, buffers in summed["memory"].items():
        assert all(torch.equal(again["memory"][name][kind], buffer) for kind, buffer in buffers.items())


@pytest.mark.parametrize("method", ["dgc", "dct"])
def test_a_distributed_checkpoint_that_cannot_restore_residuals_is_refused(method, tmp_path):
    trainer, path, key = Trainer(method, **SETTINGS), shared_folder(tmp_path), f"compression.{dist.get_rank()}"
    trainer.step(draw(SHAPES, 0, dist.get_rank()))
    dcp.save({key: trainer.compression.state_dict()}, checkpoint_id=path)
    other = Trainer(method, **SETTINGS)
    found = {key: other.compression.state_dict()}
    dcp.load(found, checkpoint_id=path)
    with pytest.raises(ValueError, match=r"the state has 0 buffers, .* Save and load state_dict\(summed=True\)"):
        other.compression.load_state_dict(found[key])
    assert other.compression.state_dict()["step"] == 0
    assert_alive()


def test_reset_begins_anew():
    trainer, fresh = Trainer(**SPARSE), Trainer(**SPARSE)
    for step in range(3):
        trainer.step(draw(SHAPES, step, dist.get_rank()))
    trainer.compression.reset()
    expected, found = (one.reduced(draw(SHAPES, 7, dist.get_rank())) for one in (fresh, trainer))
    assert all(torch.equal(expected[name], found[name]) for name in SHAPES)
    assert trainer.compression.stats()["steps"] == 1


@pytest.mark.parametrize("density", [0.03, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks(value, density):
    trainer, rank, ranks = Trainer(**{**SETTINGS, "density": density}), dist.get_rank(), dist.get_world_size()
    given = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    delivered = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(6):
        gradients = {name: array * ranks for name, array in whole_numbers(SHAPES, step, rank).items()}
        is_bad = step in (0, 3)
        if is_bad and rank == ranks - 1:
            gradients["head.weight"][7] = value
        reduced = trainer.reduced(gradients)
        if is_bad:
            assert all(bool(reduced[name].isnan().all()) for name in SHAPES)
            if density == 1.0:  # what is sent dense has no residual: a step that is skipped is lost whole
                continue
        for name, gradient in gradients.items():
            is_dense = given[name].numel() < SETTINGS["min_numel"]
            if not (is_bad and is_dense):
                given[name] += torch.as_tensor(gradient, dtype=torch.float64).nan_to_num(0.0, 0.0, 0.0)
            if not is_bad:
                delivered[name] += reduced[name].double()
    assert trainer.compression.stats()["skipped"] == 2
    summed = trainer.compression.state_dict(summed=True)["memory"]
    for name in SHAPES:
        total = torch.stack(everywhere(given[name].reshape(-1))).sum(0)
        waits = summed[name]["residual"].double()
        assert torch.equal(ranks * delivered[name].reshape(-1) + waits, total), name


def test_a_loss_scale_changes_nothing_but_the_gradients():
    plain, scaled = (
        Trainer("dgc", momentum=0.9, clip_norm=5.0, **SETTINGS),
        Trainer("dgc", momentum=0.9, clip_norm=5.0, **SETTINGS),
    )
    for step, scale in enumerate([1024.0, 512.0, 4096.0]):
        scaled.compression.loss_scale = scale
        gradients = draw(SHAPES, step, dist.get_rank())
        expected = plain.reduced(gradients)
        found = scaled.reduced({name: scale * gradient for name, gradient in gradients.items()})
        for name in SHAPES:
            torch.testing.assert_close(found[name] / scale, expected[name], rtol=1e-6, atol=0)


@ALONE
@pytest.mark.rank_counts
def test_steps_beyond_what_float64_adds_exactly():
    """With three ranks, the squares of this step number do not add up to three times one of them."""
    trainer = Trainer(density=0.05, min_numel=0)
    trainer.compression.load_state_dict({**trainer.compression.state_dict(), "step": 100_000_001})
    trainer.step(draw(SHAPES, 0, dist.get_rank()))
    assert trainer.compression.state_dict()["step"] == 100_000_002


def test_a_step_leaves_no_messages_behind():
    """At most those that gloo's threads may hold: the messages of all ranks are as large as a dense model."""
    trainer, pending = Trainer(density=0.05, min_numel=0, dense_fallback=None), []
    exchange = trainer.compression._exchange
    allgather = exchange.allgather

    def record(*arguments):
        started = allgather(*arguments)
        pending.append(weakref.ref(started))
        return started

    exchange.allgather = record
    exchange.allgather_small = lambda name, message: record(name, message)
    for step in range(2):
        trainer.step(draw(SHAPES, step, dist.get_rank()))
    gc.collect()
    assert len(pending) > 2
    assert [one() for one in pending] == [None] * len(pending)


@ALONE
def test_loss_scales_that_differ_are_refused():
    trainer = Trainer(**SETTINGS)
    trainer.compression.loss_scale = 1.0 + dist.get_rank()
    with pytest.raises(RuntimeError, match=r"loss_scale is .* on this rank, the mean over the ranks is"):
        trainer.reduced(draw(SHAPES, 0, dist.get_rank()))
    assert_alive()


@pytest.mark.parametrize("method", ["gradient_dropping", "dgc"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_types(dtype, method):
    """16-bit types round means, and float16 ends at 65,504: the residuals keep the rest, and nothing is lost.

    DGC without factor masking delivers the sum of all velocities. Small tensors are sent dense: rounding a velocity
    loses the rest. All other numbers are exact in float32, except for thirds on three ranks.
    """
    settings = {**SETTINGS, **({"momentum": 0.5, "factor_masking": False} if method == "dgc" else {})}
    balance = Balance(trainer := Trainer(method, lr=2.0**-16, dtype=dtype, **settings))
    rank, ranks, steps = dist.get_rank(), dist.get_world_size(), 8
    velocity, most = {name: np.zeros(shape) for name, shape in SHAPES.items()}, dict.fromkeys(SHAPES, 0.0)
    for step in range(steps):
        gradients = {name: 256 * ranks * value for name, value in whole_numbers(SHAPES, step, rank).items()}
        gradients["head.weight"][::3] = 30720.0  # three of them are more than float16 holds
        for name in SHAPES:
            velocity[name] = settings.get("momentum", 0.0) * velocity[name] + gradients[name]
        balance.give(velocity)
        reduced = trainer.step(gradients)
        balance.deliver(reduced)
        assert all(gradient.dtype == dtype and bool(gradient.isfinite().all()) for gradient in reduced.values())
        most = {name: max(most[name], float(gradient.abs().max())) for name, gradient in reduced.items()}
    assert (most["head.weight"] == 65504.0) if dtype == torch.float16 else (most["head.weight"] > 65504.0)
    thirds = 0.0 if ranks & (ranks - 1) == 0 else 2.0**-24
    dense = torch.finfo(dtype).eps / 2 if method == "dgc" else thirds
    rounding = {name: dense if math.prod(shape) < SETTINGS["min_numel"] else thirds for name, shape in SHAPES.items()}
    balance.check({name: ranks * steps * rounding[name] * most[name] for name in SHAPES})
    assert_ranks_agree(trainer.model)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("method", ["gradient_dropping", "dgc"])
def test_with_a_loss_scaler(method, scope):
    """torch.amp.GradScaler skips the step on every rank alike. All else is as without a scaler, bit for bit.

    All scales are powers of two, and gradients whole numbers.
    """
    own = {"momentum": 0.9, "clip_norm": 5.0, "weight_decay": 0.1} if method == "dgc" else {}
    trainer, plain = (Trainer(method, scope=scope, **SPARSE, **own) for _ in range(2))
    balance, rank, ranks = Balance(trainer), dist.get_rank(), dist.get_world_size()
    optimizer, other = (torch.optim.SGD(one.model.parameters(), lr=0.1) for one in (trainer, plain))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    scales = [scaler.get_scale()]
    for step in range(12):
        gradients, is_bad = balance.gradients(step), step in (3, 7)
        if is_bad and rank == step % ranks:
            balance.given["head.weight"][-1] -= gradients["head.weight"][-1]
            gradients["head.weight"][-1] = math.inf
        before = {name: parameter.detach().clone() for name, parameter in trainer.model.named()}
        optimizer.zero_grad()
        trainer.compression.loss_scale = scaler.get_scale()
        scaler.scale(trainer.ddp(gradients)).backward()
        scaler.unscale_(optimizer)
        reduced = {name: parameter.grad.clone() for name, parameter in trainer.model.named()}
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        expected = plain.reduced(gradients)
        for name, parameter in trainer.model.named():
            assert torch.equal(before[name], parameter) if is_bad else torch.equal(reduced[name], expected[name])
            assert bool(expected[name].isnan().all() if is_bad else expected[name].isfinite().all())
        if not is_bad:
            other.step()
            balance.deliver(reduced)
    assert [later < earlier for earlier, later in itertools.pairwise(scales)] == [step in (3, 7) for step in range(12)]
    assert max(scales) > 64.0
    assert_ranks_agree(trainer.model)
    for name in SHAPES:
        assert torch.equal(trainer.model[name], plain.model[name])
        assert all(torch.equal(trainer.buffer(name, kind), plain.buffer(name, kind)) for kind in trainer.KINDS)
    if method == "gradient_dropping":
        balance.check()


def test_a_mean_that_float16_holds_is_delivered_though_it_does_not_hold_the_sum():
    trainer = Trainer(density=1.0, dtype=torch.float16)
    reduced = trainer.reduced({name: torch.full(shape, 60000.0) for name, shape in SHAPES.items()})
    assert all(bool((gradient == 60000.0).all()) for gradient in reduced.values())
