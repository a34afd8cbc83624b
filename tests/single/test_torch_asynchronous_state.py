"""PyTorch's session and optimizer on one co-located rank: checkpoints, and errors."""

import copy
import io
import re
import warnings

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch_session import SMALL, learn, network, numbers, same

from hvd_sparse.parameter_server.server import departures
from hvd_sparse.schedule import Constant, WarmUp
from hvd_sparse.torch.asynchronous import ASGD, DGS, MSGD, DCTAsync, DGCAsync, GradientDroppingAsync, connect

METHODS = [DGS(**SMALL, warmup=25), DGCAsync(**SMALL), GradientDroppingAsync(**SMALL), DCTAsync(**SMALL)]


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_goes_on_exactly(join, method):
    """The servers' model and the worker's memory: what comes after is what would have come."""
    model = network()
    first = join(model, method)
    optimizer = first.optimizer(lr=0.1)
    learn(model, optimizer, 15)
    file = io.BytesIO()
    torch.save({"model": first.global_state_dict(), "optimizer": optimizer.state_dict()}, file)
    first.close()
    file.seek(0)
    kept = torch.load(file)
    again = network(seed=99)
    again.load_state_dict(kept["model"])
    session = join(again, method)
    resumed = session.optimizer(lr=99.0)
    resumed.load_state_dict(kept["optimizer"])
    assert resumed.param_groups[0]["lr"] == 0.1 and resumed.state_dict()["step"] == 15
    learn(again, resumed, 15, seed=1)
    straight = network()
    session = join(straight, method)
    optimizer = session.optimizer(lr=0.1)
    learn(straight, optimizer, 15)
    learn(straight, optimizer, 15, seed=1)
    same(numbers(straight), numbers(again))
    for one, other in zip(optimizer.state.values(), resumed.state.values(), strict=True):
        same(one, other)


@pytest.mark.parametrize("method", METHODS)
def test_its_own_state_changes_nothing(join, method):
    """A state dict has views of the memory: taking one over must not clear it first."""
    model = network()
    optimizer = join(model, method).optimizer(lr=0.1)
    learn(model, optimizer, 5)
    before = copy.deepcopy(dict(optimizer.state))
    optimizer.load_state_dict(optimizer.state_dict())
    assert any(bool(memory["residual"].any()) for memory in before.values())
    for one, other in zip(before.values(), optimizer.state.values(), strict=True):
        same(one, other)


ALIKE = [  # methods whose error feedback has the same names and sizes
    (GradientDroppingAsync(**SMALL), DGS(**SMALL)),
    (DGS(**SMALL), GradientDroppingAsync(**SMALL)),
    (GradientDroppingAsync(**SMALL), ASGD()),
    (MSGD(), DGCAsync(**SMALL)),
]


@pytest.mark.parametrize(("theirs", "ours"), ALIKE, ids=lambda method: method.name)
def test_the_state_of_a_method_with_the_same_buffers_is_refused(join, theirs, ours):
    """DGS's residual is its momentum; it would apply that of another method 1 / (1 - m) times."""
    model = network()
    optimizer = join(model, theirs).optimizer(lr=0.1)
    learn(model, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    session = join(network(), ours)
    optimizer = session.optimizer(lr=0.2)
    with pytest.raises(ValueError, match=f"the state is of another method: {theirs.name} there, {ours.name} here"):
        optimizer.load_state_dict(state)
    assert not session.worker.residual.any() and session.worker.step == 0 and optimizer.param_groups[0]["lr"] == 0.2


def test_a_state_without_its_method_is_loaded(join):
    """Of an earlier version."""
    model = network()
    session = join(model, DGS(**SMALL))
    optimizer = session.optimizer(lr=0.1)
    learn(model, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    assert state.pop("method") == "dgs"
    residual = session.worker.residual.copy()
    assert residual.any()
    learn(model, optimizer, 2)
    optimizer.load_state_dict(state)
    assert (session.worker.residual == residual).all() and session.worker.step == 2


@pytest.mark.parametrize("state", [{}, None, {"state": {}}, {"version": 2, "memory": {}}])
def test_what_is_no_state_is_refused(join, state):
    session = join(network(), DGS(**SMALL))
    optimizer = session.optimizer(lr=0.1)
    missing = "NoneType" if state is None else "a dict without param_groups" + ("" if "state" in state else ", state")
    told = "the state must be what state_dict() of an asynchronous optimizer returned, with param_groups, state; got "
    with pytest.raises(ValueError, match=f"^{re.escape(told + missing)}$"):
        optimizer.load_state_dict(state)
    assert optimizer.state_dict()["step"] == 0


@pytest.mark.parametrize(
    ("step", "error"), [(-5, ValueError), ("3", TypeError), (2.5, TypeError), (True, TypeError), (None, TypeError)]
)
def test_a_state_whose_step_is_none_is_refused(join, step, error):
    model = network()
    session = join(model, DGS(**SMALL))
    optimizer = session.optimizer(lr=0.1)
    learn(model, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    learn(model, optimizer, 1)
    before = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 0.5
    with pytest.raises(error, match=f"the state's step must be an integer of at least 0, got {step!r}"):
        optimizer.load_state_dict({**state, "step": step})
    after = optimizer.state_dict()
    assert after["step"] == 3 and after["param_groups"] == before["param_groups"]
    assert all(torch.equal(after["state"][i]["residual"], before["state"][i]["residual"]) for i in before["state"])


def test_states_of_others_are_refused(join):
    other = copy.deepcopy(join(network(), DGCAsync(**SMALL)).optimizer(lr=0.1).state_dict())
    wider = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 2))
    wider = copy.deepcopy(join(wider, DGS(**SMALL)).optimizer(lr=0.1).state_dict())
    session = join(network(), DGS(**SMALL))
    optimizer = session.optimizer(lr=0.1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="of another method"):
        optimizer.load_state_dict(other)
    with pytest.raises(ValueError, match=r"the state of 0\.weight must have \{'residual': 54\} elements, got .*63"):
        optimizer.load_state_dict(wider)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    empty = torch.optim.SGD(network().parameters(), lr=0.3).state_dict()
    session.worker.residual[:] = 1.0
    optimizer.load_state_dict(empty)  # of one that has done nothing yet
    assert (session.worker.residual == 0).all() and optimizer.param_groups[0]["lr"] == 0.3


def test_saved_and_restored(join, tmp_path):
    model = network()
    session = join(model, DGS(**SMALL))
    learn(model, session.optimizer(lr=0.1), 5)
    path = str(tmp_path / "state.npz")
    session.save(path)
    session.close()
    other = network(seed=5)
    join(other, DGS(**SMALL), restore=path)
    same(numbers(other), numbers(model))
    with pytest.raises(ValueError, match=r"restore=.* is of another model.*: 0.weight: \(9, 6\) there, \(9, 7\) here"):
        join(nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 2)), DGS(**SMALL), restore=path)
    join(network(), DGS(**SMALL), restore=path)  # it may be tried again


BAD_ARGUMENTS = [
    (lambda join: join(network(), "dgs"), TypeError, "method must be one of ASGD, .*DGS.* got 'dgs'"),
    (lambda join: join(network(), DGS), TypeError, "method must be one of"),
    (lambda join: join(nn.Tanh(), DGS()), ValueError, "there must be parameters"),
    (lambda join: join(network().requires_grad_(False), DGS()), ValueError, "there must be parameters"),
    (
        lambda join: join([("c", nn.Parameter(torch.ones(2, dtype=torch.complex64)))]),
        ValueError,
        "parameters must be of real numbers, got c of torch.complex64",
    ),
    (
        lambda join: join(network().parameters()),
        TypeError,
        r"model must be the model or \(name, parameter\) pairs, as from .*; got entries of type Parameter",
    ),
    (
        lambda join: join(nn.Sequential(nn.Linear(0, 4), nn.Linear(4, 4))),
        ValueError,
        r"there must be parameters, with elements; got \['0.weight'\]: set requires_grad=False",
    ),
    (lambda join: join([("a", np.zeros(3))]), TypeError, "a: a parameter must be a torch.Tensor, got ndarray"),
    (lambda join: join(3), TypeError, r"model must be the model or model.named_parameters\(\), got int"),
    (
        lambda join: join([*network().named_parameters(), *network().named_parameters()]),
        ValueError,
        r"model must have unique names, got '0\.weight' twice: of several models, pass torch.nn.ModuleList",
    ),
    (lambda join: join(network(), servers=1), ValueError, "servers must be 'colocated' or a number from 1"),
    (lambda join: join(network(), servers=True), TypeError, "servers, .* must be an integer, got True"),
    (lambda join: join(network(), servers="all"), TypeError, "servers, if not 'colocated', must be .* got 'all'"),
    (lambda join: join(network(), overlap=1), TypeError, "overlap must be True or False, got 1"),
    (lambda join: join(network(), timeout=0), ValueError, "timeout must be above 0 and finite, in seconds, got 0"),
    (lambda join: join(network(), timeout=None), TypeError, "timeout must be a number above 0 .* got None"),
    (lambda join: join(network(), silence=0), ValueError, "silence must be above 0 and finite, in seconds, got 0"),
    (lambda join: join(network(), silence="2"), TypeError, "silence must be a number above 0 .* got '2'"),
    (lambda join: join(network(), communicator=MPI.COMM_NULL), ValueError, "communicator must be .* got COMM_NULL"),
    (lambda join: join(network()).optimizer(lr=None), TypeError, "lr must be a number finite and at least 0, got None"),
    (lambda join: join(network()).optimizer(lr=-1.0), ValueError, "lr must be finite and at least 0, got -1.0"),
    (lambda join: join(network()).optimizer(lr=float("nan")), ValueError, "lr must be finite and at least 0, got nan"),
    (lambda join: join(network()).optimizer(lr=float("inf")), ValueError, "lr must be finite and at least 0, got inf"),
    (
        lambda join: join(network()).optimizer(lr=0.1, weight_decay=-1),
        ValueError,
        "weight_decay must be finite and at least 0",
    ),
    (
        lambda join: join(network()).optimizer(network().parameters(), lr=0.1),
        ValueError,
        r"params must be among those that were connected; of others, the shapes are \[\(9, 6\)",
    ),
    (lambda join: join(network()).serve(), RuntimeError, "^$"),
    (lambda join: DGS(momentum=1.0), ValueError, "momentum must be in"),
    (lambda join: DGCAsync(momentum=0.0, nesterov=True), ValueError, "nesterov=True needs a momentum above 0"),
    (lambda join: DGCAsync(nesterov=1), TypeError, "nesterov must be True or False, got 1"),
    (lambda join: DGS(density=0.0), ValueError, "density must be in"),
    (lambda join: DGS(pull_density=2), ValueError, "pull_density must be in"),
    (lambda join: DGS(values="int3"), ValueError, "values must be one of"),
    (lambda join: DCTAsync(lifespan=0), ValueError, "lifespan must be"),
    (lambda join: DCTAsync(drain=0), ValueError, "drain must be"),
    (lambda join: DCTAsync(band=1.0), ValueError, "band must be above 1"),
    (lambda join: DCTAsync(scope="model"), ValueError, "scope must be one of"),
    (lambda join: ASGD(density=0.5), ValueError, r"density must be 1.0 in asgd, which is dense, got 0\.5: use Gradi"),
    (lambda join: ASGD(density=Constant(1.0)), ValueError, r"density must be 1.0 in asgd, .*, got Constant"),
    (lambda join: ASGD(warmup=WarmUp(0.01, 100)), ValueError, "warmup must be None in asgd, which is dense"),
    (lambda join: ASGD(warmup=10), ValueError, "warmup must be None in asgd, which is dense, got 10"),
    (lambda join: MSGD(warmup=10), ValueError, "warmup must be None in msgd, which is dense, got 10"),
    (lambda join: join(network(), threads=0), ValueError, "threads must be an integer from 1 to 16, got 0"),
    (lambda join: join(network(), threads=2.0), TypeError, "threads must be an integer from 1 to 16, got 2.0"),
    (
        lambda join: join([("a", nn.Parameter(torch.ones(2)))], threads=3),
        ValueError,
        "servers times threads must be at most the model's 2 elements, got 3",
    ),
]


@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_a_rate_that_becomes_infinite_is_refused(join, name):
    """Its products would not be finite, and count as zero."""
    model = network()
    optimizer = join(model).optimizer(lr=0.1)
    learn(model, optimizer, 1)
    optimizer.param_groups[0][name] = float("inf")
    with pytest.raises(ValueError, match=f"{name} must be finite and at least 0, got inf"):
        learn(model, optimizer, 1)


@pytest.mark.parametrize(("call", "error", "text"), BAD_ARGUMENTS, ids=range(len(BAD_ARGUMENTS)))
def test_bad_arguments(join, call, error, text):
    if text == "^$":
        assert call(join) == {}  # a co-located rank serves in a thread
        return
    with pytest.raises(error, match=text):
        call(join)


def test_two_sessions_on_one_communicator_are_refused(join):
    first = join(network())
    with pytest.raises(RuntimeError, match="a session is open on this communicator"):
        connect(network(), ASGD(), servers="colocated", silence=None, timeout=5.0)
    learn(first.model, first.optimizer(lr=0.1), 3)


def test_a_group_may_be_added_of_what_was_connected(join):
    model = network()
    first, *others = model.parameters()
    optimizer = join(model).optimizer([first], lr=0.1)
    with pytest.raises(ValueError, match="params must be among those that were connected"):
        optimizer.add_param_group({"params": list(network().parameters())})
    optimizer.add_param_group({"params": others, "lr": 0.2})
    before = [parameter.detach().clone() for parameter in model.parameters()]
    learn(model, optimizer, 2)
    assert not any(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert len(optimizer.state_dict()["state"]) == 1 + len(others)


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # those of float64 are copies of the worker's
def test_changes_of_parameters_by_others_are_warned_of_once(join, dtype, changes):
    model = network().to(dtype)
    session = join(model, DGS(**SMALL))
    optimizer = session.optimizer(lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 6, dtype=dtype)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model[0].weight.mul_(0.9) if changes else model[0].weight.mul(0.9)
    told = [one for one in caught if "0.weight changed outside the session" in str(one.message)]
    assert len(told) == changes


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("trained", [slice(None), slice(2)])
def test_parameters_that_are_parts_of_one_tensor_are_not_changed_by_each_other(join, trained, dtype, changes):
    """They share PyTorch's count of changes."""
    model = network().to(dtype)
    flat = torch.cat([one.detach().reshape(-1) for one in model.parameters()])
    sizes = [one.numel() for one in model.parameters()]
    for (name, one), part in zip(list(model.named_parameters()), flat.split(sizes), strict=True):
        layer, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(layer), attribute, nn.Parameter(part.view(one.shape)))
    optimizer = join(model, DGS(**SMALL)).optimizer(list(model.parameters())[trained], lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            learn(model, optimizer, 1, dtype=dtype)
            if changes:
                flat.mul_(0.9)
    assert len([one for one in caught if "changed outside the session" in str(one.message)]) == changes


def test_parameters_unfrozen_after_connect_are_refused(join):
    model = network()
    model[0].requires_grad_(False)
    session = join(model)
    optimizer = session.optimizer(lr=0.1)
    learn(model, optimizer, 2)
    model[0].requires_grad_(True)
    with pytest.raises(ValueError, match=r"0\.weight, 0\.bias did not require gradients at connect\(\)"):
        learn(model, optimizer, 1)


def test_after_close_it_says_so(join):
    model = network()
    session = join(model)
    optimizer = session.optimizer(lr=0.1)
    session.close()
    session.close()
    with pytest.raises(RuntimeError, match="rank 0 has left the run"):
        learn(model, optimizer, 1)


@pytest.mark.parametrize("content", ["text", "array", "arrays"])
def test_other_files_are_not_restored(join, tmp_path, content):
    path = str(tmp_path / "other")
    with open(path, "wb") as file:
        if content == "text":
            file.write(b"no model")
        elif content == "array":
            np.save(file, np.zeros(3))
        else:
            np.savez(file, weight=np.zeros(3))
    with pytest.raises(ValueError, match=r"restore='.*other' is no file of session\.save"):
        join(network(), restore=path)


def test_errors_handled_around_a_with_block_or_the_end_of_an_iterator_are_none(join):
    session = join(network())
    server = session._local.servers[0]
    try:
        raise FileNotFoundError("no checkpoint")
    except FileNotFoundError:
        with session:
            learn(session.model, session.optimizer(lr=0.1), 1)
    assert departures([server]) == {0: ""}
    session = join(network())
    server = session._local.servers[0]
    try:
        next(iter(()))
    except StopIteration:
        session.close()
    assert departures([server]) == {0: ""}
    session = join(network())
    server = session._local.servers[0]
    with pytest.raises(KeyError), session:
        raise KeyError("image")
    assert departures([server]) == {0: "KeyError: 'image'"}
