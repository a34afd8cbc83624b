"""Models of Keras 3, Keras 2 and modules in asynchronous sessions: names, buffers, the servers' model; errors."""

import zlib

import numpy as np
import pytest
import tensorflow as tf

from hvd_sparse.parameter_server import METHODS
from hvd_sparse.parameter_server.session import SHARE_EVERY
from hvd_sparse.parameter_server.worker import ServerRefused
from hvd_sparse.tensorflow import asynchronous
from hvd_sparse.tensorflow.variables import unwrapped

MPI = pytest.importorskip("mpi4py.MPI")
OPTIONS = {"servers": "colocated", "communicator": MPI.COMM_SELF, "silence": None, "timeout": 60.0}
ASGD = METHODS["asgd"]()


@pytest.fixture(params=["keras", "tf_keras"])
def keras(request):
    keras = pytest.importorskip(request.param)
    if request.param == "keras" and not keras.__version__.startswith("3."):
        pytest.skip("TensorFlow before 2.16 has Keras 2")
    keras.utils.set_random_seed(0)  # a model that happens to begin near its end cannot halve its loss
    return keras


def make_model(keras, **options):
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, name="first", **options),
            layers.BatchNormalization(momentum=0.5, name="norm", **options),
            layers.Dropout(0.1, name="drop", **options),
            layers.Dense(2, name="last", **options),
        ],
        name="net",
    )


def train(model, optimizer, steps, wrap=tf.function, scale=1.0):
    inputs = np.random.default_rng(1).standard_normal((steps, 16, 6)).astype(np.float32)

    @wrap
    def step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(model(batch, training=True), tf.float32) - batch[:, :2])) * scale
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    return [float(step(tf.constant(batch))) for batch in inputs]


def short(names):
    return ["/".join(name.split("/")[-2:]) for name in names]


TRAINED = ["first/kernel", "first/bias", "norm/gamma", "norm/beta", "last/kernel", "last/bias"]
BUFFERS = ["norm/moving_mean", "norm/moving_variance"]


@pytest.mark.each_value
@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "function"])
def test_models_learn_and_their_buffers_are_averaged(keras, wrap):
    model = make_model(keras)
    with asynchronous.connect(model, METHODS["dgs"](density=0.3, momentum=0.5, min_numel=10), **OPTIONS) as session:
        assert short(session.tensors) == TRAINED
        assert short(session.buffers) == BUFFERS  # and not the state of what draws numbers
        losses = train(model, session.optimizer(0.1), 120, wrap)
        assert np.mean(losses[-10:]) < 0.5 * losses[0]
        found = session.global_variables()
        assert found.keys() == {*session.tensors, *session.buffers}
        for name, variable in {**session.tensors, **session.buffers}.items():  # of one worker
            np.testing.assert_array_equal(found[name], variable.numpy(), err_msg=name)
            assert "moving_mean" not in name or np.abs(found[name]).max() > 0.01


def test_buffers_are_shared_now_and_then(keras):
    model = make_model(keras)
    with asynchronous.connect(model, ASGD, **OPTIONS) as session:
        optimizer = session.optimizer(0.01)
        start = np.concatenate([buffer.numpy() for buffer in session.buffers.values()])
        train(model, optimizer, SHARE_EVERY - 1)
        np.testing.assert_array_equal(session._averages(), start)  # the server's own
        train(model, optimizer, 1)
        expected = np.concatenate([buffer.numpy() for buffer in session.buffers.values()])
        np.testing.assert_array_equal(session._state()[1], expected)


def test_what_is_saved_has_the_present_buffers(keras, tmp_path):
    model = make_model(keras)
    with asynchronous.connect(model, ASGD, **OPTIONS) as session:
        train(model, session.optimizer(0.01), 3)
        session.save(str(tmp_path / "saved.npz"))
        present = np.concatenate([buffer.numpy() for buffer in session.buffers.values()])
        np.testing.assert_array_equal(np.load(tmp_path / "saved.npz")["buffers"], present)
        train(model, session.optimizer(0.01), 1)
        server = session._local.servers[0]
    last = np.concatenate([buffer.numpy() for buffer in session.buffers.values()])
    assert np.abs(last - present).max() > 0
    np.testing.assert_array_equal(server.state()[1]["buffers"], last)


def test_buffers_are_restored(keras, tmp_path):
    """Into workers too, or these would pull the average back to where they begin."""
    model, other = make_model(keras), make_model(keras)
    with asynchronous.connect(model, ASGD, **OPTIONS) as session:
        train(model, session.optimizer(0.01), SHARE_EVERY)
        session.save(str(tmp_path / "saved.npz"))
        expected = {name: variable.numpy() for name, variable in {**session.tensors, **session.buffers}.items()}
    with asynchronous.connect(other, ASGD, restore=str(tmp_path / "saved.npz"), **OPTIONS) as session:
        for name, variable in {**session.tensors, **session.buffers}.items():
            np.testing.assert_array_equal(variable, expected[name], err_msg=name)


def test_buffers_that_float32_rounds_stay():
    """Where the average is what this worker would send itself."""
    module = tf.Module()
    module.weight = tf.Variable([1.0], name="weight")
    module.origin, module.mean = (
        tf.Variable([1.7e9 + 1 / 3], trainable=False, dtype=tf.float64, name=name) for name in ("origin", "mean")
    )
    with asynchronous.connect(module, ASGD, **OPTIONS) as session:
        assert module.origin.numpy() == [1.7e9 + 1 / 3]
        session._averages = lambda: np.array([2.5, 1.7e9 + 1 / 3], np.float32)  # mean, origin
        session._take_model()
        assert module.origin.numpy() == [1.7e9 + 1 / 3] and module.mean.numpy() == [2.5]
        assert session.global_variables()["origin"] == [1.7e9 + 1 / 3]


def test_a_model_that_is_built_again_has_other_names(keras, tmp_path):
    """Keras numbers the layers of a process; also where "dense_10" sorts before "dense_9"."""

    def build():
        return keras.Sequential([keras.Input((6,)), *(keras.layers.Dense(units) for units in (5, 4))])

    keras.backend.clear_session()
    for _ in range(4):
        build()
    path = str(tmp_path / "saved.npz")
    with asynchronous.connect(build(), ASGD, **OPTIONS) as session:
        session.save(path)
    with pytest.raises(ValueError, match=r"is of another model, with other names for .*clear_session\(\).*dense_9"):
        asynchronous.connect(build(), ASGD, restore=path, **OPTIONS)
    keras.backend.clear_session()
    with pytest.raises(ValueError, match="is of another model, with other shapes: "):
        asynchronous.connect(make_model(keras), ASGD, restore=path, **OPTIONS)


def test_the_servers_model(keras):
    """It goes into another model, of other names, or the worker's own; a later step starts from the worker's again."""
    model, other = make_model(keras), keras.models.clone_model(make_model(keras))
    inputs = np.ones((4, 6), np.float32)
    method = METHODS["dgs"](density=0.2, pull_density=0.1, min_numel=4)
    with asynchronous.connect(model, method, **OPTIONS) as session:
        optimizer = session.optimizer(0.1)
        train(model, optimizer, 15)
        session.load_global(other)
        expected = other(inputs)
        assert np.abs(expected - model(inputs)).max() > 1e-6  # pulls are not complete: they differ
        session.load_global()
        np.testing.assert_allclose(model(inputs), expected, rtol=0, atol=1e-6)
        session.synchronize()
        session.stats()
        np.testing.assert_allclose(model(inputs), expected, rtol=0, atol=1e-6)
        optimizer.apply_gradients([(tf.zeros_like(one), one) for one in session.tensors.values()])
        for name, variable in session.tensors.items():
            np.testing.assert_array_equal(variable, session.worker.parameters[name].reshape(variable.shape))
        with pytest.raises(ValueError, match="model must be like the one that was connected"):
            session.load_global(keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)]))


def test_frozen_layers_are_left_alone(keras):
    model = make_model(keras)
    model.get_layer("first").trainable = False
    kernel = model.get_layer("first").get_weights()[0]
    with asynchronous.connect(model, ASGD, **OPTIONS) as session:
        assert short(session.tensors) == TRAINED[2:]
        assert short(session.buffers) == BUFFERS
        train(model, session.optimizer(0.1), 10)
    np.testing.assert_array_equal(kernel, model.get_layer("first").get_weights()[0])


def test_frozen_layers_must_be_equal(keras):
    """What is compared on joining is a checksum of exactly the frozen layers' weights."""
    inputs = keras.Input((3,))
    frozen = keras.layers.Dense(4, trainable=False)
    model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.BatchNormalization()(frozen(inputs))))
    checksum = zlib.crc32(b"".join(array.tobytes() for array in frozen.get_weights()))
    with asynchronous.connect(model, ASGD, **OPTIONS) as session:
        assert session.layout.frozen == f"2, checksum {checksum:08x}"


@pytest.mark.each_value
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float64"])
def test_mixed_precision(keras, policy):
    model = make_model(keras, dtype=keras.mixed_precision.Policy(policy))
    with asynchronous.connect(model, ASGD, **OPTIONS) as session:
        losses = train(model, session.optimizer(0.1), 100)
        expected = tf.float64 if policy == "float64" else tf.float32
        assert {variable.dtype for variable in session.tensors.values()} == {expected}
    assert np.mean(losses[-10:]) < 0.5 * losses[0]


def test_tied_and_equally_named_weights(keras):
    shared, inputs = keras.layers.Dense(6, name="same"), keras.Input((6,))
    inner = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6, name="same")], name="inner")
    model = keras.Model(inputs, inner(shared(shared(inputs))))
    with asynchronous.connect(model, ASGD, **OPTIONS) as session:
        assert len(session.tensors) == 4 and session.layout.numel == 2 * 42


def test_modules_and_lists():
    class Module(tf.Module):
        def __init__(self):
            super().__init__()
            self.weight = tf.Variable(tf.ones([3]), name="weight")
            self.mean = tf.Variable(tf.ones([2]), trainable=False, name="mean")
            self.count = tf.Variable(0, trainable=False, name="count")

    module = Module()
    with asynchronous.connect(module, ASGD, **OPTIONS) as session:
        session.optimizer(1.0).apply_gradients([(tf.ones([3]), module.weight)])
        found = session.global_variables()
        np.testing.assert_array_equal(found["weight"], np.zeros(3))
        np.testing.assert_array_equal(found["mean"], np.ones(2))
        assert found.keys() == {"weight", "mean"}
    with asynchronous.connect([module.weight, module.mean, module.weight], ASGD, **OPTIONS) as session:
        assert session.global_variables().keys() == {"weight"}
    plain = [tf.Variable([float(i)]) for i in range(3)]
    with asynchronous.connect(plain, ASGD, **OPTIONS) as session:
        assert list(session.tensors) == ["Variable", "Variable#2", "Variable#3"]
        session.optimizer(1.0).apply_gradients([(tf.constant([0.5]), plain[1])])
    assert [float(variable[0]) for variable in plain] == [0.0, 0.5, 2.0]


def test_variables_of_keras_3_alone():
    keras = pytest.importorskip("keras", minversion="3")
    weight, learning_rate = keras.Variable(np.ones(3, np.float32), name="kernel"), keras.Variable(0.5)
    with asynchronous.connect([weight], ASGD, **OPTIONS) as session:
        optimizer = session.optimizer(learning_rate)
        step = tf.function(lambda: optimizer.apply_gradients([(tf.ones([3]), weight)]) + 0)
        step()
        learning_rate.assign(0.25)
        assert step() == 2
    np.testing.assert_array_equal(weight.numpy(), np.full(3, 0.25))


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (lambda: [], ValueError, "there must be variables to train, got none: build the model first"),
        (lambda: [tf.Variable(1.0, trainable=False)], ValueError, "got none"),
        (lambda: tf.Variable(1.0), TypeError, "got a single one; pass"),
        (lambda: [tf.Variable([1], name="counts")], TypeError, "counts:0: gradients must be .* got int32"),
        (
            lambda: [tf.Variable(tf.zeros([3, 0]), name="empty")],
            ValueError,
            r"with elements; got .*empty.*: set requires",
        ),
        (lambda: [np.zeros(3)], TypeError, "model must be a list of tf.Variable, got entries of type ndarray"),
        (lambda: 3, TypeError, "model must be a list of tf.Variable, got int"),
        (lambda: {"w": tf.Variable(1.0)}, TypeError, r"model must be .* got a dict: pass its \.values\(\)"),
    ],
)
def test_what_cannot_be_connected(model, error, message):
    with pytest.raises(error, match=message):
        asynchronous.connect(model(), ASGD, **OPTIONS)


def test_a_model_that_is_not_built(keras):
    with pytest.raises(ValueError, match=r"build|created"):
        asynchronous.connect(keras.Sequential([keras.layers.Dense(3)]), ASGD, **OPTIONS)


def test_weight_decay_of_each_variable():
    """By a mapping, then by a function; steps of SGD without gradients: w * (1 - lr * decay) ** steps."""
    variables = [tf.Variable(np.full([40], 2.0, np.float32), name=name) for name in ("weight", "bias")]
    with asynchronous.connect(variables, ASGD, **OPTIONS) as session:
        optimizer = session.optimizer(0.1, weight_decay={"weight": 0.5})
        for step in range(20):
            if step == 10:
                optimizer.weight_decay = lambda name, variable: 0.5 if name == "bias" else 0.0
            optimizer.apply_gradients([(tf.zeros([40]), variable) for variable in variables])
        for variable in variables:
            np.testing.assert_allclose(variable.numpy(), 2.0 * 0.95**10, rtol=1e-5)
        with pytest.raises(ValueError, match="weight_decay has 'wait', which no parameter is called"):
            optimizer.weight_decay = {"wait": 0.1}


def test_options():
    weight = [tf.Variable([1.0])]
    with pytest.raises(ValueError, match="servers must be 'colocated' or a number from 1 to one less than the 1 ranks"):
        asynchronous.connect(weight, ASGD, **{**OPTIONS, "servers": 1})
    with asynchronous.connect(weight, ASGD, **OPTIONS) as session:
        for settings, error, message in [
            ({"learning_rate": -0.1}, ValueError, "learning_rate must be at least 0 and finite, got -0.1"),
            ({"learning_rate": None}, TypeError, "learning_rate must be a number .* got None"),
            ({"learning_rate": "0.1"}, TypeError, "learning_rate must be a number .* got '0.1'"),
            ({"learning_rate": float("nan")}, ValueError, "learning_rate must be .* got nan"),
            ({"learning_rate": 0.1, "weight_decay": -1}, ValueError, "weight_decay must be .* got -1"),
            ({"learning_rate": 0.1, "weight_decay": "1"}, TypeError, "weight_decay must be a number .* got '1'"),
        ]:
            with pytest.raises(error, match=message):
                session.optimizer(**settings)
        for number in (np.float32(0.5), tf.constant(0.5), tf.constant(0.5, tf.bfloat16), 0.5):
            assert session.optimizer(number).learning_rate == 0.5
        optimizer = session.optimizer(lambda step: -1.0)
        with pytest.raises(ValueError, match="learning_rate, at step 0, must be at least 0"):
            optimizer.apply_gradients([(tf.ones([1]), weight[0])])
        with pytest.raises(tf.errors.OpError, match="learning_rate, at step 0, must be at least 0"):
            tf.function(lambda: optimizer.apply_gradients([(tf.ones([1]), weight[0])]) + 0)()
    optimizer.learning_rate = 0.1
    with pytest.raises(RuntimeError, match="has left the run"):
        optimizer.apply_gradients([(tf.ones([1]), weight[0])])


@pytest.mark.parametrize(
    ("wrap", "error"), [(lambda f: f, ServerRefused), (tf.function, tf.errors.UnknownError)], ids=["eager", "function"]
)
def test_a_refusal_in_a_step(wrap, error):
    """A `tf.function` hides its type, as documented; `close` does not."""
    weight = tf.Variable([1.0])
    session = asynchronous.connect([weight], ASGD, **OPTIONS)
    optimizer = session.optimizer(0.1)
    session._connection._refusal = ServerRefused("server 0: the server has stopped")
    with pytest.raises(error, match="server 0: the server has stopped"):
        wrap(lambda: optimizer.apply_gradients([(tf.ones([1]), weight)]) + 0)()
    with pytest.raises(ServerRefused, match="server 0: the server has stopped"):
        session.close()


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "function"])
@pytest.mark.parametrize(
    ("pairs", "error", "message"),
    [
        (lambda a, b: [(tf.ones([3]), tf.Variable(tf.ones([3]), name="c"))], ValueError, "none of .* connected: a, b"),
        (lambda a, b: [(tf.ones([3]), a), (tf.ones([3]), a)], ValueError, "a variable once, got a again"),
        (lambda a, b: [(None, a), (None, b)], ValueError, "must have a gradient, got none"),
        (lambda a, b: [(tf.ones([4]), a)], ValueError, r"gradient of a must have shape \(3,\), got \(4,\)"),
        (lambda a, b: [(tf.ones([3], tf.int32), a)], TypeError, "gradient of a must be of real numbers, got int32"),
        (lambda a, b: [(tf.ones([3], tf.complex64), a)], TypeError, "got complex64"),
    ],
)
def test_gradients_that_do_not_fit(pairs, error, message, wrap):
    a, b = tf.Variable(tf.ones([3]), name="a"), tf.Variable(tf.ones([2]), name="b")
    with asynchronous.connect([a, b], ASGD, **OPTIONS) as session:
        optimizer, made = session.optimizer(0.1), pairs(a, b)
        with pytest.raises(error, match=message):
            wrap(lambda: optimizer.apply_gradients(made) + 0)()
        assert session.stats()["pushes"] == 0


def test_graphs_of_tensorflow_1():
    weight = tf.Variable([1.0])
    with asynchronous.connect([weight], ASGD, **OPTIONS) as session, tf.Graph().as_default():
        with pytest.raises(RuntimeError, match=r"must be called eagerly or in a tf\.function"):
            session.optimizer(0.1).apply_gradients([(tf.ones([1]), weight)])


def test_variables_of_a_mixed_policy_are_unwrapped():
    """TensorFlow traces a function anew for each call with one, as no two of their types are equal."""
    keras = pytest.importorskip("tf_keras")
    layer = keras.layers.Dense(2, dtype="mixed_float16")
    layer.build((None, 3))
    assert type(layer.kernel).__name__ == "AutoCastVariable"
    inner = unwrapped(layer.kernel)
    assert type(inner).__name__ == "ResourceVariable" and unwrapped(inner) is inner
    assert inner.dtype == tf.float32
