"""Wrong uses raise a clear error on every rank, and no rank is left waiting."""

import time
import warnings

import horovod.torch as hvd
import horovod.torch.mpi_ops as mpi_ops
import numpy as np
import pytest
import torch
from gradients import SCOPES, SHAPES, draw
from helpers import alone_as_elastic, assert_alive, backward, distributed, drive, make_parameters, step

from hvd_sparse.algorithms import base
from hvd_sparse.parameter_server import DGCAsync
from hvd_sparse.torch import Compression, exchange

several = pytest.mark.skipif(hvd.size() < 2, reason="ranks can only differ where there are two of them")
LAST = hvd.size() - 1


def refuse_a_step(parameters, compression, error, message, **options):
    """Assert that the first backward pass raises, here, on every rank, and that collectives go on working."""
    distributed(parameters, compression, **options)
    with pytest.raises(error, match=message):
        backward(parameters, draw(SHAPES, 0, hvd.rank()))
    assert_alive()


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("op", ["Min", "Max", "Product", "Adasum"])
def test_other_reductions(op, scope):
    parameters = make_parameters()
    compression = Compression.gradient_dropping(parameters.items(), scope=scope)
    refuse_a_step(parameters, compression, ValueError, r"hvd\.Average.*hvd\.Sum", op=getattr(hvd, op))


@several
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("op", ["Min", "Max", "Product"])
def test_other_reductions_told_by_the_token_alone(op, scope):
    """Without Horovod's optimizer to look at: what the reduction made of the token gives it away."""
    parameters = make_parameters({"weight": (600,)})
    compression = Compression.gradient_dropping(parameters.items(), scope=scope, min_numel=100)
    parameters["weight"].grad = torch.ones(600)
    carried, context = compression.compress(parameters["weight"].grad)
    reduced = hvd.synchronize(hvd.allreduce_async(carried, op=getattr(hvd, op), name="told.by.the.token"))
    with pytest.raises(ValueError, match=r"op must be hvd\.Average or hvd\.Sum; the reduction turned the token into"):
        compression.decompress(reduced, context)
    assert_alive()


@pytest.mark.parametrize("scope", SCOPES)
def test_unknown_parameters(scope):
    parameters = make_parameters()
    strangers = make_parameters()
    compression = Compression.gradient_dropping(strangers.items(), scope=scope)
    message = r"belongs to none of the 4 parameters.* may have been made anew after it.*named_parameters"
    refuse_a_step(parameters, compression, ValueError, message)


DIFFERENCES = {
    "density": ({"density": 0.02}, "constant(0.02)"),
    "warm-up": ({"warmup": 30}, "warm_up(final=0.01, steps=30"),
    "values": ({"values": "float16"}, "values = 'float16'"),
    "seed": ({"seed": 7}, "seed = 7"),
    "scope": ({"scope": "model"}, "scope = 'model'"),
    "least size": ({"min_numel": 3}, "min_numel = 3"),
    "buckets": ({"bucket_bytes": 1}, "bucket_bytes = 1"),
}


def refuse_to_differ(compression, parameters, shapes, message):
    """The error names what differs, and the rank, on every rank."""
    with pytest.raises(ValueError, match="ranks do not agree on model or settings") as refusal:
        drive(compression, parameters, draw(shapes, 0, hvd.rank()))
    assert f"rank {LAST} has" in str(refusal.value) and message in str(refusal.value), refusal.value
    assert_alive()


@several
@pytest.mark.parametrize("what", DIFFERENCES)
def test_settings_that_differ_between_ranks(what):
    settings, message = DIFFERENCES[what]
    parameters = make_parameters()
    own = settings if hvd.rank() == LAST else {}
    compression = Compression.gradient_dropping(parameters.items(), **{"density": 0.01, **own})
    refuse_to_differ(compression, parameters, SHAPES, message)


@several
def test_versions_that_differ_between_ranks(monkeypatch):
    parameters = make_parameters()
    if hvd.rank() == LAST:
        monkeypatch.setattr(base, "__version__", "9.8.7")
    compression = Compression.gradient_dropping(parameters.items())
    refuse_to_differ(compression, parameters, SHAPES, "hvd_sparse = 9.8.7")


@several
def test_methods_that_differ_between_ranks():
    parameters = make_parameters()
    make = Compression.dgc if hvd.rank() == LAST else Compression.gradient_dropping
    refuse_to_differ(make(parameters.items(), density=0.01), parameters, SHAPES, "method = dgc")


@several
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("difference", ["extra", "missing", "shape", "type", "name"])
def test_models_that_differ_between_ranks(difference, scope):
    shapes, dtype, message = dict(SHAPES), torch.float32, "head.weight: (500,) torch.float32"
    if hvd.rank() == LAST:
        if difference == "extra":
            shapes["extra"] = (7,)
        elif difference == "shape":
            shapes["head.weight"] = (250, 2)
        elif difference == "type":
            dtype = torch.float64
        else:
            del shapes["head.weight"]
            if difference == "name":
                shapes["tail.weight"] = (500,)
    message = "extra: (7,)" if difference == "extra" else message
    parameters = make_parameters(shapes, dtype)
    compression = Compression.gradient_dropping(parameters.items(), scope=scope)
    refuse_to_differ(compression, parameters, shapes, message)


@several
@pytest.mark.parametrize("scope", SCOPES)
def test_agreement_is_found_again_after_a_refusal(scope):
    """The same compressor refuses again; equal ones, built afterwards, work."""
    parameters = make_parameters()
    compression = Compression.gradient_dropping(parameters.items(), density=0.01 * (1 + hvd.rank()), scope=scope)
    for _ in range(2):
        with pytest.raises(ValueError, match="ranks do not agree"):
            drive(compression, parameters, draw(SHAPES, 0, hvd.rank()))
    equal = Compression.gradient_dropping(parameters.items(), density=0.01, scope=scope)
    drive(equal, parameters, draw(SHAPES, 0, hvd.rank()))
    assert equal.stats()["steps"] == 1


@several
@pytest.mark.parametrize("scope", SCOPES)
def test_a_state_loaded_on_one_rank_only(scope, monkeypatch):
    """That rank is told, and keeps what it had; loaded on the others then, their steps are not the same."""
    shapes = {"weight": (600,)}
    parameters = make_parameters(shapes)
    compression = Compression.gradient_dropping(parameters.items(), scope=scope, min_numel=100)
    for t in range(3):
        drive(compression, parameters, draw(shapes, t, hvd.rank()))
    state = {**compression.state_dict(), "step": 8}
    if hvd.rank() == 0:
        monkeypatch.setattr(exchange, "TIMEOUT_SECONDS", 0.2)
        with pytest.raises(RuntimeError, match="did not take part"):
            compression.load_state_dict(state)
        assert compression.state_dict()["step"] == 3
    hvd.barrier()
    if hvd.rank() != 0:
        compression.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"at step (8|3).*state on every rank"):
        drive(compression, parameters, draw(shapes, 3, hvd.rank()))
    assert_alive()


@several
def test_ranks_that_meet_for_different_reasons_are_told():
    parameters = make_parameters({"weight": (600,)})
    compression = Compression.gradient_dropping(parameters.items(), min_numel=100)
    drive(compression, parameters, draw({"weight": (600,)}, 0, hvd.rank()))
    state = compression.state_dict()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"rank 0 is in state_dict\(.*\); rank {LAST} is in load_state_dict\(\)"):
        if hvd.rank() == LAST:
            compression.load_state_dict(state)
        else:
            compression.state_dict(summed=True)
    assert time.monotonic() - began < exchange.TIMEOUT_SECONDS / 10
    assert_alive()


@several
@pytest.mark.parametrize("call", ["load_state_dict", "reset", "state_dict"])
def test_a_rank_alone_between_two_steps_meets_the_others(call):
    """It raises at once, where it would wait for the others; these do once Horovod has reduced their tokens."""
    shapes = {"weight": (600,)}
    parameters = make_parameters(shapes)
    compression = Compression.gradient_dropping(parameters.items(), min_numel=100)
    optimizer = distributed(parameters, compression)
    for t in range(2):
        step(optimizer, parameters, draw(shapes, t, hvd.rank()))
    mpi_ops._handle_map.clear()  # empty between steps, but for what failed in earlier tests
    state = compression.state_dict()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"1 of {hvd.size()} ranks called load_state_dict\(\), reset\(\)"):
        if hvd.rank() == LAST and call == "load_state_dict":
            compression.load_state_dict(state)
        elif hvd.rank() == LAST and call == "state_dict":
            compression.state_dict(summed=True)
        elif hvd.rank() == LAST:
            compression.reset()
        parameters["weight"].grad = torch.ones(600)
        compression.decompress(*compression.compress(parameters["weight"].grad))
    assert time.monotonic() - began < exchange.TIMEOUT_SECONDS / 10
    assert_alive()


@several
def test_all_ranks_reset_and_load_at_once():
    parameters = make_parameters()
    compression = Compression.gradient_dropping(parameters.items(), min_numel=100)
    state = compression.state_dict()
    for t in range(3):
        drive(compression, parameters, draw(SHAPES, t, hvd.rank()))
        compression.reset()
        compression.load_state_dict(state)
    drive(compression, parameters, draw(SHAPES, 3, hvd.rank()))
    assert compression.state_dict()["step"] == 1


@pytest.mark.rank_counts
@pytest.mark.skipif(hvd.size() != 3, reason="three ranks, the middle one at the mean of the steps")
def test_different_states_are_seen_on_every_rank():
    shapes = {"weight": (600,)}
    parameters = make_parameters(shapes)
    compression = Compression.gradient_dropping(parameters.items(), min_numel=100)
    compression.load_state_dict({**compression.state_dict(), "step": 4 + hvd.rank()})
    refused = False
    try:
        drive(compression, parameters, draw(shapes, 0, hvd.rank()))
    except RuntimeError as error:
        refused = "state on every rank" in str(error)
    assert hvd.allreduce(torch.tensor(float(refused)), op=hvd.Sum, name="refused").item() == hvd.size()


CONSTRUCTION = {
    "density 0": ({"density": 0.0}, ValueError, r"density must be in \(0, 1\], got 0"),
    "density above 1": ({"density": 1.5}, ValueError, r"density .*1\.5"),
    "density NaN": ({"density": float("nan")}, ValueError, "density .*nan"),
    "density text": ({"density": "1%"}, TypeError, "density .*'1%'"),
    "scope": ({"scope": "layer"}, ValueError, "scope must be one of 'tensor', 'model'; got 'layer'"),
    "values": ({"values": "int8"}, ValueError, "values must be one of .*'int8'"),
    "coding": ({"coding": "zip"}, ValueError, "coding must be one of .*'zip'"),
    "warmup": ({"warmup": -1}, ValueError, "warmup .*-1"),
    "warmup epochs": ({"warmup": 4.0}, TypeError, "warmup .*4.0"),
    "min_numel": ({"min_numel": -1}, ValueError, "min_numel .*-1"),
    "bucket_bytes": ({"bucket_bytes": 0}, ValueError, "bucket_bytes .*0"),
    "seed": ({"seed": 0.5}, TypeError, "seed .*0.5"),
    "process set": ({"process_set": [0]}, TypeError, "process_set .*list"),
    "unknown": ({"densty": 0.1}, TypeError, "densty"),
}


@pytest.mark.parametrize("method", ["gradient_dropping", "dgc"])
@pytest.mark.parametrize("what", CONSTRUCTION)
def test_arguments(what, method):
    settings, error, message = CONSTRUCTION[what]
    with pytest.raises(error, match=message):
        getattr(Compression, method)(make_parameters().items(), **settings)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
def test_parameters_without_a_real_gradient(dtype):
    """A frozen one is left out; what is left then must be something, and one that trains is refused."""
    named = [("counter", torch.nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False))]
    with pytest.raises(ValueError, match="none of them can train"):
        Compression.gradient_dropping(named)
    if dtype == torch.complex64:
        named[0][1].requires_grad_()
        with pytest.raises(TypeError, match=f"counter: gradients must be float32.*{dtype}"):
            Compression.gradient_dropping(named)


def test_parameters_in_another_form():
    parameter = torch.nn.Parameter(torch.zeros(3))
    for wrong, error, message in (
        ([parameter], TypeError, "parameters must be the model or .* pairs.* entries of type Parameter"),
        ([], ValueError, "empty"),
        (
            [("a", parameter), ("a", torch.nn.Parameter(torch.zeros(2)))],
            ValueError,
            "parameters must have .* got 'a' twice: of",
        ),
        ([("a", np.zeros(3))], TypeError, "a: a parameter must be a torch.Tensor"),
        (torch.nn.ReLU(), ValueError, "parameters is empty"),
        (torch.optim.SGD([parameter], lr=0.1), TypeError, r"must be the model or model.named_parameters\(\), got SGD"),
    ):
        with pytest.raises(error, match=message):
            Compression.dgc(wrong)


@several
@pytest.mark.parametrize("given", [Compression.dgc, DGCAsync(), DGCAsync])
def test_a_method_that_is_no_compressor_is_an_error(given):
    """It was not called, as `hvd.Compression.fp16` is passed, or is asynchronous."""
    parameters = make_parameters()
    optimizer = torch.optim.SGD(list(parameters.values()), lr=0.1)
    hvd.DistributedOptimizer(optimizer, parameters.items(), compression=given)
    called = r"compression=Compression\.dgc must be a call, with the model's parameters"
    connected = r"DGCAsync is for asynchronous training, .*: connect\(model, DGCAsync\(\.\.\.\)\)"
    with pytest.raises(TypeError, match=called if given == Compression.dgc else connected):
        sum(parameter.sum() for parameter in parameters.values()).backward()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_in_both_is_warned_of(momentum):
    parameters = make_parameters()
    with alone_as_elastic():
        compression = Compression.dgc(parameters.items(), momentum=0.9)
    inner = torch.optim.SGD(list(parameters.values()), lr=0.1, momentum=momentum)
    optimizer = distributed(parameters, compression, optimizer=inner)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(2):
            step(optimizer, parameters, draw(SHAPES, t, hvd.rank()))
    messages = [str(warning.message) for warning in caught if "momentum" in str(warning.message)]
    if hvd.rank() == 0:  # the others need not repeat it
        assert len(messages) == (momentum > 0.0), messages
    assert all("Set the optimizer's to 0" in message for message in messages)


@several
def test_synchronize_without_skip_synchronize_is_an_error():
    """Horovod would reduce again what is reduced already. Not where a loss scaler has skipped step()."""
    parameters = make_parameters()
    optimizer = distributed(parameters, Compression.dgc(parameters.items(), 0.05, momentum=0.9, min_numel=100))
    for skips_step in (True, False):
        for name, gradient in draw(SHAPES, 0, hvd.rank()).items():
            parameters[name].grad = None
            (parameters[name] * torch.from_numpy(gradient).float()).sum().backward()
        optimizer.synchronize()
        if not skips_step:
            with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="skip_synchronize"):
                optimizer.step()
    optimizer._handles.clear()


@pytest.mark.rank_counts
def test_a_process_alone_is_told_that_its_momentum_is_not_applied():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Compression.dgc(make_parameters().items(), momentum=0.9)
        Compression.dgc(make_parameters().items(), momentum=0.0, weight_decay=0.1)
        Compression.gradient_dropping(make_parameters().items())
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == (2 if hvd.size() == 1 else 0), messages
    assert all("momentum, weight_decay" in message for message in messages)


@several
def test_a_process_set_of_one_rank_is_compressed_without_a_warning():
    alone = hvd.add_process_set([0])
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            parameters = make_parameters()
            compression = Compression.dgc(parameters.items(), momentum=0.9, process_set=alone)
        if hvd.rank() == 0:
            step(distributed(parameters, compression, process_set=alone), parameters, draw(SHAPES, 0, 0))
            assert compression.stats()["steps"] == 1
    finally:
        assert hvd.remove_process_set(alone)
    assert not caught


@pytest.mark.skipif(hvd.size() == 1, reason="one rank waits for nobody")
def test_horovod_initialised_again_in_the_middle_of_the_check_is_an_error_not_a_hang():
    """The last rank has not built its compressor yet: the others' check of settings is in flight, and is lost."""
    parameters = make_parameters({"weight": (40, 30)})
    is_last = hvd.rank() == hvd.size() - 1
    compression = None if is_last else Compression.gradient_dropping(parameters.items(), density=0.1)
    hvd.init()
    if not is_last:
        parameters["weight"].grad = torch.ones(40, 30)
        with pytest.raises(RuntimeError, match=r"hvd\.init\(\) was called again"):
            compression.compress(parameters["weight"].grad)
    hvd.barrier()
    if is_last:
        Compression.gradient_dropping(parameters.items(), density=0.1)
    assert_alive()
