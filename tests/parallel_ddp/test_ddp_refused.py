"""Wrong uses raise an error with the remedy on every rank; combinations of models and compressors that are allowed."""

import copy
import importlib
import sys
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from ddp_helpers import ALONE, Balance, Trainer, assert_alive, assert_ranks_agree, everywhere
from gradients import SHAPES, draw
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from hvd_sparse.torch.ddp import Compression


def linear():
    return nn.Linear(40, 30)


def test_horovod_is_neither_there_nor_needed():
    """This suite's conftest.py prevents its import."""
    with pytest.raises(ModuleNotFoundError, match="No module named 'horovod'"):
        importlib.import_module("horovod.torch")
    assert not [name for name in sys.modules if name.partition(".")[0] == "horovod"]


def test_a_model_without_ddp_is_refused():
    model = linear()
    with pytest.raises(TypeError, match=r"got Linear: model = DistributedDataParallel\(model\)"):
        Compression.dgc(model.named_parameters()).register(model)


def test_a_method_that_was_not_called_is_refused():
    model = linear()
    told = (
        r"must be a call, with the model's parameters: .*Compression\.topk\(.*\), then compression\.register\(model\)"
    )
    with pytest.raises(TypeError, match=told):
        Compression.topk.register(DistributedDataParallel(model))


def test_a_compiled_model_is_registered_without_its_wrapper():
    model = linear()
    compiled = torch.compile(DistributedDataParallel(model))
    compression = Compression.dgc(model.named_parameters())
    with pytest.raises(TypeError, match=r"register before torch\.compile, or pass model\._orig_mod"):
        compression.register(compiled)
    compression.register(compiled._orig_mod)
    copied = copy.deepcopy(compiled._orig_mod.module)
    assert torch.equal(copied.weight, model.weight)
    with pytest.raises(TypeError, match=r"Under DistributedDataParallel copy or save model\.module"):
        copy.deepcopy(compiled._orig_mod)


def test_a_second_registration_is_refused():
    model = linear()
    compression = Compression.dgc(model.named_parameters())
    wrapped = DistributedDataParallel(model)
    compression.register(wrapped)
    with pytest.raises(ValueError, match=r"registered already: build a new one .* Compression\.dgc"):
        compression.register(wrapped)
    with pytest.raises(ValueError, match="the model has a communication hook already"):
        Compression.topk(model.named_parameters()).register(wrapped)


def test_a_model_with_another_hook_is_refused():
    wrapped = DistributedDataParallel(linear())
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with pytest.raises(ValueError, match="the model has a communication hook already"):
        Compression.dgc(wrapped.module.named_parameters()).register(wrapped)


@pytest.mark.parametrize("option", ["mixed_precision", "skip_all_reduce_unused_params", "_use_python_reducer"])
def test_options_that_keep_gradients_from_the_hook_are_refused(option):
    wrapped = DistributedDataParallel(linear())
    assert hasattr(wrapped, option), "PyTorch has renamed it"
    setattr(wrapped, option, True)
    told = option.lstrip("_")
    with pytest.raises(ValueError, match=f"hvd_sparse does not work with {told} of DistributedDataParallel"):
        Compression.dgc(wrapped.module.named_parameters()).register(wrapped)


@pytest.mark.parametrize("mode", ["python_reducer", "ddp_optimizer"])
def test_the_setting_that_chooses_the_python_reducer_has_its_name(mode):
    """docs/ddp.md and the error message name it. DistributedDataParallel reads it when it is built."""
    with torch._dynamo.config.patch(optimize_ddp=mode):
        assert torch._dynamo.utils.get_optimize_ddp_mode() == mode


def test_parameters_of_another_model_are_refused():
    model, other = linear(), linear()
    wrapped = DistributedDataParallel(model)
    with pytest.raises(ValueError, match=r"was not built with: weight, bias\. Build it from the model's own"):
        Compression.dgc(other.named_parameters()).register(wrapped)
    with pytest.raises(ValueError, match=r"was not built with: bias\."):
        Compression.dgc([("weight", model.weight)]).register(wrapped)
    both = [*model.named_parameters("model"), *other.named_parameters("other")]
    with pytest.raises(ValueError, match=r"the model does not train: other\.weight, other\.bias"):
        Compression.dgc(both).register(wrapped)


def test_frozen_and_ignored_parameters_are_left_alone():
    model = nn.Sequential(OrderedDict(trained=nn.Linear(40, 30), frozen=nn.Linear(30, 20), ignored=nn.Linear(20, 10)))
    model.frozen.requires_grad_(False)
    ignored = [f"ignored.{name}" for name, _ in model.ignored.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    named = [(name, parameter) for name, parameter in model.named_parameters() if name not in ignored]
    compression = Compression.dgc(named, density=0.01, momentum=0.0, min_numel=100)
    local = copy.deepcopy(model)
    wrapped = DistributedDataParallel(model)
    compression.register(wrapped)
    delivered = {name: torch.zeros_like(parameter) for name, parameter in model.trained.named_parameters()}
    inputs = torch.randn(3, 40, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(inputs).square().sum().backward()
        for name, parameter in model.trained.named_parameters():
            delivered[name] += parameter.grad
        local(inputs).square().sum().backward()
    summed = compression.state_dict(summed=True)["memory"]
    for name, parameter in local.trained.named_parameters():
        found = dist.get_world_size() * delivered[name] + summed[f"trained.{name}"]["residual"].view(parameter.shape)
        torch.testing.assert_close(found, torch.stack(everywhere(parameter.grad)).sum(0), rtol=1e-5, atol=1e-4)
    assert bool(summed["trained.weight"]["residual"].any())
    assert summed.keys() == dict(named).keys() and model.frozen.weight.grad is None
    local.ignored.zero_grad()
    local(inputs).square().sum().backward()
    torch.testing.assert_close(model.ignored.weight.grad, local.ignored.weight.grad)


@pytest.mark.parametrize(("value", "got"), [(3, "int"), ("all", "str"), ([0, 1], "list")])
def test_what_is_no_process_group_is_refused(value, got):
    with pytest.raises(TypeError, match=rf"process_set must be a torch\.distributed\.ProcessGroup .*, got {got}"):
        Compression.dgc(linear().named_parameters(), process_set=value)


def test_another_process_group_is_refused():
    group = dist.new_group()
    model = linear()
    with pytest.raises(ValueError, match="process_group=group and process_set=group"):
        Compression.dgc(model.named_parameters(), process_set=group).register(DistributedDataParallel(model))
    with pytest.raises(ValueError, match="process_group=group and process_set=group"):
        Compression.dgc(model.named_parameters()).register(DistributedDataParallel(model, process_group=group))


@pytest.mark.rank_counts
@pytest.mark.parametrize("exchange", ["gather", "reduce_scatter"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_part_of_the_ranks(first, exchange):
    """Means and residuals are those of its members. Its first member may be rank 1; the other rank does nothing."""
    everyone, ranks = dist.get_world_size(), max(1, dist.get_world_size() - 1)
    members = [(first + place) % everyone for place in range(ranks)]
    group = dist.new_group(members)
    if dist.get_rank() in members:
        settings = {"density": 0.05, "min_numel": 100, "momentum": 0.0, "exchange": exchange, "dense_fallback": None}
        balance = Balance(trainer := Trainer("dgc", process_set=group, ddp={"process_group": group}, **settings))
        assert balance.ranks == ranks
        for step in range(6):
            balance.deliver(trainer.step(balance.gradients(step)))
        balance.check()
        assert_ranks_agree(trainer.model, group)
        assert bool(trainer.buffer("head.weight").any()) and trainer.compression.stats()["steps"] == 6
        if ranks < everyone:
            with pytest.raises(ValueError, match=f"needs all ranks of the job, got a process group of {ranks} of the"):
                Compression.dgc(trainer.model.named(), exchange="hierarchical", process_set=group)
    assert_alive()


def test_sparse_gradients_are_refused():
    model = nn.Embedding(50, 8, sparse=True)
    compression = Compression.dgc(model.named_parameters())
    wrapped = DistributedDataParallel(model)
    compression.register(wrapped)
    with pytest.raises(ValueError, match="use embeddings with sparse=False"):
        wrapped(torch.tensor([1, 2])).sum().backward()
    assert_alive()


@ALONE
def test_settings_that_differ_are_refused_on_every_rank():
    trainer = Trainer(density=0.01 * (1 + dist.get_rank()))
    with pytest.raises(ValueError, match=r"the ranks do not agree .*density"):
        trainer.reduced(draw(SHAPES, 0, dist.get_rank()))
    assert_alive()


@pytest.mark.parametrize("call", ["reset", "load_state_dict"])
def test_a_call_between_two_buckets_of_a_backward_pass_is_refused(call):
    """The rest of the step would lack the gradients of the first bucket."""
    trainer = Trainer(density=0.05)
    for step in range(2):
        trainer.step(draw(SHAPES, step, dist.get_rank()))
    compression, state = trainer.compression, trainer.compression.state_dict()

    def interrupt(parameter):
        if 0 < len(compression._arrived_names) < len(SHAPES) and compression._under_way:
            compression.reset() if call == "reset" else compression.load_state_dict(state)

    for _, parameter in trainer.model.named():
        parameter.register_post_accumulate_grad_hook(interrupt)
    with pytest.raises(RuntimeError, match=r"reset\(\) or load_state_dict\(\) was called during a backward pass"):
        trainer.reduced(draw(SHAPES, 2, dist.get_rank()))
    assert_alive()


def test_a_parameter_that_was_frozen_when_the_compressor_was_built_is_refused():
    model = nn.Sequential(linear(), nn.Linear(30, 2))
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    model[0].requires_grad_(False)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    Compression.gradient_dropping(trained).register(ddp)
    with pytest.raises(ValueError, match=r"was not built with, as it was frozen then: .* all of"):
        ddp(torch.ones(4, 40)).sum().backward()
    assert_alive()


@pytest.mark.parametrize("unfrozen", [0, 1])
def test_a_layer_that_is_unfrozen_is_refused_before_each_rank_trains_it_alone(unfrozen):
    model = nn.Sequential(linear(), nn.Linear(30, 30))
    model[unfrozen].requires_grad_(False)
    compression = Compression.gradient_dropping(model.named_parameters())
    compression.register(ddp := DistributedDataParallel(model))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    inputs = torch.full((4, 40), 1.0 + dist.get_rank())
    ddp(inputs).square().sum().backward()
    optimizer.step()
    model[unfrozen].requires_grad_(True)
    message = rf"does not reduce the gradient of {unfrozen}\.(bias|weight), and each rank"
    with pytest.raises(RuntimeError, match=message):
        ddp(inputs).square().sum().backward()  # raises, or if the layer's gradient comes after the last bucket,
        optimizer.step()
    assert_ranks_agree(model)
    assert_alive()


def test_a_frozen_layer_may_have_gradients_of_another_pass():
    """Of another DistributedDataParallel, in whose steps it trains, or of a pass for its gradients alone."""
    model = nn.Sequential(linear(), nn.Linear(30, 2))
    models = []
    for trains in (False, True):
        model[0].requires_grad_(trains)
        compression = Compression.gradient_dropping(model.named_parameters())
        compression.register(ddp := DistributedDataParallel(model))
        models.append((ddp, compression))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        model[0].requires_grad_(True)
        if step == 4:
            model(torch.ones(4, 40)).square().mean().backward()
        ddp = models[step % 2][0]
        model[0].requires_grad_(step % 2 == 1)
        optimizer.zero_grad()
        ddp(torch.ones(4, 40)).square().mean().backward()
        optimizer.step()
    assert [compression.stats()["steps"] for _, compression in models] == [3, 3]
    assert_ranks_agree(model)


def test_a_frozen_layer_may_be_of_inference_mode():
    with torch.inference_mode():
        body = linear().requires_grad_(False)
    model = nn.Sequential(body, nn.Linear(30, 2))
    compression = Compression.gradient_dropping(model.named_parameters())
    compression.register(ddp := DistributedDataParallel(model))
    ddp(torch.ones(4, 40)).sum().backward()
    assert compression.stats()["steps"] == 1


def test_two_models_side_by_side():
    """Their steps interleave: collectives start in the same order on all ranks."""
    trainers = [Trainer("dgc", density=0.05, momentum=0.9), Trainer("dct", density=0.05)]
    for step in range(4):
        for trainer in trainers:
            trainer.step(draw(SHAPES, step, dist.get_rank()))
    for trainer in trainers:
        assert_ranks_agree(trainer.model)


def test_before_torch_distributed_is_initialised(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    compression = Compression.dgc(linear().named_parameters())
    with pytest.raises(RuntimeError, match=r"call torch\.distributed\.init_process_group\(\) first"):
        compression.state_dict()
