"""The common part of `stats()`, of pipelines of TensorFlow."""

import pytest
import tensorflow as tf
from pipeline_oracle_tensorflow import cross_entropy
from pipeline_stats import (
    INPUTS,
    KEPT,
    OUTPUTS,
    RANK,
    STAGES,
    WIDTH,
    check_failing_writer,
    check_logs,
    check_occupancies,
    check_steps_and_totals,
    several,
)

from hvd_sparse.tensorflow.model_parallel import Pipeline, PipelineError, ThresholdBoundary

pytestmark = pytest.mark.rank_counts


def build(boundary=KEPT / WIDTH):
    stage = tf.keras.layers.Dense(OUTPUTS)
    stage.build([None, INPUTS])
    return Pipeline(stage, boundary=boundary, micro_batches=2, loss=cross_entropy, timeout=60.0)


def given(rows):
    return tf.random.normal([rows, 8]), tf.range(rows) % 3


@several
def test_steps_and_totals_are_those_of_training():
    check_steps_and_totals(build, given)


@several
def test_steps_of_training_are_logged():
    check_logs(build, given)


@several
def test_a_writer_that_fails_ends_all_stages():
    check_failing_writer(build, given, PipelineError)


def test_a_pipeline_says_what_it_is():
    with build() as pipeline:
        assert repr(pipeline) == f"<Pipeline, stage {RANK} of {STAGES}, 2 micro-batches, gpipe, step 0>"


@several
def test_occupancy_of_a_pipeline_is_that_of_training_and_of_a_boundary_of_all():
    check_occupancies(build, given, ThresholdBoundary(0.2, "laplace"))
