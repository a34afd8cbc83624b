"""Settings of asynchronous methods: what is sent dense, densities by position, and `sparsity` in place of a density."""

import dataclasses

import numpy as np
import pytest
from torch_session import learn, network, numbers

from hvd_sparse.parameter_server import (
    ASGD,
    DGS,
    METHODS,
    MSGD,
    DCTAsync,
    DGCAsync,
    GradientDroppingAsync,
    ParameterLayout,
    Simulation,
    in_turn,
)
from hvd_sparse.parameter_server.server import differing, introduction
from hvd_sparse.schedule import Constant, WarmUp

SPARSE = [DGS, DGCAsync, GradientDroppingAsync, DCTAsync]
SHAPES = {"body": (30, 20), "head": (25, 20), "norm": (20,), "scale": ()}


def start():
    random = np.random.default_rng(3)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def run(method, servers=1):
    """Return what 2 workers have after 30 steps towards different goals, and how many entries they have sent."""
    simulation = Simulation(method, start(), 2, servers)
    goals = [np.random.default_rng(k).standard_normal(1000).astype(np.float32) for k in range(2)]
    simulation.run(
        in_turn(2),
        30,
        lambda k, theta: {name: part - goals[k][: part.size].reshape(part.shape) for name, part in theta.items()},
        0.1,
    )
    return simulation.parameters(), [worker.traffic.entries_up for worker in simulation.workers]


CASES = [(kind, scope) for kind in SPARSE for scope in ("tensor", "model") if (kind, scope) != (DCTAsync, "model")]


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize(("kind", "scope"), CASES)
def test_a_tensor_that_is_named_is_sent_like_a_small_one(kind, scope, servers):
    """At this min_numel, head is the largest small tensor."""
    by_size, expected = run(kind(0.05, scope=scope, min_numel=501), servers)
    for dense in (["head"], lambda name, parameter: parameter.size == 500):
        by_name, entries = run(kind(0.05, scope=scope, min_numel=21, dense=dense), servers)
        assert entries == expected
        assert kind is DCTAsync or entries == [15 * (30 + 500 + 20 + 1)] * 2
        assert all((by_name[name] == by_size[name]).all() for name in SHAPES)


def test_the_names_are_part_of_the_configuration_check():
    methods = [DGS(dense=dense).with_names(SHAPES.items()) for dense in (["head"], lambda name, shape: name == "norm")]
    sides = [introduction(ParameterLayout(SHAPES, dense=method.dense), method) for method in methods]
    said = differing(*sides)
    assert "sent dense: head" in said and "sent dense: norm" in said
    assert methods[0] == DGS(dense=("head", "head")) and methods[1].dense == ("norm",)


@pytest.mark.parametrize(
    ("dense", "error", "match"),
    [
        ("head", TypeError, r"dense must be a collection.*got the string 'head'.*dense=\['head'\]"),
        (lambda name: True, TypeError, "dense must be a function of name and parameter"),
    ],
)
def test_wrong_types_are_refused_at_once(dense, error, match):
    for kind in METHODS.values():
        with pytest.raises(error, match=match):
            kind(dense=dense)


WRONG = [
    (["hed"], ValueError, "dense has 'hed', which no parameter is called"),
    (lambda name, parameter: 1, TypeError, "what dense returns for .* must be True or False, got 1"),
]


@pytest.mark.parametrize(("dense", "error", "match"), WRONG)
def test_what_does_not_fit_the_model_is_refused(join, dense, error, match):
    with pytest.raises(error, match=match):
        Simulation(DGS(dense=dense), start(), 1)
    with pytest.raises(error, match=match):
        join(network(), DGS(dense=dense))
    join(network())  # the session that was refused is not open


def test_in_pytorch_a_function_gets_parameters(join):
    by_name, by_function = network(), network()
    for model, dense in (
        (by_name, ["2.weight"]),
        (by_function, lambda name, one: one.requires_grad and one.ndim == 2 and len(one) == 2),
    ):
        session = join(model, GradientDroppingAsync(0.1, min_numel=8, dense=dense))
        assert session.method.dense == ("2.weight",)
        learn(model, session.optimizer(lr=0.1), 3)
        assert session.stats()["density_up"] == pytest.approx((5 + 1 + 18 + 2) / 83)  # of 54, 9, 18, 2 elements
        ours = numbers(model)
    assert all((ours[name] == other).all() for name, other in numbers(by_name).items())


def test_in_tensorflow_a_function_gets_variables():
    tf = pytest.importorskip("tensorflow")
    MPI = pytest.importorskip("mpi4py.MPI")
    from hvd_sparse.tensorflow import asynchronous

    variables = [tf.Variable(tf.zeros(shape), name=name) for name, shape in SHAPES.items()]
    method = DGS(0.05, min_numel=21, dense=lambda name, variable: variable.shape.as_list() == [25, 20])
    options = {"servers": "colocated", "communicator": MPI.COMM_SELF, "silence": None, "timeout": 60.0}
    with asynchronous.connect(variables, method, **options) as session:
        (name,) = session.method.dense
        assert session.tensors[name] is variables[1]
        optimizer = session.optimizer(learning_rate=0.1)
        optimizer.apply_gradients([(tf.ones_like(variable), variable) for variable in variables])
        assert session.stats()["density_up"] == pytest.approx((30 + 500 + 20 + 1) / 1121)
    for dense, error, match in WRONG:
        with pytest.raises(error, match=match):
            asynchronous.connect(variables, DGS(dense=dense), **options)


@pytest.mark.parametrize("kind", SPARSE)
def test_the_density_may_come_first(kind):
    assert kind(0.02) == kind(density=0.02)
    assert kind(0.02).schedule == Constant(0.02)
    assert kind().density == 0.01
    with pytest.raises(TypeError):
        kind(0.02, 4)  # the warm-up


def test_dense_methods_have_no_density_to_give():
    for kind in (ASGD, MSGD):
        assert kind().density == 1.0
        with pytest.raises(TypeError):
            kind(0.02)


def test_a_sparsity_in_place_of_a_density():
    """As of `Compression.dct`."""
    assert DCTAsync(sparsity=0.95) == DCTAsync(0.05)
    assert DCTAsync(sparsity=0.95).density == 0.05 and DCTAsync(sparsity=0.0).density == 1.0
    named = dataclasses.replace(DCTAsync(sparsity=0.95, lifespan=7), dense=("head",))
    assert (named.density, named.lifespan) == (0.05, 7)
    assert DCTAsync(sparsity=0.95, warmup=4).describe() == DCTAsync(0.05, warmup=4).describe()
    assert not any("sparsity" in line for line in DCTAsync(sparsity=0.95).describe())
    assert DCTAsync(warmup=WarmUp(0.001, 4)).schedule.settled == 0.001
    for wrong in (1.0, -0.1):
        with pytest.raises(ValueError, match=r"sparsity must be in \[0, 1\)"):
            DCTAsync(sparsity=wrong)
    with pytest.raises(ValueError, match=r"give density or sparsity, not both; got density=0\.01 and sparsity=0\.99"):
        DCTAsync(0.01, sparsity=0.99)
