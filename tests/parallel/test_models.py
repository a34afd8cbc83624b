"""Real models: sparse embeddings; frozen, tied and unused weights; unusual shapes and layouts; GANs."""

import gc
import warnings
import weakref

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from gradients import SCOPES, SHAPES, draw, shuffled, whole_numbers
from helpers import assert_ranks_agree, distributed, drive, make_parameters, memory_of, step, total
from torch import nn

from hvd_sparse.torch import Compression


def embedding_pair(sparse_as_dense, compression_of):
    """Train two equal models with sparse gradients, without compression and with; return their parameters."""
    trained = []
    for make in (lambda named: Compression.none, compression_of):
        torch.manual_seed(0)
        model = nn.ModuleDict({"table": nn.Embedding(150, 8, sparse=True), "head": nn.Linear(8, 150)})
        title = "plain" if not trained else "ours"
        parameters = {f"{title}.{name}": parameter for name, parameter in model.named_parameters()}
        compression = make(parameters.items())
        optimizer = distributed(parameters, compression, lr=0.5, sparse_as_dense=sparse_as_dense)
        for t in range(5):
            optimizer.zero_grad()
            words = torch.arange(20) * (t + 1 + hvd.rank()) % 150
            model["head"](model["table"](words)).square().mean().backward()
            optimizer.step()
            assert parameters[f"{title}.table.weight"].grad.is_sparse
        trained.append((parameters, compression))
    return trained


@pytest.mark.filterwarnings("ignore:hvd_sparse. Horovod reduces a sparse gradient")
@pytest.mark.parametrize("scope", SCOPES)
def test_sparse_gradients_pass_through(scope):
    """Horovod gathers them itself; the embedding moves as without compression, and has no memory."""
    (plain, _), (ours, compression) = embedding_pair(
        False, lambda named: Compression.gradient_dropping(named, density=1.0, scope=scope, min_numel=10)
    )
    torch.testing.assert_close(ours["ours.table.weight"], plain["plain.table.weight"], rtol=1e-5, atol=1e-6)
    assert compression.state_dict()["memory"]["ours.table.weight"] == {}
    assert_ranks_agree(ours)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_sparse_gradient_is_warned_of_once(momentum):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        embedding_pair(False, lambda named: Compression.dgc(named, density=0.05, momentum=momentum, min_numel=10))
    told = [one for one in caught if "sparse_as_dense=True" in str(one.message)]
    assert len(told) == (1 if hvd.rank() == 0 else 0)
    assert all(("momentum" in str(one.message)) == (momentum > 0.0) for one in told)


@pytest.mark.parametrize("scope", SCOPES)
def test_sparse_as_dense_is_horovods_at_density_one(scope):
    (plain, _), (ours, _) = embedding_pair(
        True, lambda named: Compression.gradient_dropping(named, density=1.0, scope=scope)
    )
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, plain[name.replace("ours", "plain")], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scope", SCOPES)
def test_sparse_as_dense_is_compressed(scope):
    _, (ours, compression) = embedding_pair(
        True, lambda named: Compression.gradient_dropping(named, density=0.05, scope=scope, min_numel=10)
    )
    assert_ranks_agree(ours)
    assert compression.stats()["step"]["density"] == pytest.approx(0.05, rel=0.05)
    assert memory_of(compression, ours, "ours.table.weight").count_nonzero() > 0


def two_embeddings(passes, factor):
    """Train two sparse tables of one shape by a step of some backward passes, the first's loss times `factor`."""
    torch.manual_seed(0)
    tables = nn.ModuleDict({name: nn.Embedding(200, 10, sparse=True) for name in ("first", "second")})
    parameters = dict(tables.named_parameters())
    compression = Compression.gradient_dropping(parameters.items(), min_numel=0)
    optimizer = distributed(parameters, compression, sparse_as_dense=True, backward_passes_per_step=passes)
    words = torch.arange(5)
    for _ in range(passes):
        (tables["first"](words).sum() * factor + tables["second"](words).sum()).backward()
    optimizer.step()
    return tables


def test_nan_in_a_sparse_gradient_sent_as_dense():
    tables = two_embeddings(passes=1, factor=float("nan") if hvd.rank() == 0 else 1.0)
    assert bool(tables["first"].weight.grad.to_dense().isnan().all())


def test_equal_sparse_gradients_of_equal_shape_sent_as_dense():
    """On one rank the two tables happen to have equal gradients, such as zeros from a masked loss."""
    tables = two_embeddings(passes=2, factor=1.0 if hvd.rank() == 0 else 2.0)
    assert bool(tables["first"].weight.grad.to_dense().isfinite().all())
    assert_ranks_agree({f"two.{name}": parameter for name, parameter in tables.named_parameters()})


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("method", ["gradient_dropping", "dgc"])
def test_freezing_and_unfreezing(method, scope):
    """A frozen parameter does not move and keeps its memory, also while the others go on; then it continues."""
    parameters = make_parameters()
    compression = getattr(Compression, method)(parameters.items(), density=0.05, scope=scope, min_numel=100)
    optimizer = distributed(parameters, compression)
    frozen = ("body.weight", "body.bias")  # one compressed, one sent dense
    for t in range(9):
        if t == 3:
            at_freeze = {name: parameters[name].detach().clone() for name in frozen}
            memory = {name: memory_of(compression, parameters, name) for name in frozen}
        for name in frozen:
            parameters[name].requires_grad_(not 3 <= t < 6)
        others = parameters["head.weight"].detach().clone()
        step(optimizer, parameters, draw(SHAPES, t, hvd.rank()), shuffled(SHAPES, t, hvd.rank()))
        assert not torch.equal(others, parameters["head.weight"])
        if 3 <= t < 6:
            for name in frozen:
                assert torch.equal(parameters[name], at_freeze[name]), name
                assert torch.equal(memory_of(compression, parameters, name), memory[name]), name
    assert all(not torch.equal(parameters[name], at_freeze[name]) for name in frozen)
    assert_ranks_agree(parameters)


@pytest.mark.parametrize("scope", SCOPES)
def test_nothing_is_lost_by_freezing(scope):
    parameters = make_parameters()
    compression = Compression.gradient_dropping(parameters.items(), density=0.05, scope=scope, min_numel=100)
    optimizer = distributed(parameters, compression, op=hvd.Sum)
    fed = np.zeros(SHAPES["body.weight"])
    sent = torch.zeros(SHAPES["body.weight"], dtype=torch.float64)
    for t in range(12):
        trains = t % 4 < 2
        parameters["body.weight"].requires_grad_(trains)
        gradients = whole_numbers(SHAPES, t, hvd.rank())
        fed += gradients["body.weight"] * trains
        step(optimizer, parameters, gradients)
        sent += parameters["body.weight"].grad.double()
    residual = total(memory_of(compression, parameters, "body.weight"))
    assert torch.equal(total(fed).reshape(-1), sent.reshape(-1) + residual) and residual.count_nonzero() > 0


@pytest.mark.parametrize("scope", SCOPES)
def test_what_is_frozen_may_differ_between_ranks(scope):
    """The ranks go on agreeing: a parameter moves by the gradients of the ranks on which it is not frozen."""
    shapes = {"a": (800,), "b": (800,)}
    parameters = make_parameters(shapes)
    compression = Compression.gradient_dropping(parameters.items(), density=0.1, scope=scope, min_numel=100)
    optimizer = distributed(parameters, compression)
    for t in range(6):
        parameters["ab"[hvd.rank() % 2]].requires_grad_(t < 2 or t > 3)
        step(optimizer, parameters, draw(shapes, t, hvd.rank()))
        assert_ranks_agree(parameters)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_parameter_that_is_first_used_at_step_five(scope):
    """It comes as a gradient of zeros before (Horovod fills in), and then with the rest; no rank is at odds."""
    parameters = make_parameters()
    compression = Compression.gradient_dropping(parameters.items(), density=0.05, scope=scope, min_numel=100)
    optimizer = distributed(parameters, compression)
    start = parameters["head.weight"].detach().clone()
    for t in range(9):
        used = [name for name in SHAPES if name != "head.weight" or t >= 5]
        step(optimizer, parameters, draw({name: SHAPES[name] for name in used}, t, hvd.rank()))
        assert torch.equal(start, parameters["head.weight"]) == (t < 5)
    assert_ranks_agree(parameters)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_parameter_whose_gradient_comes_only_in_some_steps(scope):
    """Driven without the optimizer, which would fill in zeros: what is not compressed keeps its memory."""
    parameters = make_parameters()
    compression = Compression.gradient_dropping(parameters.items(), density=0.05, scope=scope, min_numel=100)
    balance = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for t in range(12):
        present = [name for i, name in enumerate(SHAPES) if (t + i) % 3 or t > 10]
        gradients = whole_numbers({name: SHAPES[name] for name in present}, t, hvd.rank())
        reduced = drive(compression, parameters, gradients, order=shuffled(present, t, hvd.rank()))
        for name in present:
            balance[name] += total(gradients[name]).numpy() - reduced[name].double().numpy()
    for name in SHAPES:
        residual = total(memory_of(compression, parameters, name)).numpy()
        assert (balance[name].reshape(-1) == residual).all(), name


@pytest.mark.parametrize("scope", SCOPES)
def test_two_optimizers_with_equal_names(scope):
    """As in a GAN, in turns; each moves as it would alone."""

    def model(seed):
        parameters = make_parameters(seed=seed)
        compression = Compression.dgc(parameters.items(), density=0.05, scope=scope, min_numel=100)
        return parameters, compression, distributed(parameters, compression)

    alone = [model(1), model(2)]
    for number, (parameters, _, optimizer) in enumerate(alone):
        for t in range(6):
            step(optimizer, parameters, draw(SHAPES, t, hvd.rank(), number))
    together = [model(1), model(2)]
    for t in range(6):
        for number, (parameters, _, optimizer) in enumerate(together):
            step(optimizer, parameters, draw(SHAPES, t, hvd.rank(), number))
    for (expected, _, _), (found, _, _) in zip(alone, together, strict=True):
        assert all(torch.equal(expected[name], found[name]) for name in SHAPES)


@pytest.mark.parametrize("scope", SCOPES)
def test_tied_weights(scope):
    """A parameter with two names has one residual, and its gradient is the sum over both uses."""
    torch.manual_seed(0)
    encoder, decoder = nn.Embedding(50, 12), nn.Linear(12, 50, bias=False)
    decoder.weight = encoder.weight
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    named = list(model.named_parameters(remove_duplicate=False))
    assert len(named) == 2
    compression = Compression.gradient_dropping(named, density=0.1, scope=scope, min_numel=100)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), compression
    )
    for t in range(5):
        optimizer.zero_grad()
        decoder(encoder(torch.arange(10) + t + hvd.rank())).square().mean().backward()
        optimizer.step()
    assert list(compression.state_dict()["memory"]) == ["encoder.weight"]
    assert_ranks_agree(dict(named))


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("min_numel", [0, 10**6])
def test_gradients_in_channels_last_order(min_numel, scope):
    """Horovod alone refuses tensors that are not contiguous; the result is that of contiguous ones, bit for bit."""
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(3)
        convolution = nn.Conv2d(4, 6, 3).to(memory_format=layout)
        parameters = {f"{layout}.{name}": p for name, p in convolution.named_parameters()}
        compression = Compression.dgc(parameters.items(), 0.1, scope=scope, min_numel=min_numel, weight_decay=0.1)
        optimizer = distributed(parameters, compression)
        for t in range(6):
            optimizer.zero_grad()
            drawn = draw({"weight": (6, 4, 3, 3)}, t, hvd.rank())["weight"]
            convolution.weight.grad = torch.tensor(drawn).float().to(memory_format=layout)
            (convolution.weight * 0).sum().backward()
            assert convolution.weight.grad.is_contiguous() == (layout == torch.contiguous_format)
            optimizer.step()
            assert convolution.weight.grad.shape == (6, 4, 3, 3)
        found.append(convolution.weight.detach().contiguous())
    assert torch.equal(*found)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 30])
@pytest.mark.parametrize("min_numel", [0, 10, 10**9])
def test_any_bucket_and_least_size(min_numel, bucket_bytes, scope):
    """Scalars, single elements and tiny tensors, compressed or not, one message each or one for all."""
    shapes = {"scalar": (), "one": (1,), "one_of_many": (1, 1, 1), "few": (3, 3), "more": (40,)}
    parameters = make_parameters(shapes)
    settings = {"density": 0.2, "min_numel": min_numel, "bucket_bytes": bucket_bytes, "scope": scope}
    compression = Compression.gradient_dropping(parameters.items(), **settings)
    balance = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    for t in range(5):
        gradients = whole_numbers(shapes, t, hvd.rank())
        reduced = drive(compression, parameters, gradients, order=shuffled(shapes, t, hvd.rank()))
        for name, shape in shapes.items():
            assert reduced[name].shape == shape and reduced[name].dtype == torch.float32
            balance[name] += total(gradients[name]) - reduced[name].double()
    for name, shape in shapes.items():
        residual = total(memory_of(compression, parameters, name)).reshape(shape)
        assert torch.equal(balance[name], residual), name
        if min_numel > 40:
            assert residual.count_nonzero() == 0


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("density", [0.01, 1.0])
def test_gradients_that_are_all_zero(density, scope):
    parameters = make_parameters()
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    compression = Compression.dgc(parameters.items(), density, scope=scope, min_numel=100)
    optimizer = distributed(parameters, compression)
    for _ in range(3):
        step(optimizer, parameters, {name: np.zeros(shape) for name, shape in SHAPES.items()})
    assert all(torch.equal(start[name], parameter) for name, parameter in parameters.items())
    assert compression.stats()["residual_norm"] == 0.0


@pytest.mark.rank_counts
def test_a_process_alone_is_left_to_its_optimizer():
    """Horovod calls no compressor at one process: nothing is compressed. At more, it is."""
    parameters, plain = make_parameters(), make_parameters()
    compression = Compression.gradient_dropping(parameters.items(), density=0.01)
    inner = torch.optim.SGD(list(parameters.values()), lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner, list(parameters.items()), compression)
    expected = torch.optim.SGD(list(plain.values()), lr=0.1)
    for t in range(3):
        step(optimizer, parameters, draw(SHAPES, t, hvd.rank()))
        step(expected, plain, draw(SHAPES, t, hvd.rank()))
    stats = compression.stats()
    if hvd.size() == 1:
        assert all(torch.equal(parameters[name], plain[name]) for name in SHAPES)
        assert (stats["steps"], stats["residual_norm"], stats["total"]["payload_bytes"]) == (0, 0.0, 0)
    else:
        assert stats["steps"] == 3
        assert_ranks_agree(parameters)


def test_nothing_global_holds_on_to_a_compression():
    def use():
        parameters = make_parameters()
        compression = Compression.gradient_dropping(parameters.items(), density=0.05, min_numel=100)
        drive(compression, parameters, draw(SHAPES, 0, hvd.rank()))
        return weakref.ref(compression), weakref.ref(parameters["head.weight"])

    alive = use()
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def train(optimizer, forward, update, inputs):
    optimizer.zero_grad()
    forward(inputs).square().mean().backward()
    update()


class Watched(dict):
    """Counts how often someone looks at all entries."""

    looks = 0

    def items(self):
        self.looks += 1
        return super().items()


def test_the_first_step_does_not_look_at_all_parameters_for_each_gradient():
    """With 10,000 it took seconds."""
    parameters = make_parameters({f"layer{number}": (3,) for number in range(30)})
    compression = Compression.dgc(parameters.items())
    optimizer = distributed(parameters, compression)
    compression._parameters._by_name = watched = Watched(compression._parameters._by_name)
    sum(one.sum() for one in parameters.values()).backward()
    assert watched.looks < 5
    optimizer.step()
    assert all(torch.equal(one.grad, torch.ones(3)) for one in parameters.values())


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # Horovod's functions
@pytest.mark.each_value
@pytest.mark.parametrize("method", ["dgc", "micro"])  # Horovod's hooks start MiCRO's collectives in backward
@pytest.mark.parametrize("compiled", ["model", "optimizer", "all"])
def test_compiled_training_is_as_it_is_otherwise(compiled, method):
    """In a whole step, Horovod's hooks fail without compression, too, where two parameters have the same shape."""
    trained = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 50), nn.ReLU(), nn.Linear(50, 10))
        compression = getattr(Compression, method)(model.named_parameters(), density=0.05, min_numel=100)
        optimizer = distributed(dict(model.named_parameters()), compression)
        forward, update, run = model, optimizer.step, train
        if compiles and compiled == "model":
            forward = torch.compile(model, backend="aot_eager")
        elif compiles and compiled == "optimizer":
            update = torch.compile(optimizer.step)  # by Inductor, which fails where it traces collectives
        elif compiles:
            run = torch.compile(train)
        for t in range(4):
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * t + hvd.rank()))
            run(optimizer, forward, update, x)
        trained.append(torch.cat([one.detach().flatten() for one in model.parameters()]))
        assert hvd.size() == 1 or compression.stats()["step"]["density"] < 0.2
    if compiled == "model":
        assert torch.equal(*trained)
    else:  # Inductor rounds otherwise
        torch.testing.assert_close(*trained, rtol=1e-5, atol=1e-6)
