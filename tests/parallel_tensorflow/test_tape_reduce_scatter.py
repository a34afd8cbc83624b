"""Reduce-scatter with a tape: nothing is lost, and each payload equals PyTorch's."""

import functools
import tempfile

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
import tiers
from gradients import SCOPES, SHAPES, draw, whole_numbers
from test_tape_conservation import NowAndThenDense
from tf_helpers import Reducer, assert_ranks_agree, make_variables, residual_of, total

from hvd_sparse.checkpoint import load_state, save_state
from hvd_sparse.schedule import Schedule
from hvd_sparse.tensorflow import Compression

pytestmark = pytest.mark.skipif(hvd.size() == 1, reason="Horovod compresses nothing with one process")

SCATTER = {"exchange": "reduce_scatter", "dense_fallback": None}


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("values", ["float32", "float16", "int2", "int1"])
@pytest.mark.each_value
def test_sum_in_is_sum_out(values, scope, graph):
    check_conservation({"density": 0.05, "values": values, "scope": scope}, graph, most=50 if values[0] == "f" else 3)


@pytest.mark.parametrize("values", ["float32", "int2"])
@pytest.mark.parametrize(("scope", "graph"), [("tensor", True), ("model", False)])
def test_sum_in_is_sum_out_when_all_ranks_add_their_residuals(scope, graph, values):
    check_conservation({"density": 0.05, "values": values, "scope": scope, "complete": True}, graph, most=50)


@pytest.mark.parametrize(
    "settings",
    [
        {"density": 0.01, "warmup": 10},
        {"density": NowAndThenDense()},
        {"density": NowAndThenDense(), "complete": True},
    ],
)
@pytest.mark.rank_counts
def test_sum_in_is_sum_out_whatever_the_schedule(settings):
    check_conservation(settings, graph=True, most=50)


def check_conservation(settings, graph, most):
    variables = make_variables()
    compression = Compression.gradient_dropping(list(variables.values()), min_numel=50, **settings, **SCATTER)
    reduce = Reducer(variables, compression, graph, op=hvd.Sum)
    fed = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    out = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(10):
        for rank in range(hvd.size()):
            for name, gradient in whole_numbers(SHAPES, step, rank, most=most).items():
                fed[name] += gradient
        reduced = reduce(whole_numbers(SHAPES, step, hvd.rank(), most=most))
        assert_ranks_agree(reduced)
        for name in SHAPES:
            out[name] += reduced[name]
    tolerance = 1e-3 if settings.get("values", "").startswith("int") else 0.0  # means of whole numbers are none
    for name in SHAPES:
        left = total(residual_of(compression, name)).reshape(SHAPES[name])
        np.testing.assert_allclose(out[name] + left, fed[name], rtol=0, atol=tolerance, err_msg=name)
    assert 0 < compression.stats()["total"]["density"] < 1


@pytest.mark.parametrize(("favours", "same_as"), [(True, "reduce_scatter"), (False, "gather")])
def test_auto_is_what_the_performance_model_favours(favours, same_as, monkeypatch):
    monkeypatch.setattr("hvd_sparse.algorithms.top_k.favours_scattered", lambda *form: favours)
    results = []
    for exchange in ("auto", same_as):
        variables = make_variables()
        compression = Compression.dgc(
            list(variables.values()), density=0.05, min_numel=50, dense_fallback=None, exchange=exchange
        )
        reduce = Reducer(variables, compression, True, op=hvd.Sum)
        results.append([reduce(draw(SHAPES, step, hvd.rank())) for step in range(3)])
    for found, expected in zip(*results, strict=True):
        for name in SHAPES:
            np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.parametrize(
    ("method", "complete"),
    tiers.choice(
        [("dgc", False), ("samomentum", False), ("topk", False), ("dgc", True)], ("topk", False), ("dgc", True)
    ),
)
def test_a_state_goes_on_bit_for_bit(method, complete, tmp_path):
    """Through a file of state_dict, in which the regions are: 12 steps in a row are 5 and 7."""
    make = functools.partial(getattr(Compression, method), density=0.05, min_numel=50, complete=complete, **SCATTER)

    def run(reduce, steps):
        return [reduce(draw(SHAPES, step, hvd.rank())) for step in steps]

    variables = make_variables()
    compression = make(list(variables.values()))
    reduce = Reducer(variables, compression, True, op=hvd.Sum)
    run(reduce, range(5))
    saved = compression.state_dict()
    assert saved["regions"]
    save_state(tmp_path / "state", saved)
    expected = run(reduce, range(5, 12))
    others = make_variables()
    again = make(list(others.values()))
    again.load_state_dict(load_state(tmp_path / "state"))
    for found, wanted in zip(run(Reducer(others, again, True, op=hvd.Sum), range(5, 12)), expected, strict=True):
        for name in SHAPES:
            np.testing.assert_array_equal(found[name], wanted[name])


class DenseAtFirst(Schedule):
    """A dense first step, then 5 %."""

    def density(self, step):
        return 1.0 if step == 0 else 0.05

    def describe(self):
        return "dense at first"


def test_regions_are_agreed_on_in_the_first_sparse_step():
    """A dense step has selected nothing that could say where they should be."""
    variables = make_variables({"w": (2000,)})
    settings = {"density": DenseAtFirst(), "min_numel": 0, **SCATTER}
    compression = Compression.topk(list(variables.values()), **settings)
    reduce = Reducer(variables, compression, True, op=hvd.Sum)
    for step in range(2):
        gradient = draw({"w": (2000,)}, step, hvd.rank())["w"]
        gradient[200:] = 0.0
        reduce({"w": gradient})
        bounds = [known.tolist() for known in compression.regions.values()]
        assert bounds == [] if step == 0 else max(bounds[0][:-1]) < 200


def test_a_tensorflow_checkpoint_goes_on():
    """It has no regions: the ranks agree on new ones, and nothing is lost."""
    reducers = []
    for _ in range(2):
        variables = make_variables()
        compression = Compression.gradient_dropping(list(variables.values()), density=0.05, min_numel=50, **SCATTER)
        reducers.append(Reducer(variables, compression, True, op=hvd.Sum))
    first, second = reducers
    first(whole_numbers(SHAPES, 0, hvd.rank()))
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(compression=first.compression).save(f"{folder}/checkpoint")
        restored = tf.train.Checkpoint(compression=second.compression).restore(path)
        restored.assert_existing_objects_matched().assert_consumed()
    before = {name: total(residual_of(first.compression, name)) for name in SHAPES}
    reduced = second(whole_numbers(SHAPES, 1, hvd.rank()))
    assert_ranks_agree(reduced)
    assert second.compression.step.numpy() == 2
    assert second.compression.state_dict()["regions"]
    for name in SHAPES:
        fed = sum(whole_numbers(SHAPES, 1, rank)[name] for rank in range(hvd.size())).reshape(-1)
        left = total(residual_of(second.compression, name))
        np.testing.assert_array_equal(reduced[name].reshape(-1) + left, before[name] + fed, err_msg=name)


def test_the_histogram_of_the_first_step_is_counted():
    """8 bytes a bin, of which there are as many as elements; later steps send only payloads, of about the same size."""
    shapes = {"a": (600,), "b": (500,)}
    variables = make_variables(shapes)
    compression = Compression.gradient_dropping(list(variables.values()), density=0.05, min_numel=50, **SCATTER)
    reduce, sent = Reducer(variables, compression), []
    for step in range(3):
        reduce(draw(shapes, step, hvd.rank()))
        sent.append(compression.stats()["step"]["payload_bytes"])
    assert sent[0] - sent[1] == pytest.approx(8 * 1100, abs=200)
    assert sent[1] == pytest.approx(sent[2], abs=200) and sent[1] < 2000


def test_a_gradient_that_is_not_finite_skips_the_step():
    variables = make_variables()
    compression = Compression.gradient_dropping(list(variables.values()), density=0.05, min_numel=50, **SCATTER)
    reduce = Reducer(variables, compression, op=hvd.Sum)
    for step in range(4):
        gradients = {name: np.array(value) for name, value in whole_numbers(SHAPES, step, hvd.rank()).items()}
        if step == 2 and hvd.rank() == 0:
            gradients["head.weight"][3] = np.inf
        before = total(residual_of(compression, "head.weight")) if step == 2 else None
        reduced = reduce(gradients)
        if step == 2:
            fed = sum(whole_numbers(SHAPES, step, rank)["head.weight"] for rank in range(hvd.size()))
            fed[3] -= whole_numbers(SHAPES, step, 0)["head.weight"][3]
            np.testing.assert_array_equal(total(residual_of(compression, "head.weight")), before + fed)
            assert np.isnan(reduced["head.weight"]).all()


@pytest.mark.rank_counts
@pytest.mark.skipif(hvd.size() < 3, reason="a part of a job, and a rank outside it, need three processes")
@pytest.mark.parametrize("complete", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_a_process_set(complete):
    """What the ranks of the set put in is twice their means and their residuals; other ranks keep their gradients."""
    pair = hvd.add_process_set([0, hvd.size() - 1])
    try:
        variables = make_variables()
        settings = {"density": 0.05, "min_numel": 50, "momentum": 0.0, "complete": complete, **SCATTER}
        compression = Compression.dgc(list(variables.values()), process_set=pair, **settings)
        reduce = Reducer(variables, compression, op=hvd.Average, process_set=pair)
        fed, own, out = ({name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(3))
        for step in range(5):
            gradients = whole_numbers(SHAPES, step, hvd.rank())
            reduced = reduce(gradients)
            for name in SHAPES:
                fed[name] += sum(whole_numbers(SHAPES, step, rank)[name] for rank in pair.ranks)
                own[name] += gradients[name]
                out[name] += reduced[name]
        left = {name: total(residual_of(compression, name)).reshape(shape) for name, shape in SHAPES.items()}
        for name in SHAPES:
            expected = (fed[name] - left[name]) / 2 if pair.included() else own[name]
            np.testing.assert_array_equal(out[name], expected, err_msg=name)
        assert left["head.weight"].any() and left["body.weight"].any()
        assert compression.stats()["steps"] == 5 * pair.included()
    finally:
        assert hvd.remove_process_set(pair)
