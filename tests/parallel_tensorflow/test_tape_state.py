"""A checkpoint continues a run bit for bit. Summed over the ranks, it can be loaded by any number of ranks."""

import functools

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from gradients import draw, whole_numbers
from tf_helpers import Reducer, assert_alive, assert_ranks_agree, make_variables, memory_of, residual_of, several, total

from hvd_sparse import wire
from hvd_sparse.checkpoint import load_state, save_state
from hvd_sparse.schedule import WarmUp
from hvd_sparse.tensorflow import Compression

pytestmark = several
SHAPES = {"weight": (30, 20), "head": (500,), "bias": (20,)}
DROPPING = {"density": 0.05, "min_numel": 100}
DGC = {"density": 0.02, "warmup": WarmUp(0.02, steps=8), "nesterov": True, "min_numel": 100, "seed": 9}
SETTINGS = {"gradient_dropping": DROPPING, "dgc": DGC}
KINDS = ("residual", "velocity")
BOTH = [("gradient_dropping", "tensor"), ("dgc", "tensor"), ("dgc", "model")]


@functools.cache
def traced(method, scope, number, op=hvd.Average):
    """Return a reducer with separate variables; tests share its graph."""
    variables = make_variables(SHAPES)
    compression = getattr(Compression, method)(list(variables.values()), scope=scope, **SETTINGS[method])
    return Reducer(variables, compression, op=op)


def fresh(method, scope, number=0, **options):
    """Return a reducer whose memory is empty, its variables as at the start."""
    reduce = traced(method, scope, number, **options)
    reduce.compression.reset()
    assign(reduce, {name: variable.numpy() for name, variable in make_variables(SHAPES).items()})
    return reduce


def assign(reduce, values):
    for name, variable in reduce.variables.items():
        variable.assign(values[name])


def train(reduce, steps):
    """Descend; whole numbers tie often: what is sent then depends on the step, which must be restored too."""
    for step in steps:
        reduced = reduce(whole_numbers(SHAPES, step, hvd.rank(), most=2))
        assign(reduce, {n: (v.numpy() - 0.1 * reduced[n]).astype(np.float32) for n, v in reduce.variables.items()})


def everything(reduce):
    """Return {what: array} of variables and memory."""
    arrays = {name: variable.numpy() for name, variable in reduce.variables.items()}
    for name in SHAPES:
        arrays.update({f"{name}.{kind}": memory_of(reduce.compression, name, kind) for kind in KINDS})
    return arrays


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for what, array in expected.items():
        np.testing.assert_array_equal(found[what], array, err_msg=what)


@pytest.mark.parametrize(("method", "scope"), BOTH)
@pytest.mark.parametrize("means", ["state_dict", "tf.train.Checkpoint"])
def test_a_resumed_run_is_the_uninterrupted_one(means, method, scope, tmp_path):
    reduce = fresh(method, scope)
    train(reduce, range(5))
    variables = {name: variable.numpy() for name, variable in reduce.variables.items()}
    if means == "state_dict":
        save_state(tmp_path / "state", reduce.compression.state_dict())
    else:
        path = tf.train.Checkpoint(compression=reduce.compression).save(str(tmp_path / "checkpoint"))
    train(reduce, range(5, 12))
    uninterrupted = everything(reduce)

    resumed = fresh(method, scope, number=1)
    train(resumed, range(2))  # loading discards what was there
    assign(resumed, variables)
    if means == "state_dict":
        resumed.compression.load_state_dict(load_state(tmp_path / "state"))
    else:
        restored = tf.train.Checkpoint(compression=resumed.compression).restore(path)
        restored.assert_existing_objects_matched().assert_consumed()
    assert resumed.compression.step.numpy() == 5
    train(resumed, range(5, 12))
    assert_same(everything(resumed), uninterrupted)
    assert resumed.compression.state_dict()["step"] == 12
    assert any(array.any() for what, array in uninterrupted.items() if "residual" in what)
    assert_ranks_agree({name: variable.numpy() for name, variable in resumed.variables.items()})


@pytest.mark.parametrize("is_built", [True, False])
def test_a_checkpoint_of_a_compression_has_no_model_variables(is_built, tmp_path):
    """A restore must not overwrite the weights."""
    value = tf.Variable(tf.ones([200]), name="value")
    settings = {"density": 0.05, "min_numel": 100, "weight_decay": 0.1}
    compression = Compression.dgc([value] if is_built else lambda: [value], **settings)
    Reducer({"value": value}, compression)({"value": np.ones(200)})
    path = tf.train.Checkpoint(compression=compression).save(str(tmp_path / "checkpoint"))
    velocity = memory_of(compression, "value", "velocity")
    value.assign(tf.fill([200], 5.0))
    compression.reset()
    tf.train.Checkpoint(compression=compression).restore(path).assert_consumed()
    np.testing.assert_array_equal(value.numpy(), 5.0)
    np.testing.assert_array_equal(memory_of(compression, "value", "velocity"), velocity)
    assert velocity.any()


def test_a_checkpoint_of_another_rank_is_refused_on_all(tmp_path):
    """Rank 0's residual, restored everywhere, would be sent once by each rank, and the others' be lost."""
    variables = make_variables(SHAPES)
    compression = Compression.gradient_dropping(list(variables.values()), **DROPPING)
    reduce = Reducer(variables, compression)
    reduce(draw(SHAPES, 0, hvd.rank()))
    own = hvd.broadcast_object(str(tmp_path), name="folder")
    path = f"{own}/{hvd.rank()}"
    checkpoint, state = tf.train.Checkpoint(compression=compression), compression.state_dict()
    written = checkpoint.write(path)
    total(np.zeros(1))  # all have written
    checkpoint.read(written.replace(f"/{hvd.rank()}", "/0"))
    with pytest.raises(tf.errors.InvalidArgumentError, match="restored the error feedback of another rank"):
        reduce(draw(SHAPES, 1, hvd.rank()))
    assert_alive()
    checkpoint.read(written)
    reduce(draw(SHAPES, 1, hvd.rank()))
    checkpoint.read(written.replace(f"/{hvd.rank()}", "/0"))
    compression.load_state_dict(state)  # this rank's own again
    assert_ranks_agree(reduce(draw(SHAPES, 1, hvd.rank())))


def test_a_checkpoint_of_variables_with_other_names_is_refused(tmp_path):
    """TensorFlow finds no residuals under these names, restores the step all the same, and says nothing."""
    saved, model = make_variables(SHAPES), {f"{name}_2": shape for name, shape in SHAPES.items()}
    compression = Compression.gradient_dropping(list(saved.values()), **DROPPING)
    Reducer(saved, compression)(draw(SHAPES, 0, hvd.rank()))
    path = tf.train.Checkpoint(compression=compression).save(str(tmp_path / "checkpoint"))
    variables = make_variables(model)
    renamed = Compression.gradient_dropping(list(variables.values()), **DROPPING)
    reduce = Reducer(variables, renamed)
    reduce(draw(model, 0, hvd.rank()))
    status = tf.train.Checkpoint(compression=renamed).restore(path)
    with pytest.raises(AssertionError):
        status.expect_partial().assert_existing_objects_matched()
    with pytest.raises(tf.errors.InvalidArgumentError, match="of variables with other names"):
        reduce(draw(model, 1, hvd.rank()))
    assert_alive()
    renamed.reset()
    assert_ranks_agree(reduce(draw(model, 1, hvd.rank())))


def test_a_tf_function_is_told_that_it_cannot_read_the_state():
    reduce = fresh("gradient_dropping", "tensor")
    compression = reduce.compression
    state = compression.state_dict()
    calls = [
        compression.stats,
        compression.state_dict,
        compression.reset,
        lambda: compression.state_dict(summed=True),
        lambda: compression.load_state_dict(state),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"a tf\.function cannot read or change the state"):
            tf.function(lambda call=call: call() and None, autograph=False)()
    assert_alive()
    train(reduce, range(2))


def test_a_model_does_not_take_the_buffers_of_its_compression_for_its_own():
    """Horovod's callback broadcasts the variables of a model: all ranks would have the residuals of rank 0."""
    model = tf.Module()
    model.kernel = tf.Variable(tf.ones([200]))
    model.compression = Compression.dgc([model.kernel], density=0.05, min_numel=100)
    assert [variable is model.kernel for variable in model.variables] == [True]


@pytest.mark.parametrize("method", ["dct", "dgc", "micro"])
def test_a_checkpoint_that_is_restored_before_the_model_is_built(method, tmp_path):
    def make(variables):
        settings = {"dct": {"lifespan": 100}, "dgc": {"momentum": 0.9}, "micro": {}}
        return getattr(Compression, method)(lambda: variables, density=0.05, min_numel=100, **settings[method])

    def everything_of(compression):
        state = compression.state_dict()
        return {"step": state["step"], **state["thresholds"], **state["memory"]["value"]}

    value, later = tf.Variable(tf.zeros([2000]), name="value"), []
    compression = make([value])
    gradients = {"value": np.random.default_rng(hvd.rank()).standard_normal(2000)}
    Reducer({"value": value}, compression)(gradients)
    path = tf.train.Checkpoint(compression=compression).save(str(tmp_path / "checkpoint"))
    resumed = make(later)
    restored = tf.train.Checkpoint(compression=resumed).restore(path)
    later.append(value)
    assert_same(everything_of(resumed), everything_of(compression))
    restored.assert_consumed()
    assert residual_of(compression, "value").any()


def test_the_step_matters_to_a_resumed_run():
    """Without it the test above would see a difference."""
    reduce = fresh("dgc", "tensor")
    train(reduce, range(5))
    state = reduce.compression.state_dict()
    variables = {name: variable.numpy() for name, variable in reduce.variables.items()}
    train(reduce, range(5, 6))
    one = everything(reduce)
    assign(reduce, variables)
    reduce.compression.load_state_dict({**state, "step": 6})
    train(reduce, range(5, 6))
    assert any((array != one[what]).any() for what, array in everything(reduce).items())


def test_a_state_is_a_copy():
    """Steps after it do not change it, and loading it does not tie it to the compressor."""
    reduce = fresh("gradient_dropping", "tensor")
    train(reduce, range(1))
    state = reduce.compression.state_dict()
    kept = state["memory"]["weight"]["residual"].copy()
    for _ in range(2):
        reduce.compression.load_state_dict(state)
        train(reduce, range(1, 2))
        np.testing.assert_array_equal(state["memory"]["weight"]["residual"], kept)
        assert (memory_of(reduce.compression, "weight") != kept).any()


@pytest.mark.parametrize(("method", "scope"), BOTH)
def test_a_summed_state_is_shared_out(method, scope, monkeypatch):
    """The same on every rank; loaded, the ranks' memories add up to it again: no gradient is lost."""
    monkeypatch.setattr("hvd_sparse.tensorflow.state.SPAN", 500)
    reduce = fresh(method, scope)
    train(reduce, range(4))
    kinds = KINDS if method == "dgc" else KINDS[:1]
    before = {(name, kind): total(memory_of(reduce.compression, name, kind)) for name in SHAPES for kind in kinds}
    state = reduce.compression.state_dict(summed=True)
    memory = state["memory"]
    assert_ranks_agree({f"{name}.{kind}": array for name in SHAPES for kind, array in memory[name].items()})
    new = fresh(method, scope, number=1)
    new.compression.load_state_dict(state)
    for (name, kind), expected in before.items():
        saved = memory[name].get(kind, np.zeros(expected.shape))
        assert np.array_equal(saved, expected.astype(np.float32))  # added in float64, rounded once
        share = memory_of(new.compression, name, kind)
        np.testing.assert_allclose(share, expected / hvd.size(), rtol=1e-6, atol=1e-6, err_msg=f"{name}.{kind}")
        assert np.array_equal(total(share), saved.astype(np.float64))
    assert all(before["weight", kind].any() for kind in kinds)
    assert new.compression.state_dict()["step"] == 4
    train(new, range(4, 5))


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=["sum", "average"])
def test_fewer_ranks_continue_from_a_summed_state(op):
    """As after the loss of a worker: the remaining ranks take over its residual. A per-rank state raises an error.

    What is pending changes the weights as much as before: by the sum of residuals, or their mean.
    """
    reduce = fresh("gradient_dropping", "tensor", op=op)
    train(reduce, range(3))
    expected = total(memory_of(reduce.compression, "weight"))
    own, summed = reduce.compression.state_dict(), reduce.compression.state_dict(summed=True)
    left = hvd.add_process_set(list(range(hvd.size() - 1)))
    try:
        share = np.zeros(600)
        if left.included():
            variables = make_variables(SHAPES)
            fewer = Compression.gradient_dropping(list(variables.values()), process_set=left, **DROPPING)
            with pytest.raises(ValueError, match=f"{hvd.size()} ranks, and there are {left.size()} now"):
                fewer.load_state_dict(own)
            fewer.load_state_dict(summed)
            share = memory_of(fewer, "weight")
        before, now = (hvd.size(), hvd.size() - 1) if op == hvd.Average else (1, 1)
        np.testing.assert_allclose(total(share) / now, expected / before, rtol=1e-6)
        assert summed["averages"] == (op == hvd.Average)
    finally:
        assert hvd.remove_process_set(left)


def wrong_states(state):
    memory = state["memory"]
    short = {**memory, "weight": {"residual": np.zeros(3, np.float32)}}
    velocity = {**memory, "weight": {"velocity": np.zeros(600, np.float32)}}
    never_sent = {**memory, "bias": {"residual": np.ones(20, np.float32)}}
    return {
        "nothing": (None, "state"),
        "empty": ({}, "state"),
        "another version": ({**state, "version": 99}, "version"),
        "another model": ({**state, "memory": {**memory, "extra": {}}}, "other parameters.*extra"),
        "a variable short": ({**state, "memory": {"bias": {}}}, "other parameters"),
        "another shape": ({**state, "memory": short}, "weight.*600 elements"),
        "another method": ({**state, "memory": velocity}, "another method.*velocity"),
        "a residual of what now travels dense": ({**state, "memory": never_sent}, "bias.*min_numel"),
        "another number of ranks": ({**state, "ranks": hvd.size() + 3}, f"{hvd.size() + 3} ranks"),
        "another rank": ({**state, "rank": 7}, f"that of rank 7, and this is rank {hvd.rank()}"),
        "another shard": ({**state, "shard": 1}, "that of shard 1, and this is shard None"),
        "a negative step": ({**state, "step": -1}, "step"),
        **{f"no {key}": ({k: v for k, v in state.items() if k != key}, key) for key in ("memory", "summed", "step")},
    }


def test_a_wrong_state_is_refused_and_changes_nothing():
    reduce = fresh("gradient_dropping", "tensor")
    train(reduce, range(1))
    before = everything(reduce)
    for state, message in wrong_states(reduce.compression.state_dict()).values():
        with pytest.raises(ValueError, match=message):
            reduce.compression.load_state_dict(state)
        assert_same(everything(reduce), before)
        assert reduce.compression.step.numpy() == 1
    assert_alive()


def test_each_rank_of_an_elastic_job_refuses_its_own_state(monkeypatch):
    reduce = fresh("gradient_dropping", "tensor")
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(ValueError, match=r"^the state must be what state_dict"):  # not "rank 0: the"
        reduce.compression.load_state_dict({**reduce.compression.state_dict(), "version": 99})


@pytest.mark.parametrize(("method", "scope"), BOTH)
def test_reset(method, scope):
    """A compressor is then as if new."""
    reduce = fresh(method, scope)
    train(reduce, range(3))
    first = everything(reduce)
    assert first["weight.residual"].any() and reduce.compression.step.numpy() == 3
    again = fresh(method, scope)
    stats = again.compression.stats()
    assert (stats["steps"], stats["residual_norm"], stats["total"]["payload_bytes"]) == (0, 0.0, 0)
    assert again.compression.state_dict()["step"] == 0
    train(again, range(3))
    assert_same(everything(again), first)


PRESENCE = 8 * 2 * (1 + 1 + 1 + 1 + 6)  # one for each rank; step, loss scale, place, a digest of six; and their squares
VOTE, TOKEN = 16, 8  # a token: two elements of the gradient's type, here of float32


@pytest.mark.rank_counts
@pytest.mark.parametrize(
    ("dtype", "scope", "values"), [("float64", "tensor", "float16"), ("float32", "model", "float32")]
)
def test_stats_are_those_worked_out_by_hand(dtype, scope, values):
    variables = make_variables(SHAPES, tf.as_dtype(dtype))
    settings = {**DROPPING, "scope": scope, "values": values}
    compression = Compression.gradient_dropping(list(variables.values()), **settings)
    sizes = [600, 500] if scope == "tensor" else [1100]
    counts = [wire.top_k_count(n, 0.05) for n in sizes]
    assert counts in ([30, 25], [55])
    payloads = sum(wire.payload_size(n, k, value_dtype=values) for n, k in zip(sizes, counts, strict=True))
    item = np.dtype(dtype).itemsize
    payload_bytes, dense_bytes = payloads + 2 * TOKEN * item // 4 + 20 * item + VOTE + PRESENCE, 1120 * item
    reduce = Reducer(variables, compression)
    assert compression.stats()["steps"] == compression.stats()["total"]["dense_bytes"] == 0
    for steps in (1, 2, 3):
        reduce(draw(SHAPES, steps, hvd.rank()))
        stats = compression.stats()
        assert stats["steps"] == steps
        for part, times in (("step", 1), ("total", steps)):
            assert stats[part]["payload_bytes"] == times * payload_bytes
            assert stats[part]["received_bytes"] == times * (payload_bytes + (hvd.size() - 2) * payloads)
            assert stats[part]["dense_bytes"] == times * dense_bytes
            assert stats[part]["ratio"] == pytest.approx(dense_bytes / payload_bytes, rel=1e-12)
            assert stats[part]["density"] == pytest.approx((55 + 20) / 1120, rel=1e-12)
        waiting = np.concatenate([memory_of(compression, name) for name in SHAPES])
        assert stats["residual_norm"] == pytest.approx(np.linalg.norm(waiting), rel=1e-12) != 0.0


def test_stats_follow_a_warm_up_from_dense():
    """Everything is sent dense in the first step, 5 % of the large tensor in the second."""
    variables = make_variables(SHAPES)
    schedule = WarmUp(0.05, steps=1, initial=1.0, factor=0.05)
    compression = Compression.gradient_dropping(list(variables.values()), density=schedule, min_numel=100)
    reduce = Reducer(variables, compression)
    reduce(draw(SHAPES, 0, hvd.rank()))
    dense = compression.stats()["step"]
    assert dense["density"] == 1.0
    # the payloads of one element hold nothing, and stand where the graph has their place
    idle = wire.payload_size(600, 1) + wire.payload_size(500, 1)
    assert dense["payload_bytes"] == 1120 * 4 + idle + VOTE + PRESENCE
    reduce(draw(SHAPES, 1, hvd.rank()))
    stats = compression.stats()
    assert stats["step"]["density"] == pytest.approx(75 / 1120)
    assert stats["total"]["density"] == pytest.approx((1120 + 75) / 2240)
    payloads = wire.payload_size(600, 30) + wire.payload_size(500, 25)
    assert stats["step"]["payload_bytes"] == payloads + 2 * TOKEN + 20 * 4 + VOTE + PRESENCE


def test_many_checkpoints_bring_no_warning_of_retracing(caplog):
    compression = fresh("gradient_dropping", "tensor").compression
    with caplog.at_level("WARNING", logger="tensorflow"):
        for _ in range(8):
            compression.load_state_dict(compression.state_dict(summed=True))
    assert "retracing" not in caplog.text
