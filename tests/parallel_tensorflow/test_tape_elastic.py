"""Steps of an elastic job: ranks continue from the latest step, and a stale trace raises an error."""

import pickle

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf
from gradients import SHAPES, draw
from tf_helpers import Reducer, make_variables, several

from hvd_sparse.tensorflow import Compression


@pytest.fixture(autouse=True)
def elastic(monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")


@several
@pytest.mark.parametrize("scope", ["tensor", "model"])
def test_a_rank_that_joins_goes_on_from_the_others_step(scope):
    """The last rank is new. With the density of its own first step, payloads would differ in size."""
    variables = make_variables()
    compression = Compression.gradient_dropping(list(variables.values()), density=0.01, warmup=30, scope=scope)
    compression.step.assign(25 if hvd.rank() < hvd.size() - 1 else 0)
    reducer = Reducer(variables, compression)
    reducer(draw(SHAPES, 0, hvd.rank()))
    assert int(compression.step) == 26
    reducer(draw(SHAPES, 1, hvd.rank()))
    assert int(compression.step) == 27


def test_a_step_traced_for_other_ranks_is_refused_on_every_rank(monkeypatch):
    variables = make_variables()
    reducer = Reducer(variables, Compression.gradient_dropping(list(variables.values())))
    with monkeypatch.context() as before:
        before.setattr(hvd, "rank", lambda: hvd.size())  # while it is traced
        gradients = {name: tf.TensorSpec(variable.shape, tf.float32) for name, variable in variables.items()}
        step = reducer._reduce.get_concrete_function(gradients)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"traced for other ranks.*inside the function"):
        step({name: tf.constant(values, tf.float32) for name, values in draw(SHAPES, 0, hvd.rank()).items()})
    assert hvd.allreduce(tf.ones([]), op=hvd.Sum, name="alive").numpy() == hvd.size()


def test_a_compression_is_not_broadcast_with_an_elastic_state():
    compression = Compression.gradient_dropping([tf.Variable(tf.zeros([2000]))])
    with pytest.raises(TypeError, match=r"Leave it out of hvd\.elastic's state"):
        pickle.dumps(compression)
