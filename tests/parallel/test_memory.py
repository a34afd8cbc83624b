"""What stays in memory after a step: parameters, error feedback and messages, but no gradient."""

import gc
import weakref

import horovod.torch as hvd
import pytest
import torch
from gradients import SHAPES, draw
from helpers import distributed, make_parameters, step

from hvd_sparse.torch import Compression

SETTINGS = {"density": 0.05, "min_numel": 100}


@pytest.fixture(autouse=True)
def earlier_objects_are_left_alone():
    """The garbage collector looks at the objects of this test only; those of a whole session take it a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def bytes_held():
    """Return the bytes of all tensors that Python can reach."""
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


@pytest.mark.parametrize("method", ["dgc", "dct", "micro", "random_k"])
def test_steps_leave_no_gradient_to_the_garbage_collector(method):
    """Horovod's own frames hold gradients: a frame in a cycle of references would keep them for many steps."""
    parameters = make_parameters()
    compression = getattr(Compression, method)(parameters.items(), **SETTINGS)
    optimizer = distributed(parameters, compression)

    def train():
        step(optimizer, parameters, draw(SHAPES, 0, hvd.rank()))
        gradients = [weakref.ref(one.grad) for one in parameters.values()]
        optimizer.zero_grad()
        return [reference() for reference in gradients]

    train()
    gc.collect()
    gc.disable()
    try:
        assert train() == [None] * len(parameters)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_variables_of_the_training_function_are_not_kept():
    """Reading the variables of a frame copies them for as long as its function runs (before Python 3.13)."""
    parameters = make_parameters()
    compression = Compression.dgc(parameters.items(), **SETTINGS)
    optimizer = distributed(parameters, compression)
    for t in range(2):
        output = torch.zeros(1000)
        alive = weakref.ref(output)
        step(optimizer, parameters, draw(SHAPES, t, hvd.rank()))
        del output
        assert alive() is None


@pytest.mark.parametrize("exchange", ["gather", "reduce_scatter", "hierarchical"])
@pytest.mark.parametrize("scope", ["tensor", "model"])
def test_no_step_leaves_tensors_as_large_as_the_model(exchange, scope):
    """The first step is special: no tensor was expected."""
    shapes = {"a": (300, 100), "b": (200, 150), "c": (40,)}
    parameters = make_parameters(shapes)
    gc.collect()
    before = bytes_held()
    compression = Compression.dgc(parameters.items(), scope=scope, exchange=exchange, momentum=0.9, **SETTINGS)
    optimizer = distributed(parameters, compression)
    whole = sum(parameter.nbytes for parameter in parameters.values())
    for t in range(3):
        step(optimizer, parameters, draw(shapes, t, hvd.rank()))
        optimizer.zero_grad()
        gc.collect()
        feedback = compression._step.feedback.values()
        buffers = sum(buffer.nbytes for one in feedback for buffer in one.buffers.values())
        assert bytes_held() - before - buffers < 0.4 * whole
