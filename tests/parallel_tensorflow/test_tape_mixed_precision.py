"""The training loops of the documentation, unchanged, with a loss scaler."""

import warnings

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from documented import code_of
from tf_helpers import assert_alive, assert_ranks_agree, several

pytestmark = several
LOOP = code_of("mixed-precision.md", 1)
TRAIN_STEP = code_of("tensorflow.md", 2)


def run_loop(loop, steps=12):
    """Run it on batches of this rank's own; return its names."""
    generator = np.random.default_rng(1 + hvd.rank())
    inputs = [generator.standard_normal((16, 64)).astype(np.float32) for _ in range(steps)]
    names = {"batches": [(tf.constant(one), tf.constant((one[:, 0] > 0).astype(np.int64))) for one in inputs]}
    exec(compile(loop, "docs/mixed-precision.md", "exec"), names)
    return names


def test_the_documented_loop():
    """From 32768 the model is, but for rounding in float16, that of the loop with a scale of 1; ranks agree."""
    decaying = LOOP.replace("1e-4 if", "0.5 if")  # strong: a scale that is not known would show
    assert decaying != LOOP
    scaled = run_loop(decaying)
    plain = run_loop(decaying.replace("SGD(0.1))", "SGD(0.1), dynamic=False, initial_scale=1.0)"))
    assert scaled["compression"].loss_scale.numpy() == 32768.0 and plain["compression"].loss_scale.numpy() == 1.0
    tf.keras.utils.set_random_seed(0)
    start = tf.keras.Sequential([tf.keras.layers.Dense(128), tf.keras.layers.Dense(10)])
    start.build((None, 64))
    for before, expected, found in zip(
        start.get_weights(), plain["model"].get_weights(), scaled["model"].get_weights(), strict=True
    ):
        moved = np.linalg.norm(expected - before)
        assert moved > 0.0 and np.linalg.norm(found - expected) < 0.02 * moved
    assert_ranks_agree({str(i): weight for i, weight in enumerate(scaled["model"].get_weights())})


@pytest.fixture
def keras_3():
    """Return Keras 3, which an earlier TensorFlow may not have; keep its policy."""
    keras = pytest.importorskip("keras", minversion="3")
    before = keras.config.dtype_policy()
    yield keras
    keras.config.set_dtype_policy(before)


def moved_by(script):
    """Run a script; return by how much its model's weights have moved, as one vector, and its compressor."""
    names = {"__name__": "script"}
    first = script.replace("epochs=2", "epochs=0")
    assert first != script
    start = {}
    exec(compile(first, "docs/tensorflow.md", "exec"), start)
    exec(compile(script, "docs/tensorflow.md", "exec"), names)
    pairs = zip(start["model"].get_weights(), names["model"].get_weights(), strict=True)
    return np.concatenate([(after - before).ravel() for before, after in pairs]), names["compression"]


def test_the_documented_train_step_under_a_policy_of_float16(keras_3):
    """Keras 3 puts a scaler around the optimizer by itself: the model trains as with float32."""
    expected, _ = moved_by(TRAIN_STEP)
    keras_3.config.set_dtype_policy("mixed_float16")
    found, compression = moved_by(TRAIN_STEP)
    assert compression.loss_scale.numpy() == 2.0**15
    norm = np.linalg.norm(expected)
    assert norm > 0.0 and abs(np.linalg.norm(found) / norm - 1.0) < 0.05
    assert found @ expected > 0.9 * norm**2
    assert_ranks_agree({"moved": found})


def test_a_scaler_whose_scale_is_not_known_is_refused(keras_3):
    keras_3.config.set_dtype_policy("mixed_float16")
    unknown = TRAIN_STEP.replace("compression.loss_scale =", "unknown =")
    assert unknown != TRAIN_STEP
    with pytest.raises(RuntimeError, match=r"compression\.loss_scale was never set.*scale_loss\(1\.0\)"):
        exec(compile(unknown, "docs/tensorflow.md", "exec"), {})
    assert_alive()


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_second_momentum_in_a_train_step_is_warned_of(keras_3, policy, momentum):
    """Whether a loss scaler is around the optimizer or not."""
    keras_3.config.set_dtype_policy(policy)
    both = TRAIN_STEP.replace("SGD(0.1)", f"SGD(0.1, momentum={momentum})").replace("epochs=2", "epochs=1")
    assert both.count("momentum=") == 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(both, "docs/tensorflow.md", "exec"), {})
    told = any("both are applied" in str(one.message) for one in caught)
    assert told == (momentum > 0.0 and hvd.rank() == 0)
