"""Under DDP, many steps equal the papers' algorithms: parameters, residuals and velocities."""

import numpy as np
import pytest
import tiers
import torch
import torch.distributed as dist
from ddp_helpers import Trainer, assert_ranks_agree
from gradients import SHAPES, draw
from oracle import Method, train_without_ties
from torch.nn.parallel import DistributedDataParallel

from hvd_sparse.torch.ddp import Compression

pytestmark = pytest.mark.rank_counts

LR = 0.1
JOINT = {"momentum": 0.7, "density": 0.05, "scope": "model", "clip_norm": 10.0, "clip_scope": "model"}
DGC = {"density": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05, "clip_norm": 8.0, "min_numel": 100}
SAMOMENTUM = {
    "density": 0.05,
    "scope": "model",
    "momentum": 0.7,
    "weight_decay": 0.05,
    "clip_norm": 10.0,
    "clip_scope": "model",
    "min_numel": 100,
}
TRIALS = {
    "dgc": ("dgc", Method(**DGC), DGC, 30),
    "dgc, joint": ("dgc", Method(**JOINT), {**JOINT, "min_numel": 100}, 30),
    "dgc, joint, hierarchical": (
        "dgc",
        Method(**JOINT),
        {**JOINT, "min_numel": 100, "exchange": "hierarchical", "ranks_per_host": 1, "dense_fallback": None},
        30,
    ),
    "samomentum": (
        "samomentum",
        Method(samomentum=True, momentum=0.7, density=0.05),
        {"momentum": 0.7, "density": 0.05, "min_numel": 100},
        30,
    ),
    "samomentum, joint, clipped": ("samomentum", Method(samomentum=True, **SAMOMENTUM), SAMOMENTUM, 30),
    "cltk": (
        "cltk",
        Method(density=0.05, scope="model", cyclic=True),
        {"density": 0.05, "min_numel": 100, "dense_fallback": None},
        20,
    ),
    "hard_threshold": ("hard_threshold", Method(value=3.0), {"value": 3.0, "min_numel": 100}, 20),
    "int2": (
        "gradient_dropping",
        Method(density=0.05, values="int2"),
        {"density": 0.05, "values": "int2", "min_numel": 100},
        20,
    ),
    "reduce-scatter": (
        "gradient_dropping",
        Method(density=0.05, owned=True),
        {"density": 0.05, "exchange": "reduce_scatter", "min_numel": 100, "dense_fallback": None},
        20,
    ),
    "completed": (
        "gradient_dropping",
        Method(density=0.05, owned=True, complete=True),
        {"density": 0.05, "exchange": "reduce_scatter", "complete": True, "min_numel": 100, "dense_fallback": None},
        20,
    ),
}


@pytest.mark.parametrize("trial", TRIALS)
def test_a_method_is_that_of_the_paper(trial):
    name, method, settings, steps = TRIALS[trial]
    trainer, rank, ranks = Trainer(name, lr=LR, **settings), dist.get_rank(), dist.get_world_size()
    start = {key: parameter.detach().double().numpy().copy() for key, parameter in trainer.model.named()}
    expected, seed = train_without_ties(
        method, start, lambda step, k, seed: draw(SHAPES, step, k, seed), ranks, steps, LR
    )
    for step in range(steps):
        trainer.step(draw(SHAPES, step, rank, seed))
    tolerance = 2e-5 if method.values == "float32" else 2e-4
    close = {"rtol": tolerance, "atol": tolerance}
    for key, parameter in trainer.model.named():
        np.testing.assert_allclose(parameter.detach(), expected.parameters[key], err_msg=key, **close)
        residual = expected.v[rank][key].reshape(-1) * (method.momentum if method.samomentum else 1.0)
        np.testing.assert_allclose(trainer.buffer(key), residual, err_msg=key, **close)
        if method.momentum and not method.samomentum:
            velocity = expected.u[rank][key].reshape(-1)
            np.testing.assert_allclose(trainer.buffer(key, "velocity"), velocity, err_msg=key, **close)
    assert any(np.any(value) for value in expected.v[rank].values()), "all must be sparse"
    assert_ranks_agree(trainer.model)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"bucket_cap_mb": 25},
    ],
)
def test_options_of_ddp_change_nothing(options):
    """Buckets are cut, and rebuilt, in another way: what reaches the optimizer is the same, bit for bit.

    Nothing is sent dense: on three ranks, gloo's order of a sum depends on what else is in the message.
    """
    settings = {"density": 0.05, "momentum": 0.9, "min_numel": 0, "dense_fallback": None, "bucket_bytes": 200}
    plain, other = Trainer("dgc", **settings), Trainer("dgc", ddp=options, **settings)
    for step in range(12):
        gradients = draw(SHAPES, step, dist.get_rank())
        expected, found = plain.step(gradients), other.step(gradients)
        assert all(torch.equal(expected[name], found[name]) for name in SHAPES)
    assert any(bool(plain.buffer(name).any()) for name in SHAPES)
    assert plain.buckets() == 3 and ("bucket_cap_mb" not in options or other.buckets() == 1)


@pytest.mark.filterwarnings("ignore:You passed find_unused_parameters")
def test_several_buckets_in_the_first_step_of_a_static_graph():
    """DDP cuts a bucket where the dtype changes, and then gives every bucket of this step the index 0."""
    dtypes = {name: torch.bfloat16 if name.endswith("bias") else torch.float32 for name in SHAPES}
    assert len(set(dtypes.values())) == 2
    settings = {"density": 0.05, "min_numel": 0, "dense_fallback": None, "dtype": dtypes}
    plain, other = Trainer(**settings), Trainer(ddp={"static_graph": True}, **settings)
    later = Trainer(ddp={"find_unused_parameters": True, "bucket_cap_mb": 0.0001}, **settings)
    later.ddp._set_static_graph()  # after `register`; buckets are as small as without a static graph
    for step in range(4):
        gradients = draw(SHAPES, step, dist.get_rank())
        expected = plain.step(gradients)
        for found in (other.step(gradients), later.step(gradients)):
            assert all(torch.equal(expected[name], found[name]) for name in SHAPES)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("exchange", ["gather", "reduce_scatter"])
@pytest.mark.parametrize("min_numel", [0, 10**6])
def test_parameters_in_channels_last_order(min_numel, exchange, view):
    """DDP's buckets have the parameter's order in memory; gradients, decay and states are those of contiguous ones."""
    shapes, steps = {"weight": (6, 4, 3, 3), "cube": (5, 4, 2, 2), "bias": (6,)}, 6
    settings = {"density": 0.1, "weight_decay": 0.1, "dense_fallback": None, "min_numel": min_numel}
    settings |= {"momentum": 0.9, "exchange": exchange, "ddp": {"gradient_as_bucket_view": view}, "shapes": shapes}
    plain, other = (Trainer("dgc", layout=one, **settings) for one in (torch.contiguous_format, torch.channels_last))
    assert not other.model["weight"].is_contiguous()
    for step in range(steps):
        gradients = draw(shapes, step, dist.get_rank())
        expected, found = plain.step(gradients), other.step(gradients)
        assert all(torch.equal(expected[name], found[name]) for name in shapes)
    for name in shapes:
        assert torch.equal(plain.buffer(name, "velocity"), other.buffer(name, "velocity"))
        assert torch.equal(plain.model[name], other.model[name])


def train(optimizer, forward, inputs):
    optimizer.zero_grad()
    forward(inputs).square().mean().backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize("compiled", tiers.choice(["model", "all"], "all"))
def test_compiled_training_is_as_it_is_otherwise(compiled):
    trained = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 10)))
        compression = Compression.dgc(model.module.named_parameters(), density=0.05, momentum=0.9, min_numel=100)
        compression.register(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        forward = torch.compile(model, backend="aot_eager") if compiles and compiled == "model" else model
        run = torch.compile(train) if compiles and compiled == "all" else train  # by Inductor, the strictest
        for t in range(4):
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * t + dist.get_rank()))
            run(optimizer, forward, x)
        trained.append(torch.cat([one.detach().flatten() for one in model.parameters()]))
        assert compression.stats()["step"]["density"] < 0.2
    if compiled == "model":
        assert torch.equal(*trained)
    else:  # Inductor rounds otherwise
        torch.testing.assert_close(*trained, rtol=1e-5, atol=1e-6)
