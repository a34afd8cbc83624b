"""A TensorFlow 1 graph: hvd.DistributedOptimizer around a v1 optimizer, run by sessions."""

import time
import warnings

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from oracle import Method, train
from tf_helpers import several

from hvd_sparse.schedule import WarmUp
from hvd_sparse.tensorflow import Compression
from hvd_sparse.tensorflow import step as tensorflow_step

v1 = tf.compat.v1
pytestmark = several
SHAPES = {"w": (20, 30), "b": (30,)}
STEPS, LR = 25, 0.1


def gradients_of(step, rank):
    generator = np.random.default_rng([step, rank])
    return {name: generator.standard_normal(shape) for name, shape in SHAPES.items()}


def build(compression_of, optimizer=None, **options):
    """Return placeholders for gradients, the variables, the compressor, and an operation that takes a step."""
    variables = {
        name: v1.get_variable(name, shape, initializer=v1.zeros_initializer()) for name, shape in SHAPES.items()
    }
    fed = {name: v1.placeholder(tf.float32, shape) for name, shape in SHAPES.items()}
    compression = compression_of(list(variables.values()))
    optimizer = optimizer or v1.train.GradientDescentOptimizer(LR)
    optimizer = hvd.DistributedOptimizer(optimizer, compression=compression, **options)
    loss = tf.add_n([tf.reduce_sum(variables[name] * fed[name]) for name in SHAPES])
    return fed, variables, compression, optimizer.minimize(loss)


def start(session):
    session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
    session.run(hvd.broadcast_global_variables(0))


def take_steps(session, fed, step_operation, steps):
    for step in steps:
        own = gradients_of(step, hvd.rank())
        session.run(step_operation, {fed[name]: own[name] for name in SHAPES})


@pytest.mark.parametrize("scope", ["tensor", "model"])
def test_optimizer_follows_the_paper(scope):
    def dgc(variables):
        return Compression.dgc(variables, density=0.02, min_numel=100, warmup=8, momentum=0.9, scope=scope)

    with tf.Graph().as_default():
        fed, variables, compression, step = build(dgc)
        with v1.Session() as session:
            start(session)
            take_steps(session, fed, step, range(STEPS))
            values = session.run(variables)
            stats, state = compression.stats(session), compression.state_dict(session=session)
            with pytest.raises(ValueError, match="pass session="):
                compression.stats()
            compression.reset(session)
            assert compression.state_dict(session=session)["step"] == 0
            compression.load_state_dict(state, session)
            again = compression.state_dict(session=session)
    method = Method(density=WarmUp(0.02, 8).density, scope=scope, momentum=0.9)
    zeros = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    expected = train(method, zeros, gradients_of, hvd.size(), STEPS, LR)
    for name in SHAPES:
        np.testing.assert_allclose(values[name], expected.parameters[name], rtol=1e-4, atol=1e-5)
    assert stats["steps"] == state["step"] == again["step"] == STEPS
    for one, other in zip(state["memory"].values(), again["memory"].values(), strict=True):
        for kind in one:
            np.testing.assert_array_equal(one[kind], other[kind])


@pytest.mark.parametrize("which", ["momentum", "beta1", "none"])
def test_second_momentum_warns(which):
    """Horovod's optimizer holds the one that has it."""
    with tf.Graph().as_default():
        optimizers = {
            "momentum": lambda: v1.train.MomentumOptimizer(LR, momentum=0.5),
            "beta1": lambda: v1.train.AdamOptimizer(LR, beta1=0.5),
            "none": lambda: v1.train.GradientDescentOptimizer(LR),
        }
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            build(lambda variables: Compression.dgc(variables, density=0.05, min_numel=100), optimizers[which]())
    told = sum("momentum (or beta1) 0.5" in str(one.message) for one in caught)
    assert told == (which != "none" and hvd.rank() == 0)


def test_a_finalized_graph():
    """As in a MonitoredTrainingSession: statistics and a rank's state can be read, and what adds operations says so."""
    with tf.Graph().as_default() as graph:
        fed, _, compression, step = build(lambda variables: Compression.dgc(variables, density=0.05, min_numel=100))
        with v1.Session() as session:
            start(session)
            graph.finalize()
            take_steps(session, fed, step, range(2))
            state, stats = compression.state_dict(session=session), compression.stats(session)
            residuals = np.concatenate([one["residual"] for one in state["memory"].values() if "residual" in one])
            assert stats["residual_norm"] == pytest.approx(np.linalg.norm(residuals.astype(np.float64)))
            assert stats["residual_norm"] > 0.0
            compression.reset(session)
            assert compression.state_dict(session=session)["step"] == 0
            assert compression.stats(session)["residual_norm"] == 0.0
            for call in (
                lambda: compression.load_state_dict(state, session),
                lambda: compression.state_dict(summed=True, session=session),
            ):
                with pytest.raises(RuntimeError, match="the graph of this session is finalized"):
                    call()


def test_the_hooks_of_a_monitored_session_take_no_step_when_the_state_is_read():
    """A hook that logs the reduced gradients would compress once more, on rank 0 alone."""
    with tf.Graph().as_default():
        weight = v1.get_variable("w", SHAPES["w"], initializer=v1.zeros_initializer())
        compression = Compression.dgc([weight], density=0.05, min_numel=100)
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(LR), compression=compression)
        reduced = optimizer.compute_gradients(tf.reduce_sum(weight * gradients_of(0, hvd.rank())["w"]), [weight])
        step = optimizer.apply_gradients(reduced)
        hooks = [v1.train.LoggingTensorHook({"norm": tf.norm(reduced[0][0])}, every_n_iter=1)]
        with v1.train.MonitoredTrainingSession(hooks=hooks if hvd.rank() == 0 else []) as session:
            for number in range(3):
                session.run(step)
                assert compression.stats(session=session)["steps"] == number + 1
                assert compression.state_dict(session=session)["step"] == number + 1
            compression.reset(session=session)
            assert compression.state_dict(session=session)["step"] == 0


@pytest.mark.parametrize("scale", [v1.mixed_precision.FixedLossScale, v1.mixed_precision.DynamicLossScale])
def test_a_loss_scaler_around_horovods_optimizer_changes_nothing(scale):
    """Clipping, weight decay and residuals are in units of the loss that is not scaled."""

    def train(scaler):
        with tf.Graph().as_default():
            weight = v1.get_variable("w", SHAPES["w"], initializer=v1.ones_initializer())
            fed = v1.placeholder(tf.float32, SHAPES["w"])
            settings = {"momentum": 0.5, "clip_norm": 1.0, "weight_decay": 0.1, "dense_fallback": None}
            compression = Compression.dgc([weight], density=0.1, min_numel=100, **settings)
            optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(LR), compression=compression)
            step = scaler(optimizer).minimize(tf.reduce_sum(weight * fed), var_list=[weight])
            with v1.Session() as session:
                start(session)
                for number in range(6):
                    session.run(step, {fed: gradients_of(number, hvd.rank())["w"]})
                residual = compression.state_dict(session=session)["memory"]["w"]["residual"]
                return session.run(weight), residual

    wrap = v1.mixed_precision.MixedPrecisionLossScaleOptimizer
    plain, scaled = train(lambda optimizer: optimizer), train(lambda optimizer: wrap(optimizer, scale(1024.0)))
    for expected, found in zip(plain, scaled, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert np.abs(plain[1]).max() > 0.01


def test_states_are_not_constants_of_the_graph():
    """A graph never frees its constants, and may have 2 GiB."""
    with tf.Graph().as_default() as graph:
        fed, _, compression, step = build(lambda variables: Compression.dgc(variables, density=0.05, min_numel=100))
        with v1.Session() as session:
            start(session)
            take_steps(session, fed, step, range(2))
            state = compression.state_dict(session=session)
            held = sum(one.nbytes for kinds in state["memory"].values() for one in kinds.values())
            before = graph.as_graph_def().ByteSize()
            for _ in range(3):
                compression.load_state_dict(state, session)
                compression.reset(session)
            assert graph.as_graph_def().ByteSize() - before < held
            compression.load_state_dict(state, session)
            again = compression.state_dict(session=session)
            for name, kinds in state["memory"].items():
                for kind, saved in kinds.items():
                    np.testing.assert_array_equal(again["memory"][name][kind], saved)


def train_monitored(folder, until):
    """Continue in a MonitoredTrainingSession up to a step, as documented; return the weights and this rank's state."""
    with tf.Graph().as_default():
        counter = v1.train.get_or_create_global_step()
        fed, variables, compression, step = build(lambda found: Compression.dgc(found, density=0.05, min_numel=100))
        with tf.control_dependencies([step]):
            step = counter.assign_add(1)
        own = [variable for variable in v1.local_variables() if variable.name.startswith("hvd_sparse/")]
        others = [variable for variable in v1.local_variables() if not variable.name.startswith("hvd_sparse/")]
        scaffold = v1.train.Scaffold(
            init_op=v1.variables_initializer(v1.global_variables() + own),
            local_init_op=tf.group(v1.variables_initializer(others), v1.tables_initializer()),
            saver=v1.train.Saver(v1.global_variables() + own),
        )
        directory = f"{folder}/{hvd.rank()}"
        with v1.train.MonitoredTrainingSession(checkpoint_dir=directory, scaffold=scaffold) as session:
            begun = int(session.run(counter))
            assert compression.stats(session)["steps"] == begun
            take_steps(session, fed, step, range(begun, until))
            return begun, session.run(variables), compression.state_dict(session=session)


def test_a_monitored_session_goes_on_from_its_checkpoint(tmp_path):
    folder = hvd.broadcast_object(str(tmp_path), name="folder")
    train_monitored(f"{folder}/resumed", 3)
    begun, values, state = train_monitored(f"{folder}/resumed", 6)
    _, whole, expected = train_monitored(f"{folder}/whole", 6)
    assert begun == 3 and state["step"] == expected["step"] == 6
    for name in SHAPES:
        np.testing.assert_array_equal(values[name], whole[name], err_msg=name)
        for kind, buffer in expected["memory"][name].items():
            np.testing.assert_array_equal(state["memory"][name][kind], buffer, err_msg=f"{name} {kind}")
            assert buffer.any()


def test_backward_passes_per_step():
    with tf.Graph().as_default():
        fed, variables, compression, step = build(
            lambda variables: Compression.gradient_dropping(variables, density=1.0), backward_passes_per_step=2
        )
        with v1.Session() as session:
            start(session)
            take_steps(session, fed, step, range(6))
            values, stats = session.run(variables), compression.stats(session)
    fed_in = {name: sum(gradients_of(s, r)[name] for s in range(6) for r in range(hvd.size())) for name in SHAPES}
    for name in SHAPES:
        np.testing.assert_allclose(values[name], -LR * fed_in[name] / hvd.size(), rtol=1e-4, atol=1e-5)
    assert stats["steps"] == 3


@pytest.mark.parametrize("averaged", [False, True])
def test_weight_decay_counts_once_for_several_passes(averaged):
    """It is in units of what the optimizer receives: a sum over two passes, or their average."""
    with tf.Graph().as_default():
        fed, variables, _, step = build(
            lambda variables: Compression.dgc(variables, density=1.0, momentum=0.0, weight_decay=0.5),
            backward_passes_per_step=2,
            average_aggregated_gradients=averaged,
        )
        with v1.Session() as session:
            start(session)
            take_steps(session, fed, step, range(6))
            values = session.run(variables)
    for name, shape in SHAPES.items():
        expected = np.zeros(shape)
        for first in range(0, 6, 2):
            parts = [gradients_of(step, rank)[name] for step in (first, first + 1) for rank in range(hvd.size())]
            gradient = sum(parts) / hvd.size() / (2 if averaged else 1)
            expected -= LR * (gradient + 0.5 * expected)
        np.testing.assert_allclose(values[name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("values", ["float32", "float16"])
def test_a_follower_of_cltk_sends_its_gradient_though_it_is_late(values):
    """Nothing orders the operations of a graph but their dependencies: those of the values include the gradient."""
    leader = {"step": 0}

    def wait(gradient):
        if hvd.rank() != leader["step"] % hvd.size():
            time.sleep(0.3)
        return gradient

    @tf.custom_gradient
    def late(variable):
        def backward(gradient):
            return tf.ensure_shape(tf.numpy_function(wait, [gradient], tf.float32), variable.shape)

        return tf.identity(variable), backward

    with tf.Graph().as_default():
        variable = v1.get_variable("w", [600], initializer=v1.zeros_initializer())
        fed = v1.placeholder(tf.float32, [600])
        compression = Compression.cltk([variable], density=0.05, min_numel=100, values=values)
        optimizer = hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(1.0), compression=compression, op=hvd.Sum
        )
        operation = optimizer.minimize(tf.reduce_sum(late(variable) * fed))
        given = np.zeros(600)
        with v1.Session() as session:
            start(session)
            for step in range(4):
                leader["step"] = step
                own = np.random.default_rng([step, hvd.rank()]).integers(-20, 20, 600)
                given += own
                session.run(operation, {fed: own})
            moved = -session.run(variable)
            (state,) = compression.state_dict(session=session)["memory"].values()
    sums = np.stack([given, state["residual"].astype(np.float64)])
    given, waits = hvd.allreduce(tf.constant(sums), op=hvd.Sum, name="late").numpy()
    np.testing.assert_array_equal(moved, given - waits)


@pytest.mark.parametrize("dense_wins", [False, True])
def test_steps_are_timed_in_a_graph_too(monkeypatch, dense_wins):
    """Payloads take 2 seconds, dense 1 or 3: all ranks choose the faster; what is fed arrives or stays in residuals."""
    clock, took = [1.0], {False: 2.0, True: 1.0 if dense_wins else 3.0}
    monkeypatch.setattr(tensorflow_step, "perf_counter", lambda: clock[0])

    def dropping(variables):
        return Compression.gradient_dropping(variables, density=0.02, min_numel=100, dense_fallback="measured")

    ways = []
    with tf.Graph().as_default():
        fed, variables, compression, operation = build(dropping)
        with v1.Session() as session:
            start(session)
            for step in range(25):
                take_steps(session, fed, operation, [step])
                ways.append(compression.stats(session)["dense_fallback"]["is_dense"])
                clock[0] += took[ways[-1]]
            values, state = session.run(variables), compression.state_dict(session=session)
    assert set(ways[:20]) == {False, True} and set(ways[-4:]) == {dense_wins}
    for name in SHAPES:
        whole = sum(gradients_of(step, rank)[name] for step in range(25) for rank in range(hvd.size()))
        zeros = np.zeros(whole.size, np.float32)  # what is small never waits
        waits = hvd.allreduce(
            tf.constant(state["memory"][name].get("residual", zeros)), op=hvd.Sum, name=f"waits.{name}"
        )
        left = whole - np.reshape(waits, SHAPES[name])
        np.testing.assert_allclose(values[name], -LR * left / hvd.size(), rtol=1e-3, atol=1e-4)
