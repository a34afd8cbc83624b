"""Steps of an elastic job: ranks continue from the latest step, and a stale trace raises an error."""

import contextlib
import pickle

import horovod.tensorflow
import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from gradients import SHAPES, draw
from tf_helpers import (
    Reducer,
    assert_alive,
    assert_ranks_agree,
    make_variables,
    reduce_whole_numbers,
    residual_of,
    several,
    total,
)

from hvd_sparse.tensorflow import Compression
from hvd_sparse.tensorflow import step as tensorflow_step

SCATTER = {"density": 0.05, "min_numel": 50, "exchange": "reduce_scatter", "dense_fallback": None}


@pytest.fixture(autouse=True)
def elastic(monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")


@pytest.mark.rank_counts
@pytest.mark.skipif(hvd.size() != 1, reason="an elastic job of which one rank is left")
@pytest.mark.parametrize("graph", [False, True])
def test_one_rank_alone_applies_its_gradients_and_keeps_nothing(graph):
    """Horovod delivers them as they are: what a residual had of them would be sent again when a rank joins."""
    variables = make_variables()
    with pytest.warns(UserWarning, match="calls no compressor with one process"):
        compression = Compression.dgc(list(variables.values()), density=0.01, momentum=0.9)
    reduce = Reducer(variables, compression, graph=graph)
    with pytest.warns(UserWarning, match="calls no compressor with one process"):  # as when the other ranks have left
        results = [reduce(draw(SHAPES, step, 0)) for step in range(3)]
    for step, found in enumerate(results):
        for name, gradient in draw(SHAPES, step, 0).items():
            np.testing.assert_array_equal(found[name], gradient, err_msg=name)
    assert not any(np.any(residual_of(compression, name)) for name in SHAPES)
    assert int(compression.step) == 0


@pytest.mark.rank_counts
@pytest.mark.skipif(hvd.size() != 1, reason="an elastic job of which one rank is left")
def test_a_step_traced_for_one_rank_alone_is_refused_with_more(monkeypatch):
    variables = make_variables()
    reduce = Reducer(variables, Compression.gradient_dropping(list(variables.values()), density=0.01))
    monkeypatch.setattr(horovod.tensorflow, "size_op", lambda *_, **__: tf.constant(2))  # as after a rank has joined
    with pytest.raises(tf.errors.InvalidArgumentError, match="was traced for other ranks"):
        reduce(draw(SHAPES, 0, 0))


@several
def test_a_rank_outside_the_process_set_takes_no_part():
    members = hvd.add_process_set([0])
    try:
        with (
            contextlib.nullcontext() if hvd.rank() else pytest.warns(UserWarning, match="in a process set of one rank")
        ):
            compression = Compression.dgc(list(make_variables().values()), density=0.01, process_set=members)
        assert compression._parts.exchange.is_used() == (hvd.rank() == 0)
        assert (compression.place is None) == (hvd.rank() > 0)
    finally:
        hvd.remove_process_set(members)


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


@several
def test_regions_of_another_world_size_are_agreed_on_anew():
    """Such as those of all ranks that are left when one has gone: they have the same, for one rank more."""
    variables = make_variables()
    compression = Compression.gradient_dropping(list(variables.values()), **SCATTER)

    def leave_regions_of_more_ranks(step):
        if step == 0:
            more = hvd.size() + 1
            for names, bounds in compression.regions.items():
                compression.regions[names] = np.arange(more + 1) * bounds[-1] // more

    fed, out = reduce_whole_numbers(Reducer(variables, compression, op=hvd.Sum), 4, leave_regions_of_more_ranks)
    assert {bounds.size for bounds in compression.regions.values()} == {hvd.size() + 1}
    for name in SHAPES:
        left = total(residual_of(compression, name)).reshape(SHAPES[name])
        np.testing.assert_array_equal(out[name] + left, fed[name], err_msg=name)


@several
def test_a_replaced_rank_sends_dense_when_the_others_do(monkeypatch):
    """Dense steps are faster. The last rank, which is new at the same world size, has not timed any."""
    shapes, clock = {"a": (40, 50), "b": (3000,)}, [1.0]
    monkeypatch.setattr(tensorflow_step, "perf_counter", lambda: clock[0])
    variables = make_variables(shapes)
    compression = Compression.gradient_dropping(list(variables.values()), density=0.02, dense_fallback="measured")

    def run(steps):
        reduce, ways = Reducer(variables, compression), []
        for step in steps:
            assert_ranks_agree(reduce(draw(shapes, step, hvd.rank())))
            ways.append(compression.stats()["dense_fallback"]["is_dense"])
            clock[0] += 1.0 if ways[-1] else 4.0
        return ways

    assert run(range(20))[-1]
    if hvd.rank() == hvd.size() - 1:
        compression.reset()
    ways = run(range(20, 40))
    assert hvd.allgather_object(ways, name="ways") == [ways] * hvd.size()
    assert not ways[0] and ways[-1], "timed anew, by all ranks"


@several
def test_a_rank_that_joins_takes_the_scaled_threshold_of_the_others():
    """A threshold far below theirs would make it send nearly everything, for all following steps."""
    variables = make_variables()
    settings = {"density": 0.05, "controller": "scaling", "dense_fallback": None}
    compression = Compression.micro(list(variables.values()), min_numel=0, **settings)
    reduce = Reducer(variables, compression)
    for step in range(3):
        reduce(draw(SHAPES, step, hvd.rank()))
    threshold, _ = compression.thresholds
    theirs = threshold.numpy()
    if hvd.rank() == hvd.size() - 1:
        threshold.assign([1e-6])
    reduce(draw(SHAPES, 3, hvd.rank()))
    assert_ranks_agree({"threshold": threshold.numpy()})
    np.testing.assert_allclose(threshold.numpy(), theirs, rtol=0.006)


@several
@pytest.mark.parametrize("exchange", ["gather", "reduce_scatter"])
def test_horovod_recognises_a_failure_of_each_collective(exchange):
    """hvd.elastic.run looks for these words in the error, which names the operation; others would end the training."""
    variables = make_variables()
    settings = {**SCATTER, "exchange": exchange, "complete": exchange == "reduce_scatter"}
    reducer = Reducer(variables, Compression.topk(list(variables.values()), **settings))
    gradients = {name: tf.TensorSpec(variable.shape, tf.float32) for name, variable in variables.items()}
    graph = reducer._reduce.get_concrete_function(gradients).graph.as_graph_def()
    nodes = [node for part in (graph.node, *(one.node_def for one in graph.library.function)) for node in part]
    local = ("HorovodRank", "HorovodSize", "HorovodProcessSetIncluded")
    names = {node.name for node in nodes if node.op.startswith("Horovod") and node.op not in local}
    assert len(names) > len(SHAPES)
    known = ("HorovodAllreduce", "HorovodAllgather", "HorovodBroadcast")
    assert [name for name in sorted(names) if not any(word in name for word in known)] == []


@several
def test_a_checkpoint_of_another_rank_is_refused_on_all(tmp_path):
    """Rank 0's residual, restored everywhere, would be sent once by each rank; its own is what a rank may restore."""
    variables = make_variables()
    compression = Compression.gradient_dropping(list(variables.values()), density=0.05, min_numel=50)
    reduce = Reducer(variables, compression)
    reduce(draw(SHAPES, 0, hvd.rank()))
    folder = hvd.broadcast_object(str(tmp_path), name="folder")
    checkpoint = tf.train.Checkpoint(compression=compression)
    written = checkpoint.write(f"{folder}/{hvd.rank()}")
    total(np.zeros(1))  # all have written
    checkpoint.read(written)
    reduce(draw(SHAPES, 1, hvd.rank()))
    checkpoint.read(f"{folder}/0")
    with pytest.raises(tf.errors.InvalidArgumentError, match="restored the error feedback of another rank"):
        reduce(draw(SHAPES, 2, hvd.rank()))
    assert_alive()


@several
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
    with pytest.raises(TypeError, match=r"Leave it out of what is copied, such as .* hvd\.elastic's state"):
        pickle.dumps(compression)
