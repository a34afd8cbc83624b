"""Messages with states, such as a whole model: they arrive as sent, with little memory; nonsense is damage."""

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from hvd_sparse.mailbox import DamagedMessage
from hvd_sparse.parameter_server import protocol
from hvd_sparse.parameter_server.protocol import Kind, Message, decode


@given(st.dictionaries(st.text(max_size=9), st.tuples(st.booleans(), st.integers(0, 20)), max_size=4), st.integers())
@examples(100)
def test_states_round_trip(table, number):
    arrays = {name: np.arange(size, dtype=("float32", "float64")[wide]) for name, (wide, size) in table.items()}
    sent = Message(Kind.STATE, 3, 1, 4, 1, 5)
    message = decode(protocol.encode_state(sent, {"number": number}, arrays))
    description, found = protocol.decode_state(message.body)
    assert message[:-1] == sent[:-1] and description == {"number": number} and list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and found[name].flags.aligned and (found[name] == array).all()


def test_a_model_is_copied_once_to_send_it():
    """And not at all where it arrives."""
    model = np.ones(1 << 21, np.float32)
    tracemalloc.start()
    data = protocol.encode_state(Message(Kind.STATE, 0), {}, {"parameters": model})
    _, sending = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    _, found = protocol.decode_state(decode(data).body)
    _, arriving = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (found["parameters"] == model).all()
    assert sending < 1.1 * model.nbytes and arriving - data.nbytes < 0.1 * model.nbytes


NONSENSE = [
    b"",
    b"\0" * 7,
    struct.pack("<Q", 2**64 - 1),
    struct.pack("<Q", 0),
    *(
        struct.pack("<Q", len(text)) + text + bytes(8)
        for text in [
            b"{",
            b"null",
            b"[]",
            b"{}",
            b'{"arrays": 3, "description": {}}',
            b'{"arrays": {}}',
            b"\xff\xfe",
            b"[" * 100_000,
            *(
                b'{"description": {}, "arrays": {"x": %b}}' % table
                for table in [
                    b'["float32", 1]',
                    b'["float32", 3]',
                    b'["float32", -1]',
                    b'["float32", 1e300]',
                    b'["float32", 1e999]',
                    b'["float32", "2"]',
                    b'["float32", [2]]',
                    b'["float32", null]',
                    b'["float32", 99999999999999999999999]',
                    b'["object", 1]',
                    b'["float16", 4]',
                    b'["(2", 4]',
                    b'[["float32"], 2]',
                    b'["float32"]',
                    b"{}",
                ]
            ),
        ]
    ),
]


@pytest.mark.parametrize("body", NONSENSE, ids=range(len(NONSENSE)))
def test_states_of_nonsense(body):
    with pytest.raises(DamagedMessage):
        protocol.decode_state(np.frombuffer(body, np.uint8))
