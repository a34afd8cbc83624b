"""Servers and workers in one process, with a given order of arrivals, equal the paper's algorithms in NumPy."""

import itertools

import numpy as np
import pytest
from dgs_oracle import DgsOracle

from hvd_sparse.parameter_server import METHODS, Simulation, by_speed, in_turn
from hvd_sparse.parameter_server.layout import ParameterLayout
from hvd_sparse.parameter_server.server import differing, introduction

SHAPES = {"body.weight": (40, 30), "body.bias": (30,), "head": (501,)}
ARRIVALS = {
    "in turn": lambda workers: in_turn(workers),
    "one is slow": lambda workers: by_speed([5.0] + [1.0] * (workers - 1), seed=3),
}


def start(seed=0):
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def gradients_of(targets, noise, step):
    """A quadratic with another minimum for each worker, and noise: it depends on where the worker is."""

    def gradients(worker, theta):
        random = np.random.default_rng([noise, step[0], worker])
        return {
            name: np.asarray(theta[name] - targets[worker][name], np.float32)
            + random.standard_normal(theta[name].shape, np.float32)
            for name in theta
        }

    return gradients


def flat(arrays):
    return {name: np.asarray(array, np.float64).reshape(-1) for name, array in arrays.items()}


def run_both(method, oracle_options, workers, *, arrivals, steps, servers=1, weight_decay=0.0, lr=0.05, seed=0):
    """Run the simulation and the oracle side by side; the oracle takes the gradients that the workers computed."""
    theta = start()
    simulation = Simulation(method, theta, workers, servers)
    oracle = DgsOracle(method.name, theta, workers, dense_below=method.min_numel, **oracle_options)
    targets, step = [start(100 + k) for k in range(workers)], [0]
    gradients = gradients_of(targets, seed, step)
    for number in itertools.islice(arrivals, steps):
        here = {name: array.reshape(SHAPES[name]) for name, array in simulation.workers[number].parameters.items()}
        oracle.step(number, gradients(number, here), lr, weight_decay)
        simulation.step(number, gradients, lr, weight_decay)
        step[0] += 1
    return simulation, oracle


def run_without_ties(*arguments, arrivals, **options):
    """Run both on the first data of which float32 and float64 must select alike."""
    for seed in range(20):
        simulation, oracle = run_both(*arguments, arrivals=arrivals(), seed=seed, **options)
        if oracle.gap > 2e-6:
            return simulation, oracle
    raise AssertionError("no data without near-ties among 20 seeds")


def check(simulation, oracle):
    for name, expected in oracle.model().items():
        np.testing.assert_allclose(flat(simulation.parameters())[name], expected, rtol=2e-5, atol=2e-5, err_msg=name)
    for k, worker in enumerate(simulation.workers):
        for name, expected in oracle.theta(k).items():
            np.testing.assert_allclose(worker.parameters[name], expected, rtol=2e-5, atol=2e-5, err_msg=f"{k} {name}")


CASES = {
    "dgs": ({"momentum": 0.7}, {"density": 0.05}),
    "dgc_async": ({"momentum": 0.7}, {"density": 0.05}),
    "dgc_async, nesterov": ({"momentum": 0.7, "nesterov": True}, {"density": 0.05}),
    "gd_async": ({}, {"density": 0.05}),
    "dct_async": ({"lifespan": 10, "band": None}, {"density": 0.05}),
    "dct_async, band": ({"lifespan": 1000, "band": 1.5}, {"density": 0.05}),
    "asgd": ({}, {"density": 1.0}),
}


# With secondary compression, a tensor cut by servers is selected from in its parts: not what the paper does.
@pytest.mark.parametrize(("pull_density", "servers"), [(None, 1), (None, 3), (0.08, 1)])
@pytest.mark.parametrize("arrivals", ARRIVALS)
@pytest.mark.parametrize("name", CASES)
def test_methods_are_those_of_the_paper(name, pull_density, arrivals, servers):
    settings, density = CASES[name]
    method = METHODS[name.split(",")[0]](pull_density=pull_density, min_numel=100, **settings, **density)
    options = {**settings, **density, "pull_density": pull_density}
    simulation, oracle = run_without_ties(
        method, options, 4, arrivals=lambda: ARRIVALS[arrivals](4), steps=120, servers=servers, weight_decay=0.01
    )
    check(simulation, oracle)
    assert sum(worker.traffic.entries_up for worker in simulation.workers) == sum(oracle.sent)
    if name == "dgs":
        for k, worker in enumerate(simulation.workers):
            for piece in simulation.layout.tensors():
                expected = 0.7 * oracle.u[k][piece.name]
                np.testing.assert_allclose(worker.residual[piece.begin : piece.end], expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_msgd_is_momentum_sgd_on_one_worker(nesterov):
    settings = {"momentum": 0.9, "nesterov": nesterov}
    method = METHODS["msgd"](**settings)
    simulation, oracle = run_both(method, settings, 1, arrivals=in_turn(1), steps=60)
    check(simulation, oracle)
    with pytest.raises(ValueError, match="at most 1 worker"):
        Simulation(method, start(), 2)


def test_wrong_arguments_of_a_simulation_are_named():
    with pytest.raises(TypeError, match=r"method must be one of .* such as DGS\(\)"):
        Simulation(METHODS["dgs"], start(), 2)
    for wrong in ({"workers": 0}, {"workers": 2, "servers": 0}):
        with pytest.raises(ValueError, match=f"{list(wrong)[-1]} must be an integer of at least 1, got 0"):
            Simulation(METHODS["dgs"](), start(), **wrong)
    simulation = Simulation(METHODS["dgs"](), start(), 2)
    with pytest.raises(ValueError, match="number must be an integer from 0 to 1, got -1"):
        simulation.step(-1, lambda worker, theta: theta, 0.1)


WHOLE = {  # elements, settings
    "small": (8, {"density": 0.01}),
    "density 1": (2000, {"density": 1.0}),
    "one element": (1, {"density": 0.01, "min_numel": 1}),
    "k is rounded up": (4, {"density": 0.9, "min_numel": 1}),
    "k is rounded up, jointly": (4, {"density": 0.9, "min_numel": 1, "scope": "model"}),
}


@pytest.mark.parametrize("case", WHOLE)
@pytest.mark.parametrize("values", ["float32", "int2"])
def test_what_is_sent_whole_has_ordinary_momentum_with_dgc(case, values):
    """Velocities 1, 1.5 and 1.75: no element is delayed, so none is masked."""
    numel, settings = WHOLE[case]
    method = METHODS["dgc_async"](momentum=0.5, values=values, **settings)
    simulation = Simulation(method, {"w": np.zeros(numel, np.float32)}, 1)
    for _ in range(3):
        simulation.step(0, lambda worker, theta: {"w": np.ones(numel, np.float32)}, 1.0)
    np.testing.assert_array_equal(simulation.parameters()["w"], np.full(numel, -4.25))


def test_only_tensors_of_which_a_part_is_sent_are_masked_with_dgc():
    """Of four gradients, the first and last tensor send all of it, the others the first element alone."""
    method = METHODS["dgc_async"](momentum=0.5, density=0.25, min_numel=1)
    gradients = {
        name: np.arange(size, 0, -1, dtype=np.float32) for name, size in zip("abcd", (1, 4, 4, 1), strict=True)
    }
    simulation = Simulation(method, {name: np.zeros(array.size) for name, array in gradients.items()}, 1)
    for _ in range(2):
        simulation.step(0, lambda worker, theta: gradients, 1.0)
    feedback = {name: simulation.workers[0].feedback_of(name)["velocity"] for name in gradients}
    for name in "bc":  # residuals 4 3 2 1, then 4 7.5 5 2.5
        np.testing.assert_array_equal(feedback[name], [6.0 - 2.0, 0.0, 3.0, 1.5])
        np.testing.assert_array_equal(simulation.parameters()[name], [-4.0, -7.5, 0.0, 0.0])
    for name in "ad":
        np.testing.assert_array_equal(feedback[name], [1.5])
        np.testing.assert_array_equal(simulation.parameters()[name], [-2.5])


@pytest.mark.parametrize("values", ["int1", "int2"])
@pytest.mark.parametrize("density", [0.1, 1.0])
def test_what_has_no_gradient_does_not_move(values, density):
    """Selections that are larger than the gradient, and one that is empty: the levels have no zero."""
    method = METHODS["gd_async"](density=density, values=values, pull_density=0.1, pull_values=values, min_numel=1)
    simulation = Simulation(method, {"w": np.zeros(100, np.float32)}, 1)
    for number in range(3):
        gradient = np.zeros(100, np.float32)
        gradient[50] = number > 0
        simulation.step(0, lambda worker, theta, found=gradient: {"w": found}, 1.0)
        for found in (simulation.parameters()["w"], simulation.workers[0].parameters["w"]):
            np.testing.assert_array_equal(found, -number * (np.arange(100) == 50))


def test_a_worker_is_restarted_in_a_simulation():
    simulation = Simulation(METHODS["dgs"](min_numel=1), {"w": np.zeros(8, np.float32)}, 1)
    for _ in range(2):
        simulation.step(0, lambda worker, theta: {"w": np.ones(8, np.float32)}, 0.5)
        simulation.join(0)
    np.testing.assert_array_equal(simulation.workers[0].parameters["w"], simulation.parameters()["w"])
    assert simulation.servers[0].statistics.pushes == 2


def test_a_worker_that_joins_again_goes_on_with_its_schedule():
    """Its messages are counted anew, but the density does not start from the warm-up's first step."""
    time, method = [0.0], METHODS["gd_async"](density=0.01, warmup=4, min_numel=0)
    simulation = Simulation(method, start(), 1, silence=1.0, now=lambda: time[0])
    gradients = gradients_of([start(100)], 0, [0])
    for _ in range(6):
        simulation.step(0, gradients, 0.1)
    before = simulation.workers[0].traffic.entries_up
    time[0] += 2.0
    assert simulation.servers[0].tick() == [0]
    for _ in range(2):
        simulation.step(0, gradients, 0.1)
    worker = simulation.workers[0]
    assert (worker.incarnation, worker.sequence, worker.step) == (1, 2, 8)
    assert worker.traffic.entries_up - before == 2 * (12 + 5 + 1)


def test_a_silent_worker_is_dropped_in_a_simulation():
    """At 1.5 seconds worker 1 has said nothing since it joined; when it comes, it joins again."""
    time = [0.0]
    simulation = Simulation(
        METHODS["dgs"](min_numel=1), {"w": np.zeros(8, np.float32)}, 2, 2, silence=1.0, now=lambda: time[0]
    )
    for _ in range(2):
        time[0] += 0.75
        simulation.step(0, lambda worker, theta: {"w": np.ones(8, np.float32)}, 0.5)
    for server in simulation.servers:
        assert server.departures == {1: "no sign of life for 1 seconds"}
    simulation.step(1, lambda worker, theta: {"w": np.ones(8, np.float32)}, 0.5)
    for server in simulation.servers:
        assert server.departures == {} and server.statistics.pushes == 3


def test_a_worker_whose_push_has_arrived_is_not_dropped():
    """Each worker pushes every 1.5 seconds: silent for too long before its push, and not after it."""
    time = [0.0]
    options = {"silence": 1.0, "now": lambda: time[0]}
    simulation = Simulation(METHODS["dgs"](min_numel=1), {"w": np.zeros(8, np.float32)}, 2, **options)
    for step in range(6):
        time[0] += 0.75
        simulation.step(step % 2, lambda worker, theta: {"w": np.ones(8, np.float32)}, 0.5)
    server = simulation.servers[0]
    assert server.departures == {} and server.statistics.refused == 0
    assert server.statistics.staleness == {0: 1, 1: 5}


@pytest.mark.parametrize(
    ("theirs", "ours", "are_renamed"),
    [
        (
            {"dense_9/kernel": (3, 2), "dense_10/kernel": (2,)},
            {"dense_10/kernel": (3, 2), "dense_11/kernel": (2,)},
            True,
        ),
        ({"a": (3,), "b": (2,)}, {"a": (3,), "c": (2,)}, True),
        ({"a": (3,), "b": (2,)}, {"a": (2,), "b": (3,)}, False),
        ({"a": (3,), "b": (2,)}, {"a": (3,), "c": (4,)}, False),
        ({"a": (3,)}, {"a": (3,)}, False),
    ],
)
def test_models_that_differ_in_names_alone_are_told_what_to_do(theirs, ours, are_renamed):
    sides = [introduction(ParameterLayout(shapes), METHODS["asgd"]()) for shapes in (theirs, ours)]
    said = differing(*sides)
    assert said.startswith("other names for the same shapes: with Keras, call tf.keras.backend.clear") == are_renamed
    assert bool(said) == (theirs != ours)


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [("wieght", 20, "'wieght' is of no parameter"), ("weight", 10, "'weight' must have 20 elements, got 10")],
)
def test_a_gradient_of_another_name_or_size_is_refused(name, size, message):
    simulation = Simulation(METHODS["dgs"](density=0.1), {"weight": np.zeros(20, np.float32)}, workers=1)
    with pytest.raises(ValueError, match=message):
        simulation.step(0, lambda *_: {name: np.ones(size, np.float32)}, lr=0.1)
