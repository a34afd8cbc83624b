"""The framework-free parts of model parallelism: settings, schedules, trees, messages, and damaged messages."""

import zlib
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from hvd_sparse import library
from hvd_sparse.mailbox import DamagedMessage
from hvd_sparse.model_parallel import message, tree
from hvd_sparse.model_parallel.boundary import BoundarySettings
from hvd_sparse.model_parallel.hybrid import hybrid
from hvd_sparse.model_parallel.message import Head, Kind, Tensor
from hvd_sparse.model_parallel.schedule import BACKWARD, FORWARD, SCHEDULES, split_rows
from hvd_sparse.parameter_server.methods import DGS
from hvd_sparse.parameter_server.session import Session
from hvd_sparse.torch.model_parallel import Pipeline, ThresholdBoundary


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 9])
def test_schedules_end_and_never_wait_for_each_other(schedule, stages, micro_batches):
    plans = [SCHEDULES[schedule](stage, stages, micro_batches) for stage in range(stages)]
    done, places, most = set(), [0] * stages, [0] * stages
    while any(place < len(plan) for place, plan in zip(places, plans, strict=True)):
        moved = False
        for stage, plan in enumerate(plans):
            if places[stage] == len(plan):
                continue
            what, micro = plan[places[stage]]
            needs = (what, micro, stage - 1) if what == FORWARD else (what, micro, stage + 1)
            is_end = needs[2] < 0 or needs[2] == stages
            if is_end or needs in done:
                assert what == FORWARD or (FORWARD, micro, stage) in done
                done.add((what, micro, stage))
                places[stage] += 1
                moved = True
                held = sum((FORWARD, m, stage) in done for m in range(micro_batches))
                held -= sum((BACKWARD, m, stage) in done for m in range(micro_batches))
                most[stage] = max(most[stage], held)
        assert moved, "the stages wait for each other"
    assert len(done) == 2 * stages * micro_batches
    if schedule == "1f1b":
        assert most == [min(stages - stage, micro_batches) for stage in range(stages)]
    else:
        assert most == [micro_batches] * stages


def test_backwards_come_in_one_order_whatever_the_schedule():
    for stage in range(4):
        orders = [[m for what, m in order(stage, 4, 6) if what == BACKWARD] for order in SCHEDULES.values()]
        assert orders[0] == orders[1] == list(range(6))


@pytest.mark.parametrize(
    ("rows", "parts", "sizes"), [(7, 3, [3, 2, 2]), (2, 4, [1, 1]), (1, 1, [1]), (8, 4, [2] * 4), (5, 1, [5])]
)
def test_micro_batches_are_as_equal_as_can_be(rows, parts, sizes):
    assert split_rows(rows, parts) == sizes


def test_how_many_a_row_keeps_and_what_a_row_is():
    chosen = BoundarySettings(0.05, "topk", -1, 0.1, 0).checked()
    assert [chosen.kept(f) for f in (1, 9, 10, 50, 512)] == [1, 1, 1, 3, 26]  # half is rounded up
    assert chosen.row_shape((2, 3, 4)) == (6, 4)
    assert chosen._replace(start_dim=1).row_shape((2, 3, 4)) == (2, 12)
    assert chosen._replace(start_dim=-2).row_shape((0, 3, 4)) == (0, 12)


def test_the_numbers_of_a_boundary_are_those_of_python():
    chosen = BoundarySettings(Fraction(1, 20), "laplace", np.int64(-1), Fraction(1, 5), np.uint8(3)).checked()
    assert chosen == (0.05, "laplace", -1, 0.2, 3)
    assert [type(value) for value in chosen] == [float, str, int, float, int]


def test_a_seed_below_0_is_refused_at_once():
    with pytest.raises(ValueError, match="seed must be an integer of at least 0, got -1"):
        ThresholdBoundary(0.1, seed=-1)


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("HOROVOD_SIZE", "MPI has 1 rank where Horovod has 2: start with mpirun or horovodrun --mpi"),
        ("OMPI_COMM_WORLD_SIZE", "MPI has 1 rank where its launcher has started 2: mpi4py is built for another"),
        ("PMI_SIZE", "MPI has 1 rank where its launcher has started 2: mpi4py is built for another"),
    ],
)
def test_processes_of_a_job_that_are_worlds_of_mpi_of_their_own_are_refused(monkeypatch, variable, expected):
    """As `horovodrun --gloo` starts them, or the mpirun of another MPI than mpi4py's: each would train alone."""
    monkeypatch.setenv(variable, "2")
    world = SimpleNamespace(Get_size=lambda: 1)
    monkeypatch.setattr(library, "mpi", lambda: SimpleNamespace(COMM_WORLD=world, Is_finalized=lambda: False))
    stage, loss = torch.nn.Linear(3, 3), torch.nn.functional.mse_loss
    for start in (
        lambda: Pipeline(stage, loss=loss),
        lambda: Pipeline(stage, loss=loss, communicator=world),
        lambda: hybrid(None, 2),
        lambda: Session({"w": np.zeros(3, np.float32)}, DGS()),
    ):
        with pytest.raises(RuntimeError, match=expected):
            start()


TREES = [3, None, (1, 2), [1, (2, None)], {"a": 1, "b": (2, {"c": 3})}, (), {}]


@pytest.mark.parametrize("nested", TREES)
def test_trees_come_back(nested):
    def tuples(node):
        if isinstance(node, (list, tuple)):
            return tuple(tuples(part) for part in node)
        return {key: tuples(part) for key, part in node.items()} if isinstance(node, dict) else node

    leaves, structure = tree.flatten(nested)
    assert tree.unflatten(leaves, structure) == tuples(nested)
    assert len(tree.names(structure)) == len(leaves)


def test_leaves_are_named_by_their_path():
    assert tree.names(tree.flatten(5)[1]) == ["output"]
    assert tree.names(tree.flatten({"x": 1, "y": (2, 3)})[1]) == ["x", "y.0", "y.1"]
    with pytest.raises(TypeError, match="keys of what crosses a boundary must be strings, got 1"):
        tree.flatten({1: 2})


def masked(shape, dtype="float32", density=0.3, seed=0):
    random = np.random.default_rng(seed)
    columns = shape[-1]
    mask = random.random((int(np.prod(shape)) // columns, columns)) < density
    array = random.normal(size=shape).astype(np.float32)
    if dtype == "bfloat16":
        array = (array.view(np.uint32) >> 16).astype(np.uint16)
    else:
        array = array.astype(dtype)
    return Tensor(array * mask.reshape(shape), dtype, mask, True)


def whole(shape, dtype):
    random = np.random.default_rng(1)
    array = random.integers(0, 2 if dtype == "bool" else 100, shape).astype(message.item_type(dtype))
    return Tensor(array, dtype)


HEAD = Head(Kind.FORWARD, step=7, micro=2, micros=4, rows=5, total_rows=19, flags=2)


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [masked((4, 33))],
        [masked((2, 3, 17), dtype) for dtype in message.MASKABLE],
        [whole((3, 1), dtype) for dtype in message.DTYPES],
        [whole((), "float64"), whole((0, 4), "int32"), masked((1, 1), density=0.0), masked((6, 5), density=1.0)],
    ],
)
def test_messages_come_back(tensors):
    structure = list(range(len(tensors)))
    data = message.encode(HEAD, structure, tensors)
    head, description, body = message.decode_head(data)
    found_structure, found = message.decode_tensors(description, body)
    assert head == HEAD and found_structure == structure and len(found) == len(tensors)
    for ours, theirs in zip(found, tensors, strict=True):
        assert (ours.dtype, ours.gradient, ours.array.shape) == (theirs.dtype, theirs.gradient, theirs.array.shape)
        assert np.array_equal(ours.array, theirs.array)
        assert (ours.mask is None) == (theirs.mask is None)
        if ours.mask is not None:
            assert np.array_equal(ours.mask, theirs.mask)


@pytest.mark.parametrize("dtype", message.MASKABLE)
def test_gradients_travel_as_values_alone(dtype):
    likes = [masked((8, 64), dtype), whole((5,), "float32")]
    gradients = [masked((8, 64), dtype, seed=3), whole((5,), "float32")]
    gradients[0] = gradients[0]._replace(mask=likes[0].mask)
    data = message.encode(HEAD._replace(kind=Kind.BACKWARD), tensors=gradients, describe=False)
    head, description, body = message.decode_head(data)
    assert head.kind == Kind.BACKWARD and description == b""
    kept = np.count_nonzero(likes[0].mask)
    assert data.size <= 32 + 32 + 7 + kept * likes[0].array.itemsize + 20
    first, second = message.decode_gradients(body, likes)
    mask = likes[0].mask.reshape(8, 64)
    assert np.array_equal(first.array, gradients[0].array * mask) and np.array_equal(second.array, gradients[1].array)


def test_gradients_of_other_shapes_are_refused():
    like, other = masked((8, 64)), masked((8, 65))
    data = message.encode(HEAD._replace(kind=Kind.BACKWARD), tensors=[other], describe=False)
    with pytest.raises(DamagedMessage):
        message.decode_gradients(message.decode_head(data)[2], [like])
    data = message.encode(HEAD, tensors=[whole((6,), "float32")], describe=False)
    with pytest.raises(DamagedMessage, match="gradients of 20 bytes were expected, got 24"):
        message.decode_gradients(message.decode_head(data)[2], [whole((5,), "float32")])


@examples(300)
@given(st.data())
def test_damage_is_found_or_does_no_harm(data):
    tensors = [masked((4, 33)), whole((3, 2), "int16"), masked((2, 3, 17), "float16")]
    good = message.encode(HEAD, [0, 1, 2], tensors)
    bad = good.copy()
    for place in data.draw(st.lists(st.integers(0, good.size - 1), min_size=1, max_size=4)):
        bad[place] = data.draw(st.integers(0, 255))
    bad = bad[: data.draw(st.sampled_from([good.size, good.size - 1, 40, 5, 0]))]
    try:
        _, description, body = message.decode_head(bad)
        _, found = message.decode_tensors(description, body)
    except DamagedMessage:
        return
    for ours, theirs in zip(found, tensors, strict=True):  # what got through is what was sent
        assert ours.array.shape == theirs.array.shape
        assert np.array_equal(ours.array, theirs.array)


@examples(200)
@given(st.binary(max_size=200), st.binary(max_size=100))
def test_any_description_is_refused_or_read(description, body):
    try:
        message.decode_tensors(description, np.frombuffer(body, np.uint8))
    except DamagedMessage:
        pass


def test_another_version_is_refused():
    good = message.encode(HEAD)
    bad = good.copy()
    bad[4] = 9
    zeroed = bytes(bad[:28]) + bytes(4)
    description = bytes(bad[32:])
    bad[28:32] = np.frombuffer(zlib.crc32(description, zlib.crc32(zeroed)).to_bytes(4, "little"), np.uint8)
    with pytest.raises(DamagedMessage, match="version 9 of the protocol; this is version 2"):
        message.decode_head(bad)
