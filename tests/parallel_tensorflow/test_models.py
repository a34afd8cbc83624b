"""Gradient tapes of real models: missing and sparse gradients, groups, retracing, several steps in one graph."""

import time
import warnings

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from tf_helpers import assert_alive, assert_ranks_agree, residual_of, total

from hvd_sparse.tensorflow import Compression

pytestmark = pytest.mark.skipif(hvd.size() == 1, reason="Horovod compresses nothing with one process")
SUM = {"op": hvd.Sum}


def rows_of(table, rank):
    """Return which rows of an embedding a rank reads."""
    return tf.constant([rank, 7, 7], tf.int64) % table.shape[0]


def embedding_model():
    tables = tf.Variable(tf.ones([40, 8])), tf.Variable(tf.fill([8, 50], 0.5)), tf.Variable(tf.zeros([5]))

    def loss(rows):
        return tf.reduce_sum(tf.matmul(tf.gather(tables[0], rows), tables[1]))

    return tables, loss


@pytest.mark.filterwarnings("ignore:hvd_sparse. Horovod reduces the sparse gradient")
@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_and_missing_gradients(sparse_as_dense):
    tables, loss = embedding_model()
    compression = Compression.gradient_dropping(tables, density=0.05, min_numel=50)

    @tf.function
    def reduce(rows, compression):
        with tf.GradientTape() as tape:
            value = loss(rows)
        options = {"compression": compression} if compression is not None else {}
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=sparse_as_dense, op=hvd.Sum, **options)
        return tape.gradient(value, tables)

    rows = rows_of(tables[0], hvd.rank())
    dense = reduce(rows, None)
    fed = [0.0, 0.0]
    out = [0.0, 0.0]
    for _ in range(4):
        reduced = reduce(rows, compression)
        assert reduced[2] is None
        for i in range(2):
            fed[i] += tf.convert_to_tensor(dense[i]).numpy().astype(np.float64)
            out[i] += tf.convert_to_tensor(reduced[i]).numpy().astype(np.float64)
    assert isinstance(reduced[0], tf.IndexedSlices) != sparse_as_dense
    for i, name in enumerate(list(compression.feedback)[:2]):
        left = total(residual_of(compression, name)).reshape(out[i].shape)
        np.testing.assert_array_equal(out[i] + left, fed[i])


@pytest.mark.parametrize("sparse_as_dense", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_sparse_gradient_is_warned_of(sparse_as_dense, momentum):
    tables, loss = embedding_model()
    compression = Compression.dgc(tables, density=0.05, momentum=momentum, min_numel=50)
    with tf.GradientTape() as tape:
        value = loss(rows_of(tables[0], hvd.rank()))
    tape = hvd.DistributedGradientTape(tape, sparse_as_dense=sparse_as_dense, compression=compression)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tape.gradient(value, tables)
    told = [one for one in caught if f"sparse gradient of {tables[0].name}" in str(one.message)]
    assert len(told) == (1 if not sparse_as_dense and hvd.rank() == 0 else 0)
    assert all(("momentum" in str(one.message)) == (momentum > 0.0) for one in told)


@pytest.mark.parametrize(
    ("groups", "dtype"),
    [(None, "float32"), (1, "float64"), (1, "float16"), (1, "float32"), (5, "float32"), ("lists", "float32")],
)
@pytest.mark.parametrize("scope", ["tensor", "hierarchical", "model"])
def test_groups(groups, dtype, scope):
    variables = [tf.Variable(tf.zeros([100 + 10 * i], dtype), name=f"v{i}") for i in range(5)]  # grouped by name
    gradients = [np.arange(100 + 10 * i) * (hvd.rank() + 1.0) for i in range(5)]
    settings = {"exchange": "hierarchical", "ranks_per_host": 1} if scope == "hierarchical" else {"scope": scope}
    compression = Compression.gradient_dropping(variables, density=0.1, min_numel=105, **settings)
    chosen = [[variables[3], variables[1]], [variables[0]]] if groups == "lists" else groups

    @tf.function
    def reduce():
        with tf.GradientTape() as tape:
            terms = zip(variables, gradients, strict=True)
            loss = tf.add_n([tf.reduce_sum(v * tf.cast(g, dtype)) for v, g in terms])
        tape = hvd.DistributedGradientTape(tape, compression=compression, groups=chosen, op=hvd.Sum)
        return [tf.cast(reduced, tf.float64) for reduced in tape.gradient(loss, variables)]

    out = [np.zeros(v.shape) for v in variables]
    for _ in range(3):
        for i, reduced in enumerate(reduce()):
            out[i] += reduced.numpy()
    for i, name in enumerate(compression.feedback):
        fed = 3 * np.arange(100 + 10 * i) * sum(rank + 1 for rank in range(hvd.size()))
        np.testing.assert_array_equal(out[i] + total(residual_of(compression, name)), fed)
    if scope != "model":  # three times its own k of each variable, so none was taken for another
        assert [np.count_nonzero(o) for o in out[1:]] == [33, 36, 39, 42]


def test_one_tensor_as_the_gradient_of_two_variables():
    a, b = tf.Variable(tf.zeros([200]), name="a"), tf.Variable(tf.zeros([200]), name="b")
    compression = Compression.gradient_dropping([a, b], density=0.05, min_numel=50)

    @tf.function
    def reduce(weights, groups):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((a + b) * weights)
        tape = hvd.DistributedGradientTape(tape, compression=compression, groups=groups, **SUM)
        return tape.gradient(loss, [a, b])

    for reduced in reduce(tf.range(200.0), None):
        np.testing.assert_array_equal(reduced.numpy().nonzero()[0], np.arange(190, 200))
    with pytest.raises(ValueError, match="one gradient tensor could belong to each of"):
        reduce(tf.range(200.0), [[b, a]])


@pytest.mark.parametrize("listed", [False, True])
def test_a_variable_that_is_listed_twice(listed):
    """Of its places, Horovod compresses one where groups are lists, and returns the result for each."""
    tied, other = tf.Variable(tf.zeros([200]), name="tied"), tf.Variable(tf.zeros([210]), name="other")
    compression = Compression.gradient_dropping([tied, other], density=0.05, min_numel=50)

    @tf.function
    def reduce():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tied * tf.range(200.0)) + tf.reduce_sum(other)
        groups = [[tied, other]] if listed else None
        tape = hvd.DistributedGradientTape(tape, compression=compression, groups=groups, **SUM)
        return tape.gradient(loss, [tied, other, tied])

    expected = np.where(np.arange(200) >= 190, hvd.size() * np.arange(200.0), 0.0)
    first, _, second = reduce()
    np.testing.assert_array_equal(first.numpy(), expected)
    np.testing.assert_array_equal(second.numpy(), expected)


def test_retracing_and_several_traces_share_the_memory():
    weights = tf.Variable(tf.zeros([30, 10]))
    compression = Compression.gradient_dropping([weights], density=0.02, min_numel=50)

    @tf.function
    def reduce(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.matmul(batch, weights))
        return hvd.DistributedGradientTape(tape, compression=compression, **SUM).gradient(loss, [weights])[0]

    fed = out = 0.0
    for step, size in enumerate([8, 8, 3, 8, 5]):  # a last smaller batch, and another one
        batch = np.full([size, 30], float(step + hvd.rank() + 1), np.float32)
        fed += total(np.repeat(batch.sum(0)[:, None], 10, axis=1))
        out += reduce(tf.constant(batch)).numpy().astype(np.float64)
    assert reduce.experimental_get_tracing_count() == 3
    left = total(residual_of(compression, next(iter(compression.feedback)))).reshape(30, 10)
    np.testing.assert_array_equal(out + left, fed)
    assert compression.stats()["steps"] == 5


def test_several_steps_and_several_compressors_in_one_graph():
    one, two = tf.Variable(tf.zeros([300])), tf.Variable(tf.zeros([300]))
    compressions = [
        Compression.dgc([v], density=0.02, min_numel=50, scope=s) for v, s in ((one, "tensor"), (two, "model"))
    ]

    @tf.function
    def train(scale):
        for repeat in range(2):
            for variable, compression in zip((one, two), compressions, strict=True):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(variable * tf.range(300.0) * scale * (repeat + 1.0))
                tape = hvd.DistributedGradientTape(tape, compression=compression)
                variable.assign_sub(tape.gradient(loss, [variable])[0])

    for step in range(3):
        train(tf.constant(step + hvd.rank() + 1.0))
    assert [compression.stats()["steps"] for compression in compressions] == [6, 6]
    np.testing.assert_array_equal(one.numpy(), two.numpy())  # one variable alone: both scopes mean the same
    assert np.count_nonzero(one.numpy()) > 6
    assert_ranks_agree({"one": one.numpy()})


@pytest.mark.rank_counts
@pytest.mark.skipif(hvd.size() < 3, reason="a part of a job, and a rank outside it, need three processes")
def test_process_set():
    members = hvd.add_process_set([0, 2])
    try:
        variable = tf.Variable(tf.zeros([200]))
        compression = Compression.gradient_dropping([variable], density=0.05, min_numel=50, process_set=members)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * tf.range(200.0) * (hvd.rank() + 1.0))
        tape = hvd.DistributedGradientTape(tape, compression=compression, process_set=members, op=hvd.Sum)
        reduced = tape.gradient(loss, [variable])[0].numpy()
        if members.included():
            np.testing.assert_array_equal(reduced, np.where(np.arange(200) >= 190, np.arange(200) * 4.0, 0.0))
            assert compression.stats()["steps"] == 1
        else:  # Horovod leaves other ranks' gradients alone
            np.testing.assert_array_equal(reduced, np.arange(200) * (hvd.rank() + 1.0))
            assert compression.stats()["steps"] == 0
    finally:
        hvd.remove_process_set(members)


@pytest.mark.parametrize("named", ["all", "global"])
def test_local_layers_of_horovod_keep_their_own_gradients(named):
    """The layers that `PartialDistributedGradientTape` leaves to each rank send nothing; the others lose nothing."""
    layers = [tf.keras.layers.Dense(width) for width in (40, 30, 20)]
    model = tf.keras.Sequential([tf.keras.Input((50,)), *layers])
    everything, own = model.trainable_variables, layers[1].trainable_variables
    shared = [variable for variable in everything if all(variable is not one for one in own)]
    given = everything if named == "all" else shared
    compression = Compression.gradient_dropping(given, density=0.05, min_numel=100)
    names = dict(zip(map(id, given), compression.feedback, strict=True))
    inputs = tf.random.stateless_normal([8, 50], [hvd.rank(), 0])

    @tf.function(autograph=False)
    def reduce(options):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(model(inputs))
        plain = tape.gradient(loss, everything)
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=[layers[1]], op=hvd.Sum, **dict(options))
        return plain, tape.gradient(loss, everything)

    plain, dense = reduce(())
    steps = [reduce((("compression", compression),))[1] for _ in range(3)]
    for i, variable in enumerate(everything):
        if any(variable is one for one in own):
            np.testing.assert_allclose(dense[i], plain[i] / hvd.size(), rtol=1e-6)
            for step in steps:
                np.testing.assert_array_equal(step[i], dense[i])
        else:
            left = total(residual_of(compression, names[id(variable)])).reshape(variable.shape)
            out = sum(step[i].numpy().astype(np.float64) for step in steps)
            np.testing.assert_allclose(out + left, 3 * dense[i].numpy().astype(np.float64), rtol=1e-5, atol=1e-4)
    assert compression.stats()["steps"] == 3


@pytest.mark.parametrize("method", ["dgc", "gradient_dropping", "micro"])
def test_variables_without_elements_are_reduced_like_others(method):
    variables = [tf.Variable(tf.ones(shape)) for shape in ([0, 7], [30, 20], [0])]
    compression = getattr(Compression, method)(variables, density=0.05, min_numel=0)
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(variable**2) for variable in variables])
        reduced = hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, variables)
    assert [gradient.shape.as_list() for gradient in reduced] == [[0, 7], [30, 20], [0]]
    assert 0 < np.count_nonzero(reduced[1].numpy()) < 100
    compression.load_state_dict(compression.state_dict(summed=True))


class Schedule(tf.keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate without a configuration, as many a tutorial has it."""

    def __call__(self, step):
        return 0.1


class Trainer(dict):
    """Its methods have names of an optimizer's, and missing attributes raise another error than usual."""

    __getattr__ = dict.__getitem__

    def apply_gradients(self, gradients):
        self.optimizer.apply_gradients(gradients)

    def get_unscaled_gradients(self, gradients):
        return gradients

    def step(self, variables, compression):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(variable**2) for variable in variables])
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        self.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


def test_a_trainer_that_resembles_an_optimizer():
    variables = [tf.Variable(tf.ones([30, 20]), name="weight")]
    compression = Compression.dgc(variables, density=0.05, momentum=0.9, min_numel=50)
    trainer = Trainer(optimizer=tf.keras.optimizers.SGD(Schedule(), momentum=0.9))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            trainer.step(variables, compression)
    told = [str(one.message) for one in caught if "momentum (or beta1) 0.9" in str(one.message)]
    assert len(told) == (hvd.rank() == 0)
    assert_ranks_agree({"weight": variables[0].numpy()})
    assert 0 < np.count_nonzero(variables[0].numpy() != 1.0) < 600


def test_a_forward_pass_that_fails_on_a_rank_leaves_no_collective_behind():
    """As at the end of a rank's data, which its training step reads: the others, which know, meet it in other calls."""
    variable = tf.Variable(tf.ones([200]))
    compression = Compression.gradient_dropping([variable], density=0.05, min_numel=0)

    def read(fails):
        time.sleep(0.3)  # more than a collective needs to start that depends on nothing
        if fails:
            raise StopIteration
        return np.float32(1.0)

    @tf.function
    def step(fails):
        scale = tf.ensure_shape(tf.numpy_function(read, [fails], tf.float32), [])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * scale)
        return hvd.DistributedGradientTape(tape, compression=compression, op=hvd.Sum).gradient(loss, [variable])[0]

    step(False)
    if hvd.rank() == 0:
        with pytest.raises(tf.errors.OutOfRangeError):
            step(True)
    assert_alive()
    assert np.count_nonzero(step(False).numpy()) == 10
    assert compression.stats()["steps"] == 2
