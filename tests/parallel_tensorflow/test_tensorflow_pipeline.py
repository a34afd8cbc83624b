"""Pipelines with one stage per rank equal the same training in one process."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from mpi4py import MPI
from pipeline_oracle_tensorflow import Mask, Oracle, Stage, cross_entropy, make_stages

from hvd_sparse.tensorflow.model_parallel import Pipeline, PipelineError, ThresholdBoundary
from hvd_sparse.wire import payload_size

pytestmark = pytest.mark.each_value

WORLD = MPI.COMM_WORLD
RANK, STAGES = WORLD.Get_rank(), WORLD.Get_size()
LAST = RANK == STAGES - 1
SIZES = [*[13, 37, 101, 23, 6][:STAGES], 5]
several = pytest.mark.skipif(STAGES == 1, reason="one stage has no boundary")


def batches(count, rows=(7, 1, 12), seed=0):
    """Return inputs and targets of batches whose sizes take turns."""
    random = np.random.default_rng(seed)
    for number in range(count):
        size = rows[number % len(rows)]
        yield random.normal(size=(size, SIZES[0])).astype(np.float32), random.integers(0, 5, size)


def pair(density=1.0, threshold="topk", micro_batches=3, schedule="gpipe", **options):
    """Return this rank's pipeline, and the oracle."""
    masks = [Mask(density, threshold) for _ in range(STAGES - 1)]
    oracle = Oracle(make_stages(SIZES), masks, cross_entropy, micro_batches)
    options = {"boundary": ThresholdBoundary(density, threshold), "loss": cross_entropy, **options}
    stage = make_stages(SIZES)[RANK]
    return Pipeline(stage, micro_batches=micro_batches, schedule=schedule, timeout=60.0, **options), oracle


def mse(outputs, targets):
    return tf.reduce_mean(tf.square(outputs - targets))


class Linear(Stage):
    def __call__(self, x):
        return tf.matmul(x, self.kernel)


@pytest.mark.rank_counts
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(("density", "threshold"), [(1.0, "topk"), (0.1, "topk"), (0.1, "laplace"), (1.0, "laplace")])
def test_training_is_that_of_one_process_bit_for_bit(schedule, micro_batches, density, threshold):
    """The kernels are the same, on the same shapes, and gradients are added up in the same order."""
    pipeline, oracle = pair(density, threshold, micro_batches, schedule)
    ours, theirs = (tf.keras.optimizers.SGD(0.1, momentum=0.9) for _ in range(2))
    own = slice(2 * RANK, 2 * RANK + 2)
    with pipeline:
        for inputs, targets in batches(30):
            expected, gradients = oracle.gradients(inputs, targets)
            loss = pipeline.step(inputs, targets)
            assert loss == pytest.approx(expected, rel=0, abs=1e-12)
            for mine, its in zip(pipeline.gradients(), gradients[own], strict=True):
                np.testing.assert_array_equal(mine, its)
            ours.apply_gradients(zip(pipeline.gradients(), pipeline.stage.trainable_variables, strict=True))
            theirs.apply_gradients(zip(gradients, oracle.variables, strict=True))
        for mine, its in zip(pipeline.stage.trainable_variables, oracle.variables[own], strict=True):
            np.testing.assert_array_equal(mine, its)
        inputs, targets = next(batches(1, seed=9))
        outputs = oracle(tf.constant(inputs), False)
        assert pipeline.evaluate(inputs, targets) == pytest.approx(float(cross_entropy(outputs, targets)), rel=1e-6)
        found = pipeline.predict(inputs)
        if LAST:  # there in one batch, not in parts
            np.testing.assert_allclose(found, outputs, atol=1e-6)
        else:
            assert found is None


@several
@pytest.mark.parametrize("threshold", ["topk", "laplace"])
def test_statistics_tell_bytes_and_occupancy(threshold):
    pipeline, _ = pair(0.1, threshold, micro_batches=1)
    with pipeline:
        for inputs, targets in batches(6, rows=(64,)):
            pipeline.step(inputs, targets)
        stats = pipeline.stats()
    forward, backward = stats["forward"], stats["backward"]
    assert forward["messages"] == (0 if LAST else 6) and backward["messages"] == (0 if RANK == 0 else 6)
    if not LAST:
        f = SIZES[RANK + 1]
        assert forward["dense_bytes"] == 6 * 64 * f * 4
        if threshold == "topk":
            k = int(0.1 * f + 0.5)
            assert stats["occupancy"] == k / f == stats["boundaries"]["output"]["occupancy"]
            headers = forward["sent_bytes"] - 6 * payload_size(64 * f, 64 * k, "auto", "float32")
            assert 0 < headers < 6 * 100
        assert stats["boundaries"]["output"]["batches"] == 6
    if RANK > 0 and threshold == "topk":
        f = SIZES[RANK]
        k = int(0.1 * f + 0.5)
        assert backward["sent_bytes"] == 6 * (32 + payload_size(64 * k, 64 * k, "dense", "float32"))
    assert (stats["targets_bytes"] > 0) == (RANK == 0)


class Several(tf.keras.layers.Layer):
    """Takes and returns several tensors: a matrix, a vector, and integers."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        random = np.random.default_rng(3 + rank).standard_normal((9, 9)).astype(np.float32)
        self.kernel = self.add_weight(name="kernel", shape=(9, 9), initializer=tf.constant_initializer(random))
        self.unused = self.add_weight(name="unused", shape=(2,), initializer="zeros")

    def call(self, x, scale=None, ids=None, training=None):
        assert training is not None
        if self.rank == 0:
            scale, ids = tf.reduce_mean(x, 1), tf.cast(x[:, 0] > 0, tf.int64)
        y = tf.matmul(x, self.kernel) * scale[:, None] + tf.cast(ids, tf.float32)[:, None]
        return y if self.rank == STAGES - 1 else {"x": y, "scale": scale * 2.0, "ids": ids}


@several
@pytest.mark.parametrize("boundary", [None, {"x": 0.3}, {"x": 1.0, "scale": None}])
def test_several_tensors_cross_a_boundary(boundary):
    stage = Several(RANK)
    pipeline = Pipeline(stage, boundary=boundary if not LAST else None, loss=mse, timeout=60.0)
    x, zeros = np.random.default_rng(1).standard_normal((8, 9)).astype(np.float32), np.zeros((8, 9), np.float32)
    with pipeline:
        found = pipeline.step(x, zeros)
    mask, whole = Mask(0.3 if boundary == {"x": 0.3} else 1.0), [Several(rank) for rank in range(STAGES)]
    with tf.GradientTape() as tape:
        given = (tf.constant(x),)
        for one in whole[:-1]:
            out = one(*given, training=True)
            given = (mask(out["x"], True), out["scale"], out["ids"])
        loss = mse(whole[-1](*given, training=True), zeros)
    assert found == float(loss)
    gradients = pipeline.gradients()
    np.testing.assert_array_equal(gradients[0], tape.gradient(loss, whole[RANK].trainable_variables[0]))
    assert [g.shape for g in gradients] == [(9, 9), (2,)] and not gradients[1].numpy().any()


def functional(rank):
    """Return a model of Keras: one that has two outputs, on the first rank; two inputs, elsewhere."""
    tf.keras.utils.set_random_seed(10 + rank)
    dense = tf.keras.layers.Dense
    inputs = tf.keras.Input((13,)) if rank == 0 else [tf.keras.Input((6,)), tf.keras.Input((4,))]
    x = inputs if rank == 0 else tf.keras.layers.Concatenate()(inputs)
    x = tf.keras.layers.BatchNormalization()(dense(12, activation="relu")(x))
    return tf.keras.Model(inputs, dense(5)(x) if rank == STAGES - 1 else (dense(6)(x), dense(4)(x)))


@pytest.mark.parametrize("compiled", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_models_of_keras_are_stages(compiled):
    stage, optimizer = functional(RANK), tf.keras.optimizers.Adam(0.01)
    if compiled:
        stage.call = tf.function(stage.call, reduce_retracing=True)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    pipeline = Pipeline(stage, boundary={"0": 0.5} if not LAST else None, micro_batches=2, loss=loss, timeout=60.0)
    random = np.random.default_rng(3)
    inputs = random.standard_normal((24, 13)).astype(np.float32)
    targets = (inputs[:, :5]).argmax(1)
    moving = next(variable for variable in stage.non_trainable_variables if "moving_mean" in variable.name)
    with pipeline:
        losses = []
        for _ in range(30):
            losses.append(pipeline.step(inputs, targets))
            optimizer.apply_gradients(zip(pipeline.gradients(), stage.trainable_variables, strict=True))
        assert losses[-1] < 0.7 * losses[0]
        before = moving.numpy()
        assert before.any()  # trained with training=True
        first = pipeline.evaluate(inputs, targets)
        assert first == pipeline.evaluate(inputs, targets)
        np.testing.assert_array_equal(moving.numpy(), before)
        found = pipeline.predict(inputs)
        assert found.shape == (24, 5) if LAST else found is None
    if not LAST:
        assert list(pipeline.stats()["boundaries"]) == ["0"]


def test_sparse_gradients_come_dense():
    class Embedded(Linear):
        def __call__(self, x):
            return tf.nn.embedding_lookup(self.kernel, x) if RANK == 0 else super().__call__(x)

    pipeline = Pipeline(Embedded(8, 8), micro_batches=2, boundary=0.5, loss=mse, timeout=60.0)
    with pipeline:
        pipeline.step(np.array([1, 1, 3, 5]), np.ones((4, 8), np.float32))
    gradient = pipeline.gradients()[1]
    assert gradient.shape == (8, 8)
    if RANK == 0:
        assert set(np.flatnonzero(gradient.numpy().any(1))) <= {1, 3, 5}


@several
def test_complex_tensors_have_gradients():
    """sum |F(x w)|^2 = n sum (x w)^2 for rows of n: Parseval's theorem."""

    class Transform(tf.Module):
        def __init__(self):
            self.w = tf.Variable(tf.ones([4]))

        def __call__(self, x):
            if RANK == 0:
                x = tf.signal.fft(tf.cast(x * self.w, tf.complex64))
            return tf.reduce_sum(tf.abs(x) ** 2) if LAST else x

    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    with Pipeline(Transform(), loss=lambda outputs, _: outputs, timeout=60.0) as pipeline:
        pipeline.step(x, np.zeros(2, np.float32))
    expected = 4 * 2 * (x**2).sum(0) if RANK == 0 else np.zeros(4)
    np.testing.assert_allclose(pipeline.gradients()[0], expected, rtol=1e-5)


@several
def test_outputs_that_share_a_boundary_have_thresholds_of_their_own_that_are_restored(tmp_path):
    class Scaled(tf.Module):
        trainable_variables = ()

        def __call__(self, a, b=None):
            self.kept = {"a": a, "b": b}
            return tf.reduce_sum(a) if LAST else {"a": a, "b": 100 * a}

    x = np.random.default_rng(0).standard_normal((64, 200)).astype(np.float32)
    kept, path = [], None
    for _ in range(2):
        boundary = ThresholdBoundary(0.1, "laplace")
        with Pipeline(Scaled(), boundary=boundary, loss=lambda outputs, _: outputs, timeout=60.0) as pipeline:
            checkpoint = tf.train.Checkpoint(boundaries=pipeline.boundaries)
            if path is None:
                for _ in range(5):
                    pipeline.step(x, np.zeros(64, np.float32))
                path = checkpoint.write(str(tmp_path / "saved"))
            else:
                checkpoint.read(path)  # before the first batch
            pipeline.evaluate(x, np.zeros(64, np.float32))
            if RANK > 0:
                kept.append([int(tf.math.count_nonzero(one)) for one in pipeline.stage.kept.values()])
    if RANK == 1:
        assert kept[0] == kept[1] and 0 < kept[0][0] == kept[0][1] < 0.3 * x.size  # b is a multiple of a


@several
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_crosses_as_it_is(dtype):
    class Half(Stage):
        def __call__(self, x):
            out = tf.tanh(tf.matmul(tf.cast(x, dtype), tf.cast(self.kernel, dtype)))
            return tf.cast(out, tf.float32) if self.kernel.shape[1] == SIZES[-1] else out

    stages = [Half(*sizes) for sizes in itertools.pairwise(SIZES)]
    oracle = Oracle(stages, [Mask(0.2) for _ in stages[1:]], cross_entropy, 2)
    inputs, targets = next(batches(1, rows=(32,)))
    expected, gradients = oracle.gradients(inputs, targets)
    with Pipeline(stages[RANK], boundary=0.2, micro_batches=2, loss=cross_entropy, timeout=60.0) as pipeline:
        assert pipeline.step(inputs, targets) == pytest.approx(expected, rel=0, abs=1e-12)
    for mine, its in zip(pipeline.gradients(), gradients[2 * RANK : 2 * RANK + 2], strict=True):
        np.testing.assert_array_equal(mine, tf.zeros_like(mine) if its is None else its)  # the bias is not used
    if not LAST:
        assert pipeline.stats()["forward"]["dense_bytes"] == 32 * SIZES[RANK + 1] * 2


def test_targets_may_be_on_the_last_stage_and_a_loss_may_be_a_sum():
    def loss(outputs, targets):
        return cross_entropy(outputs, targets) * tf.cast(len(targets), tf.float32)

    pipeline, oracle = pair(0.5, loss=loss, reduction="sum", micro_batches=2)
    inputs, targets = next(batches(1))
    with pipeline:
        found = pipeline.step(inputs if RANK == 0 else None, targets if LAST else None)
        assert pipeline.stats()["targets_bytes"] == 0
    assert found / len(inputs) == pytest.approx(oracle.gradients(inputs, targets)[0], rel=1e-6)


@several
def test_what_is_not_a_number_stays_visible():
    pipeline, _ = pair(0.05)
    inputs, targets = next(batches(1))
    inputs[3, 2] = np.nan
    with pipeline:
        assert np.isnan(pipeline.step(inputs, targets))


@pytest.mark.parametrize("failing", range(STAGES))
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_stage_that_raises_ends_all_with_the_reason(failing, direction):
    class Failing(Stage):
        def __call__(self, x):
            if RANK == failing and direction == "forward":
                raise ArithmeticError("a division that has gone wrong")
            return fail(super().__call__(x)) if RANK == failing else super().__call__(x)

    @tf.custom_gradient
    def fail(x):
        def gradient(_):
            raise ArithmeticError("a division that has gone wrong")

        return x, gradient

    stage = Failing(*SIZES[RANK : RANK + 2])
    pipeline = Pipeline(stage, boundary=0.5, micro_batches=2, loss=cross_entropy, timeout=60.0)
    expected = ArithmeticError if failing == RANK else PipelineError
    with pipeline, pytest.raises(expected, match="a division that has gone wrong"):
        for _ in range(2):  # stages whose part in a step is over hear of it in the next one
            pipeline.step(*next(batches(1)))
    with pytest.raises(RuntimeError, match="cannot go on"):
        pipeline.step(*next(batches(1)))
    with pytest.raises(RuntimeError, match=r"needs a step\(\) that has run to its end"):
        pipeline.gradients()


@several
def test_a_first_stage_of_pytorch_goes_with_one_of_tensorflow():
    """Both cut and send alike: gradients are those of a pipeline of TensorFlow alone, but for the matrix products."""
    torch = pytest.importorskip("torch")
    from hvd_sparse.torch import model_parallel as twin

    pipeline, oracle = pair(0.2)
    pipeline.close()
    WORLD.Barrier()
    inputs, targets = next(batches(1))
    expected, gradients = oracle.gradients(inputs, targets)
    gradients = gradients[2 * RANK : 2 * RANK + 2]
    if RANK == 0:
        stage = torch.nn.Sequential(torch.nn.Linear(*SIZES[:2]), torch.nn.Tanh())
        kernel, bias = (torch.from_numpy(variable.numpy()) for variable in pipeline.stage.trainable_variables[::-1])
        with torch.no_grad():
            stage[0].weight.copy_(kernel.T), stage[0].bias.copy_(bias)
        with twin.Pipeline(stage, boundary=0.2, micro_batches=3, timeout=60.0) as mixed:
            loss = mixed.step(torch.from_numpy(inputs), torch.from_numpy(targets))
        found = [stage[0].bias.grad, stage[0].weight.grad.T]
    else:
        with Pipeline(
            pipeline.stage, boundary=0.2, micro_batches=3, loss=cross_entropy if LAST else None, timeout=60.0
        ) as mixed:
            loss = mixed.step()
        found = mixed.gradients()
    assert loss == pytest.approx(expected, rel=1e-5)
    for ours, theirs in zip(found, gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"schedule": "zigzag"}, "schedule must be one of 'gpipe', '1f1b'; got 'zigzag'"),
        ({"micro_batches": 0}, "micro_batches must be an integer from 1 to 65535, got 0"),
        ({"timeout": 0}, "timeout must be above 0 and finite, in seconds, got 0"),
        ({"reduction": "max"}, "reduction must be one of"),
        ({"boundary": 1.5}, "density must be in"),
        ({"boundary": {"output": "many"}}, "density must be a number"),
        (
            {"stage": lambda x: x},
            "stage must be a model or layer of Keras, or be callable and have trainable_variables",
        ),
    ],
)
def test_a_wrong_argument_on_one_stage_is_refused_on_all(options, error):
    good = {"stage": Linear(3, 3), "loss": mse, "timeout": 60.0}
    wrong = options if RANK == STAGES // 2 else {}
    with pytest.raises((ValueError, TypeError, PipelineError), match=error):
        Pipeline(**{**good, **wrong})


def test_the_last_stage_needs_a_loss():
    with pytest.raises((TypeError, PipelineError), match="loss must be a function"):
        Pipeline(Linear(3, 3), timeout=60.0)


ZEROS = np.zeros((4, 3), np.float32)


@pytest.mark.parametrize(
    ("inputs", "targets", "error"),
    [
        (None, ZEROS, "inputs must be given on the first stage"),
        (ZEROS[:0], ZEROS[:0], "at least 1"),
        ((ZEROS, np.zeros((5, 3))), ZEROS, "the same number of samples"),
        (ZEROS, ZEROS[:3], "targets must have as many samples as inputs, 4; got 3"),
        (ZEROS, None, "targets must be given"),
    ],
)
def test_wrong_data_is_refused_on_all_stages(inputs, targets, error):
    pipeline = Pipeline(Linear(3, 3), loss=mse, timeout=60.0)
    with pytest.raises((ValueError, PipelineError), match=error):
        pipeline.step(inputs, targets if RANK == 0 else None)


def test_a_loss_that_is_no_scalar_is_refused():
    pipeline = Pipeline(Linear(3, 3), loss=lambda outputs, targets: outputs - targets, timeout=60.0)
    with pytest.raises((ValueError, PipelineError), match=r"loss must return a scalar, got shape \(4, 3\)"):
        pipeline.step(ZEROS, ZEROS)


@several
def test_a_boundary_for_an_output_that_is_none_is_refused():
    pipeline = Pipeline(Linear(3, 3), boundary={"hidden": 0.5} if RANK == 0 else None, loss=mse, timeout=60.0)
    with pytest.raises((ValueError, PipelineError), match=r"must name outputs of this stage, \['output'\]"):
        pipeline.step(ZEROS, ZEROS)
