"""Error feedback beside variables on a GPU: here TensorFlow puts what asks for a missing GPU on the CPU, as it may."""

import types

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from gradients import SHAPES, draw
from tf_helpers import Reducer, make_variables, several

import hvd_sparse.tensorflow.compression
from hvd_sparse.tensorflow import Compression
from hvd_sparse.tensorflow.devices import CPU, place_buffers

GPU = "/job:localhost/replica:0/task:0/device:GPU:0"
SECOND = GPU.replace("GPU:0", "GPU:1")
SETTINGS = {
    "clipped": ("dgc", {"momentum": 0.9, "weight_decay": 0.01, "clip_norm": 5.0}),
    "whole": ("dgc", {"momentum": 0.9, "scope": "model", "clip_norm": 5.0, "clip_scope": "model"}),
    "low_bit": ("gradient_dropping", {"values": "int2"}),
    "dense_at_first": ("samomentum", {"warmup": 2, "dense_fallback": "measured"}),
}
ON_GPU = {"HvdSparseAccumulateBucket", "HvdSparseClearBucket", "HvdSparseReduceBucket", "HvdSparseTakeSum"}
ON_CPU = {"HorovodAllgather", "ScatterNdUpdate", "ResourceScatterUpdate", "HvdSparseToken"}


def train(kind, dtype=tf.float32):
    """Return the compressor, the graph of a step, and the reduced gradients of five steps."""
    method, options = SETTINGS[kind]
    variables = make_variables(dtype=dtype)
    compression = getattr(Compression, method)(list(variables.values()), density=0.05, min_numel=10, **options)
    reduce = Reducer(variables, compression)
    steps = [reduce(draw(SHAPES, step, hvd.rank(), seed=3)) for step in range(5)]
    (traced,) = reduce._reduce._list_all_concrete_functions()
    return compression, traced.graph, steps


def nodes_of(graph):
    """Yield the operations of a graph, and of the branches in it."""
    definition = graph.as_graph_def()
    yield from definition.node
    for function in definition.library.function:
        yield from function.node_def


@several
@pytest.mark.parametrize("dtype", [tf.float32, tf.float16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("kind", SETTINGS)
def test_results_are_those_without_a_gpu(monkeypatch, kind, dtype):
    *_, expected = train(kind, dtype)
    monkeypatch.setattr(hvd_sparse.tensorflow.compression, "place_buffers", lambda *arguments, warns: GPU)
    compression, graph, found = train(kind, dtype)
    assert {feedback.device for feedback in compression.feedback.values()} == {GPU}
    for mine, theirs in zip(found, expected, strict=True):
        for name, gradient in theirs.items():
            np.testing.assert_array_equal(mine[name], gradient, name)
    places = {(node.op, tf.DeviceSpec.from_string(node.device).device_type) for node in nodes_of(graph)}
    assert {op for op, device in places if op in ON_GPU and device == "GPU"} == ON_GPU
    assert not [op for op, device in places if op in ON_GPU and device != "GPU"]
    assert not [op for op, device in places if op in ON_CPU and device == "GPU"]


def place(method, devices=(GPU, GPU), **options):
    """Return where the error feedback of a method would be, for variables on these devices."""
    algorithm = getattr(Compression, method)(list(make_variables().values()), density=0.05, **options).algorithm
    variables = [types.SimpleNamespace(device=device) for device in devices]
    return place_buffers(algorithm, variables, warns=True)


def cross(why, method, **options):
    """Check that gradients of this method cross to the CPU, with a warning that says why."""
    with pytest.warns(UserWarning, match=f"gradients cross to the CPU and back: {why}"):
        assert place(method, **options) == CPU


@pytest.fixture
def with_gpu(monkeypatch):
    """Pretend that the operators were built for the GPU."""
    monkeypatch.setattr("hvd_sparse.library.has_cuda", lambda framework: framework == "tensorflow")


def test_buffers_are_beside_the_variables_of_one_gpu(with_gpu):
    for method in ("dgc", "gradient_dropping", "samomentum", "topk"):
        assert place(method) == GPU, method
    assert place("dgc", scope="model", values="int1") == GPU
    assert place("dgc", (SECOND, SECOND)) == SECOND
    for device in ("", GPU.replace("GPU", "CPU")):
        assert place("dgc", (device, device)) == CPU
    with tf.Graph().as_default():
        assert place("dgc") == CPU


def test_a_warning_says_why_gradients_cross(with_gpu, monkeypatch):
    for method in ("micro", "cltk", "random_k", "sidco", "dct"):
        cross(f"Compression.{method} works on the CPU", method)
    for exchange in ("reduce_scatter", "auto"):
        cross(f'exchange="{exchange}" works on the CPU', "dgc", exchange=exchange)
    for other in (SECOND, GPU.replace("GPU", "CPU")):
        cross(f"they are on several devices, .*{other[-5:]}", "dgc", devices=(GPU, other))

    def fail(values):
        raise tf.errors.InternalError(None, None, "no kernel image is available")

    with monkeypatch.context() as patch:
        patch.setattr("hvd_sparse.tensorflow.ops.all_finite", fail)
        cross("the kernels do not run on this GPU: no kernel image", "dgc")
    monkeypatch.setattr("hvd_sparse.library.has_cuda", lambda framework: framework == "torch")
    cross("hvd_sparse was built without CUDA.*HVD_SPARSE_WITH_CUDA=1", "dgc")


@several
def test_a_process_that_compresses_nothing_needs_no_memory_of_a_gpu(monkeypatch):
    asked = []
    monkeypatch.setattr(
        hvd_sparse.tensorflow.compression, "place_buffers", lambda *arguments, warns: asked.append(warns) or CPU
    )
    members = hvd.add_process_set([0])
    try:
        Compression.dgc(list(make_variables().values()), density=0.05, process_set=members)
        assert asked == []  # a set of one, or a rank outside it
        Compression.dgc(list(make_variables().values()), density=0.05)
        assert asked == [hvd.rank() == 0]
    finally:
        hvd.remove_process_set(members)
