"""Hostile messages of a pipeline: all errors are DamagedMessage, and memory is bounded by the received bytes."""

import json
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_sparse.mailbox import DamagedMessage
from hvd_sparse.model_parallel import message
from hvd_sparse.model_parallel.message import MASKED, TENSOR, WHOLE, Head, Kind, Tensor

PER_BYTE = (
    1024 * 10
)  # of memory: an entry takes 2 bytes or more, and may stand for 1024 elements of at most 9 + 8 bytes
OVERHEAD = 200_000  # bytes: Python's own objects


def description(shapes, structure=0, dtype=0, form=MASKED, gradient=0, columns=None, kept=1):
    """Return the description of tensors of these shapes, in the layout that the module documents."""
    text = json.dumps(structure).encode()
    parts = [struct.pack("<H", len(text)), text]
    for shape in shapes:
        width = (shape[-1] if shape else 0) if columns is None else columns
        parts += [TENSOR.pack(dtype, form, gradient, len(shape), width, kept), struct.pack(f"<{len(shape)}I", *shape)]
    return b"".join(parts)


def decoded_within_bounds(text, body):
    """Decode; return the tensors, None for damage. Fails where memory is asked for that the bytes do not justify."""
    tracemalloc.start()
    try:
        return message.decode_tensors(text, body)[1]
    except DamagedMessage:
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= OVERHEAD + PER_BYTE * (len(text) + body.size), peak


@pytest.mark.parametrize(
    ("shape", "kept"),
    [
        ((2**30, 2**30), 1),  # 4 EiB of float32
        ((2**20, 2**20), 1),
        ((2**14, 2**15), 0),  # 2 GiB, which would have been there
        ((2**31, 2**31, 2**31), 2**64 - 1),
        ((2**32 - 1,) * 255, 1),
    ],
)
@pytest.mark.parametrize("form", [MASKED, WHOLE])
def test_few_bytes_cannot_claim_much_memory(shape, kept, form):
    for size in (0, 48, 56, 4096):
        text = description([shape], form=form, kept=kept)
        assert decoded_within_bounds(text, np.zeros(size, np.uint8)) is None


SIDES = st.sampled_from([0, 1, 2, 3, 5, 64, 1000, 2**16, 2**20, 2**31, 2**32 - 1])
TEXTS = st.one_of(
    st.binary(max_size=60),
    st.builds(
        description,
        st.lists(st.lists(SIDES, max_size=4), max_size=3),
        structure=st.sampled_from([0, [0, 1], {"a": 0}, None, "a", True, 1.5, -1, [1, 0], [[0]], 10**30]),
        dtype=st.integers(0, 20),
        form=st.sampled_from([WHOLE, MASKED, MASKED, 2, 255]),
        gradient=st.integers(0, 2),
        columns=st.one_of(st.none(), SIDES),
        kept=st.one_of(SIDES, st.sampled_from([2**63, 2**64 - 1])),
    ),
)


@settings(max_examples=400, deadline=None)
@given(TEXTS, st.one_of(st.binary(max_size=100), st.integers(0, 5000).map(bytes)))
def test_any_description_is_read_within_bounds_or_damaged(text, body):
    decoded_within_bounds(text, np.frombuffer(body, np.uint8))


def masked(shape, seed, dtype="float32"):
    """Return a tensor of which a third is kept."""
    random = np.random.default_rng(seed)
    mask = random.random((shape[0], int(np.prod(shape[1:])))) < 0.3
    return Tensor(random.normal(size=shape).astype(dtype) * mask.reshape(shape), dtype, mask, True)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_bytes_for_gradients_are_theirs_or_damaged(data):
    likes = [
        masked((8, 32), 0),
        Tensor(np.zeros((3, 2), np.float32), "float32", None, True),
        masked((2, 9), 1, "float16"),
    ]
    gradients = [like._replace(array=masked(like.array.shape, 5, like.dtype).array) for like in likes]
    encoded = message.encode(Head(Kind.BACKWARD, rows=8, total_rows=8), tensors=gradients, describe=False)
    body = message.decode_head(encoded)[2].copy()
    for place in data.draw(st.lists(st.integers(0, body.size - 1), max_size=4)):
        body[place] = data.draw(st.integers(0, 255))
    body = np.concatenate([body, np.zeros(8, np.uint8)])[: data.draw(st.integers(0, body.size + 8))]
    body = np.frombuffer(data.draw(st.binary(max_size=200)), np.uint8) if data.draw(st.booleans()) else body
    try:
        found = message.decode_gradients(body, likes)
    except DamagedMessage:
        return
    assert [one.array.shape for one in found] == [like.array.shape for like in likes]
    for one, like in zip(found, likes, strict=True):
        assert like.mask is None or not np.any(one.array.reshape(like.mask.shape)[~like.mask])


@pytest.mark.parametrize("dtype", ["float32", "bool"])
@pytest.mark.parametrize("structure", [1, [0, 1], [1, 0], {"a": 0.0}, "0", True, [], None, {"a": [0, 0]}])
def test_a_structure_of_other_tensors_is_damaged(structure, dtype):
    text = description([(2,)], structure, message.DTYPES.index(dtype), WHOLE)
    with pytest.raises(DamagedMessage, match="structure"):
        message.decode_tensors(text, np.zeros(8 if dtype == "float32" else 2, np.uint8))


@pytest.mark.parametrize(
    ("text", "body", "what"),
    [
        (description([(2,)], dtype=12, form=WHOLE), b"\1\2", "a bool is 0 or 1, got 2"),
        (description([(2,)], dtype=12, form=WHOLE, gradient=1), b"\1\1", "no tensor of bool has form 0 and gradient 1"),
        (description([(2,)], form=7), bytes(8), "no tensor of float32 has form 7"),
        (description([(2,)], dtype=99), bytes(8), "cannot be read"),
        (b"", b"", "cannot be read"),
        (b"\5\0[[[[[", b"", "cannot be read"),
        (struct.pack("<H", 60_000) + b"[" * 60_000, b"", "cannot be read"),
    ],
)
def test_what_no_stage_sends_is_damaged(text, body, what):
    with pytest.raises(DamagedMessage, match=what):
        message.decode_tensors(text, np.frombuffer(body, np.uint8))


@pytest.mark.parametrize(
    ("tensors", "what"),
    [
        ([], "got \\[\\]"),
        ([Tensor(np.zeros(1), "float64")], "one float64"),
        ([Tensor(np.float32(1), "float32")], "one"),
    ],
)
def test_a_loss_is_one_number(tensors, what):
    structure = list(range(len(tensors)))
    with pytest.raises(DamagedMessage, match=what):
        message.decode_loss(*message.decode_head(message.encode(Head(Kind.LOSS), structure, tensors))[1:])
    good = message.encode(Head(Kind.LOSS), 0, [Tensor(np.array(2.5), "float64")])
    assert message.decode_loss(*message.decode_head(good)[1:]) == 2.5


@pytest.mark.parametrize(
    "place",  # micro, micros, rows, total_rows: 7 rows in 3 are 3, 2, 2
    [(0, 0, 7, 7), (3, 3, 2, 7), (1, 3, 3, 7), (0, 3, 2, 7), (0, 8, 1, 7), (0, 1, 0, 0), (0, 1, 8, 7)],
)
def test_micro_batches_that_cannot_be_are_damaged(place):
    micro, micros, rows, total = place
    with pytest.raises(DamagedMessage, match=f"{rows} rows of {total} cannot be micro-batch {micro} of {micros}"):
        message.decode_head(message.encode(Head(Kind.FORWARD, 1, micro, micros, rows, total)))
    for micro, rows in enumerate((3, 2, 2)):
        assert message.decode_head(message.encode(Head(Kind.FORWARD, 1, micro, 3, rows, 7)))[0].rows == rows


@pytest.mark.parametrize("kept", [0, 1, 2, 3, 7])
def test_next_to_nothing_is_sent_as_a_bitmap_and_comes_back(kept):
    rows, columns = 2, 1500  # 3000 elements: more than 1024 for each of one or two that are kept
    mask = np.zeros((rows, columns), bool)
    mask.reshape(-1)[np.random.default_rng(0).choice(mask.size, kept, replace=False)] = True
    array = np.where(mask, np.float32(1.5), np.float32(0))
    encoded = message.encode(Head(Kind.FORWARD, 1, 0, 1, 2, 2), 0, [Tensor(array, "float32", mask, True)])
    _, text, body = message.decode_head(encoded)
    (found,) = message.decode_tensors(text, body)[1]
    assert np.array_equal(found.mask, mask) and np.array_equal(found.array, array)
    if kept < 3:
        assert body.size == 416  # a header of 32, 375 of 3000 bits, 4 or 8 of values, to a multiple of 8
    else:
        assert body.size < 32 + 3000 // 8


@pytest.mark.parametrize("describe", [True, False])
def test_any_flipped_bit_is_damage(describe):
    """Also in dense tensors, whose bytes have no separate checksum."""
    likes = [masked((4, 6), 3), Tensor(np.arange(6, dtype=np.float32), "float32", None, True)]
    kind = Kind.FORWARD if describe else Kind.BACKWARD
    encoded = message.encode(Head(kind, 1, 0, 1, 4, 4), [0, 1] if describe else None, likes, describe)
    assert np.array_equal(message.decode_head(encoded)[2][-24:].view(np.float32), likes[1].array)
    for bit in range(8 * encoded.size):
        harmed = encoded.copy()
        harmed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedMessage):
            message.decode_head(harmed)


def test_a_checksum_that_is_right_proves_nothing():
    """Who sends hostile bytes gets the checksum right too."""
    text = description([(2**30, 2**30)])
    fields = (message.MAGIC, message.VERSION, Kind.FORWARD, 0, 1, 0, 1, 4, 4, len(text))
    check = zlib.crc32(text + bytes(48), zlib.crc32(message.HEADER.pack(*fields, 0)))
    data = np.frombuffer(message.HEADER.pack(*fields, check) + text + bytes(48), np.uint8)
    _, found, body = message.decode_head(data)
    assert decoded_within_bounds(found, body) is None
