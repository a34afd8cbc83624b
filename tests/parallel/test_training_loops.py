"""Training loops that a compressor must not misread: changed gradients, closures, layouts, shared compressors."""

import copy
import pickle
import warnings
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from gradients import SHAPES, draw
from helpers import alone_as_elastic, assert_alive, assert_ranks_agree, backward, distributed, make_parameters, step

from hvd_sparse.torch import Compression
from hvd_sparse.torch.parameters import Parameters


def sparse(parameters, **options):
    return Compression.gradient_dropping(parameters.items(), 0.05, min_numel=100, **options)


def scaler_step(optimizer, parameters):
    """Do what the usual loop with a loss scaler does."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.zeros(1))  # makes its tensors
    scaler.step(optimizer)


def clip_and_step(optimizer, parameters):
    torch.nn.utils.clip_grad_norm_(parameters.values(), 1e-6)
    optimizer.step()


def replace_and_step(optimizer, parameters):
    for one in parameters.values():
        one.grad = one.grad * 0.5
    optimizer.step()


@pytest.mark.parametrize("scope", ["tensor", "model"])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    ("finish", "message"),
    [
        (replace_and_step, r"was changed between backward\(\) and optimizer\.step\(\)"),
        (scaler_step, r"scaler\.step\(\) unscales gradients before"),
        (clip_and_step, r"was changed between backward\(\) and optimizer\.step\(\)"),
    ],
)
def test_a_gradient_changed_before_it_is_reduced_is_an_error(scope, steps, finish, message):
    """Horovod would write the sum of what was compressed over it. In the first step, too, where it could be read."""
    parameters = make_parameters()
    optimizer = distributed(parameters, sparse(parameters, scope=scope))
    for t in range(steps):
        step(optimizer, parameters, draw(SHAPES, t, hvd.rank()))
    backward(parameters, draw(SHAPES, steps, hvd.rank()))
    with pytest.raises(RuntimeError, match=f"{message}.*Reduce first"):
        finish(optimizer, parameters)
    optimizer._handles.clear()
    assert_alive()


@pytest.mark.parametrize("method", ["gradient_dropping", "dgc", "dct"])
def test_a_gradient_changed_before_a_dense_step_reduces_it_is_an_error(method):
    """As in the first stages of a warm-up on many ranks: the message is a copy, and the clipped gradient is lost."""
    parameters = make_parameters()
    compression = getattr(Compression, method)(parameters.items(), density=1.0, min_numel=100)
    optimizer = distributed(parameters, compression)
    step(optimizer, parameters, draw(SHAPES, 0, hvd.rank()))
    backward(parameters, draw(SHAPES, 1, hvd.rank()))
    with pytest.raises(RuntimeError, match=r"was changed between backward\(\) and optimizer\.step\(\)"):
        clip_and_step(optimizer, parameters)
    optimizer._handles.clear()
    assert_alive()


@pytest.mark.parametrize("finish", [scaler_step, clip_and_step])
def test_a_gradient_changed_once_it_is_reduced_is_what_the_optimizer_takes(finish):
    parameters = make_parameters()
    compression = sparse(parameters)
    compression.loss_scale = 64.0  # as if the gradients here were scaled
    optimizer = distributed(parameters, compression, lr=1.0)
    for t in range(3):
        optimizer.zero_grad()
        backward(parameters, draw(SHAPES, t, hvd.rank()))
        optimizer.synchronize()
        before = {name: one.detach().clone() for name, one in parameters.items()}
        reduced = {name: one.grad.clone() for name, one in parameters.items()}
        norm = float(torch.cat([one.reshape(-1) for one in reduced.values()]).norm())
        factor = 1.0 / 64.0 if finish is scaler_step else 1e-6 / norm
        with optimizer.skip_synchronize():
            finish(optimizer, parameters)
        for name, one in parameters.items():
            torch.testing.assert_close(one.detach(), before[name] - factor * reduced[name])


def test_a_scaler_that_is_switched_off_changes_nothing():
    weights = []
    for scaler in (None, torch.amp.GradScaler("cpu", enabled=False)):
        parameters = make_parameters()
        optimizer = distributed(parameters, sparse(parameters))
        for t in range(3):
            optimizer.zero_grad()
            backward(parameters, draw(SHAPES, t, hvd.rank()))
            optimizer.step() if scaler is None else scaler.step(optimizer)
        weights.append(torch.cat([one.detach().reshape(-1) for one in parameters.values()]))
    assert torch.equal(*weights)


@pytest.mark.parametrize("join", [torch.cat, torch.stack])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("clips", [False, True])
def test_gradients_that_share_a_count_of_changes(join, passes, clips):
    """Those of tensors that were joined: adding to one of them, or clearing it, counts for the others, too."""
    parameters = {name: torch.nn.Parameter(torch.ones(20, 30)) for name in ("q", "k", "v")}
    optimizer = distributed(parameters, sparse(parameters), backward_passes_per_step=passes)
    for t in range(3):
        for one in parameters.values():
            if one.grad is not None:
                one.grad.zero_()
        for number in range(passes):
            inputs = torch.from_numpy(draw({"x": (30,)}, 2 * t + number, hvd.rank())["x"]).float()
            (join(list(parameters.values())) @ inputs).square().sum().backward()
        if clips and t == 2:
            with pytest.raises(RuntimeError, match="was changed between backward"):
                clip_and_step(optimizer, parameters)
            optimizer._handles.clear()
        else:
            optimizer.step()


def test_a_closure_that_reduces_by_itself_is_plain_training():
    weights = []
    for closes in (False, True):
        parameters = make_parameters()
        optimizer = distributed(parameters, sparse(parameters))
        for t in range(3):

            def closure(parameters=parameters, optimizer=optimizer, t=t):
                optimizer.zero_grad()
                backward(parameters, draw(SHAPES, t, hvd.rank()))
                optimizer.synchronize()
                return torch.zeros(())

            if not closes:
                closure()
            with optimizer.skip_synchronize():
                optimizer.step(closure if closes else None)
        weights.append(torch.cat([one.detach().reshape(-1) for one in parameters.values()]))
    assert torch.equal(*weights)


def test_a_compression_for_the_other_host_says_so():
    parameters = make_parameters()
    with pytest.raises(TypeError, match=r"from hvd_sparse\.torch\.ddp import Compression"):
        sparse(parameters).register(torch.nn.Linear(2, 2))


def test_a_closure_is_an_error():
    """Horovod reduces before it runs a closure, so the ranks would train on gradients of their own."""
    parameters = make_parameters()
    optimizer = distributed(parameters, sparse(parameters))

    def closure():
        backward(parameters, draw(SHAPES, 0, hvd.rank()))
        return torch.zeros(())

    with pytest.raises(RuntimeError, match=r"optimizer\.step\(closure\).*loss = closure\(\)"):
        optimizer.step(closure)
    optimizer._handles.clear()
    assert_alive()


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_gradients_keep_their_layout(fused, compressed):
    """PyTorch's fused optimizers read a parameter and its gradient as two runs of memory."""
    random = np.random.default_rng(3)
    weight = torch.nn.Parameter(torch.zeros(16, 9, 3, 3).to(memory_format=torch.channels_last))
    parameters = {"weight": weight}
    inner = torch.optim.SGD([weight], lr=1.0, fused=fused)
    density = 0.5 if compressed else 1.0
    compression = Compression.gradient_dropping(parameters.items(), density, min_numel=1, dense_fallback=None)
    optimizer = distributed(parameters, compression, optimizer=inner, op=hvd.Sum)
    distinct = 1.0 + random.permutation(16 * 9 * 3 * 3)  # whole numbers, whose sums are exact
    gradient = torch.from_numpy((distinct * random.choice([-1.0, 1.0], distinct.size)).astype(np.float32))
    gradient = gradient.view(16, 9, 3, 3)
    (weight * gradient.to(memory_format=torch.channels_last)).sum().backward()
    optimizer.step()
    moved = -weight.detach().numpy() / hvd.size()
    kept = np.abs(gradient.numpy()) >= np.sort(np.abs(gradient.numpy()), axis=None)[-(gradient.numel() // 2)]
    np.testing.assert_array_equal(moved, np.where(kept, gradient, 0.0) if compressed else gradient)
    assert weight.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("in_turn", [True, False])
def test_a_compression_that_optimizers_use_in_turn_is_warned_of_once(in_turn):
    first, second = make_parameters(), make_parameters(seed=2)
    named = [*((f"first.{name}", one) for name, one in first.items()), *(("s." + n, p) for n, p in second.items())]
    compression = Compression.gradient_dropping(named, 0.05, min_numel=100)
    optimizers = [distributed(first, compression), distributed(second, compression)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t, number in enumerate([0, 1, 0, 1] if in_turn else [0, 0, 1, 1]):
            step(optimizers[number], (first, second)[number], draw(SHAPES, t, hvd.rank()))
    told = [str(one.message).split(":")[1] for one in caught]
    assert told == [" several optimizers use one compressor"] * in_turn


def test_one_backward_pass_may_serve_two_optimizers():
    """Of one compressor: nothing is wrong, and nothing is warned of. The first steps while the other's wait."""
    one, two = make_parameters(), {f"two.{name}": value for name, value in make_parameters(seed=2).items()}
    both = {**one, **two}
    with alone_as_elastic():
        compression = sparse(both)
    optimizers = [distributed(one, compression), distributed(two, compression)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(3):
            gradients = draw(SHAPES, t, hvd.rank())
            backward(both, {**gradients, **{f"two.{name}": value for name, value in gradients.items()}})
            for optimizer in optimizers[:: -1 if t == 2 else 1]:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    assert not [str(one.message) for one in caught]
    assert compression.stats()["steps"] == 3
    assert_ranks_agree(both)


@pytest.mark.parametrize("loop", ["frozen", "discarded", "reset"])
def test_discarded_gradients_are_warned_of_once(loop):
    """As of a discriminator in a generator's step: the residual keeps what was not sent of them."""
    one, other = make_parameters(), {f"other.{name}": value for name, value in make_parameters(seed=2).items()}
    with alone_as_elastic():
        first_compression = sparse(one)
        first, second = distributed(one, first_compression), distributed(other, sparse(other))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(4):
            gradients = draw(SHAPES, t, hvd.rank())
            step(first, one, gradients)
            if loop != "frozen":
                backward(one, gradients)
            step(second, other, {f"other.{name}": value for name, value in gradients.items()})
            if loop != "frozen":
                first.synchronize()
                first.zero_grad()
            if loop == "reset":
                first_compression.reset()
    told = [one for one in caught if "no optimizer has stepped with them" in str(one.message)]
    assert len(told) == (loop == "discarded" and hvd.rank() == 0)


@pytest.mark.parametrize(("beta", "warned"), [(0.9, True), (0.0, False)])
def test_the_momentum_of_adam_is_warned_of(beta, warned):
    parameters = make_parameters()
    with alone_as_elastic():
        compression = Compression.dgc(parameters.items(), 0.05, momentum=0.9, min_numel=100)
    inner = torch.optim.Adam(list(parameters.values()), betas=(beta, 0.999))
    optimizer = distributed(parameters, compression, optimizer=inner)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(optimizer, parameters, draw(SHAPES, 0, hvd.rank()))
    told = [one for one in caught if "beta1" in str(one.message)]
    assert len(told) == (warned and hvd.rank() == 0)
    assert all("momentum (or beta1) 0.9" in str(one.message) for one in told)
    assert all(Path(one.filename).parent == Path(__file__).parent for one in told)  # a line of these tests


@pytest.mark.parametrize(("name", "decay"), [("SGD", 0.01), ("SGD", 0.0), ("AdamW", 0.01)])
@pytest.mark.parametrize("method", ["dgc", "gradient_dropping"])
def test_weight_decay_behind_the_momentum_is_warned_of(method, name, decay):
    """AdamW's acts on the weights. Without a momentum in the compressor, SGD's is where it belongs."""
    parameters = make_parameters()
    with alone_as_elastic():
        compression = getattr(Compression, method)(parameters.items(), 0.05, min_numel=100)
    options = {"betas": (0.0, 0.999)} if name == "AdamW" else {}
    inner = getattr(torch.optim, name)(list(parameters.values()), lr=0.1, weight_decay=decay, **options)
    optimizer = distributed(parameters, compression, optimizer=inner)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(2):
            step(optimizer, parameters, draw(SHAPES, t, hvd.rank()))
    told = [str(one.message) for one in caught if "weight_decay" in str(one.message)]
    assert len(told) == (method == "dgc" and name == "SGD" and decay > 0.0 and hvd.rank() == 0)
    assert all("momentum of 0.9, which Compression.dgc has: it is 10 times as weak" in one for one in told)


@pytest.mark.parametrize("copies", [copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused_with_a_reason(copies):
    with pytest.raises(TypeError, match=r"cannot be copied, pickled or broadcast.*Module.*state_dict\(\)"):
        copies(sparse(make_parameters()))


def test_a_model_that_moves_after_its_compression_was_built_is_an_error():
    parameters = Parameters(torch.nn.Linear(3, 2).named_parameters())
    parameters.check_device()
    parameters.device = torch.device("cuda", 0)  # where it was built, as there may be no GPU here
    with pytest.raises(ValueError, match=r"were on cuda:0 when .* are on cpu now.*after model\.to\(device\)"):
        parameters.check_device()


@pytest.mark.skipif(hvd.size() == 1, reason="Horovod compresses nothing with one process")
def test_an_optimizer_without_its_compressor_is_warned_of_once():
    parameters = make_parameters({"weight": (30, 20)})
    compression = Compression.dgc(parameters.items(), momentum=0.9)
    sgd = torch.optim.SGD(parameters.values(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, parameters.items())  # without compression=compression
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        hvd.broadcast_optimizer_state(sgd, root_rank=0)  # steps with zeros
        assert not found
        for _ in range(3):
            parameters["weight"].square().sum().backward()
            optimizer.step()
    told = [one for one in found if "gradients that its compressor has not seen" in str(one.message)]
    assert len(told) == (hvd.rank() == 0) and compression.stats()["steps"] == 0
    assert "SparseCompressor, step 0: " in repr(compression) and "density" in repr(compression)


def several_built(parameters):
    """One of several compressors that were built is used."""
    used = Compression.dgc(parameters.items(), momentum=0.9)
    others = Compression.topk(parameters.items()), Compression.micro(parameters.items())  # exist until it has trained
    optimizer = distributed(parameters, used)
    for t in range(2):
        step(optimizer, parameters, draw(SHAPES, t, hvd.rank()))
    del others
    return used, optimizer


def fewer_passes(parameters):
    """The compressor is called in the optimizer's step, as the first has fewer backward passes."""
    used = sparse(parameters)
    optimizer = distributed(parameters, used, backward_passes_per_step=2)
    backward(parameters, draw(SHAPES, 0, hvd.rank()))
    optimizer.step()
    return used, optimizer


@pytest.mark.skipif(hvd.size() == 1, reason="Horovod compresses nothing with one process")
@pytest.mark.parametrize("train", [several_built, fewer_passes])
def test_a_compressor_that_is_used_is_not_warned_of(train):
    parameters = make_parameters()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        used, _ = train(parameters)
    assert not found and used.stats()["steps"] > 0


def test_the_compressor_that_is_used_checks_the_loss_scale_where_others_were_built():
    parameters = make_parameters()
    _, optimizer = several_built(parameters)
    backward(parameters, draw(SHAPES, 2, hvd.rank()))
    optimizer.synchronize()
    with optimizer.skip_synchronize(), pytest.raises(RuntimeError, match=r"compression\.loss_scale was never set"):
        scaler_step(optimizer, parameters)


def test_the_compressor_that_is_used_checks_the_loss_scale_where_another_is_built_later():
    parameters = make_parameters()
    _, optimizer = several_built(parameters)
    later = Compression.topk(parameters.items())
    step(optimizer, parameters, draw(SHAPES, 2, hvd.rank()))
    backward(parameters, draw(SHAPES, 3, hvd.rank()))
    optimizer.synchronize()
    with optimizer.skip_synchronize(), pytest.raises(RuntimeError, match=r"compression\.loss_scale was never set"):
        scaler_step(optimizer, parameters)
    assert later.stats()["steps"] == 0


@pytest.mark.skipif(hvd.size() == 1, reason="Horovod compresses nothing with one process")
def test_a_second_optimizer_for_the_same_layers_is_refused():
    parameters = make_parameters()
    compression = sparse(parameters)
    first = distributed(parameters, compression)
    step(first, parameters, draw(SHAPES, 0, hvd.rank()))
    second = distributed(parameters, compression, optimizer=torch.optim.Adam(parameters.values()))
    with pytest.raises(RuntimeError, match=r"two of Horovod's optimizers reduce the gradient of .*param_groups"):
        backward(parameters, draw(SHAPES, 1, hvd.rank()))
    for optimizer in (first, second):
        optimizer._handles.clear()
    assert_alive()
