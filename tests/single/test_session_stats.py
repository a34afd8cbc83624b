"""The common part of `stats()`, of asynchronous sessions: bytes as they cross the wire, densities by hand."""

import itertools

import pytest
from tensorboard_events import events
from torch_session import learn, network

from hvd_sparse.parameter_server import connection
from hvd_sparse.parameter_server.summary import summary
from hvd_sparse.torch.asynchronous import ASGD, GradientDroppingAsync

ELEMENTS = 6 * 9 + 9 + 9 * 2 + 2
SENT = 5 + 1 + 2 + 2  # of these, per tensor, at density 0.1; the last tensor is below min_numel
SMALL = {"density": 0.1, "min_numel": 8}


@pytest.fixture
def wire(monkeypatch):
    """Return two lists, of the bytes of messages that a worker sends and receives."""
    sent, received = [], []
    send, receive = connection.Connection._send, connection.Connection._receive

    def noted_send(self, messages):
        sent.extend(data.size for data in messages.values())
        send(self, messages)

    def noted_receive(self, start):
        server, data = receive(self, start)
        received.append(data.size)
        return server, data

    monkeypatch.setattr(connection.Connection, "_send", noted_send)
    monkeypatch.setattr(connection.Connection, "_receive", noted_receive)
    return sent, received


@pytest.mark.parametrize("overlap", [False, True])
def test_a_push_is_sent_and_its_answer_received(join, wire, overlap):
    """With overlap a step receives the answer to the push before."""
    sent, received = wire
    model = network()
    session = join(model, GradientDroppingAsync(**SMALL), overlap=overlap)
    optimizer, hello, header = session.optimizer(lr=0.1), sum(sent), sum(received) - 4 * ELEMENTS
    pushes, answers = [], []
    for number in range(3):
        sent.clear()
        received.clear()
        learn(model, optimizer, 1, seed=number)
        pushes.append(sum(sent))
        answers.append(sum(received))
    assert (answers[0] == 0) == overlap and min(answers[1:]) > 0
    stats = summary(session._connection, session._last, servers_of(session), 1.0)  # asks nobody, waits for nothing
    step, total = stats["step"], stats["total"]
    assert stats["steps"] == 3
    assert (step["dense_bytes"], total["dense_bytes"]) == (4 * ELEMENTS, 3 * 4 * ELEMENTS)
    assert (step["payload_bytes"], total["payload_bytes"]) == (pushes[-1], hello + sum(pushes))
    assert (step["received_bytes"], total["received_bytes"]) == (answers[-1], header + sum(answers))
    assert step["ratio"] == pytest.approx(4 * ELEMENTS / pushes[-1])
    assert step["density"] == total["density"] == pytest.approx(SENT / ELEMENTS)
    assert set(step["seconds"]) == {"exchange"}
    assert 0.0 <= step["seconds"]["exchange"] <= total["seconds"]["exchange"] == stats["seconds_waiting"]
    assert stats["ratio_up"] == total["ratio"]
    residual = sum(float(part["residual"].square().sum()) for part in optimizer.state.values())
    assert stats["residual_norm"] == pytest.approx(residual**0.5, rel=1e-5) and residual > 0.0


def servers_of(session):
    return [server.state()[0] for server in session._local.servers.values()]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_answer_that_comes_between_two_steps_belongs_to_the_second(join, overlap):
    """stats() waits for it."""
    model = network()
    session = join(model, GradientDroppingAsync(**SMALL), overlap=overlap)
    optimizer, totals = session.optimizer(lr=0.1), []
    for number in range(4):
        learn(model, optimizer, 1, seed=number)
        stats = session.stats()
        totals.append(stats["total"]["received_bytes"] - stats["step"]["received_bytes"])
        assert (stats["step"]["received_bytes"] == 0) == (overlap and number == 0)
    assert all(later > earlier for earlier, later in itertools.pairwise(totals[1:]))


def check_before_the_first_step(stats):
    assert stats["steps"] == stats["pushes"] == stats["step"]["payload_bytes"] == stats["total"]["payload_bytes"] == 0
    for part in (stats["step"], stats["total"]):
        assert part["ratio"] == part["density"] == 1.0
    assert [stats[f"{what}_{way}"] for what in ("ratio", "density") for way in ("up", "down")] == [1.0] * 4
    assert stats["residual_norm"] == 0.0


def test_a_session_says_what_it_is(join):
    session = join(network(), GradientDroppingAsync(**SMALL))
    expected = "<TorchSession, rank 0 of 1, worker and server: GradientDroppingAsync(density=0.1, warmup=None"
    assert repr(session).startswith(expected)


def test_before_the_first_step(join):
    check_before_the_first_step(join(network(), GradientDroppingAsync(**SMALL)).stats())


def test_an_answer_that_is_still_to_come_has_no_ratio(join):
    model = network()
    session = join(model, ASGD(), overlap=True)
    learn(model, session.optimizer(lr=0.1), 1)
    session._connection.worker.traffic.bytes_down = 4 * ELEMENTS  # of the model: as if there were no header
    assert summary(session._connection, session._last, servers_of(session), 1.0)["ratio_down"] == 1.0


def test_tensorflow_tells_the_same_and_logs_it_in_a_tf_function(tmp_path):
    tf = pytest.importorskip("tensorflow")
    MPI = pytest.importorskip("mpi4py.MPI")
    from hvd_sparse.tensorflow import asynchronous

    variable = tf.Variable(tf.zeros([100]))
    method = GradientDroppingAsync(**SMALL)
    options = {"servers": "colocated", "communicator": MPI.COMM_SELF, "silence": None, "timeout": 60.0}
    with asynchronous.connect([variable], method, **options) as session:
        check_before_the_first_step(session.stats())
        writer = tf.summary.create_file_writer(str(tmp_path))
        session.log_to(writer, prefix="run")
        optimizer = session.optimizer(learning_rate=0.1)

        @tf.function
        def step():
            optimizer.apply_gradients([(tf.range(100.0), variable)])

        step()
        step()
        stats = session.stats()
    assert stats["steps"] == stats["pushes"] == 2
    assert (stats["step"]["dense_bytes"], stats["total"]["dense_bytes"]) == (400, 800)
    assert stats["step"]["density"] == stats["total"]["density"] == 0.1
    assert stats["step"]["received_bytes"] > 0
    writer.close()
    logged = events(tmp_path)
    assert logged["run/density"] == {1: pytest.approx(0.1), 2: pytest.approx(0.1)}
    assert logged["run/residual_norm"][2] == pytest.approx(stats["residual_norm"])


def test_pushes_are_logged(join):
    """The numbers of stats(), which asks no server for them."""
    reports, model = [], network()
    session = join(model, GradientDroppingAsync(**SMALL))
    session.log_to(lambda numbers, step: reports.append((step, numbers)), every=2)
    optimizer = session.optimizer(lr=0.1)
    learn(model, optimizer, 3)
    assert [step for step, _ in reports] == [2]
    session.log_to(lambda numbers, step: reports.append((step, numbers)), prefix="worker 0")
    learn(model, optimizer, 1)
    stats, (step, numbers) = session.stats(), reports[-1]
    assert step == 4 and len(reports) == 2
    assert numbers == {
        "worker 0/ratio": stats["step"]["ratio"],
        "worker 0/density": pytest.approx(SENT / ELEMENTS),
        "worker 0/payload_bytes": stats["step"]["payload_bytes"],
        "worker 0/received_bytes": stats["step"]["received_bytes"],
        "worker 0/residual_norm": stats["residual_norm"],
        "worker 0/seconds/exchange": stats["step"]["seconds"]["exchange"],
    }
    assert "compression/ratio" in reports[0][1]
    session.log_to(None)
    learn(model, optimizer, 1)
    assert len(reports) == 2
    with pytest.raises(TypeError, match="writer must be a SummaryWriter"):
        session.log_to("runs")
