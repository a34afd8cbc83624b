"""The training loop of docs/mixed-precision.md, unchanged."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from documented import code_of
from tf_helpers import assert_ranks_agree, several

pytestmark = several
LOOP = code_of("mixed-precision.md", 1)


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
