"""What the optimizer around a compressor must not do, found at its first step on every rank."""

import math
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from ddp_helpers import assert_ranks_agree
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from hvd_sparse.torch.ddp import Compression


def build(optimizer, **settings):
    """Return a model, its compressor and its optimizer."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(40, 30))
    compression = Compression.dgc(model.module.named_parameters(), min_numel=100, **settings)
    compression.register(model)
    return model, compression, optimizer(model.parameters())


def loss_of(model):
    generator = torch.Generator().manual_seed(dist.get_rank())
    return model(torch.randn(8, 40, generator=generator)).square().mean()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def scaled_step(model, optimizer, scaler):
    optimizer.zero_grad()
    scaler.scale(loss_of(model)).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("joins", [False, True], ids=["", "join"])
def test_a_loss_scale_that_was_not_set_is_an_error(joins):
    model, compression, optimizer = build(sgd, clip_norm=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    message = r"before training: compression\.loss_scale = scaler"
    with pytest.raises(RuntimeError, match=message), Join([model], enable=joins):
        scaled_step(model, optimizer, scaler)
    assert all(map(torch.equal, before, model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    compression.loss_scale = 64.0
    scaled_step(model, optimizer, scaler)
    assert not any(map(torch.equal, before, model.parameters()))
    assert_ranks_agree(model)


def test_a_compiled_step_is_checked_too():
    model, _, optimizer = build(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), clip_norm=1.0)
    optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
    loss_of(model).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    told = [one for one in caught if "both are applied" in str(one.message)]
    assert len(told) == (dist.get_rank() == 0)
    with pytest.raises(RuntimeError, match=r"before training: compression\.loss_scale = scaler"):
        scaled_step(model, optimizer, torch.amp.GradScaler("cpu", init_scale=64.0))


def test_a_compressor_that_is_not_registered_is_warned_of_once():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(40, 30))
    compression = Compression.gradient_dropping(model.module.named_parameters())
    optimizer = sgd(model.parameters())
    message = r"optimizer steps with gradients that its compressor has not seen.*compression\.register\(model\)"
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            loss_of(model).backward()
            optimizer.step()
    told = [one for one in found if re.search(message, str(one.message))]
    assert len(told) == (dist.get_rank() == 0 and dist.get_world_size() > 1)  # a rank alone has nothing to compress
    assert compression.stats()["steps"] == 0


@pytest.mark.parametrize("by_name", [False, True])
def test_passes_in_no_sync_before_a_step_with_a_closure_are_no_gradients_without_a_compressor(by_name):
    """Lightning accumulates in this way: the closure runs the last pass."""
    model, compression, optimizer = build(sgd)

    def closure():
        loss_of(model).backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with model.no_sync():
            loss_of(model).backward()
        optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert compression.stats()["steps"] == 1


def two_models(second_momentum=0.0):
    """Two models, each compressed, in two parameter groups of one optimizer."""
    models = [nn.Linear(40, 30), nn.Linear(40, 30)]
    momenta = zip(models, (0.9, 0.0), strict=True)
    compressions = [Compression.dgc(one.named_parameters(), 0.1, momentum=m, min_numel=100) for one, m in momenta]
    models = [DistributedDataParallel(one) for one in models]
    for model, compression in zip(models, compressions, strict=True):
        compression.register(model)
    groups = [{"params": list(one.parameters())} for one in models]
    groups[1]["momentum"] = second_momentum
    return models, compressions, torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize("given", ["number", "scaler"])
def test_the_scale_of_a_model_that_a_step_leaves_out_may_be_old(given):
    models, compressions, optimizer = two_models()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    for step in range(3):
        optimizer.zero_grad()
        for compression in compressions:  # a number, or once the scaler, which each step asks
            compression.loss_scale = scaler if given == "scaler" else scaler.get_scale()
        loss = sum(loss_of(model) for model in models[: 1 if step == 1 else 2])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 64.0
    for model in models:
        assert_ranks_agree(model)


def test_the_momentum_of_another_models_group_is_not_warned_of():
    models, _, optimizer = two_models(second_momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sum(map(loss_of, models)).backward()
        optimizer.step()


def test_a_scaler_that_is_switched_off_needs_no_loss_scale():
    model, _, optimizer = build(sgd)
    scaled_step(model, optimizer, torch.amp.GradScaler("cpu", enabled=False))


def test_the_last_compression_of_a_model_counts():
    """An earlier one, of a run without a scaler, may live on."""
    model, _, optimizer = build(sgd)
    again = DistributedDataParallel(model.module)
    compression = Compression.dgc(again.module.named_parameters(), min_numel=100)
    compression.register(again)
    compression.loss_scale = 64.0
    scaled_step(again, optimizer, torch.amp.GradScaler("cpu", init_scale=64.0))


def test_a_compression_that_is_not_used_says_nothing():
    """As with one process under Accelerate, or where Horovod calls none: the optimizer has the momentum."""
    model = nn.Linear(40, 30)
    Compression.dgc(model.named_parameters(), min_numel=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaled_step(model, optimizer, torch.amp.GradScaler("cpu", init_scale=64.0))


def test_dense_steps_without_momentum_need_no_loss_scale():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(40, 30))
    Compression.topk(model.module.named_parameters(), density=1.0).register(model)
    scaled_step(model, sgd(model.parameters()), torch.amp.GradScaler("cpu", init_scale=64.0))


def plain(model, optimizer):
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def accumulated(model, optimizer):
    with model.no_sync():
        loss_of(model).backward()
    plain(model, optimizer)


def overflown(model, optimizer):
    """A step that a loss scaler skips."""
    (math.inf * loss_of(model)).backward()


def uneven(model, optimizer):
    """Rank 0 leaves its loop before the others do."""
    with Join([model]):
        for _ in range(1 + 2 * dist.get_rank()):
            plain(model, optimizer)


def twice(model, optimizer):
    optimizer.zero_grad()
    for _ in range(2):
        loss_of(model).backward()
    optimizer.step()


def joined_twice(model, optimizer):
    with Join([model]):
        twice(model, optimizer)


def without_optimizer(model, optimizer):
    for _ in range(2):
        loss_of(model).backward()


@pytest.mark.parametrize(
    ("loop", "warned"),
    [
        ([plain, plain], False),
        ([accumulated, accumulated], False),
        ([plain, overflown, overflown, plain], False),
        ([uneven, uneven, plain], False),
        ([without_optimizer], False),
        ([twice, twice, twice], True),
        ([plain, overflown, twice], True),
        ([uneven, joined_twice], True),
    ],
)
def test_two_reductions_before_an_optimizer_step_are_warned_of_once(loop, warned):
    model, _, optimizer = build(sgd)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in loop:
            step(model, optimizer)
    told = [one for one in caught if "two backward passes without an optimizer step" in str(one.message)]
    assert len(told) == (warned and dist.get_rank() == 0)


class Adversaries(nn.Module):
    """A generator and a discriminator under one DistributedDataParallel."""

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, noise, trains_generator):
        made = self.generator(noise)
        return self.discriminator(made if trains_generator else made.detach()).square().mean()


@pytest.mark.parametrize("loop", ["frozen", "discarded", "together"])
def test_discarded_gradients_are_warned_of_once(loop):
    """Frozen in the generator's pass, the discriminator has no gradient there; otherwise it has one, which is lost."""
    model = DistributedDataParallel(Adversaries(), find_unused_parameters=True)
    Compression.dgc(model.module.named_parameters(), min_numel=0).register(model)
    halves = [model.module.discriminator, model.module.generator]
    optimizers = [sgd(half.parameters()) for half in halves]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            for number, optimizer in enumerate(optimizers):
                model.zero_grad()
                halves[0].requires_grad_(number == 0 or loop != "frozen")
                model(torch.ones(2, 8), trains_generator=number == 1 or loop == "together").backward()
                for one in optimizers if loop == "together" else [optimizer]:
                    one.step()
                halves[0].requires_grad_(True)
    told = [one for one in caught if "was not to train these parameters" in str(one.message)]
    assert len(told) == (loop == "discarded" and dist.get_rank() == 0)


@pytest.mark.parametrize(
    ("optimizer", "warned"),
    [
        (sgd, False),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), True),
        (lambda parameters: torch.optim.AdamW(parameters, betas=(0.9, 0.99)), True),
    ],
)
def test_a_second_momentum_is_warned_of_once(optimizer, warned):
    model, _, inner = build(optimizer)
    other = sgd([nn.Parameter(torch.zeros(3))])  # has nothing to do with it
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            loss_of(model).backward()
            inner.step()
            other.step()
    messages = [str(one.message) for one in caught if "Set the optimizer's to 0" in str(one.message)]
    assert len(messages) == (warned and dist.get_rank() == 0)


def schedule(model, optimizer):
    torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1)  # sets a momentum


def load(model, optimizer):
    optimizer.load_state_dict(torch.optim.SGD([optimizer.param_groups[0]["params"][0]], 0.1, momentum=0.9).state_dict())


def add_group(model, optimizer):
    optimizer.add_param_group({"params": [model.module.bias], "momentum": 0.9})


@pytest.mark.parametrize("change", [schedule, load, add_group])
@pytest.mark.parametrize("has_none", [False, True], ids=["of the weight", "of another model"])
def test_a_momentum_that_comes_later_is_warned_of_once(change, has_none):
    model, _, _ = build(sgd)
    optimizer = sgd([nn.Parameter(torch.zeros(3)) if has_none else model.module.weight])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            if step == 2:
                change(model, optimizer)
            loss_of(model).backward()
            optimizer.step()
    messages = [one for one in caught if "Set the optimizer's to 0" in str(one.message)]
    assert len(messages) == (dist.get_rank() == 0 and not (has_none and change is not add_group))
