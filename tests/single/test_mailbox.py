"""Messages between ranks without collectives. A single rank sends to itself."""

import subprocess
import sys
import textwrap
import threading
import weakref

import launching
import numpy as np
import pytest
from launching import launch, mpirun
from mpi4py import MPI

from hvd_sparse import finalization, mailbox
from hvd_sparse.library import checked_communicator
from hvd_sparse.mailbox import Mailbox, poll

OPEN = "hvd_sparse: MPI ends while a session or pipeline is open: close() it before hvd.shutdown() or MPI.Finalize()"


@pytest.mark.parametrize("code", [None, 0, False, 1, 3, "", "failed"])
def test_an_exit_is_an_error_where_it_is_one_for_python(code):
    """A session or pipeline in a `with` block then tells the other ranks why this one has left."""
    exits = [sys.executable, "-ISc", f"import sys; sys.exit({code!r})"]
    status = subprocess.run(exits, stderr=subprocess.DEVNULL).returncode
    assert finalization.is_end(SystemExit(code)) == (status == 0)


def test_a_generator_that_is_closed_has_no_error_and_an_exception_has():
    assert finalization.is_end(GeneratorExit())
    assert not finalization.is_end(ValueError()) and not finalization.is_end(KeyboardInterrupt())
    assert not finalization.is_end(None)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("size", [0, 1, 100, 3_000_000])
def test_messages_arrive_in_order_by_tag(size, background):
    box = Mailbox(MPI.COMM_SELF.Dup(), background)
    assert box.look(tag=1) is None
    for number in range(3):
        box.post(0, 1, np.full(size, number, np.uint8))
    box.post(0, 2, np.full(size, 9, np.uint8))
    for tag, expected in ((2, 9), (1, 0), (1, 1), (1, 2)):
        source, data = poll(lambda tag=tag: box.look(tag, source=0), 10.0)
        assert source == 0 and data.size == size and (data == expected).all()
    assert poll(lambda: box.reap() or None, 10.0)
    box.close(1.0)


@pytest.mark.skipif(launching.MPIRUN is None, reason="needs mpirun")
def test_a_message_that_does_not_move_keeps_nobody_else_waiting():
    """Rank 1 computes, without a call of MPI, while a long message of it is under way; rank 2 sends a short one."""
    script = """
        import time, numpy as np
        from mpi4py import MPI
        from hvd_sparse.mailbox import Mailbox, poll
        rank, box = MPI.COMM_WORLD.Get_rank(), Mailbox(MPI.COMM_WORLD)
        MPI.COMM_WORLD.Barrier()
        if rank == 0:
            begin = time.monotonic()
            source, data = poll(lambda: box.look(1), 30.0)
            print("first", source, data.size, time.monotonic() - begin < 2.5, box.is_arriving(1, 1), flush=True)
            source, data = poll(lambda: box.look(1), 30.0)
            print("then", source, data.size, (data == 7).all(), box.is_arriving(1, 1), flush=True)
        else:
            time.sleep(0.0 if rank == 1 else 0.5)
            box.post(0, 1, np.full(20_000_000 if rank == 1 else 10, 7, np.uint8))
            time.sleep(4.0 if rank == 1 else 0.0)
        box.close(10.0)
    """
    code, output = launch([*mpirun(3), sys.executable, "-c", textwrap.dedent(script)])
    assert code == 0, output
    assert "first 2 10 True True" in output and "then 1 20000000 True False" in output, output


@pytest.mark.parametrize("size", [0, 99, 100, 101, 1000, 12_345])
def test_messages_longer_than_mpi_can_count_arrive_whole(monkeypatch, size):
    """The limit lowered; two threads send at once, and pieces of their messages must not mix."""
    monkeypatch.setattr(mailbox, "MOST_BYTES", 100)
    communicator = MPI.COMM_SELF.Dup()
    boxes = [Mailbox(communicator), Mailbox(communicator)]  # a worker has one, its heartbeat has another
    sent = [np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8) for number in range(20)]
    threads = [
        threading.Thread(target=lambda own=own: [boxes[own].post(0, 1, data) for data in sent[own::2]])
        for own in (0, 1)
    ]
    for thread in threads:
        thread.start()
    found = [poll(lambda: boxes[0].look(1), 10.0) for _ in sent]
    for thread in threads:
        thread.join()
    assert all(source == 0 for source, _ in found) and boxes[0].look(1) is None
    assert sorted(bytes(data) for _, data in found) == sorted(map(bytes, sent))
    for box in boxes:
        box.close(1.0)


def test_what_was_sent_is_freed_though_there_is_always_something_to_read(monkeypatch):
    """As on a busy server: it reads a push, answers, and finds the next push."""
    box, done = Mailbox(MPI.COMM_SELF.Dup()), []

    class Sending:
        """A send that is complete a while after it began."""

        def Test(self):
            done.append(self)
            return done.count(self) > 1

    class Communicator:
        def Isend(self, *_):
            return Sending()

    box._communicator = Communicator()
    for _ in range(100):
        box.post(0, 1, np.zeros(10, np.uint8))
    assert len(box._pending) <= 1


@pytest.mark.parametrize("size", [0, 10, 25])
def test_an_interrupt_in_the_middle_loses_no_message(monkeypatch, size):
    """At any line of `_complete` but the last, which has no call."""
    monkeypatch.setattr(mailbox, "MOST_BYTES", 10)

    def interrupted(after):
        """Return the messages that arrive if the line after so many is interrupted, and how many lines there were."""
        box, count = Mailbox(MPI.COMM_SELF.Dup()), 0

        def trace(frame, event, argument):
            nonlocal count
            if frame.f_code is not Mailbox._complete.__code__:
                return None
            count += event == "line"
            if event == "line" and count == after + 1:
                raise KeyboardInterrupt
            return trace

        for number in range(2):
            box.post(0, 1, np.full(size, number, np.uint8))
        sys.settrace(trace)
        try:
            first = poll(lambda: box.look(1), 10.0)
        except KeyboardInterrupt:
            first = None
        finally:
            sys.settrace(None)
        found = [first, *(poll(lambda: box.look(1), 10.0 if first is None or n < 1 else 0.01) for n in range(2))]
        box.close(1.0)
        return [data.tolist() for data in (one[1] for one in found if one is not None)], count

    expected = [[0] * size, [1] * size]
    before = sys.gettrace()
    try:
        found, lines = interrupted(10**6)
        assert found == expected and lines > 5
        for after in range(lines - 1):
            assert interrupted(after)[0] == expected, after
    finally:
        sys.settrace(before)


def test_what_nobody_takes_is_given_up():
    box = Mailbox(MPI.COMM_SELF.Dup())
    box.post(0, 1, np.zeros(3_000_000, np.uint8))
    assert not box.reap()
    box.close(0.05)
    assert box.reap()


def test_poll_looks_again_until_there_is_something_or_time_is_over(monkeypatch):
    naps = []
    monkeypatch.setattr(mailbox.time, "sleep", naps.append)
    found = iter([None] * 30 + ["it"])
    assert poll(lambda: next(found), 60.0) == "it"
    assert naps == sorted(naps) and naps[0] == mailbox.SHORTEST_NAP and naps[-1] < 1.5 * mailbox.LONGEST_NAP
    monkeypatch.undo()
    assert poll(lambda: None, 0.01) is None


def test_mpi_that_another_thread_ends_runs_until_the_mailbox_is_closed():
    """As Horovod's thread does if Horovod has started MPI, on all ranks when the first one ends."""
    script = """
        import ctypes, threading, mpi4py, numpy as np
        mpi4py.rc.finalize = False
        from mpi4py import MPI
        from hvd_sparse.mailbox import Mailbox, poll
        box = Mailbox(MPI.COMM_SELF, background=True)
        end = threading.Thread(target=ctypes.CDLL(MPI.__file__).MPI_Finalize)
        end.start()
        end.join(0.5)
        box.post(0, 1, np.arange(3, dtype=np.uint8))
        print(poll(lambda: box.look(1), 10.0)[1].tolist(), end.is_alive(), MPI.Is_finalized())
        box.close(10.0)
        end.join(10.0)
        print(end.is_alive(), MPI.Is_finalized())
    """
    code, output = launch([sys.executable, "-c", textwrap.dedent(script)])
    assert code == 0 and "[0, 1, 2] True False\nFalse True\n" in output and OPEN not in output, output


def test_mpi_that_ends_with_an_open_mailbox_says_so():
    script = (
        "from mpi4py import MPI; from hvd_sparse.mailbox import Mailbox; box = Mailbox(MPI.COMM_SELF); MPI.Finalize()"
    )
    code, output = launch([sys.executable, "-c", script])
    assert code == 0 and output.count(OPEN) == 1, output


def test_mpi_waits_for_open_mailboxes_but_not_for_a_process_that_ends_it_itself(monkeypatch, capsys):
    monkeypatch.setattr(finalization, "_users", weakref.WeakSet())
    monkeypatch.setattr(finalization, "_begun", [])
    closed, forgotten = (Mailbox(MPI.COMM_SELF) for _ in range(2))
    assert not finalization.is_ending(MPI)
    end = threading.Thread(target=finalization._wait, daemon=True)
    end.start()
    closed.close(0.1)
    end.join(0.2)
    assert end.is_alive() and finalization.is_ending(MPI)
    with pytest.raises(RuntimeError, match=r"Import mpi4py\.MPI before hvd\.init"):
        checked_communicator(None)
    del forgotten
    end.join(10.0)
    assert not end.is_alive()
    finalization._wait()
    assert not capsys.readouterr().err
    box, lock, horovod = Mailbox(MPI.COMM_SELF), threading.Lock(), {"__name__": "horovod.common.basics"}
    exec("def shutdown(call):\n    call()", horovod)
    with lock:
        threading.Thread(target=horovod["shutdown"], args=(lock.acquire,), daemon=True).start()
        end = threading.Thread(target=finalization._wait, daemon=True)
        end.start()
        end.join(10.0)
        assert not end.is_alive() and capsys.readouterr().err == f"{OPEN}\n"
    finalization._wait()  # in the main thread, as of MPI.Finalize() with an open mailbox
    assert capsys.readouterr().err == f"{OPEN}\n"
    box.close(0.1)
