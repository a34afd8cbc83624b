"""Messages: damage raises DamagedMessage and no other exception; hostile messages do not change a server."""

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from hvd_sparse.mailbox import DamagedMessage
from hvd_sparse.parameter_server import METHODS, ParameterLayout, Server, Worker, protocol
from hvd_sparse.parameter_server.protocol import Form, Kind, Message, Reason, decode, encode
from hvd_sparse.parameter_server.server import introduction
from hvd_sparse.parameter_server.updates import Update, pack, piece_segments, unpack
from hvd_sparse.wire import LOW_BITS

SHAPES = {"a": (30, 4), "b": (7,), "c": (50,)}
VALUES = ["float32", "float16", "bfloat16", "int2", "int1"]
U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


def message(kind, body=b"", **fields):
    return encode(Message(kind, body=np.frombuffer(body, np.uint8), **fields))


@given(
    st.sampled_from(Kind),
    U32,
    U32,
    U64,
    U64,
    U64,
    st.sampled_from(Reason),
    st.sampled_from(Form),
    st.binary(max_size=99),
)
@examples(200)
def test_round_trip(kind, worker, incarnation, sequence, clock, k, reason, form, body):
    sent = Message(kind, worker, incarnation, sequence, clock, k, reason, form, np.frombuffer(body, np.uint8))
    data = encode(sent)
    assert data.size == protocol.HEADER_BYTES + len(body) and data.dtype == np.uint8
    found = decode(data)
    assert found[:-1] == sent[:-1] and bytes(found.body) == body
    assert found.text == body.decode(errors="replace")


@pytest.fixture(params=["plain", "mirrored"])
def pair(request):
    """A server and a worker that has pushed twice; a third push is ready."""
    mirrored = {"pull_density": 0.3, "pull_values": "float16"} if request.param == "mirrored" else {}
    return make_pair(METHODS["dgs"](density=0.1, min_numel=20, values="int2", **mirrored))


def make_pair(method):
    layout, random = ParameterLayout(SHAPES, method.min_numel), np.random.default_rng(0)
    server = Server(layout, (0, layout.numel), method, random.standard_normal(layout.numel).astype(np.float32), 3)
    worker = Worker(1, layout, method, {name: np.zeros(np.prod(shape), np.float32) for name, shape in SHAPES.items()})
    exchange(server, worker, worker.hello()[0])
    for _ in range(2):
        exchange(server, worker, push(worker, random))
    exchange(server, worker, worker.share(np.arange(5, dtype=np.float32))[0])
    return server, worker


def push(worker, random):
    gradients = {name: random.standard_normal(array.size, np.float32) for name, array in worker.parameters.items()}
    return worker.push(gradients, dict.fromkeys(SHAPES, 0.1))[0]


def exchange(server, worker, data):
    for _, answer in server.handle(data, worker.number):
        assert worker.receive(0, answer) == {}


def snapshot(server):
    """All that a server knows, but for how often it refused, and when it heard what."""
    mirrors = getattr(server._tracker, "_mirrors", {})
    tracked = getattr(server._tracker, "_changed", np.empty(0))
    records = [
        (number, record.incarnation, record.sequence, None if record.answer is None else record.answer.tobytes())
        for number, record in sorted(server._records.items())
    ]
    arrays = [server.parameters, server.buffers, tracked, *mirrors.values()]
    return server.clock, records, [array.tobytes() for array in arrays], sorted(mirrors), server.statistics.pushes


def every_kind(server, worker):
    """Return one encoded message of each kind."""
    random = np.random.default_rng(1)
    hello = encode(
        Message(Kind.HELLO, 2, 5, body=protocol.as_body("\n".join(introduction(server.layout, server.method))))
    )
    third = push(worker, random)
    found = {
        Kind.HELLO: hello,
        Kind.WELCOME: server.handle(hello, 2)[0][1],
        Kind.PUSH: third,
        Kind.REPLY: server.handle(third, 1)[0][1],
        Kind.REFUSED: server.handle(third[:-1], 1)[0][1],
        Kind.BUFFERS: worker.share(np.arange(5, dtype=np.float32))[0],
        Kind.ASK: worker.ask("state")[0],
        Kind.ALIVE: worker.alive()[0],
        Kind.LEAVE: worker.leave("why")[0],
    }
    found[Kind.STATE] = server.handle(found[Kind.ASK], 1)[0][1]
    assert set(found) == set(Kind) and all(decode(data).kind == kind for kind, data in found.items())
    return found


def test_buffers_are_averaged_and_infinities_that_stay_are_no_damage():
    """Such as those of an attention mask. What has become something not finite is left out, the others are averaged."""
    server, worker = make_pair(METHODS["dgs"](density=0.1, min_numel=20))
    mask = np.array([-np.inf, 0.1, np.inf, 1.0, 2.0], np.float32)
    server.buffers = mask
    lines = introduction(server.layout, worker.method)
    server.handle(encode(Message(Kind.HELLO, 2, 5, body=protocol.as_body("\n".join(lines)))), 2)  # a second worker
    exchange(server, worker, worker.share(mask + np.array([0, 0, 0, 3, 0], np.float32))[0])
    np.testing.assert_array_equal(server.buffers, [-np.inf, np.float32(0.1), np.inf, 2.5, 2.0])
    assert not np.shares_memory(server.buffers, mask)
    for bad in (np.nan, np.inf):
        server.handle(worker.share(np.array([-np.inf, bad, np.inf, 2.5, 4.0], np.float32))[0], worker.number)
    assert server.statistics.refused == 0
    np.testing.assert_array_equal(server.buffers, [-np.inf, np.float32(0.1), np.inf, 2.5, 3.5])


def test_every_flipped_bit_and_every_cut_is_noticed(pair):
    server, worker = pair
    kinds, before = every_kind(server, worker), snapshot(server)
    for kind, data in kinds.items():
        for bit in (
            range(8 * data.size) if data.size < 400 else np.random.default_rng(2).integers(8 * data.size, size=2000)
        ):
            data[bit // 8] ^= 1 << bit % 8
            with pytest.raises(DamagedMessage):
                decode(data)
            if kind in (Kind.PUSH, Kind.BUFFERS, Kind.LEAVE, Kind.HELLO):
                (answer,) = server.handle(data, 1)
                assert decode(answer[1]).reason == Reason.DAMAGED
            data[bit // 8] ^= 1 << bit % 8
        for length in range(data.size):
            with pytest.raises(DamagedMessage):
                decode(data[:length])
        for more in (1, 4, 60, 1000):
            with pytest.raises(DamagedMessage):
                decode(np.append(data, np.zeros(more, np.uint8)))
    assert snapshot(server) == before


@given(st.binary(max_size=200), st.booleans())
@examples(300)
def test_any_bytes_are_damage(data, right_start):
    start = struct.pack("<I", protocol.MAGIC) + bytes([protocol.VERSION]) if right_start else b""
    with pytest.raises(DamagedMessage):
        decode(np.frombuffer(start + data, np.uint8))


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("coding", ["auto", "elias_fano", "run_length", "bitmap"])
def test_updates_that_are_damaged_under_a_right_checksum(values, coding):
    """Every bit of a payload flipped, every count, every size: DamagedMessage, or an update that is in range."""
    n, segments = 187, piece_segments(ParameterLayout(SHAPES).tensors(), 0)
    random = np.random.default_rng(3)
    indices = np.sort(random.choice(n, 20, replace=False))
    numbers = np.sign(random.standard_normal(20)).astype(np.float32)
    k, body = pack(Update(indices, numbers), n, coding, values, segments)
    form = (n, coding, values, segments)
    good = unpack(Message(Kind.PUSH, k=k, body=body), *form)
    assert (good.indices == indices).all() and (good.values == numbers).all()

    def try_one(k, body):
        try:
            update = unpack(Message(Kind.PUSH, k=k, body=body), *form)
        except DamagedMessage:
            return False
        at = np.zeros(n)[update.at]
        assert at.size == update.values.size == k and np.isfinite(update.values).all()
        return True

    for bit in range(8 * body.size):
        changed = body.copy()
        changed[bit // 8] ^= 1 << bit % 8
        assert not try_one(k, changed)
        changed[24:28] = 0
        changed[24:28] = np.frombuffer(struct.pack("<I", zlib.crc32(changed)), np.uint8)
        try_one(k, changed)
    for count in [0, 1, k - 1, k + 1, n - 1, n, n + 1, 2**16, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1]:
        assert not try_one(count, body)
    for length in range(body.size):
        assert not try_one(k, body[:length])
    assert not try_one(k, np.append(body, np.zeros(8, np.uint8)))
    if values not in LOW_BITS:
        for special in (np.nan, np.inf, -np.inf):
            spoiled = numbers.copy()
            spoiled[7] = special
            assert values != "float32" or not try_one(*pack(Update(indices, spoiled), n, coding, values, segments))


HOSTILE_PUSHES = {
    "huge k": lambda good: good._replace(k=2**63),
    "k of all": lambda good: good._replace(k=177),
    "k above n": lambda good: good._replace(k=178),
    "one entry less": lambda good: good._replace(k=good.k - 1),
    "k of none": lambda good: good._replace(k=0),
    "no body": lambda good: good._replace(body=good.body[:0]),
    "a short body": lambda good: good._replace(body=good.body[:-8]),
    "a long body": lambda good: good._replace(body=np.append(good.body, np.zeros(8, np.uint8))),
    "a body of NaN": lambda good: good._replace(k=177, body=np.full(177, np.nan, np.float32).view(np.uint8)),
    "a sequence that jumps": lambda good: good._replace(sequence=5),
    "no sequence": lambda good: good._replace(sequence=0),
    "the last sequence": lambda good: good._replace(sequence=2**64 - 1),
    "a clock of the future": lambda good: good._replace(clock=3),
    "the last clock": lambda good: good._replace(clock=2**64 - 1),
    "another life": lambda good: good._replace(incarnation=77),
    "another worker's": lambda good: good._replace(worker=2),
    "a worker out of range": lambda good: good._replace(worker=2**32 - 1),
    "a reply": lambda good: good._replace(kind=Kind.REPLY),
    "a welcome": lambda good: good._replace(kind=Kind.WELCOME),
    "a state": lambda good: good._replace(kind=Kind.STATE),
    "a refusal": lambda good: good._replace(kind=Kind.REFUSED),
    "buffers of another size": lambda good: good._replace(kind=Kind.BUFFERS, body=np.zeros(24, np.uint8)),
    "buffers of an odd size": lambda good: good._replace(kind=Kind.BUFFERS, body=np.zeros(19, np.uint8)),
    "no buffers": lambda good: good._replace(kind=Kind.BUFFERS, body=np.zeros(0, np.uint8)),
    "a question": lambda good: good._replace(kind=Kind.ASK, body=protocol.as_body("what?")),
    "a HELLO of nonsense": lambda good: good._replace(kind=Kind.HELLO, incarnation=9),
}


@pytest.mark.parametrize("what", HOSTILE_PUSHES)
def test_hostile_messages_are_refused_and_change_nothing(pair, what):
    server, worker = pair
    good = decode(push(worker, np.random.default_rng(4)))
    bad = HOSTILE_PUSHES[what](good)
    before, refused = snapshot(server), server.statistics.refused
    ((rank, answer),) = server.handle(encode(bad), 1)
    answer = decode(answer)
    assert rank == 1 and answer.kind == Kind.REFUSED and answer.text
    assert answer.reason == (
        Reason.UNKNOWN_WORKER
        if what == "another life"
        else Reason.WRONG
        if "sequence" in what or "clock" in what or "HELLO" in what
        else Reason.DAMAGED
    )
    assert snapshot(server) == before and server.statistics.refused == refused + 1
    ((_, answer),) = server.handle(encode(good), 1)  # it goes on
    assert decode(answer).kind == Kind.REPLY and server.clock == 3


def test_old_pushes_and_messages_of_unknown_to_need_no_answer(pair):
    server, worker = pair
    good = decode(push(worker, np.random.default_rng(4)))
    before = snapshot(server)
    assert server.handle(encode(good._replace(sequence=1)), 1) == []
    for kind in (Kind.ALIVE, Kind.LEAVE):
        assert server.handle(message(kind, worker=2, incarnation=3), 2) == []
        assert server.handle(message(kind, worker=1, incarnation=3), 1) == []
    assert snapshot(server) == before


def test_buffers_move_to_the_average_of_workers(pair):
    """By 1/N of the difference, N the workers that have joined, but for refused ones; the first come as they are."""
    server, worker = pair
    first = np.arange(5, dtype=np.float32)
    assert (server.buffers == first).all()
    other = Worker(2, server.layout, server.method, worker.parameters)
    exchange(server, other, other.hello()[0])
    exchange(server, other, other.share(first + 8)[0])
    assert (server.buffers == first + 4).all()
    for _ in range(60):
        exchange(server, worker, worker.share(first)[0])
        exchange(server, other, other.share(first + 8)[0])
    assert (np.abs(server.buffers - first - 4) < 1.5).all()  # swings about the mean, by 1/N each
    exchange(server, other, other.leave()[0])
    server.departures[0] = server.refused[0] = "another model"
    average = server.buffers.copy()
    exchange(server, worker, worker.share(first - 3)[0])
    np.testing.assert_allclose(server.buffers, (average + first - 3) / 2, rtol=1e-6)  # not first - 3


def test_hello_of_another_model_or_method(pair):
    server, _ = pair
    ours = introduction(server.layout, server.method)
    before = snapshot(server)
    others = {
        "density = constant(0.5) there": introduction(
            server.layout, METHODS["dgs"](density=0.5, min_numel=20, values="int2")
        ),
        "method = gd_async": introduction(server.layout, METHODS["gd_async"]()),
        "layout = ": introduction(ParameterLayout({**SHAPES, "a": (4, 30)}, 20), server.method),
        "elements = ": introduction(ParameterLayout({**SHAPES, "d": (1,)}, 20), server.method),
        "density = constant(0.1) here": [line for line in ours if not line.startswith("density")],
        "tensor a = [4, 30] there": introduction(ParameterLayout({**SHAPES, "a": (4, 30)}, 20), server.method),
        "more there": [*ours, "more"],
    }
    for difference, lines in others.items():
        body = "\n".join(lines).encode()
        ((_, answer),) = server.handle(message(Kind.HELLO, body, worker=2), 2)
        answer = decode(answer)
        assert answer.reason == Reason.WRONG and difference in answer.text
        assert "differ" in answer.text
        assert "differ" in server.departures[2]
    body = "\n".join(ours).encode()
    ((_, answer),) = server.handle(message(Kind.HELLO, body, worker=3), 3)
    assert decode(answer).text == "there are 3 workers, not 3" and 3 not in server.departures
    assert snapshot(server) == before


HOSTILE_ANSWERS = {
    "huge k": lambda good: good._replace(k=2**63),
    "a short body": lambda good: good._replace(body=good.body[:-8]),
    "no body": lambda good: good._replace(body=good.body[:0]),
}
IGNORED_ANSWERS = {
    "another life": lambda good: good._replace(incarnation=4),
    "another sequence": lambda good: good._replace(sequence=2),
    "a welcome": lambda good: good._replace(kind=Kind.WELCOME, body=np.zeros(4 * 177, np.uint8)),
    "a state": lambda good: good._replace(kind=Kind.STATE),
    "a push": lambda good: good._replace(kind=Kind.PUSH),
    "a refusal of no push": lambda good: good._replace(kind=Kind.REFUSED, reason=Reason.UNKNOWN_WORKER, sequence=2),
}


@pytest.mark.parametrize("what", {**HOSTILE_ANSWERS, **IGNORED_ANSWERS})
def test_hostile_answers_change_nothing_in_a_worker(pair, what):
    server, worker = pair
    third = push(worker, np.random.default_rng(4))
    ((_, data),) = server.handle(third, 1)
    before = [array.copy() for array in worker.parameters.values()]
    change = {**HOSTILE_ANSWERS, **IGNORED_ANSWERS}[what]
    again = worker.receive(0, encode(change(decode(data))))
    assert again == {} if what in IGNORED_ANSWERS else again[0].tobytes() == third.tobytes()
    assert all((one == other).all() for one, other in zip(before, worker.parameters.values(), strict=True))
    assert worker.is_waiting
    assert worker.receive(0, data) == {} and not worker.is_waiting
