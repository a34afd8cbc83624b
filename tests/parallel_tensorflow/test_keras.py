"""Keras' fit with Horovod's own optimizer: the model trains, ranks agree, and Keras' other features work."""

import json
import subprocess
import sys
import warnings
from contextlib import nullcontext

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import pytest
import tensorflow as tf
from tf_helpers import assert_ranks_agree

from hvd_sparse.tensorflow import Compression

layers = tf.keras.layers
needs_two = pytest.mark.skipif(hvd.size() == 1, reason="Horovod compresses nothing with one process")
SETTINGS = {"density": 0.05, "min_numel": 60}
LOADER = """
import sys
import numpy as np, tensorflow as tf
model = tf.keras.models.load_model(sys.argv[1])
assert "horovod" not in sys.modules and "hvd_sparse" not in sys.modules
print(model(np.ones((1, 20), np.float32)).numpy().tolist())
"""


def make_model(seed=1):
    tf.keras.utils.set_random_seed(seed)
    sizes = (layers.Dense(60, activation="relu"), layers.Dense(30, activation="relu"), layers.Dense(3))
    return tf.keras.Sequential([tf.keras.Input((20,)), *sizes])


def samples(count=44):
    """Return this rank's part of a problem that can be learnt."""
    generator = np.random.default_rng(hvd.rank())
    x = generator.standard_normal((count, 20)).astype(np.float32)
    return x, np.argmax(x[:, :3], axis=1)


def compile_with(model, compression, optimizer=None, wrap=None, **options):
    optimizer = hvd_keras.DistributedOptimizer(
        optimizer or tf.keras.optimizers.SGD(0.1), compression=compression, **options
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(wrap(optimizer) if wrap else optimizer, loss)


def fit(model, epochs=1, callbacks=()):
    x, y = samples()
    return model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, callbacks=list(callbacks)).history["loss"]


def assert_alike(model):
    assert_ranks_agree({str(i): variable.numpy() for i, variable in enumerate(model.trainable_variables)})


@needs_two
@pytest.mark.parametrize("groups", [None, 1])
@pytest.mark.parametrize("scope", ["tensor", "model"])
def test_fit_learns_and_ranks_agree(scope, groups):
    model = make_model(seed=hvd.rank())
    compression = Compression.dgc(model.trainable_variables, scope=scope, warmup=6, **SETTINGS)
    compile_with(model, compression, groups=groups)
    losses = fit(model, 8, [hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)])  # 44 = 5 * 8 + 4: two traces
    assert losses[-1] < 0.7 * losses[0]
    assert_alike(model)
    stats = compression.stats()
    assert stats["steps"] == 48
    assert stats["step"]["ratio"] > 5


@needs_two
def test_density_one_is_horovod():
    dense, sparse = make_model(), make_model()
    compile_with(dense, hvd.Compression.none)
    compile_with(sparse, Compression.gradient_dropping(sparse.trainable_variables, density=1.0))
    fit(dense, 2), fit(sparse, 2)
    for one, other in zip(dense.get_weights(), sparse.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


@needs_two
def test_each_optimizer_has_a_graph_of_its_own():
    """Loss scale and number of passes are part of it: one optimizer may replace another around a compressor."""
    compression = Compression.gradient_dropping(make_model().trainable_variables)
    made = [
        hvd_keras.DistributedOptimizer(tf.keras.optimizers.legacy.SGD(0.1), compression=compression) for _ in range(2)
    ]
    assert made[0]._allreduce_grads is not made[1]._allreduce_grads


@needs_two
def test_backward_passes_per_step():
    model = make_model()
    compression = Compression.dgc(model.trainable_variables, **SETTINGS)
    compile_with(model, compression, backward_passes_per_step=2)
    fit(model, 2)  # 12 batches
    assert compression.stats()["steps"] == 6
    assert_alike(model)


@needs_two
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        pytest.param(
            *("dgc", {"density": 1.0, "momentum": 0.0, "weight_decay": 0.5, "clip_norm": 0.1}),
            id="dense",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("samomentum", {"density": 0.05, "weight_decay": 0.5}, id="sparse"),
        pytest.param("hard_threshold", {"value": 0.01}, id="threshold", marks=pytest.mark.exhaustive),
    ],
)
def test_settings_are_in_units_of_the_average_over_passes(method, settings):
    """Four passes over one batch, averaged, are one: Horovod sums them, and divides after decompressing."""
    moved, sent = [], []
    for passes in (1, 4):
        model = make_model()
        compression = getattr(Compression, method)(model.trainable_variables, min_numel=60, **settings)
        compile_with(model, compression, backward_passes_per_step=passes, average_aggregated_gradients=True)
        x, y = samples(8)
        for _ in range(3 * passes):
            model.train_on_batch(x, y)
        stats = compression.stats()
        assert stats["steps"] == 3
        moved.append(model.get_weights()), sent.append((stats["total"]["density"], stats["residual_norm"]))
    for one, four in zip(*moved, strict=True):
        np.testing.assert_allclose(four, one, rtol=1e-5, atol=1e-6)
    assert sent[1] == pytest.approx(sent[0], rel=1e-4)


@needs_two
def test_loss_scale_overflow_skips_the_step():
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = make_model()
        before = model.get_weights()
        compression = Compression.dgc(model.trainable_variables, **SETTINGS)

        def wrap(optimizer):
            return tf.keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=2.0**10)

        compile_with(model, compression, wrap=wrap)
        x, y = samples()
        x = x * (1e6 if hvd.rank() == 0 else 1.0)  # beyond float16 on rank 0: the step is skipped on every rank
        model.train_on_batch(x[:8], y[:8])
        for one, other in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
        assert float(model.optimizer.loss_scale) == 2.0**9
        assert_alike(model)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")


@needs_two
def test_a_loss_scaler_changes_nothing():
    """Horovod reduces gradients that Keras' scaler has multiplied, and divides afterwards."""
    weights, norms = [], []
    for scale in (None, 1024.0):
        tf.keras.utils.set_random_seed(1)
        model = make_model()
        settings = {**SETTINGS, "clip_norm": 0.05, "weight_decay": 0.01}
        compression = Compression.dgc(model.trainable_variables, **settings)

        def wrap(optimizer, scale=scale):
            if scale is None:
                return optimizer
            return tf.keras.mixed_precision.LossScaleOptimizer(optimizer, dynamic=False, initial_scale=scale)

        compile_with(model, compression, wrap=wrap)
        x, y = samples()
        for step in range(4):
            model.train_on_batch(x[8 * step : 8 * step + 8], y[8 * step : 8 * step + 8])
        weights.append(model.get_weights())
        norms.append(compression.stats()["residual_norm"])
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) and norms[0] > 0.0


@needs_two
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_loss_scaler_around_several_passes_must_not_change(dynamic):
    model = make_model()
    compression = Compression.gradient_dropping(model.trainable_variables, density=0.05)

    def wrap(optimizer):
        return tf.keras.mixed_precision.LossScaleOptimizer(optimizer, dynamic=dynamic, initial_scale=64.0)

    compile_with(model, compression, wrap=wrap, backward_passes_per_step=2)
    x, y = samples()
    with pytest.raises(ValueError, match="backward_passes_per_step=1") if dynamic else nullcontext():
        for _ in range(2):
            model.train_on_batch(x[:8], y[:8])
        assert_alike(model)


@needs_two
def test_model_built_at_its_first_call():
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([layers.Dense(60, activation="relu"), layers.Dense(3)])
    compression = Compression.dgc(model, **SETTINGS)
    with pytest.raises(ValueError, match=r"parameters is empty|not yet been created"):
        compression.state_dict()
    compile_with(model, compression)
    fit(model)
    assert compression.stats()["steps"] == 6
    assert len(compression.state_dict()["memory"]) == 4
    assert_alike(model)


@needs_two
def test_model_of_which_a_part_is_built_earlier():
    class Partly(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.body, self.head = layers.Dense(60), layers.Dense(3)
            self.body.build((None, 20))

        def call(self, inputs):
            return self.head(self.body(inputs))

    tf.keras.utils.set_random_seed(1)
    model = Partly()
    compression = Compression.dgc(model, **SETTINGS)
    assert compression.stats()["steps"] == 0
    compile_with(model, compression)
    fit(model)
    assert compression.stats()["steps"] == 6
    assert len(compression.state_dict()["memory"]) == 4
    assert_alike(model)


@needs_two
def test_frozen_layer():
    model = make_model()
    compression = Compression.dgc(model.trainable_variables, **SETTINGS)
    compile_with(model, compression)
    fit(model)
    frozen = model.layers[0]
    frozen.trainable = False
    before = frozen.get_weights()
    kept = next(iter(compression.state_dict()["memory"].values()))
    compile_with(model, compression)
    fit(model)
    for one, other in zip(before, frozen.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    still = next(iter(compression.state_dict()["memory"].values()))
    for kind, buffer in kept.items():
        assert np.any(buffer)
        np.testing.assert_array_equal(buffer, still[kind])
    frozen.trainable = True
    compile_with(model, compression)
    fit(model)
    assert np.any(before[0] != frozen.get_weights()[0])
    assert compression.stats()["steps"] == 18
    assert_alike(model)


@needs_two
@pytest.mark.parametrize("form", [pytest.param("h5", marks=pytest.mark.exhaustive), "tf"])
def test_saved_model_needs_no_horovod(form, tmp_path):
    model = make_model()
    compile_with(model, Compression.dgc(model.trainable_variables, **SETTINGS))
    fit(model)
    path = str(tmp_path / ("model.h5" if form == "h5" else "model"))
    model.save(path, save_format=form, include_optimizer=form == "h5")
    if hvd.rank() == 0:
        done = subprocess.run([sys.executable, "-c", LOADER, path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        np.testing.assert_allclose(json.loads(done.stdout), model(np.ones((1, 20), np.float32)), rtol=1e-5)


OPTIMIZERS = {
    "new": lambda: tf.keras.optimizers.SGD(0.1, momentum=0.5),
    "Adam": lambda: tf.keras.optimizers.Adam(0.1, beta_1=0.5),
    "legacy": lambda: tf.keras.optimizers.legacy.SGD(0.1, momentum=0.5),
    "legacy Adam": lambda: tf.keras.optimizers.legacy.Adam(0.1, beta_1=0.5),
}


@needs_two
@pytest.mark.parametrize(
    ("which", "passes"),
    [
        pytest.param("new", 1, marks=pytest.mark.exhaustive),
        ("Adam", 1),
        pytest.param("legacy", 1, marks=pytest.mark.exhaustive),
        pytest.param("legacy Adam", 1, marks=pytest.mark.exhaustive),
        ("new", 2),
        pytest.param("legacy", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_second_momentum_warns(which, passes):
    model = make_model()
    compression = Compression.dgc(model.trainable_variables, **SETTINGS)
    compile_with(model, compression, OPTIMIZERS[which](), backward_passes_per_step=passes)
    if hvd.rank() == 0:
        with pytest.warns(UserWarning, match=r"momentum \(or beta1\) 0.5 .* both are applied"):
            fit(model)
    else:
        fit(model)


CLIPPING = {
    "new": lambda: (tf.keras.optimizers.SGD(0.1, clipnorm=1.0), "clipnorm=1"),
    "legacy": lambda: (tf.keras.optimizers.legacy.Adam(0.1, global_clipnorm=2.5), "global_clipnorm=2.5"),
    "value": lambda: (tf.keras.optimizers.SGD(0.1, clipvalue=0.5), "clipvalue=0.5"),
    "none": lambda: (tf.keras.optimizers.SGD(0.1), ""),
}


@needs_two
@pytest.mark.parametrize(
    ("method", "which", "density"),
    [
        ("dgc", "new", 0.05),
        ("gradient_dropping", "legacy", 0.05),
        ("gradient_dropping", "value", 1.0),
        ("dgc", "value", 1.0),
        ("dgc", "none", 0.05),
    ],
)
def test_clipping_of_the_reduced_gradient_is_warned_of(method, which, density):
    """Where all is sent dense, without a momentum before, it is as in dense training."""
    variable = tf.Variable(tf.ones([20, 30]))
    compression = getattr(Compression, method)([variable], density, min_numel=60)
    inner, said = CLIPPING[which]()
    optimizer = hvd_keras.DistributedOptimizer(inner, compression=compression)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.minimize(lambda: tf.reduce_sum(variable**2), [variable])
    told = [str(one.message) for one in caught if "clips the reduced gradient" in str(one.message)]
    lost = which != "none" and (method == "dgc" or density < 1.0)
    assert len(told) == (lost and hvd.rank() == 0)
    remedy = "and use clip_norm of Compression.dgc" if method == "dgc" else "has no clip_norm: try a larger bound"
    assert all(f"{said} of the optimizer" in one and remedy in one for one in told)


@needs_two
@pytest.mark.parametrize("how", ["apply_gradients", "minimize"])
def test_an_optimizer_whose_gradients_are_not_reduced_warns(how):
    """Horovod's apply_gradients reduces nothing: each rank trains alone."""
    model, (x, y) = make_model(), samples(8)
    compression = Compression.gradient_dropping(model.trainable_variables, **SETTINGS)
    optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), compression=compression)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x))
    if how == "minimize":
        optimizer.minimize(loss, model.trainable_variables, tape=tape)
        assert compression.stats()["steps"] == 1
        assert_alike(model)
    else:
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        with pytest.warns(UserWarning, match=r"Only fit and optimizer\.minimize.* reduce"):
            assert compression.stats()["steps"] == 0


@pytest.mark.rank_counts
@pytest.mark.skipif(hvd.size() > 1, reason="what a lone process does")
def test_one_process_compresses_nothing():
    model, plain = make_model(), make_model()
    with pytest.warns(UserWarning, match="calls no compressor with one process"):
        compression = Compression.dgc(model.trainable_variables, **SETTINGS)
    compile_with(model, compression)
    compile_with(plain, hvd.Compression.none)
    assert fit(model) == fit(plain)
    assert compression.stats()["steps"] == 0
