"""Wrong uses raise a clear error on every rank, and no rank is left waiting."""

import time
import warnings
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from gradients import SCOPES, draw, whole_numbers
from tf_helpers import Reducer, assert_alive, make_variables, residual_of, several, total

from hvd_sparse.parameter_server import DGCAsync
from hvd_sparse.tensorflow import Compression, exchange

pytestmark = pytest.mark.each_value

LAST = hvd.size() - 1
SHAPES = {"weight": (300,), "bias": (20,)}
SETTINGS = {"density": 0.05, "min_numel": 100}


def make(shapes=SHAPES, **settings):
    """Return a reducer, not yet traced."""
    variables = make_variables(shapes)
    compression = Compression.gradient_dropping(list(variables.values()), **{**SETTINGS, **settings})
    return Reducer(variables, compression)


def refuse(reduce, error, message):
    """Assert that a step raises, here, on every rank, and that collectives go on working."""
    shapes = {name: tuple(variable.shape) for name, variable in reduce.variables.items()}
    with pytest.raises(error, match=message) as refusal:
        reduce(draw(shapes, 0, hvd.rank()))
    assert_alive()
    return str(refusal.value)


@several
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("op", ["Min", "Max", "Product", "Adasum"])
def test_other_reductions(op, graph):
    variables = make_variables(SHAPES)
    compression = Compression.gradient_dropping(list(variables.values()), **SETTINGS)
    reduce = Reducer(variables, compression, graph, op=getattr(hvd, op))
    refuse(reduce, ValueError, r"op.*hvd\.Average or .*hvd\.Sum")


@several
def test_functions_that_run_eagerly():
    tf.config.run_functions_eagerly(True)
    try:
        refuse(make(), RuntimeError, r"tf\.config\.run_functions_eagerly\(False\)")
    finally:
        tf.config.run_functions_eagerly(False)


@several
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_unknown_variables(graph):
    variables, others = make_variables(SHAPES), make_variables(SHAPES)
    compression = Compression.gradient_dropping(list(others.values()), **SETTINGS)
    reduce = Reducer(variables, compression, graph)
    refuse(reduce, ValueError, r"'weight:0' belongs to none of the 2 variables.*If the variable was frozen then")


@several
@pytest.mark.parametrize("given", [Compression.dgc, DGCAsync()])
def test_what_is_no_compressor(given):
    variables = make_variables(SHAPES)
    called = r"Compression\.dgc must be a call, with the model's parameters"
    connected = r"DGCAsync is for asynchronous training, .*: connect\(model, DGCAsync\(\.\.\.\)\)"
    refuse(Reducer(variables, given), TypeError, called if given == Compression.dgc else connected)


class Unready:
    """A trainer of the user's whose optimizer cannot be had yet."""

    @property
    def optimizer(self):
        raise RuntimeError("call setup() first")

    def reduce(self, reduce, gradients):
        return reduce(gradients)


@several
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_property_of_the_caller_that_raises_is_not_its_business(graph):
    variables = make_variables(SHAPES)
    compression = Compression.gradient_dropping(list(variables.values()), **SETTINGS)
    Unready().reduce(Reducer(variables, compression, graph), draw(SHAPES, 0, hvd.rank()))
    assert compression.stats()["steps"] == 1


@several
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("how", ["allreduce", "grouped_allreduce"])
def test_a_gradient_that_came_through_no_tape(how, graph):
    compression = Compression.gradient_dropping([tf.Variable(tf.zeros([300]))], **SETTINGS)

    def reduce(tensor):
        given = [tensor] if how == "grouped_allreduce" else tensor
        return getattr(hvd, how)(given, compression=compression, op=hvd.Sum)

    for tensor in (tf.zeros([300]), tf.Variable(tf.zeros([300]))):
        with pytest.raises(ValueError, match=r"did not come through hvd\.DistributedGradientTape"):
            (tf.function(reduce) if graph else reduce)(tensor)
    assert_alive()


@pytest.mark.rank_counts
@several
@pytest.mark.parametrize("whose", ["tape", "compression"])
@pytest.mark.parametrize("members", ["first", "all but the last"])
def test_another_process_set(members, whose):
    """On the ranks outside of it too: they would wait for those that refuse."""
    chosen = hvd.add_process_set([0] if members == "first" else list(range(LAST)))
    try:
        variables = make_variables(SHAPES)
        ours, theirs = ({"process_set": chosen}, {}) if whose == "compression" else ({}, {"process_set": chosen})
        compression = Compression.gradient_dropping(list(variables.values()), **SETTINGS, **ours)
        refuse(Reducer(variables, compression, **theirs), ValueError, "must have the same process_set")
    finally:
        assert hvd.remove_process_set(chosen)


@pytest.mark.rank_counts
@several
@pytest.mark.parametrize("summed", [False, True], ids=["own", "summed"])
def test_a_rank_outside_the_process_set_has_no_state(summed):
    first = hvd.add_process_set([0])
    try:
        variables = list(make_variables(SHAPES).values())
        compression = Compression.gradient_dropping(variables, process_set=first)
        state = Compression.gradient_dropping(variables).state_dict(summed=summed)
        if first.included():
            compression.state_dict(summed=summed)
        else:
            for call in (lambda: compression.state_dict(summed=summed), lambda: compression.load_state_dict(state)):
                with pytest.raises(RuntimeError, match="this rank is not in the process_set"):
                    call()
    finally:
        assert hvd.remove_process_set(first)


DIFFERENCES = {
    "density": ({"density": 0.02}, "constant(0.02)"),
    "warm-up": ({"warmup": 30}, "warm_up(final=0.05, steps=30"),
    "scope": ({"scope": "model"}, "scope = 'model'"),
    "seed": ({"seed": 7}, "seed = 7"),
    "shape": ({"shapes": {"weight": (150, 2), "bias": (20,)}}, "weight: (150, 2) float32"),
    "variable": ({"shapes": {**SHAPES, "extra": (7,)}}, "extra: (7,) float32"),
}


@several
@pytest.mark.parametrize("what", DIFFERENCES)
def test_settings_or_models_that_differ_between_ranks(what):
    """The error names what differs, and the rank, on every rank; again and again."""
    settings, message = DIFFERENCES[what]
    reduce = make(**(settings if hvd.rank() == LAST else {}))
    for _ in range(2):
        text = refuse(reduce, ValueError, "ranks do not agree on model or settings")
        assert f"rank {LAST} has" in text and message in text, text


@several
def test_methods_that_differ_between_ranks():
    variables = make_variables(SHAPES)
    method = Compression.dgc if hvd.rank() == LAST else Compression.gradient_dropping
    reduce = Reducer(variables, method(list(variables.values()), **SETTINGS))
    assert "method = dgc" in refuse(reduce, ValueError, f"rank {LAST} has")


@several
@pytest.mark.parametrize("scope", SCOPES)
def test_a_state_loaded_on_one_rank_only(scope, monkeypatch):
    """That rank is told, and keeps what it had; loaded on all, all can go on."""
    reduce = make(scope=scope)
    reduce(draw(SHAPES, 0, hvd.rank()))
    state = {**reduce.compression.state_dict(), "step": 8}
    if hvd.rank() == 0:
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="did not take part"):
            patch.setattr(exchange, "TIMEOUT_SECONDS", 0.2)
            reduce.compression.load_state_dict(state)
    assert_alive()
    if hvd.rank() != 0:
        reduce.compression.load_state_dict(state)
    assert_alive()  # rank 0 has been heard, too
    refuse(reduce, tf.errors.InvalidArgumentError, "not at the same step; load the state on every rank")
    reduce.compression.load_state_dict({**reduce.compression.state_dict(), "step": 8})
    reduce(draw(SHAPES, 1, hvd.rank()))
    assert reduce.compression.step.numpy() == 9


@pytest.mark.rank_counts
@pytest.mark.skipif(hvd.size() != 3, reason="three ranks, the middle one at the mean of the steps")
def test_different_steps_are_seen_on_every_rank():
    reduce = make()
    reduce.compression.load_state_dict({**reduce.compression.state_dict(), "step": 3_000_000 + hvd.rank()})
    own_and_mean = rf"on this rank:\D*{3_000_000 + hvd.rank()}\D*mean:\D*3000001\D"
    refuse(reduce, tf.errors.InvalidArgumentError, f"(?s)not at the same step.*{own_and_mean}")


@several
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_call_that_leaves_out_variables_of_its_own_shapes_warns(graph):
    """Eagerly, TensorFlow would take a call with some of these for this one: Horovod keeps its tf.function."""
    shapes = {"actor": (3, 4), "critic": (3, 4), "head": (5,)}
    variables = make_variables(shapes)
    for names, has_twin in ((["actor"], True), (["actor", "critic"], False), (["actor", "head"], True)):
        compression = Compression.gradient_dropping(list(variables.values()), density=0.5, min_numel=0)
        reduce = Reducer(variables, compression, graph)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            reduce({name: np.ones(shapes[name]) for name in names})
        advice = "compile with a new hvd.DistributedOptimizer around the same compressor, or under a tape build a new"
        told = [one.filename for one in caught if advice in str(one.message)]
        assert (len(told) > 0) == (has_twin and not graph and hvd.rank() == 0), names
        assert {Path(name).parent for name in told} <= {Path(__file__).parent}  # a line of these tests


@several
@pytest.mark.filterwarnings("ignore:hvd_sparse. this call reduces 2 of")
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_other_layers_train_with_a_new_compressor(graph):
    """Three equal layers, of which another one is frozen each time: what is not sent stays in its own residual."""
    shapes = dict.fromkeys("abc", (300,))
    variables, state = make_variables(shapes), None
    fed, out = ({name: np.zeros(300) for name in shapes} for _ in range(2))
    for phase, names in enumerate(("bc", "ab", "ac")):
        compression = Compression.gradient_dropping(list(variables.values()), density=0.05, min_numel=0)
        if state:
            compression.load_state_dict(state)
        reduce = Reducer(variables, compression, graph, op=hvd.Sum)
        for step in range(3):
            drawn = whole_numbers(shapes, 3 * phase + step, hvd.rank())
            gradients = {name: drawn[name] for name in names}
            reduced = reduce(gradients)
            for name in names:
                fed[name] += total(gradients[name])
                out[name] += reduced[name]
        state = compression.state_dict()
    for name in shapes:
        np.testing.assert_array_equal(fed[name], out[name] + total(residual_of(compression, name)))


@several
def test_different_variables_in_several_calls_are_warned_of_once():
    """As of a GAN with one compressor: its calls would count as steps of both networks."""
    shapes = {"generator": (3, 4), "critic": (5,), "scale": (7,)}
    compression = Compression.gradient_dropping(list(make_variables(shapes).values()), density=0.5, min_numel=0)
    variables = dict(
        zip(shapes, (compression._parts.variables[name] for name in compression._parts.variables), strict=True)
    )
    reduce, told = Reducer(variables, compression), []
    for names in (["generator"], ["generator", "scale"], ["critic"], ["scale"]):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            reduce({name: np.ones(shapes[name]) for name in names})
        told.append(sum("counts as a step" in str(one.message) for one in caught))
    assert told == ([0, 0, 1, 0] if hvd.rank() == 0 else [0, 0, 0, 0])


@several
def test_a_model_of_which_a_variable_is_wrong_leaves_nothing_behind():
    class Model:
        trainable_variables = (tf.Variable(tf.zeros([3])), tf.Variable([1.0], shape=[None]))

    compression = Compression.gradient_dropping(Model())
    with pytest.raises(ValueError, match="must have a known shape"):
        compression.state_dict()


@several
@pytest.mark.rank_counts
def test_steps_beyond_what_float64_adds_exactly():
    """With three ranks, the squares of this step number do not add up to three times one of them."""
    reduce = make()
    reduce.compression.load_state_dict({**reduce.compression.state_dict(), "step": 100_000_001})
    reduce(draw(SHAPES, 0, hvd.rank()))
    assert reduce.compression.step.numpy() == 100_000_002


@several
def test_gradients_that_differ_between_ranks():
    """One is missing on the last rank: the others must not wait for its reduction."""
    reduce = make()
    reduce(draw(SHAPES, 0, hvd.rank()))
    own = draw(SHAPES, 1, hvd.rank())
    if hvd.rank() == LAST:
        del own["bias"]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"do not agree on .*the gradients that are there"):
        reduce(own)
    assert_alive()


@several
def test_a_rank_that_joined():
    """Horovod lets a rank that ran out of data join; it cannot be gathered from."""
    reduce = make()
    reduce(draw(SHAPES, 0, hvd.rank()))
    if hvd.rank() != LAST:
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"does not work with hvd\.join"):
            reduce(draw(SHAPES, 1, hvd.rank()))
    hvd.join()
    assert_alive()
    reduce(draw(SHAPES, 2, hvd.rank()))


CONSTRUCTION = {
    "density 0": ({"density": 0.0}, ValueError, r"density must be in \(0, 1\], got 0"),
    "density text": ({"density": "1%"}, TypeError, "density .*'1%'"),
    "scope": ({"scope": "layer"}, ValueError, "scope must be one of 'tensor', 'model'; got 'layer'"),
    "values": ({"values": "int8"}, ValueError, "values must be one of .*'int8'"),
    "warmup epochs": ({"warmup": 4.0}, TypeError, "warmup .*4.0"),
    "min_numel": ({"min_numel": -1}, ValueError, "min_numel .*-1"),
    "process set": ({"process_set": [0]}, TypeError, "process_set .*list"),
    "unknown": ({"densty": 0.1}, TypeError, "densty"),
}


@pytest.mark.parametrize("method", ["gradient_dropping", "dgc"])
@pytest.mark.parametrize("what", CONSTRUCTION)
def test_arguments(what, method):
    settings, error, message = CONSTRUCTION[what]
    with pytest.raises(error, match=message):
        getattr(Compression, method)([tf.Variable(tf.zeros([3]))], **settings)


NOT_VARIABLES = {
    "none": (lambda: [], ValueError, "parameters is empty"),
    "no list": (lambda: 3, TypeError, "parameters must be a list of tf.Variable, got int"),
    "a variable": (lambda: tf.Variable(tf.zeros([3])), TypeError, r"a single one; pass \[variable\]"),
    "a mapping": (lambda: {"w": tf.Variable(tf.zeros([3]))}, TypeError, r"parameters .* got a dict: pass its \.values"),
    "arrays": (
        lambda: [np.zeros(3)],
        TypeError,
        "parameters must be a list of tf.Variable, got entries of type ndarray",
    ),
    "tensors": (lambda: [tf.zeros([3])], TypeError, "parameters must be a list .* entries of type EagerTensor"),
    "integers": (lambda: [tf.Variable([1, 2], name="counter")], TypeError, "counter.*must be float32.*int32"),
    "complex": (lambda: [tf.Variable([1j], name="wave")], TypeError, "wave.*must be float32.*complex128"),
    "open": (lambda: [tf.Variable([1.0], shape=[None], name="open")], ValueError, "open.*known shape"),
}


@pytest.mark.parametrize("what", NOT_VARIABLES)
def test_what_is_no_list_of_real_variables(what):
    variables, error, message = NOT_VARIABLES[what]
    with pytest.raises(error, match=message):
        Compression.dgc(variables())


@pytest.mark.rank_counts
def test_a_process_alone_is_told_that_its_momentum_is_not_applied():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Compression.dgc([tf.Variable(tf.zeros([3]))], momentum=0.9)
        Compression.gradient_dropping([tf.Variable(tf.zeros([3]))])
    messages = [str(warning.message) for warning in caught if "momentum" in str(warning.message)]
    assert len(messages) == (hvd.size() == 1), messages


@several
@pytest.mark.parametrize("call", ["load_state_dict", "state_dict"])
@pytest.mark.parametrize(
    ("when", "message"),
    [
        ("in training", r"called load_state_dict\(\), reset\(\)"),
        ("before the first step", r"in different calls: rank 0 is in .*; rank 1 is in the first step\."),
    ],
)
def test_a_rank_that_loads_alone_meets_the_others(when, message, call):
    """All of them raise at once, where each would wait for the other.

    The last test here: it leaves a collective behind, which would meet a rank in hvd.join().
    """
    reduce = make()
    if when == "in training":
        reduce(draw(SHAPES, 0, hvd.rank()))
    began = time.monotonic()
    with pytest.raises((RuntimeError, tf.errors.InvalidArgumentError), match=message):
        if hvd.rank() == 0 and call == "load_state_dict":
            reduce.compression.load_state_dict(reduce.compression.state_dict())
        elif hvd.rank() == 0:
            reduce.compression.state_dict(summed=True)
        else:
            reduce(draw(SHAPES, 1, hvd.rank()))
    assert time.monotonic() - began < exchange.TIMEOUT_SECONDS / 10
    assert_alive()
