"""Errors of the low-bit and dense functions, which name the argument; damaged payloads; the groups of levels."""

import numpy as np
import pytest
import torch
from test_low_bit import LOW_BIT, VALUES, tensor

from hvd_sparse import algorithms, reference, wire
from hvd_sparse.granularity import by_group, channels_of, segments_of
from hvd_sparse.torch import ops, varying_ops

BAD_SEGMENTS = [
    *([[1, 2]], [[-1, 2]]),  # not from 0
    *([[0, 0]], [[0, -1]], [[0, 7]], [[0, 5], [4, 1]], [[0, 1], [4, 3]]),  # no channels, or more than elements
    *([[0, 1], [4, 1], [4, 1]], [[0, 1], [4, 1], [2, 1]], [[0, 1], [6, 1]], [[0, 1], [9, 1]]),  # not ascending below n
]


@pytest.mark.parametrize("segments", BAD_SEGMENTS)
@pytest.mark.parametrize("value_dtype", LOW_BIT)
def test_segments_that_do_not_fit_are_refused(segments, value_dtype):
    n, k, form = 6, 2, ("run_length", value_dtype, tensor(segments))
    out, payload = torch.full((64,), 9, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    total, places = torch.full((n,), 7.0), torch.tensor([[0], [k]])
    for name, call in {
        "payload_size": lambda: ops.payload_size(n, k, *form),
        "pack": lambda: ops.pack(torch.tensor([1, 4]), torch.ones(2), n, k, out, *form),
        "unpack": lambda: ops.unpack(payload, n, k, *form),
        "reduce_payloads": lambda: ops.reduce_payloads(payload[None], 0, n, k, total, 1.0, *form),
        "reduce_located": lambda: varying_ops.reduce_located(payload, places, n, total, 1.0, *form),
    }.items():
        with pytest.raises(ValueError, match=rf"hvd_sparse.{name}: segment \d from -?\d to -?\d of n = 6"):
            call()
    assert (out == 9).all() and (total == 7.0).all()
    with pytest.raises(ValueError, match="segments: from"):
        wire.payload_size(n, k, "run_length", value_dtype, segments)
    with pytest.raises(ValueError, match="segments: from"):
        reference.pack([1, 4], [1.0, 1.0], n, k, "run_length", value_dtype, segments)


def test_segments_are_read_for_low_bit_values_alone():
    assert wire.payload_size(5, 2, "run_length", "float32", [[1, 99]]) == wire.payload_size(5, 2)
    assert ops.payload_size(5, 2, "run_length", "float32", tensor([[1, 99]])) == wire.payload_size(5, 2)


ARGUMENTS = {"values": torch.tensor(VALUES), "value_dtype": "int2", "indices": torch.arange(6)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"level": "median"}, "level must be mean or min, got median"),
        ({"value_dtype": "int4"}, "value_dtype must be .*int2, int1 or none, got int4"),
        ({"values": torch.ones(6, dtype=torch.float64)}, "values must be Float"),
        ({"indices": None, "segments": torch.tensor([[0, 2]])}, "0 indices but 6 values, and segments"),
        ({"indices": torch.arange(5), "segments": torch.tensor([[0, 2]])}, "5 indices but 6 values, and segments"),
        ({"indices": torch.arange(6).int()}, "indices must be Long"),
        ({"indices": torch.arange(-1, 5), "segments": torch.tensor([[0, 2]])}, "indices must be strictly ascending"),
        (
            {"indices": torch.arange(6).flip(0), "segments": torch.tensor([[0, 2]])},
            "indices must be strictly ascending",
        ),
        (
            {"indices": torch.zeros(6, dtype=torch.int64), "segments": torch.tensor([[0, 2]])},
            "indices must be strictly ascending",
        ),
        ({"segments": torch.tensor([[0, 2]]).int()}, "segments must be Long"),
        ({"segments": torch.tensor([0, 2])}, r"segments must be \[segments, 2\]"),
        ({"segments": torch.tensor([[0, 2, 1]])}, r"segments must be \[segments, 2\]"),
        ({"segments": torch.tensor([[0, 4], [0, 2]]).t()}, "segments must be contiguous"),
        ({"segments": torch.tensor([[1, 2]])}, "segment 0 from 1"),
        ({"segments": torch.tensor([[0, 0]])}, "cannot have 0 channels"),
    ],
)
def test_quantize_names_what_it_refuses(change, message):
    ops.quantize(**ARGUMENTS, segments=torch.tensor([[0, 2]]))
    with pytest.raises(ValueError, match=f"hvd_sparse.quantize: .*{message}"):
        ops.quantize(**(ARGUMENTS | change))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("median",), "level must be one of 'mean', 'min'; got 'median'"),
        (("mean", np.arange(5), [[0, 2]]), "indices must ascend from 0, one a value; got 5 for 6 values"),
        (("mean", np.arange(-1, 5), [[0, 2]]), "indices must ascend from 0"),
        (("mean", np.zeros(6, int), [[0, 2]]), "indices must ascend from 0"),
        (("mean", None, [[0, 2]]), "segments need the indices"),
        (("mean", np.arange(6), [[1, 2]]), "segments: from 1 "),
        (("mean", np.arange(6), [[0, 0]]), "there cannot be 0 channels"),
        (("mean", np.arange(6), [[0, 1], [0, 1]]), "segments: from 0 to 0"),
    ],
)
def test_the_reference_names_what_it_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        reference.quantize(np.float32(VALUES), "int1", *arguments)


@pytest.mark.parametrize(
    ("value_dtype", "values", "segments"),
    [
        ("int1", [1.0, -2.0, 1.0], None),
        ("int2", [1.0, -2.0, 3.0], None),
        ("int2", [0.0, -2.0, 3.0], None),
        ("int1", [1.0, -2.0, 3.0], [[0, 2]]),
    ],
)
@pytest.mark.parametrize("coding", [*wire.CODINGS, "auto"])
def test_values_that_were_not_quantized_are_refused_and_nothing_is_written(value_dtype, values, segments, coding):
    form, values = (coding, value_dtype), np.float32(values)
    out = torch.full((wire.payload_size(3, 3, *form, segments),), 9, dtype=torch.uint8)
    with pytest.raises(ValueError, match="quantize them first"):
        reference.pack(np.arange(3), values, 3, 3, *form, segments)
    with pytest.raises(ValueError, match=r"hvd_sparse.pack: values have more magnitudes .* quantize them first"):
        ops.pack(torch.arange(3), tensor(values), 3, 3, out, *form, tensor(segments))
    assert (out == 9).all()


@pytest.mark.parametrize("value_dtype", ["float32", *LOW_BIT])
def test_dense_payloads_hold_all_elements_or_none(value_dtype):
    form, out = ("dense", value_dtype), torch.full((200,), 9, dtype=torch.uint8)
    for call in (
        lambda: ops.payload_size(5, 4, *form),
        lambda: ops.pack(torch.arange(4), torch.ones(4), 5, 4, out, *form),
        lambda: ops.unpack(out, 5, 4, *form),
    ):
        with pytest.raises(ValueError, match="a dense payload holds all n = 5 entries, got k = 4"):
            call()
    with pytest.raises(ValueError, match="k must be n = 5 where all are sent, got 4"):
        reference.pack(np.arange(4), np.ones(4), 5, 4, *form)
    nothing = reference.pack([], [], 5, 5, *form)
    assert nothing.size == ops.payload_size(5, 5, *form) and not nothing[32:].any()
    for indices, values in (reference.unpack(nothing, 5, 5, *form), ops.unpack(tensor(nothing), 5, 5, *form)):
        assert len(indices) == len(values) == 0
    total = torch.full((5,), 7.0)
    ops.reduce_payloads(tensor(nothing[None]), 0, 5, 5, total, 1.0, *form)
    assert (total == 0).all()


PAYLOADS = [
    (9, [1, 4, 5, 8], "run_length", "int2", [[0, 3]]),
    (9, [1, 4, 5, 8], "run_length", "int1", None),
    (9, [1, 4, 5, 8], "elias_fano", "int2", [[0, 3]]),
    (9, [1, 4, 5, 8], "bitmap", "int1", None),
    (5, range(5), "dense", "int2", None),
    (5, range(5), "dense", "int1", [[0, 2]]),
    (5, range(5), "dense", "float32", None),
]


@pytest.mark.parametrize(("n", "indices", "coding", "value_dtype", "segments"), PAYLOADS)
def test_payloads_cut_or_flipped_anywhere_are_refused(n, indices, coding, value_dtype, segments):
    k, form, places = len(indices), (coding, value_dtype), np.array(indices)
    sent = reference.quantize(np.float32([-3, 1, 2, -6, 5][:k]), value_dtype, "mean", places, segments)
    good = reference.pack(places, sent, n, k, *form, segments)
    for size in (*range(good.size), good.size + 8):
        with pytest.raises(ValueError, match="size"):
            ops.unpack(tensor(np.resize(good, size)), n, k, *form, tensor(segments))
    for byte in range(good.size):
        for bit in range(8):
            damaged, total = good.copy(), torch.full((n,), 7.0)
            damaged[byte] ^= 1 << bit
            with pytest.raises(ValueError, match="payload"):
                reference.unpack(damaged, n, k, *form, segments)
            with pytest.raises(ValueError, match=r"hvd_sparse.unpack: payload"):
                ops.unpack(tensor(damaged), n, k, *form, tensor(segments))
            with pytest.raises(ValueError, match="from rank 1: payload"):
                rows = np.stack([good, damaged])
                ops.reduce_payloads(tensor(rows), 0, n, k, total, 1.0, *form, tensor(segments))
            assert (total == 7.0).all()


def test_channels_are_as_many_as_tensors_and_fit_them():
    payload = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"hvd_sparse.locate_payloads: channels must have 2 entries, one a member"):
        varying_ops.locate_payloads(payload, [5, 5], 1, "run_length", "int1", [2])
    for channels in ([0], [-1], [6]):
        with pytest.raises(ValueError, match=rf"hvd_sparse.locate_payloads: .*cannot have {channels[0]} channels"):
            varying_ops.locate_payloads(payload, [5], 1, "run_length", "int1", channels)
        with pytest.raises(ValueError, match=f"there cannot be {channels[0]} channels"):
            reference.locate_payloads(payload.numpy(), [5], 1, "run_length", "int1", channels)


def dropping(**options):
    return algorithms.Settings.gradient_dropping(None, **options)


@pytest.mark.parametrize(
    ("shape", "granularity", "channels"),
    [
        *(((6, 4), "channel", 4), ((2, 3, 4, 5), "channel", 5), ((7, 1), "channel", 1), ((9,), "channel", 1)),
        *(((), "channel", 1), ((6, 4), "tensor", 1), ((9,), "tensor", 1)),
    ],
)
def test_channels_of_a_tensor(shape, granularity, channels):
    assert channels_of(shape, dropping(values="int1", granularity=granularity)) == channels


@pytest.mark.parametrize(
    ("shapes", "values", "granularity", "segments"),
    [
        ([(6, 4)], "int1", "channel", [[0, 4]]),
        ([(6, 4)], "int1", "tensor", None),
        ([(24,)], "int2", "channel", None),
        ([(6, 1)], "int2", "channel", None),
        ([(6, 4), (5,), (2, 3, 7)], "int2", "channel", [[0, 4], [24, 1], [29, 7]]),
        ([(6, 4), (5,), (2, 3, 7)], "int2", "tensor", [[0, 1], [24, 1], [29, 1]]),
        ([(6, 4), (5,)], "float32", "channel", None),
        ([(6, 4), (5,)], "bfloat16", "channel", None),
    ],
)
def test_segments_of_tensors_one_after_the_other(shapes, values, granularity, segments):
    found = segments_of(shapes, dropping(values=values, granularity=granularity))
    if segments is None:
        assert found is None
    else:
        assert (found.dtype, found.tolist()) == (np.int64, segments)
        assert found.flags.c_contiguous
        n = sum(int(np.prod(shape)) for shape in shapes)
        assert wire.group_count(found, n) == sum(channels for _, channels in segments)


def test_by_group_puts_the_entries_of_a_group_together():
    indices, segments = np.array([0, 1, 3, 5, 6, 8, 9, 11]), np.array([[0, 3], [6, 2], [10, 1]])
    # channels 0, 1, 0, 2 of the first matrix; 0, 0, 1 of the second; the third
    order, grouped = by_group(indices, segments)
    assert order.tolist() == [0, 2, 1, 3, 4, 5, 6, 7]
    assert grouped.tolist() == [[0, 1], [2, 1], [3, 1], [4, 1], [6, 1], [7, 1]]
    assert order.dtype == grouped.dtype == np.int64


def test_by_group_of_a_single_group_and_of_nothing():
    order, grouped = by_group(np.array([3, 5, 9]), None)
    assert (order.tolist(), grouped.tolist()) == ([0, 1, 2], [[0, 1]])
    order, grouped = by_group(np.zeros(0, np.int64), np.array([[0, 3]]))
    assert (order.shape, grouped.shape) == ((0,), (0, 2))


@pytest.mark.parametrize("value_dtype", LOW_BIT)
@pytest.mark.parametrize("level", reference.LEVELS)
def test_by_group_changes_no_level(value_dtype, level):
    """Entries in the order of their groups, as if they were a separate tensor, keep their levels."""
    rng, segments = np.random.default_rng(0), np.array([[0, 7], [500, 1], [600, 40]])
    indices = np.sort(rng.choice(1000, 300, replace=False))
    values = rng.standard_normal(300).astype(np.float32)
    order, grouped = by_group(indices, segments)
    expected = reference.quantize(values, value_dtype, level, indices, segments)[order]
    found = ops.quantize(tensor(values[order]), value_dtype, level, torch.arange(300), tensor(grouped))
    assert found.numpy().tobytes() == expected.tobytes()
    assert np.unique(np.abs(expected)).size > 20
    for members in np.split(indices[order], grouped[1:, 0]):
        assert (np.diff(members) > 0).all() and np.unique(reference.group_of(members, segments)).size == 1
