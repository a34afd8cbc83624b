"""Horovod names the all-reduce of a gradient after the compressor and the variable."""

import re
import threading

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf
from gradients import draw
from tf_helpers import Reducer, as_gradients, make_variables, reduce_through_tape, several

from hvd_sparse.tensorflow import Compression

pytestmark = several
SHAPES = {"body": (40, 50), "head/kernel": (2000,), "head_kernel": (30, 60), "scale": ()}
SETTINGS = {
    "token": {},
    "token in half": {"values": "float16"},
    "dense or token": {"warmup": 3},
    "model": {"scope": "model"},
}


def prefix_of(compression):
    """Return the part of a name that is the compressor's."""
    return compression._parts.exchange.describe().removeprefix("compressor = ").replace(".", "_")


def names_in(graph):
    """Return the names of Horovod's own all-reduces in a traced function."""
    nodes = [node for function in graph.as_graph_def().library.function for node in function.node_def]
    reduced = {node.name.split("/")[-1] for node in nodes if node.op == "HorovodAllreduce"}
    return sorted(name for name in reduced if name.startswith("HorovodAllreduce_"))  # the others are the compressor's


def trace(settings, calls=1, **options):
    """Return the compressor's part of names, and the names of a step."""
    variables = make_variables(SHAPES)
    compression = Compression.dgc(list(variables.values()), density=0.02, **settings)

    def step(gradients):
        return [reduce_through_tape(variables, gradients, compression, **options) for _ in range(calls)]

    gradients = as_gradients(variables, draw(SHAPES, 0, hvd.rank()))
    graph = tf.function(step, autograph=False).get_concrete_function(gradients).graph
    return prefix_of(compression), names_in(graph)


def variables_of(prefix, names):
    """Return what follows the compressor's part of each name."""
    return sorted(re.search(rf"_{prefix}_(\w+)_0$", name)[1] for name in names)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_names_are_those_of_compressor_and_variable(settings):
    prefix, names = trace(settings)
    assert variables_of(prefix, names) == ["body", "head_kernel", "head_kernel_1", "scale"]
    _, others = trace(settings)
    assert len(set(names + others)) == 2 * len(SHAPES)


def test_each_call_in_one_graph_has_its_own_names():
    prefix, names = trace({}, calls=2)
    assert len(names) == len(set(names)) == 2 * len(SHAPES)
    assert {"body", "body_1", "scale", "scale_1"} <= set(variables_of(prefix, names))


def test_two_compressors_train_in_two_threads():
    """The threads may start their collectives in another order on each rank: Horovod matches them by name."""
    shapes = {"first": (60, 50), "second": (30,)}
    trained = [{"variables": make_variables(shapes), "out": []} for _ in range(2)]
    for one in trained:
        compression = Compression.gradient_dropping(list(one["variables"].values()), density=0.02)
        one["reduce"] = Reducer(one["variables"], compression)
        one["reduce"](draw(shapes, 0, hvd.rank()))  # traced here, in the same order on every rank

    def train(one, seed):
        for step in range(1, 20):
            one["out"].append(one["reduce"](draw(shapes, step, hvd.rank(), seed=seed)))

    threads = [threading.Thread(target=train, args=(one, seed), daemon=True) for seed, one in enumerate(trained)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    for seed, one in enumerate(trained):
        expected = [
            sum(draw(shapes, step, rank, seed)["second"] for rank in range(hvd.size())) for step in range(1, 20)
        ]
        assert len(one["out"]) == len(expected)
        for found, total in zip(one["out"], expected, strict=True):
            assert found["second"] == pytest.approx(total / hvd.size(), rel=1e-5, abs=1e-6)
