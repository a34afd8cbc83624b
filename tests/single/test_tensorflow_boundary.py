"""ThresholdBoundary in Keras: masks, values and gradients equal the reference's; files, policies, graphs."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from hvd_sparse import reference
from hvd_sparse.tensorflow.model_parallel import ThresholdBoundary

pytestmark = pytest.mark.each_value  # the core and its twin are compared elsewhere, pair by pair
DTYPES = ["float32", "float64", "float16", "bfloat16"]
SHAPES = [(1, 1), (1, 7), (5, 1), (33, 129), (2, 3, 31), (0, 8)]
Dense = tf.keras.layers.Dense


def drawn(shape, dtype="float32", kind="normal", seed=0):
    random = np.random.default_rng(seed)
    x = random.standard_normal(shape)
    if kind == "ties":
        x = random.integers(-2, 3, shape).astype(np.float64)
    elif kind == "zeros":
        x[::2] = 0.0
    elif kind == "relu":
        x = np.maximum(x, 0.0)
    return tf.cast(tf.constant(x, tf.float32), dtype)


def expected_mask(x, density, threshold, start_dim=1):
    start, array = start_dim % x.shape.rank, tf.cast(x, tf.float64).numpy()
    columns = math.prod(array.shape[start:])
    rows = array.reshape(math.prod(array.shape[:start]), columns)
    if threshold == "topk":
        mask, _ = reference.select_top_k_rows(rows, max(1, int(density * columns + 0.5)))
    else:
        mask = reference.filter_threshold_rows(rows, reference.laplace_threshold_rows(rows, density))
    return mask.reshape(array.shape)


def same(ours, theirs):
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(tf.cast(ours, tf.float64).numpy(), tf.cast(theirs, tf.float64).numpy())


def network(threshold="topk", density=0.1, **options):
    layers = [tf.keras.Input((16,)), Dense(48), ThresholdBoundary(density, threshold, **options), Dense(4)]
    return tf.keras.Sequential(layers)


@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "relu"])
@pytest.mark.parametrize("threshold", ["topk", "laplace"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_and_backward_are_those_of_a_mask(shape, dtype, threshold, kind):
    x, weights = drawn(shape, dtype, kind), drawn(shape, dtype, seed=1)
    boundary = ThresholdBoundary(0.3, threshold)
    with tf.GradientTape() as tape:
        tape.watch(x)
        out = boundary(x, training=True)
        loss = tf.reduce_sum(out * weights)
    mask = expected_mask(x, 0.3, threshold)
    same(out, tf.where(mask, x, tf.zeros_like(x)))
    same(tape.gradient(loss, x), tf.where(mask, weights, tf.zeros_like(x)))
    assert boundary.stats()["occupancy"] == (mask.mean() if mask.size else 0.0)
    if threshold == "topk":
        assert (
            mask.reshape(shape[0], math.prod(shape[1:])).sum(1) == max(1, int(0.3 * math.prod(shape[1:]) + 0.5))
        ).all()


@pytest.mark.parametrize(("start_dim", "rows"), [(1, 2), (2, 6), (-1, 30), (-3, 2)])
def test_start_dim_says_what_a_row_is(start_dim, rows):
    x = drawn((2, 3, 5, 7))
    boundary = ThresholdBoundary(0.2, start_dim=start_dim)
    assert boundary.mask(x).shape == (rows, 210 // rows)
    np.testing.assert_array_equal(boundary(x).numpy() != 0, expected_mask(x, 0.2, "topk", start_dim))


@pytest.mark.parametrize("threshold", ["topk", "laplace"])
def test_density_one_changes_nothing(threshold):
    x, boundary = drawn((4, 9), kind="zeros"), ThresholdBoundary(1.0, threshold)
    for training in (True, False):
        same(boundary(x, training=training), x)
        assert boundary.mask(x, training).numpy().all()
    assert boundary.stats()["occupancy"] == 1.0


def test_gradients_are_right_by_finite_differences():
    boundary = ThresholdBoundary(0.4)
    error = tf.test.compute_gradient(lambda x: tf.sin(boundary(x)), [drawn((6, 11), "float64")], 1e-6)
    assert np.abs(error[0][0] - error[1][0]).max() < 1e-8


def test_laplace_evaluates_with_the_threshold_of_training():
    boundary, x, running = ThresholdBoundary(0.05, "laplace", momentum=0.25), drawn((8, 100)), None
    same(boundary(x), x)  # nothing is known yet; Keras takes it for evaluation unless told
    for seed in range(5):
        batch = drawn((8, 100), seed=seed) * (1 + seed)
        boundary(batch, training=True)
        mean = reference.laplace_threshold_rows(batch.numpy(), 0.05).mean()
        running = mean if running is None else running + 0.25 * (mean - running)
    boundary(drawn((0, 100)), training=True)  # without rows, nothing is learned
    assert boundary.stats()["threshold"] == pytest.approx(running, rel=1e-5)
    assert boundary.stats()["batches"] == 5
    bar = boundary.stats()["threshold"]
    same(boundary(x, training=False), tf.where(tf.abs(x) >= bar, x, tf.zeros_like(x)))
    assert boundary.stats()["batches"] == 5


@pytest.mark.parametrize("threshold", ["topk", "laplace"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays(threshold, value):
    x = drawn((5, 50)).numpy()
    x[2, 3] = value
    boundary = ThresholdBoundary(0.02, threshold)
    for training in (True, False):
        out = boundary(tf.constant(x), training=training).numpy()
        np.testing.assert_array_equal(out[2, 3], value)
        assert np.isfinite(out[[0, 1, 3, 4]]).all() and np.isfinite(boundary.stats()["threshold"])


@pytest.mark.parametrize("threshold", ["topk", "laplace"])
@pytest.mark.parametrize("signature", [[None, 50], [None, None], [7, 50]])
def test_one_graph_serves_all_batch_sizes(signature, threshold):
    traces, boundary, plain = [], ThresholdBoundary(0.1, threshold), ThresholdBoundary(0.1, threshold)

    @tf.function(input_signature=[tf.TensorSpec(signature)])
    def keep(x):
        traces.append(0)
        out = boundary(x, training=True)
        assert out.shape.as_list() == signature
        return out

    for rows in (7, 7, 7) if signature[0] else (7, 1, 0, 12):
        x = drawn((rows, 50), seed=rows)
        same(keep(x), plain(x, training=True))
    assert len(traces) == 1
    assert boundary.stats() == plain.stats()


def test_a_row_may_be_a_sample_of_unknown_length():
    boundary, plain = ThresholdBoundary(0.1, start_dim=1), ThresholdBoundary(0.1, start_dim=1)
    run = tf.function(boundary, input_signature=[tf.TensorSpec([None, None, 6])])
    for length in (1, 4, 9):
        x = drawn((3, length, 6), seed=length)
        same(run(x), plain(x))


def test_training_may_be_a_tensor():
    boundary, plain = ThresholdBoundary(0.1, "laplace"), ThresholdBoundary(0.1, "laplace")
    run = tf.function(lambda x, training: boundary.mask(x, training))
    for seed, training in enumerate([True, False, True, False]):
        x = drawn((6, 40), seed=seed)
        same(run(x, tf.constant(training)), plain.mask(x, training))
    assert boundary.stats() == plain.stats() and boundary.stats()["batches"] == 2


@pytest.mark.parametrize("threshold", ["topk", "laplace"])
def test_keras_fit_trains_through_it(threshold):
    tf.keras.utils.set_random_seed(0)
    model = network(threshold, 0.25)
    model.compile(tf.keras.optimizers.SGD(0.02), tf.keras.losses.MeanSquaredError())
    x = drawn((64, 16)).numpy()
    losses = model.fit(x, x[:, :4], batch_size=16, epochs=6, verbose=0).history["loss"]
    assert losses[-1] < 0.9 * losses[0]
    stats = model.layers[1].stats()
    assert stats["batches"] == 24 and 0.05 < stats["mean_occupancy"] < 0.4
    model.evaluate(x, x[:, :4], verbose=0)
    model.predict(x, verbose=0)
    assert model.layers[1].stats()["batches"] == 24


@pytest.mark.parametrize("ending", ["keras", "h5", "weights.h5"])
@pytest.mark.parametrize("threshold", ["topk", "laplace"])
def test_files_of_keras_keep_the_state(threshold, ending, tmp_path):
    model, x = network(threshold, 0.05, momentum=0.5, seed=3), drawn((9, 16))
    model(x, training=True)
    path = str(tmp_path / f"model.{ending}")
    if ending == "weights.h5":
        model.save_weights(path)
        other = network(threshold, 0.05, momentum=0.5, seed=3)
        other.load_weights(path)
    else:
        model.save(path)
        other = tf.keras.models.load_model(path)
    same(other(x), model(x))
    ours, theirs = model.layers[1], other.layers[1]
    assert theirs.settings == ours.settings
    assert [theirs.stats()[name] for name in ("threshold", "batches")] == [ours.stats()["threshold"], 1]
    assert len(ours.weights) == 2 and not ours.trainable_weights


def test_a_checkpoint_keeps_the_state(tmp_path):
    ours, theirs = ThresholdBoundary(0.05, "laplace"), ThresholdBoundary(0.05, "laplace")
    ours(drawn((8, 100)), training=True)
    path = tf.train.Checkpoint(boundary=ours).save(str(tmp_path / "state"))
    tf.train.Checkpoint(boundary=theirs).restore(path)
    assert ours.stats() == theirs.stats()


def test_a_config_makes_an_equal_layer():
    ours = ThresholdBoundary(0.05, "laplace", start_dim=1, momentum=0.3, seed=9, name="cut")
    theirs = ThresholdBoundary.from_config(ours.get_config())
    assert theirs.settings == ours.settings and theirs.name == "cut"


SAVE = """
import sys, numpy as np, tensorflow as tf
from hvd_sparse.tensorflow.model_parallel import ThresholdBoundary
layers = [tf.keras.Input((16,)), tf.keras.layers.Dense(48), ThresholdBoundary(0.1, "laplace"), tf.keras.layers.Dense(4)]
model, x = tf.keras.Sequential(layers), tf.random.stateless_normal([5, 16], [1, 2])
model(x, training=True)
tf.saved_model.save(model, sys.argv[1] + "/saved")
model.export(sys.argv[1] + "/exported")
model.save(sys.argv[1] + "/model.keras")
np.savez(sys.argv[1] + "/expected.npz", x=x, y=model(x))
"""
LOAD = """
import sys, numpy as np, tensorflow as tf
import hvd_sparse.tensorflow.model_parallel
data = np.load(sys.argv[1] + "/expected.npz")
x, y = tf.constant(data["x"]), data["y"]
saved, exported = (tf.saved_model.load(sys.argv[1] + "/" + name) for name in ("saved", "exported"))
(found,) = saved.signatures["serving_default"](x).values()
np.testing.assert_array_equal(found, y)
np.testing.assert_array_equal(exported.serve(x), y)
np.testing.assert_array_equal(tf.keras.models.load_model(sys.argv[1] + "/model.keras")(x), y)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("legacy", ["0", "1"])
def test_a_saved_model_runs_in_another_process(legacy, tmp_path):
    if legacy == "1":
        pytest.importorskip("tf_keras")
    for script in (SAVE, LOAD):
        environment = {**os.environ, "TF_USE_LEGACY_KERAS": legacy, "TF_CPP_MIN_LOG_LEVEL": "2"}
        command = [sys.executable, "-c", script, str(tmp_path)]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_under_a_mixed_policy_activations_stay_what_they_are(policy):
    tf.keras.mixed_precision.set_global_policy(policy)
    try:
        model = network("laplace")
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    boundary, x = model.layers[1], drawn((5, 16))
    activations = model.layers[0](x)
    assert activations.dtype.name == policy.removeprefix("mixed_")
    same(boundary(activations, training=True), tf.where(expected_mask(activations, 0.1, "laplace"), activations, 0))
    assert boundary.running_threshold.dtype == "float32"
    bars = reference.laplace_threshold_rows(tf.cast(activations, tf.float64).numpy(), 0.1)
    assert boundary.stats()["threshold"] == pytest.approx(bars.mean(), rel=1e-6)
    assert tf.as_dtype(model(x).dtype).name == policy.removeprefix("mixed_")
    assert boundary(drawn((3, 9), "float64")).dtype == tf.float64


@pytest.mark.parametrize("threshold", ["topk", "laplace"])
@pytest.mark.parametrize("graph", [False, True])
def test_recomputation_cuts_the_same(graph, threshold):
    """It is documented that a batch counts twice where it runs eagerly; the gradients are what matters."""
    boundary, plain = ThresholdBoundary(0.1, threshold), ThresholdBoundary(0.1, threshold)
    kernel, x = tf.Variable(drawn((16, 48), seed=2)), drawn((5, 16))

    def gradient(function):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(function(x)))
        return tape.gradient(loss, kernel)

    cut = tf.recompute_grad(lambda x: boundary(tf.tanh(x @ kernel), training=True))
    found = (tf.function(gradient) if graph else gradient)(cut)
    expected = gradient(lambda x: plain(tf.tanh(x @ kernel), training=True))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert boundary.stats()["batches"] == (1 if graph else 2)
    assert boundary.stats()["threshold"] == pytest.approx(plain.stats()["threshold"])


def test_the_twin_of_pytorch_cuts_and_learns_alike():
    torch = pytest.importorskip("torch")
    from hvd_sparse.torch.model_parallel import ThresholdBoundary as Twin

    for threshold in ("topk", "laplace"):
        ours, theirs = (kind(0.15, threshold, momentum=0.3, seed=5) for kind in (ThresholdBoundary, Twin))
        for seed, training in enumerate([True, True, False, True]):
            x, weights = (drawn((2, 9, 40), kind="ties" if seed % 2 else "normal", seed=s) for s in (seed, 10 + seed))
            x = x + 0.5 if seed == 3 else x
            twin = torch.from_numpy(x.numpy()).requires_grad_()
            theirs.train(training)
            with tf.GradientTape() as tape:
                tape.watch(x)
                out = ours(x, training=training)
                loss = tf.reduce_sum(out * weights)
            expected = theirs(twin)
            (expected * torch.from_numpy(weights.numpy())).sum().backward()
            np.testing.assert_array_equal(out, expected.detach())
            np.testing.assert_array_equal(tape.gradient(loss, x), twin.grad)
            assert ours.stats() == pytest.approx(theirs.stats(), rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"density": 0.0}, ValueError, r"density must be in \(0, 1\], got 0.0"),
        ({"density": "5 %"}, TypeError, "density must be a number"),
        ({"density": 0.1, "threshold": "sort"}, ValueError, "threshold must be one of 'topk', 'laplace'; got 'sort'"),
        ({"density": 0.1, "start_dim": 0}, ValueError, "start_dim must not be 0"),
        ({"density": 0.1, "start_dim": 1.0}, TypeError, "start_dim must be an integer, got 1.0 of type float"),
        ({"density": 0.1, "momentum": 0.0}, ValueError, "momentum must be in"),
        ({"density": 0.1, "seed": None}, TypeError, "seed must be an integer"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        ThresholdBoundary(**arguments)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (tf.zeros([5]), {}, r"activations must have dimensions before and from start_dim=1 on, got shape \[5\]"),
        (tf.zeros([5, 4]), {"start_dim": 2}, "start_dim=2"),
        (tf.zeros([5, 0]), {}, "at least one feature"),
        (tf.zeros([5, 4], tf.int64), {}, "activations must be of real numbers, got int64"),
    ],
)
def test_wrong_activations_are_refused(x, options, message):
    with pytest.raises(ValueError, match=message):
        ThresholdBoundary(0.5, **options)(x)


def test_an_unknown_number_of_dimensions_is_refused():
    run = tf.function(ThresholdBoundary(0.5).mask, input_signature=[tf.TensorSpec(None)])
    with pytest.raises(ValueError, match="a known number of dimensions"):
        run(tf.zeros([2, 3]))
