"""What a pipeline refuses, with an error on all stages."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from mpi4py import MPI

from hvd_sparse.tensorflow.model_parallel import Pipeline, PipelineError

pytestmark = pytest.mark.each_value

RANK, STAGES = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
LAST = RANK == STAGES - 1
several = pytest.mark.skipif(STAGES == 1, reason="one stage sends nothing")
ZEROS = np.zeros((4, 3), np.float32)
MEAN = tf.keras.losses.MeanSquaredError().reduction  # "auto" in Keras 2, "sum_over_batch_size" in Keras 3


def pipeline(stage=None, **options):
    """Return a pipeline of linear layers."""
    options = {"loss": tf.keras.losses.MeanSquaredError(), "timeout": 30.0, **options}
    return Pipeline(tf.keras.layers.Dense(3) if stage is None else stage, **options)


@pytest.mark.parametrize(("own", "reduction"), [("sum", "mean"), (MEAN, "sum")])
def test_a_loss_object_of_another_reduction_is_refused(own, reduction):
    loss = tf.keras.losses.MeanSquaredError(reduction=own)
    expected = rf"reduction must be that of the loss, got '{reduction}' with MeanSquaredError\(reduction='{own}'\)"
    with pytest.raises((ValueError, PipelineError), match=expected):
        pipeline(loss=loss if LAST else None, reduction=reduction)


def test_a_loss_object_that_sums_has_the_loss_of_the_whole_batch():
    stage = tf.keras.layers.Dense(3, kernel_initializer="ones", use_bias=False)
    with pipeline(stage, loss=tf.keras.losses.MeanSquaredError(reduction="sum"), reduction="sum", micro_batches=3) as p:
        assert p.step(ZEROS, ZEROS + 2.0) == pytest.approx(4 * 4.0)  # four samples, each the mean of three squares


def test_inputs_and_targets_may_be_variables():
    with pipeline(tf.keras.layers.Dense(3, kernel_initializer="ones", use_bias=False), micro_batches=2) as one:
        assert one.step(tf.Variable(ZEROS), tf.Variable(ZEROS + 2.0)) == pytest.approx(4.0)
        with pytest.raises((ValueError, PipelineError), match="targets must have as many samples as inputs, 4; got 3"):
            one.step(tf.Variable(ZEROS), tf.Variable(ZEROS[1:]))


def test_a_closed_pipeline_says_so():
    one = pipeline()
    one.close()
    for call in (lambda: one.step(ZEROS, ZEROS), lambda: one.evaluate(ZEROS, ZEROS), lambda: one.predict(ZEROS)):
        with pytest.raises(RuntimeError, match="closed"):
            call()


@pytest.mark.parametrize("method", ["step", "evaluate", "predict"])
def test_a_call_inside_a_tf_function_is_refused_and_the_pipeline_lives_on(method):
    data = (ZEROS,) if method == "predict" else (ZEROS, ZEROS)
    with pipeline() as one:

        @tf.function
        def compiled():
            return getattr(one, method)(*data)

        with pytest.raises(RuntimeError, match=r"call step eagerly; to compile a stage, make its call a tf\.function"):
            compiled()
        assert one.step(ZEROS, ZEROS) == 0.0


@pytest.mark.parametrize(
    ("inputs", "targets", "error"),
    [
        ([1.0, 2.0], ZEROS, "inputs must be dense tensors or arrays, .*; got float"),
        (
            tf.ragged.constant([[1.0], [2.0, 3.0]]),
            ZEROS,
            "inputs must be dense tensors or arrays, .*; got RaggedTensor",
        ),
        (np.float32(1.0), ZEROS, "inputs must have a first dimension that counts samples"),
        (ZEROS, tf.constant(1.0), "targets must have a first dimension that counts samples"),
        (ZEROS, [1.0, 2.0], "targets must be dense tensors or arrays, .*; got float"),
    ],
)
@pytest.mark.parametrize("where", [0, STAGES - 1])
def test_data_that_are_no_tensors_of_samples_are_refused(inputs, targets, error, where):
    with pytest.raises((TypeError, ValueError, PipelineError), match=error):
        pipeline().step(inputs, targets if where == RANK else None)


@pytest.mark.parametrize("method", ["step", "evaluate"])
def test_a_loss_that_is_no_tensor_is_refused(method):
    with pytest.raises((TypeError, PipelineError), match="loss must return a tensor of TensorFlow, got float"):
        getattr(pipeline(loss=lambda outputs, _: float(tf.reduce_sum(outputs))), method)(ZEROS, ZEROS)


class Masking(tf.keras.layers.Layer):
    """Marks padding, and computes the mean of what is none: as a Keras mask, or as a second output or argument."""

    def __init__(self, returns):
        super().__init__()
        self.scale = self.add_weight(shape=[], initializer="ones", name="scale")
        self.returns = returns

    def call(self, x, mask=None):
        if mask is not None or LAST:
            mask = tf.ones_like(x[:, :, 0], tf.bool) if mask is None else mask
            return self.scale * tf.reduce_mean(tf.boolean_mask(x, mask), 0, keepdims=True) + 0.0 * x[:, 0]
        mask = tf.reduce_any(x != 0.0, -1)
        if self.returns == "keras":
            output = self.scale * x
            output._keras_mask = mask
            return output
        return {"x": self.scale * x, "mask": mask} if self.returns == "dict" else (self.scale * x, mask)


@pytest.mark.skipif(STAGES != 2, reason="the first stage masks, the second takes the mask")
@pytest.mark.parametrize("returns", ["tuple", "dict"])
def test_a_mask_is_an_argument_of_the_next_stage(returns):
    inputs = np.array([[[2.0], [4.0], [0.0]], [[6.0], [0.0], [0.0]]], np.float32)
    with pipeline(Masking(returns)) as one:
        found = one.predict(inputs)
        assert one.step(inputs, np.full((2, 1), 3.0, np.float32)) == 1.0
    if LAST:
        np.testing.assert_array_equal(found, [[4.0], [4.0]])


@pytest.mark.skipif(STAGES != 2, reason="the first stage masks")
@pytest.mark.parametrize("method", ["step", "predict"])
def test_a_mask_of_keras_is_refused_where_it_would_be_lost(method):
    data = (np.ones((2, 3, 1), np.float32), np.zeros((2, 1), np.float32))[: 1 + (method == "step")]
    with pytest.raises((ValueError, PipelineError), match="output 'output' of a stage has a Keras mask"):
        with pipeline(Masking("keras")) as one:
            getattr(one, method)(*data)


def test_gradients_are_not_reduced_among_other_ranks_than_the_replicas():
    one, theirs = pipeline(), SimpleNamespace(process_set_id=1 + RANK)
    one.step(ZEROS, ZEROS)
    one._channel._everyone = SimpleNamespace(process_set=SimpleNamespace(process_set_id=0), fail=lambda error: None)
    with pytest.raises(ValueError, match=r"process_set must be the one that hybrid\(\) returned"):
        one._reduced(one.gradients(), {"process_set": theirs})
    one._channel._everyone = None
    one.close()


def test_gradients_of_several_stages_need_a_process_set(monkeypatch):
    monkeypatch.setattr("hvd_sparse.tensorflow.reduce_gradients", lambda gradients, variables, **options: options)
    theirs = SimpleNamespace(process_set_id=1)
    with pipeline() as one:
        one.step(ZEROS, ZEROS)
        MPI.COMM_WORLD.Barrier()  # else a stage may hear of another one's failure in its step
        assert one._reduced(one.gradients(), {"process_set": theirs}) == {"process_set": theirs}
        one._channel._everyone = SimpleNamespace(process_set=theirs, fail=lambda error: None)
        for options in ({}, {"process_set": None}):
            assert one._reduced(one.gradients(), options) == {"process_set": theirs}
        one._channel._everyone = None
        if STAGES == 1:
            assert one.reduced_gradients() == {}
        else:
            with pytest.raises((ValueError, PipelineError), match="process_set must have the replicas of this stage"):
                one.reduced_gradients()


@several
@pytest.mark.parametrize(
    "own", ["none", [1.0, 2.0], np.zeros((7, 3), np.float32)], ids=["text", "list", "more samples"]
)
def test_the_last_stage_ignores_its_targets_if_the_first_has_some(own):
    with pipeline(tf.keras.layers.Activation("linear")) as one:
        assert one.evaluate(ZEROS, own if LAST else ZEROS + 2.0) == 4.0


@several
def test_a_boundary_of_density_1_counts_what_it_keeps():
    with pipeline(boundary=1.0) as one:
        one.step(ZEROS, ZEROS)
        found = one.stats()
    assert found["occupancy"] == 1.0
    if not LAST:
        assert found["boundaries"]["output"]["occupancy"] == found["boundaries"]["output"]["mean_occupancy"] == 1.0


@several
def test_an_output_without_elements_crosses_whole():
    class Two(tf.keras.layers.Layer):
        def call(self, x, empty=None):
            return x if LAST else (x, x[:, :0])

    with pipeline(Two(), boundary=0.5) as one:
        assert one.evaluate(ZEROS, ZEROS + 2.0) == 4.0


@several
def test_a_type_that_messages_cannot_have_is_refused():
    class Tiny(tf.keras.layers.Dense):
        def call(self, x):
            return tf.strings.as_string(super().call(x))

    with pytest.raises((TypeError, PipelineError), match="output 'output' of a stage must have one of the dtypes"):
        pipeline(Tiny(3)).predict(ZEROS)


@pytest.mark.parametrize(
    ("second", "shape"), [(tf.reduce_sum, []), (tf.transpose, [3, 2])], ids=["scalar", "transposed"]
)
def test_predictions_join_only_what_counts_samples(second, shape):
    class Pair(tf.keras.layers.Layer):
        def call(self, x):
            return (x, second(x)) if LAST else x

    inputs = np.arange(12, dtype=np.float32).reshape(4, 3)
    with pipeline(Pair()) as one:
        found = one.predict(inputs)
    if LAST:
        np.testing.assert_array_equal(found[0], inputs)
        np.testing.assert_array_equal(found[1], inputs.sum() if shape == [] else inputs.T)
    with pytest.raises((ValueError, PipelineError), match=re.escape(f"output '1' has shape {shape} for 2 samples")):
        with pipeline(Pair(), micro_batches=2) as one:
            one.predict(inputs)
            one.evaluate(inputs, inputs)  # stages but the last may only be told now
