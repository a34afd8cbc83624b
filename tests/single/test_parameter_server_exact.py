"""Exact properties of the asynchronous methods: the paper's equations in whole numbers, and nothing is lost."""

import itertools

import numpy as np
import pytest

from hvd_sparse.parameter_server import (
    METHODS,
    ParameterLayout,
    Server,
    ServerRefused,
    Simulation,
    by_speed,
    in_turn,
    protocol,
)
from hvd_sparse.parameter_server.tracker import MirrorTracker

SHAPES = {"a": (20, 15), "b": (30,), "c": (101,), "one": (1,)}
NUMEL = 432


def whole(seed, shapes=SHAPES, most=50):
    """Whole numbers: sums of them are exact in float32."""
    random = np.random.default_rng(seed)
    return {name: random.integers(-most, most + 1, shape).astype(np.float32) for name, shape in shapes.items()}


def drawn(seed, shapes=SHAPES):
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def whole_gradients(seed=0, make=whole):
    count = itertools.count(1000 * (seed + 1))
    return lambda worker, theta: make(next(count), {name: array.shape for name, array in theta.items()})


def quadratic(theta_of):
    return lambda worker, theta: {name: theta[name] - theta_of[name] for name in theta}


def no_gradients(worker, theta):
    return {name: np.zeros_like(array) for name, array in theta.items()}


def flat(simulation, arrays):
    return simulation.layout.flatten(arrays)


def theirs(simulation):
    return np.concatenate([server.parameters for server in simulation.servers])


def mirror(simulation, number):
    return np.concatenate([server._tracker._mirrors[number] for server in simulation.servers])


def unsent(simulation):
    """What all workers remember, and have not sent."""
    return sum(worker.residual.astype(np.float64) for worker in simulation.workers)


ORDERS = {"in turn": in_turn, "by speed": lambda workers: by_speed([7.0] + [1.0] * (workers - 1), seed=1)}


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "method", [METHODS["asgd"](), METHODS["gd_async"](density=1.0), METHODS["dgs"](density=1.0, momentum=0.0)]
)
def test_without_sparsification_it_is_asynchronous_sgd(method, order, servers):
    """Equation 5: theta_{t+1} = theta_t - lr * g(theta at worker k's last visit), step by step, bit for bit."""
    start, gradients, twin_gradients = whole(0), whole_gradients(), whole_gradients()
    simulation = Simulation(method, start, 5, servers)
    theta = flat(simulation, start).copy()
    seen = [theta.copy() for _ in range(5)]
    for number in itertools.islice(ORDERS[order](5), 80):
        here = simulation.workers[number].parameters
        assert (flat(simulation, here) == seen[number]).all()
        simulation.step(number, gradients, lr=0.5)
        theta -= np.float32(0.5) * flat(simulation, twin_gradients(number, start))
        seen[number] = theta.copy()
        assert (theirs(simulation) == theta).all()


@pytest.mark.parametrize("servers", [1, 2, 7])
@pytest.mark.parametrize("scope", ["tensor", "model"])
@pytest.mark.parametrize("name", ["dgs", "gd_async", "dgc_async"])
def test_without_secondary_compression_a_visitor_has_all(name, scope, servers):
    """Equation 4, v_k = M after each visit: the worker's parameters are the servers', bit for bit."""
    method = METHODS[name](density=0.05, scope=scope, min_numel=50)
    simulation = Simulation(method, drawn(0), 4, servers)
    gradients = quadratic(drawn(1))
    for number in itertools.islice(by_speed([1.0, 1.5, 2.0, 9.0], seed=2), 200):
        simulation.step(number, gradients, lr=0.1, weight_decay=0.01)
        assert flat(simulation, simulation.workers[number].parameters).tobytes() == theirs(simulation).tobytes()


@pytest.mark.parametrize("pull_values", ["float32", "float16", "bfloat16", "int2", "int1"])
@pytest.mark.parametrize(("scope", "servers"), [("tensor", 1), ("model", 1), ("tensor", 3)])
def test_with_secondary_compression_nothing_is_lost(pull_values, scope, servers):
    """A worker has what its mirror says, bit for bit; what is missing comes with later answers."""
    method = METHODS["dgs"](density=0.05, pull_density=0.1, scope=scope, min_numel=50, pull_values=pull_values)
    simulation = Simulation(method, drawn(0), 3, servers)
    simulation.run(in_turn(3), 60, whole_gradients(make=drawn), lr=0.05)
    for number, worker in enumerate(simulation.workers):
        assert flat(simulation, worker.parameters).tobytes() == mirror(simulation, number).tobytes()
    for worker in simulation.workers:  # nobody learns any more
        worker.residual[:] = 0.0
    gaps = []
    for _ in range(300):
        simulation.step(0, no_gradients, lr=0.0)
        assert flat(simulation, simulation.workers[0].parameters).tobytes() == mirror(simulation, 0).tobytes()
        gaps.append(np.abs(theirs(simulation) - mirror(simulation, 0)).max())
    if pull_values == "float32":
        np.testing.assert_allclose(mirror(simulation, 0), theirs(simulation), rtol=1e-6, atol=1e-7)
    assert gaps[-1] <= (1e-6 if pull_values != "int1" else 1e-2) and gaps[0] > 1e-2


def test_answers_in_whole_numbers_drain_bit_for_bit():
    method = METHODS["gd_async"](density=0.1, pull_density=0.05, min_numel=0)
    simulation = Simulation(method, whole(0), 3, 2)
    simulation.run(in_turn(3), 60, whole_gradients(), lr=1.0)
    for worker in simulation.workers:
        worker.residual[:] = 0.0
    assert (mirror(simulation, 1) != theirs(simulation)).any()
    for _ in range(25):
        simulation.step(1, no_gradients, lr=0.0)
    assert (mirror(simulation, 1) == theirs(simulation)).all()
    assert (flat(simulation, simulation.workers[1].parameters) == theirs(simulation)).all()


@pytest.mark.parametrize("silent", [1, 2, 5, 30])
def test_an_element_that_waits_has_the_sum_of_its_gradients(silent):
    """Equation 16: after T silent steps u = m * u_0 + lr * sum of T gradients, exactly."""
    m, lr, n = 0.5, 0.25, 64
    method = METHODS["dgs"](density=1 / n, momentum=m, min_numel=0)
    simulation = Simulation(method, {"w": np.zeros(n, np.float32)}, 1)
    worker, random = simulation.workers[0], np.random.default_rng(0)

    def step(values):
        simulation.step(0, lambda worker, theta: {"w": values}, lr=lr)

    first = np.zeros(n, np.float32)
    first[7] = 1024.0
    step(first)  # it is sent, and m * u_0 stays
    u_0 = np.float32(lr * 1024.0)
    assert worker.residual[7] == m * u_0 and simulation.servers[0].parameters[7] == -u_0
    total = np.float32(0.0)
    for _ in range(silent):
        values = np.zeros(n, np.float32)
        values[7], values[8] = random.integers(-8, 9), 4096.0  # another one is sent
        total += values[7]
        step(values)
        assert worker.residual[7] == m * u_0 + lr * total
    assert simulation.servers[0].parameters[7] == -u_0
    values = np.zeros(n, np.float32)
    values[7] = 2.0**20
    step(values)  # all of u is sent at last
    u = m * u_0 + lr * (total + 2.0**20)
    assert simulation.servers[0].parameters[7] == -u_0 - u and worker.residual[7] == m * u


CONSERVED = [
    {"values": "float32"},
    {"values": "float16"},
    {"values": "bfloat16"},
    {"values": "int2"},
    {"values": "int1", "level": "min"},
    {"values": "int2", "scope": "model", "min_numel": 0},
    {"values": "float32", "density": 0.3, "pull_density": 0.1},
    {"values": "int1", "density": 1.0},
    {"values": "float16", "density": 0.9, "warmup": 20},
    {"values": "float32", "coding": "bitmap", "min_numel": 10**6},
    {"values": "float32", "name": "dct_async", "lifespan": 5},
    {"values": "int2", "name": "dct_async", "lifespan": 3, "drain": 4, "warmup": 10},
]


@pytest.mark.parametrize("servers", [1, 2, 9])
@pytest.mark.parametrize("settings", CONSERVED, ids=range(len(CONSERVED)))
def test_updates_are_conserved(settings, servers):
    """Of lr * gradient, all is either in the servers' parameters or in a worker's residual."""
    options = {"name": "gd_async", "density": 0.05, "min_numel": 20, **settings}
    method = METHODS[options.pop("name")](**options)
    start, gradients, twin_gradients = whole(0), whole_gradients(3), whole_gradients(3)
    simulation = Simulation(method, start, 4, servers)
    total = np.zeros(NUMEL)
    for number in itertools.islice(by_speed([1.0, 1.0, 2.0, 5.0]), 100):
        simulation.step(number, gradients, lr=0.25)
        total += 0.25 * flat(simulation, twin_gradients(number, start)).astype(np.float64)
    applied = flat(simulation, start) - theirs(simulation).astype(np.float64)
    exact = settings["values"] == "float32"  # with levels float32 rounds
    np.testing.assert_allclose(applied + unsent(simulation), total, rtol=0, atol=0 if exact else 2e-3)


def test_warm_up_sends_as_many_as_its_schedule_says():
    method = METHODS["gd_async"](density=0.01, warmup=30, min_numel=0, scope="model")
    simulation, counts = Simulation(method, drawn(0), 1), []
    for step in range(40):
        before = simulation.workers[0].traffic.entries_up
        simulation.step(0, quadratic(drawn(1)), lr=0.1)
        counts.append(simulation.workers[0].traffic.entries_up - before)
        assert counts[-1] == max(1, int(method.schedule.density(step) * NUMEL + 0.5))
    assert counts[0] > counts[-1] == 4


def test_tensors_of_one_element_and_more_servers_than_tensors():
    shapes = {name: (1,) for name in "abcde"}
    for method in (
        METHODS["dgs"](density=0.01, min_numel=0),
        METHODS["gd_async"](density=0.5, min_numel=0, scope="model"),
    ):
        simulation = Simulation(method, whole(0, shapes), 2, servers=5)
        simulation.run(in_turn(2), 50, quadratic(whole(1, shapes)), lr=0.1)
        assert (flat(simulation, simulation.workers[1].parameters) == theirs(simulation)).all()
    with pytest.raises(ValueError, match=r"servers must be in \[1, 5\]"):
        Simulation(method, whole(0, shapes), 2, servers=6)
    simulation = Simulation(METHODS["dgs"](density=0.1, min_numel=0), {"only": np.ones(40, np.float32)}, 2, servers=13)
    simulation.run(in_turn(2), 20, no_gradients, lr=0.1)
    assert (theirs(simulation) == 1).all()


def test_small_tensors_travel_whole_both_ways():
    method = METHODS["gd_async"](density=0.01, pull_density=0.01, min_numel=102)
    simulation, gradients = Simulation(method, whole(0), 2), whole_gradients()
    for number in itertools.islice(in_turn(2), 20):
        simulation.step(number, gradients, lr=1.0)
        worker = simulation.workers[number]
        small = slice(worker.part("b").start, worker.part("one").stop)
        assert (worker.residual[small] == 0).all() and (worker.residual[worker.part("a")] != 0).sum() > 250
        assert (mirror(simulation, number)[small] == theirs(simulation)[small]).all()


def test_thirty_two_workers():
    method = METHODS["dgs"](density=0.1, momentum=0.3, min_numel=50)
    simulation, target = Simulation(method, drawn(0), 32, servers=2), drawn(1)
    distance = np.abs(theirs(simulation) - flat(simulation, target)).mean()
    simulation.run(in_turn(32), 32 * 30, quadratic(target), lr=0.002)
    assert np.abs(theirs(simulation) - flat(simulation, target)).mean() < 0.5 * distance
    assert simulation.servers[0].statistics.staleness[31] == 32 * 29 + 1
    assert all((worker.parameters["one"] != drawn(0)["one"]).all() for worker in simulation.workers)


def with_mirrors(simulation):
    """Give servers mirrors though nothing asks for them: what the paper's server keeps."""
    for server in simulation.servers:
        pieces = simulation.layout.pieces(*server.shard)
        server._tracker = MirrorTracker(server.parameters, server.method, pieces, server.shard[0])
        for number in server._records:
            server._tracker.join(number)
    return simulation


@pytest.mark.parametrize("servers", [1, 2])
def test_changes_tracked_by_time_are_those_tracked_by_mirrors(servers):
    """In whole numbers bit for bit, in others to rounding."""
    for make, gradients, exact in ((whole, whole_gradients, True), (drawn, lambda: quadratic(drawn(1)), False)):
        method = METHODS["gd_async"](density=0.05, min_numel=50)
        plain, mirrored = (Simulation(method, make(0), 4, servers) for _ in range(2))
        with_mirrors(mirrored)
        for simulation in (plain, mirrored):
            simulation.run(by_speed([1.0, 2.0, 3.0, 4.0]), 150, gradients(), lr=0.5 if exact else 0.05)
        for one, other in zip(plain.workers, mirrored.workers, strict=True):
            found, expected = flat(plain, one.parameters), flat(mirrored, other.parameters)
            assert not exact or (found == expected).all()
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        assert not exact or (theirs(plain) == theirs(mirrored)).all()


def test_memory_of_a_server_of_many_workers():
    """ResNet-18's 11.7 million parameters and 32 workers: the paper keeps 32 mirrors beside M."""
    n, workers = 11_700_000, 32
    layout = ParameterLayout({"w": (n,)})
    parameters = np.zeros(n, np.float32)
    server = Server(layout, (0, n), METHODS["dgs"](density=0.01), parameters, workers)
    paper = (workers + 1) * 4 * n
    for number in range(workers):
        server._tracker.join(number)
    assert server.nbytes == 4 * n == paper / (workers + 1)  # until an update is longer ago than the log reaches
    mirrored = Server(layout, (0, 1000), METHODS["dgs"](density=0.01, pull_density=0.01), parameters, workers)
    for number in range(workers):
        mirrored._tracker.join(number)
    assert mirrored.nbytes == (workers + 1) * 4 * 1000


@pytest.mark.parametrize("name", ["dgs", "dgc_async", "gd_async", "dct_async", "asgd"])
def test_what_is_not_finite_counts_as_zero(name):
    method = METHODS[name](**({} if name == "asgd" else {"density": 0.05}), min_numel=50)
    simulation, spoiled = Simulation(method, drawn(0), 2), quadratic(drawn(1))

    def gradients(worker, theta):
        found = spoiled(worker, theta)
        found["a"] = found["a"].copy()
        found["a"][3, :5] = [np.nan, np.inf, -np.inf, np.nan, 1.0]
        return found

    simulation.run(in_turn(2), 40, gradients, lr=0.1)
    assert np.isfinite(theirs(simulation)).all()
    assert (simulation.parameters()["a"][3, :4] == drawn(0)["a"][3, :4]).all()
    assert all(worker.traffic.non_finite == 20 for worker in simulation.workers)


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_run_that_diverges_says_so():
    """At once: to repeat a message does not help."""
    simulation = Simulation(METHODS["asgd"](), drawn(0), 1)
    with pytest.raises(ServerRefused, match="in the answer of server 0, not all values are finite: has training div"):
        simulation.run(in_turn(1), 3, lambda worker, theta: {name: theta[name] * 0 + 2e38 for name in theta}, lr=1.0)
    assert simulation.workers[0].traffic.repeated == 0
    assert all(np.isfinite(array).all() for array in simulation.workers[0].parameters.values())


def test_a_push_that_is_not_finite_is_refused_at_once():
    simulation = Simulation(METHODS["asgd"](), drawn(0), 1)
    (server,), (worker,) = simulation.servers, simulation.workers
    good = protocol.decode(worker.push({}, dict.fromkeys(drawn(0), 0.1))[0])
    bad = good._replace(body=np.full(good.body.size // 4, np.inf, np.float32).view(np.uint8))
    ((_, answer),) = server.handle(protocol.encode(bad), 0)
    with pytest.raises(ServerRefused, match="server 0: in a push of worker 0, not all values are finite: has training"):
        worker.receive(0, answer)
    assert (simulation.parameters()["a"] == drawn(0)["a"]).all() and server.clock == 0


@pytest.mark.parametrize(
    ("rates", "error", "text"),
    [
        ({"lr": float("nan")}, ValueError, "lr must be finite and at least 0, got nan"),
        ({"lr": -1.0}, ValueError, "lr must be finite and at least 0, got -1.0"),
        ({"lr": "0.1"}, TypeError, "lr must be a number finite and at least 0, got '0.1'"),
        ({"lr": 0.1, "weight_decay": -1}, ValueError, "weight_decay must be finite and at least 0, got -1"),
    ],
)
def test_a_simulation_refuses_the_rates_that_sessions_refuse(rates, error, text):
    simulation = Simulation(METHODS["asgd"](), drawn(0), 1)
    with pytest.raises(error, match=text):
        simulation.step(0, quadratic(drawn(1)), **rates)
    assert (simulation.parameters()["a"] == drawn(0)["a"]).all() and simulation.workers[0].step == 0
