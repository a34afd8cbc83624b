"""TensorFlow jobs that a test inside the job could not check, or would not survive."""

import pathlib
import sys

import launching
import numpy as np
import pytest
from launching import KERAS_2, launch, mpirun
from parity_job import CASES, SHAPES

pytestmark = launching.MARKS
SHARED = pathlib.Path(__file__).parent.parent / "shared"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(SHARED), **KERAS_2}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Return where each framework's job left what it sent."""
    folder = tmp_path_factory.mktemp("parity")
    for framework in ("torch", "tensorflow"):
        script = [sys.executable, str(SHARED / "parity_job.py"), framework, str(folder)]
        code, output = launch([*mpirun(2), *script], QUIET)
        assert code == 0, output
    return folder


@pytest.mark.parametrize("case", CASES)
def test_both_frameworks_send_the_same_bytes(folder, case):
    """The same gradients give the same payloads, bit for bit, over 50 steps, and the same parameters."""
    for rank in range(2):
        ours, theirs = (np.load(folder / f"{framework}.{case}.{rank}.npz") for framework in ("torch", "tensorflow"))
        assert ours["sent"].size > 10_000
        np.testing.assert_array_equal(ours["sent"], theirs["sent"])
        for name in SHAPES:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-6)


WITHOUT_V2 = """
import sys
import horovod.tensorflow as hvd
import numpy as np
import tensorflow.compat.v1 as tf
from hvd_sparse.tensorflow import Compression

tf.disable_v2_behavior()  # shapes are made of Dimension, variables are RefVariables
hvd.init()
method, options, resource = sys.argv[1], eval(sys.argv[2]), sys.argv[3] == "resource"
w = tf.get_variable("w", [40, 50], initializer=tf.zeros_initializer(), use_resource=resource)
b = tf.get_variable("b", [50], initializer=tf.zeros_initializer(), use_resource=resource)
fed = {"w": tf.placeholder(tf.float32, [40, 50]), "b": tf.placeholder(tf.float32, [50])}
compression = getattr(Compression, method)([w, b], density=0.05, min_numel=100, dense_fallback=None, **options)
optimizer = hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(1.0), compression=compression)
step = optimizer.minimize(tf.reduce_sum(w * fed["w"]) + tf.reduce_sum(b * fed["b"]))
total = {"w": 0.0, "b": 0.0}
with tf.Session() as session:
    session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
    for number in range(4):
        own = np.random.default_rng([number, hvd.rank()])
        own = {"w": own.standard_normal((40, 50)), "b": own.standard_normal(50)}
        session.run(step, {fed[name]: own[name] for name in fed})
        total = {name: total[name] + own[name] for name in fed}
    found = {"w": session.run(w), "b": session.run(b)}
    memory = compression.state_dict(session=session)["memory"]
sent = np.concatenate([total["w"].ravel() - memory["w"]["residual"], total["b"]])
np.save(sys.argv[4] + str(hvd.rank()), np.stack([sent, np.concatenate([found["w"].ravel(), found["b"]])]))
"""


@pytest.mark.parametrize(
    ("method", "options", "variables"),
    [
        ("gradient_dropping", {}, "ref"),
        pytest.param("gradient_dropping", {}, "resource", marks=pytest.mark.exhaustive),
        pytest.param("micro", {"values": "float16"}, "ref", marks=pytest.mark.exhaustive),
    ],
)
def test_nothing_is_lost_without_the_behaviour_of_tensorflow_2(method, options, variables, tmp_path):
    """The weights are minus the mean of what the ranks' gradients have beyond their residuals."""
    arguments = [method, repr(options), variables, str(tmp_path / "rank")]
    code, output = launch([*mpirun(2), sys.executable, "-c", WITHOUT_V2, *arguments], QUIET)
    assert code == 0, output
    (one, weights), (other, same) = (np.load(tmp_path / f"rank{rank}.npy") for rank in range(2))
    np.testing.assert_array_equal(weights, same)
    np.testing.assert_allclose(weights, -(one + other) / 2, rtol=0, atol=1e-5)


KERAS_3 = """
import sys
import horovod.tensorflow as hvd, horovod.tensorflow.keras as hvd_keras
import numpy as np, tensorflow as tf
from hvd_sparse.tensorflow import Compression
hvd.init()
assert tf.keras.__version__.startswith("3."), tf.keras.__version__
model = tf.keras.Sequential([tf.keras.Input((20,)), tf.keras.layers.Dense(100), tf.keras.layers.Dense(3)])
compression = Compression.dgc(model.trainable_variables, density=0.05, min_numel=60)
for wrap in (hvd.DistributedOptimizer, hvd_keras.DistributedOptimizer):
    try:
        wrap(tf.keras.optimizers.SGD(0.1), compression=compression)
    except RuntimeError as error:
        assert "TF_USE_LEGACY_KERAS=1" in str(error)
    else:
        raise AssertionError("an optimizer of Keras 3 was not refused")
optimizer = tf.keras.optimizers.SGD(0.01)  # a loop of one's own is fine, with Keras 3 too
x = np.random.default_rng(hvd.rank()).standard_normal((8, 20)).astype(np.float32)
variables = [variable.value for variable in model.trainable_variables]
hvd.broadcast_variables(variables, 0)
for _ in range(3):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x)))
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), model.trainable_variables))
assert compression.stats()["steps"] == 3
weights = tf.concat([tf.reshape(v, [1, -1]) for v in variables], 1)
everywhere = hvd.allgather(weights, name="weights").numpy()
assert (everywhere == everywhere[0]).all()
"""


KERAS_3_RESUMES = """
first = tf.keras.Sequential([tf.keras.Input((20,)), tf.keras.layers.Dense(100, name="d"), tf.keras.layers.Dense(3)])
path = f"{sys.argv[1]}/{hvd.rank()}.keras"


def train(model, compression, steps):
    for step in steps:
        x = tf.constant(np.random.default_rng([step, hvd.rank()]).standard_normal((8, 20)), tf.float32)
        variables = [variable.value for variable in model.trainable_variables]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        for variable, gradient in zip(variables, tape.gradient(loss, variables)):
            variable.assign_sub(0.05 * gradient)


for settings in ({}, {"exchange": "reduce_scatter", "scope": "model"}):
    before = Compression.dgc(first, density=0.05, min_numel=10, **settings)
    train(first, before, range(4))
    first.save(path)
    again = tf.keras.models.load_model(path)
    after = Compression.dgc(again, density=0.05, min_numel=10, **settings)
    state = before.state_dict()
    after.load_state_dict(state)
    assert any(buffer.any() for buffers in state["memory"].values() for buffer in buffers.values())
    assert set(state["memory"]) != set(after.state_dict()["memory"]) or settings, "Keras keeps the names now"
    train(first, before, range(4, 8))
    train(again, after, range(4, 8))
    for one, other in zip(first.trainable_variables, again.trainable_variables):
        assert np.array_equal(one.numpy(), other.numpy())
    first = again
"""


def test_keras_3(tmp_path):
    """Refused where it would not reduce; a saved model resumes bit for bit, though its variables have other names."""
    pytest.importorskip("keras", minversion="3", reason="TensorFlow before 2.16 has Keras 2")
    command = [*mpirun(2), sys.executable, "-c", KERAS_3 + KERAS_3_RESUMES, str(tmp_path)]
    code, output = launch(command, {**QUIET, "TF_USE_LEGACY_KERAS": "0"})
    assert code == 0, output


JOIN = """
import horovod.tensorflow as hvd
import tensorflow as tf
from hvd_sparse.tensorflow import Compression
hvd.init()
variables = [tf.Variable(tf.zeros([5000]))]
compression = Compression.dgc(variables, density=0.01, scope="{scope}")

@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variables[0])
    return hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, variables)

for _ in range(3 + (hvd.rank() != {first})):
    step()
hvd.join()
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("scope", "first"), [pytest.param("tensor", 0, marks=pytest.mark.exhaustive), ("model", 1)])
def test_join_with_uneven_steps_is_refused(scope, first):
    """Rank `first`, the coordinator or another, has joined; the other rank, which still trains, raises the error."""
    code, output = launch([*mpirun(2), sys.executable, "-c", JOIN.format(scope=scope, first=first)], QUIET)
    assert code != 0
    assert "hvd_sparse does not work with hvd.join()" in output, output
