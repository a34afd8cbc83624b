"""TensorFlow's asynchronous sessions on one co-located rank equal PyTorch's and the oracle; wrong inputs.

With one worker the order of messages is determined, so both frameworks must agree bit for bit.
"""

import io
import threading

import numpy as np
import pytest
import tensorflow as tf
from dgs_oracle import DgsOracle
from gradients import draw

from hvd_sparse.parameter_server import METHODS
from hvd_sparse.tensorflow import asynchronous

MPI = pytest.importorskip("mpi4py.MPI")
SHAPES = {"body.weight": (40, 30), "body.bias": (30,), "head": (501,), "scale": ()}
STEPS, DECAY = 50, 0.01
OPTIONS = {"servers": "colocated", "communicator": MPI.COMM_SELF, "silence": None, "timeout": 60.0}
MOMENTUM = {"dgs": {"momentum": 0.7}, "dgc_async": {"momentum": 0.6}, "msgd": {"momentum": 0.9}}
DENSITY = {"asgd": {}, "msgd": {}}
eagerly_and_traced = pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "function"])


def rate(step):
    return 0.1 * 0.97**step


def start():
    return {name: value.astype(np.float32) for name, value in draw(SHAPES, 0, 0, seed=9).items()}


def gradients_of(step, seed=0):
    return {name: value.astype(np.float32) for name, value in draw(SHAPES, step, 1, seed).items()}


def make(name, **settings):
    density = DENSITY.get(name, {"density": 0.05})
    return METHODS[name](min_numel=100, **density, **MOMENTUM.get(name, {}), **settings)


def train_torch(method, seed=0, **options):
    import torch

    from hvd_sparse.torch import asynchronous as torch_asynchronous

    parameters = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in start().items()}
    with torch_asynchronous.connect(parameters.items(), method, **OPTIONS, **options) as session:
        optimizer = session.optimizer(lr=0.0, weight_decay=DECAY)
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = rate(step)
            for name, gradient in gradients_of(step, seed).items():
                parameters[name].grad = torch.tensor(gradient)
            optimizer.step()
        session.synchronize()
    return {name: parameter.detach().numpy() for name, parameter in parameters.items()}


def test_close_takes_the_last_answer():
    """With overlap, the answer to a push comes with the next one: the last one has none."""
    variable = tf.Variable(tf.zeros([3]))
    session = asynchronous.connect([variable], METHODS["asgd"](), **OPTIONS, overlap=True)
    session.optimizer(1.0).apply_gradients([(tf.ones([3]), variable)])
    session.close()
    np.testing.assert_array_equal(variable.numpy(), -np.ones(3))


def variables_of(values, dtype=tf.float32):
    return {name: tf.Variable(value, name=name, dtype=dtype) for name, value in values.items()}


def stepper(optimizer, variables, wrap):
    """Return step({name: gradient}), as such or in a tf.function."""

    @wrap
    def step(gradients):
        optimizer.apply_gradients((gradients.get(name), variable) for name, variable in variables.items())

    return step


def train_tensorflow(method, wrap, seed=0, learning_rate=rate, **options):
    variables = variables_of(start())
    with asynchronous.connect(list(variables.values()), method, **OPTIONS, **options) as session:
        optimizer = session.optimizer(learning_rate, weight_decay=DECAY)
        step = stepper(optimizer, variables, wrap)
        for number in range(STEPS):
            step({name: tf.constant(value) for name, value in gradients_of(number, seed).items()})
        assert optimizer.iterations.numpy() == STEPS
        session.synchronize()
    return {name: variable.numpy() for name, variable in variables.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def oracle_of(method, seed):
    theta = start()
    pull = {"pull_density": method.pull_density}
    density = {"density": method.density, "momentum": method.momentum, "dense_below": method.min_numel}
    kept = {name: getattr(method, name) for name in ("lifespan", "band") if hasattr(method, name)}
    oracle = DgsOracle(method.name, theta, 1, **density, **pull, **kept)
    for step in range(STEPS):
        oracle.step(0, gradients_of(step, seed), rate(step), DECAY)
    return oracle


@pytest.mark.each_value
@pytest.mark.parametrize("pull_density", [None, 0.1])
@pytest.mark.parametrize("name", METHODS)
def test_both_frameworks_do_what_the_paper_says(name, pull_density):
    method = make(name, pull_density=pull_density)
    seed = next(seed for seed in range(20) if oracle_of(method, seed).gap > 2e-6)
    found = train_tensorflow(method, tf.function, seed)
    assert_same(found, train_tensorflow(method, lambda f: f, seed))
    assert_same(found, train_torch(method, seed))
    for tensor, expected in oracle_of(method, seed).theta(0).items():
        np.testing.assert_allclose(found[tensor].reshape(-1), expected, rtol=2e-5, atol=2e-5, err_msg=tensor)


SETTINGS = [{"values": "int2", "coding": "run_length"}, {"scope": "model", "warmup": 20}, {"pull_values": "float16"}]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("settings", SETTINGS)
def test_both_frameworks_agree(settings, overlap):
    method = make("dgs", **settings)
    assert_same(train_tensorflow(method, tf.function, overlap=overlap), train_torch(method, overlap=overlap))


def test_both_frameworks_agree_on_a_server_of_two_threads():
    method = make("dgs", pull_density=0.02)
    found = train_tensorflow(method, tf.function, threads=2)
    assert_same(found, train_torch(method, threads=2))
    alone = train_tensorflow(method, tf.function)  # each thread selects in its part
    assert any((found[name] != alone[name]).any() for name in found)


def schedule(keras):
    boundaries = [int(step) for step in range(STEPS - 1)]  # a different learning rate for every step
    return keras.optimizers.schedules.PiecewiseConstantDecay(boundaries, [rate(step) for step in range(STEPS)])


@pytest.mark.each_value
@eagerly_and_traced
@pytest.mark.parametrize("keras", ["keras", "tf_keras"])
def test_learning_rates_may_be_schedules_of_keras(keras, wrap):
    keras = pytest.importorskip(keras)
    method = make("dgs")
    found = train_tensorflow(method, wrap, learning_rate=schedule(keras))
    for name, expected in train_tensorflow(method, wrap).items():
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-6)


@eagerly_and_traced
def test_learning_rates_may_change(wrap):
    """A number or a variable, which the same function may assign; what is set last is what counts."""
    variables, variable = variables_of({"a": np.zeros(3, np.float32)}), tf.Variable(0.5)
    with asynchronous.connect(list(variables.values()), METHODS["asgd"](), **OPTIONS) as session:
        optimizer = session.optimizer(1.0)
        step, found = stepper(optimizer, variables, wrap), []
        for value in (1.0, 0.25, np.float32(0.5), lambda number: 2 if number == 3 else 0):
            optimizer.learning_rate = value
            step({"a": tf.ones([3])})
            found.append(float(variables["a"][0]))
        optimizer.learning_rate = variable

        @wrap
        def assign_and_step():
            variable.assign(variable / 2.0)
            optimizer.apply_gradients([(tf.ones([3]), variables["a"])])
            return variables["a"] + 0.0

        found += [float(assign_and_step()[0]) for _ in range(2)]
    assert found == [-1.0, -1.25, -1.75, -3.75, -4.0, -4.125]


@eagerly_and_traced
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_other_types(dtype, wrap):
    """Variables are the worker's float32 rounded; nothing smaller than their last digit is lost between steps."""
    variables = variables_of({"a": np.ones(4, np.float32)}, dtype)
    with asynchronous.connect(list(variables.values()), METHODS["asgd"](), **OPTIONS) as session:
        step = stepper(session.optimizer(2.0**-12), variables, wrap)
        for _ in range(128):
            step({"a": tf.constant([1.0, -1.0, 0.0, 8.0], dtype)})
        assert variables["a"].dtype == dtype
        expected = 1.0 - np.array([1.0, -1.0, 0.0, 8.0]) / 32
        np.testing.assert_array_equal(tf.cast(variables["a"], tf.float64), expected)
        assert session.global_variables()["a"].dtype == dtype.as_numpy_dtype


@eagerly_and_traced
def test_slices_and_missing_gradients(wrap):
    table, rest = tf.Variable(tf.zeros([6, 2]), name="table"), tf.Variable(tf.zeros([3]), name="rest")
    with asynchronous.connect([table, rest], METHODS["asgd"](), **OPTIONS) as session:
        optimizer = session.optimizer(1.0)

        @wrap
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, [1, 4, 1]) * [[1.0, 2.0]])
            gradients = tape.gradient(loss, [table, rest])
            assert isinstance(gradients[0], tf.IndexedSlices) and gradients[1] is None
            optimizer.apply_gradients(zip(gradients, [table, rest], strict=True))

        step()
        np.testing.assert_array_equal(table, [[0, 0], [-2, -4], [0, 0], [0, 0], [-1, -2], [0, 0]])
        half = tf.IndexedSlices(tf.ones([2, 2], tf.float16), tf.constant([5, 5], tf.int64))  # no shape
        optimizer.apply_gradients([(half, table), (None, rest)])
        np.testing.assert_array_equal(table[5], [-2, -2])
        np.testing.assert_array_equal(rest, np.zeros(3))


def test_the_order_in_a_function():
    """What reads a variable before a step has the old value; what comes after it has the new one, in a loop too."""
    variable, seen = tf.Variable([0.0]), tf.Variable(tf.zeros([20, 2]))
    with asynchronous.connect([variable], METHODS["asgd"](), **OPTIONS) as session:
        optimizer = session.optimizer(lambda step: 1.0)

        @tf.function
        def steps():
            for i in tf.range(20):
                before = tf.identity(variable)
                optimizer.apply_gradients([(-tf.ones([1]), variable)])
                seen.scatter_nd_update([[i]], [tf.stack([before[0], variable[0]])])
            return optimizer.iterations + 0

        assert steps() == 20
    np.testing.assert_array_equal(seen, [[i, i + 1] for i in range(20)])


def test_what_has_not_changed_is_not_assigned():
    variables = variables_of({name: np.zeros(100, np.float32) for name in "abcd"})
    method = METHODS["gd_async"](density=0.01, scope="model", min_numel=1)  # 4 elements a step, of any tensor
    with asynchronous.connect(list(variables.values()), method, **OPTIONS) as session:
        assigned, updated = [], session._updated
        session._updated = lambda names: (assigned.append(names), updated(names))
        step = stepper(session.optimizer(1.0), variables, tf.function)
        for name, factor in (("b", 1.0), ("d", 10.0)):  # the residual of b is smaller
            step({other: tf.fill([100], factor if other == name else 0.125) for other in variables})
        assert assigned == [{"b"}, {"d"}]
        assert [np.count_nonzero(variable) for variable in variables.values()] == [0, 4, 0, 4]


def test_what_is_not_finite_counts_as_zero():
    variables = variables_of({"a": np.zeros(3, np.float32)})
    with asynchronous.connect(list(variables.values()), METHODS["asgd"](), **OPTIONS) as session:
        stepper(session.optimizer(1.0), variables, tf.function)({"a": tf.constant([1.0, np.nan, -np.inf])})
        np.testing.assert_array_equal(variables["a"], [-1.0, 0.0, 0.0])
        assert session.stats()["non_finite"] == 1


@pytest.mark.each_value
@eagerly_and_traced
@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_whose_answer_is_late_counts_if_it_has_pushed(monkeypatch, wrap, overlap):
    """With overlap, it waits for the answer to the step before, and has pushed nothing."""
    variables = variables_of({"a": np.zeros(3, np.float32)})
    options = {**OPTIONS, "timeout": 1.0, "overlap": overlap}
    with asynchronous.connect(list(variables.values()), METHODS["asgd"](), **options) as session:
        server, optimizer, may_answer = session._local.servers[0], session.optimizer(1.0), threading.Event()
        push, step = server._push, stepper(optimizer, variables, wrap)
        monkeypatch.setattr(server, "_push", lambda *arguments: (may_answer.wait(20.0), push(*arguments))[1])
        for _ in range(overlap):
            step({"a": tf.ones([3])})
        for _ in range(2):  # the second one waits for the same answer
            with pytest.raises((TimeoutError, tf.errors.OpError), match="no answer from the servers"):
                step({"a": tf.ones([3])})
            assert optimizer.iterations.numpy() == session.worker.step == session.worker.traffic.pushes == 1
        may_answer.set()
        step({"a": tf.ones([3])})
        session.synchronize()
        assert optimizer.iterations.numpy() == server.statistics.pushes == 2
        np.testing.assert_array_equal(variables["a"], [-2.0, -2.0, -2.0])


def resumed(means, tmp_path, steps, method, restore=None):
    """Train on from a file of the server and, by one means or another, what the worker saved; save both."""
    variables = variables_of(start())
    with asynchronous.connect(list(variables.values()), method, restore=restore, **OPTIONS) as session:
        optimizer = session.optimizer(rate)
        checkpoint = tf.train.Checkpoint(optimizer=optimizer)
        if restore and means == "checkpoint":
            checkpoint.restore(str(tmp_path / "worker-1")).assert_existing_objects_matched().assert_consumed()
        elif restore:
            optimizer.load_state_dict(np.load(tmp_path / "worker.npy", allow_pickle=True).item())
        step = stepper(optimizer, variables, tf.function)
        for number in steps:
            assert optimizer.iterations.numpy() == number
            step({name: tf.constant(value) for name, value in gradients_of(number).items()})
        if not restore:
            session.save(str(tmp_path / "server.npz"))
            checkpoint.save(str(tmp_path / "worker"))
            np.save(tmp_path / "worker.npy", optimizer.state_dict())
    return {name: variable.numpy() for name, variable in variables.items()}


@pytest.mark.parametrize("means", ["checkpoint", "state_dict"])
@pytest.mark.parametrize(("name", "settings"), [("dgs", {"warmup": 10}), ("dgc_async", {}), ("dct_async", {})])
def test_a_resumed_run_is_the_uninterrupted_one(means, name, settings, tmp_path):
    method = make(name, **settings)
    whole = resumed(means, tmp_path, range(12), method)
    resumed(means, tmp_path, range(7), method)
    assert_same(resumed(means, tmp_path, range(7, 12), method, str(tmp_path / "server.npz")), whole)


def test_the_names_in_a_checkpoint_are_those_of_earlier_versions(tmp_path):
    found = {name for name, _ in tf.train.list_variables(saved("dgs", tmp_path)[1]) if name.startswith("optimizer/")}
    names = {"optimizer/memory/.ATTRIBUTES/py_state", "optimizer/iterations/.ATTRIBUTES/VARIABLE_VALUE"}
    assert found == names


def saved(name, tmp_path):
    """Return a state of a method, and its file of a `tf.train.Checkpoint`."""
    with asynchronous.connect([tf.Variable(tf.zeros([5]), name="a")], make(name), **OPTIONS) as session:
        optimizer = session.optimizer(0.1)
        session.worker.residual[:] = 1.0
        return optimizer.state_dict(), tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / name))


@pytest.mark.parametrize(
    ("theirs", "ours"), [("dgc_async", "dgs"), ("gd_async", "dgs"), ("dgs", "gd_async"), ("msgd", "dgc_async")]
)
def test_a_state_of_another_method_is_refused(theirs, ours, tmp_path):
    """Also of one that has the same arrays."""
    state, path = saved(theirs, tmp_path)
    with asynchronous.connect([tf.Variable(tf.zeros([5]), name="a")], make(ours), **OPTIONS) as session:
        optimizer = session.optimizer(0.1)
        for load in (optimizer.load_state_dict, lambda _: tf.train.Checkpoint(optimizer=optimizer).restore(path)):
            with pytest.raises(ValueError, match=f"of another method: {theirs} there, {ours} here"):
                load(state)
            assert not session.worker.residual.any()


def test_a_state_without_its_method_is_loaded(tmp_path):
    """Of an earlier version."""
    state, _ = saved("dgs", tmp_path)
    assert state.pop("method") == "dgs"
    with asynchronous.connect([tf.Variable(tf.zeros([5]), name="a")], make("dgs"), **OPTIONS) as session:
        optimizer = session.optimizer(0.1)
        optimizer.load_state_dict(state)
        assert (session.worker.residual == 1.0).all()
        np.savez(file := io.BytesIO(), **{"residual/a": np.full(5, 2.0, np.float32)})
        optimizer._feedback.deserialize(file.getvalue())
        assert (session.worker.residual == 2.0).all()


def test_a_state_of_other_arrays_is_refused():
    with asynchronous.connect([tf.Variable(tf.zeros([5]), name="a")], make("dgs"), **OPTIONS) as session:
        optimizer = session.optimizer(0.1)
        state = optimizer.state_dict()
        state["memory"]["a"]["velocity"] = state["memory"]["a"]["residual"] + 1.0
        with pytest.raises(ValueError, match=r"the state of a must have .*, got .*velocity.* of another method"):
            optimizer.load_state_dict(state)
        assert not session.worker.residual.any()


WRONG = {
    "nothing": ({}, "a dict without iterations, memory"),
    "of a compressor": ({"version": 2, "memory": {}, "step": 3}, "a dict without iterations"),
    "no dict": ([3], "list"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_state_is_refused(case):
    state, found = WRONG[case]
    with asynchronous.connect([tf.Variable(tf.zeros([5]), name="a")], make("dgs"), **OPTIONS) as session:
        optimizer = session.optimizer(0.1)
        told = rf"what state_dict\(\) of an asynchronous optimizer returned, with iterations, memory; got {found}$"
        with pytest.raises(ValueError, match=told):
            optimizer.load_state_dict(state)
        with pytest.raises(ValueError, match="the state's iterations must be an integer of at least 0, got -1"):
            optimizer.load_state_dict({**optimizer.state_dict(), "iterations": -1})
        assert not session.worker.residual.any() and optimizer.iterations.numpy() == 0
