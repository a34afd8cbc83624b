"""Simulated hosts with links of a given rate: the bytes per second that arrive, and that nothing is left behind."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "network"
PROGRAM = """
import json, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
sys.path.insert(0, {folder!r})
from hosts import enter_switch, hosts

enter_switch()
RECEIVE = '''
import socket, time
server = socket.create_server(("10.99.0.2", 5000))
connection, size = server.accept()[0], 0
while size < 300_000 and (data := connection.recv(1 << 20)):
    size += len(data)
start, size = time.perf_counter(), 0
while data := connection.recv(1 << 20):
    size += len(data)
print(8 * size / (time.perf_counter() - start))
'''
SEND = '''
import socket, time
while True:
    try:
        connection = socket.create_connection(("10.99.0.2", 5000))
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
connection.sendall(bytes({size}))
'''
with hosts(2) as lab:
    print(*[holder.pid for holder in lab.holders], flush=True)
    for rate in {rates!r}:
        lab.shape(rate)
        receiver = subprocess.Popen(lab.inside(1, [sys.executable, "-c", RECEIVE]), stdout=subprocess.PIPE, text=True)
        subprocess.run(lab.inside(0, [sys.executable, "-c", SEND]), check=True)
        print(receiver.communicate()[0].strip(), flush=True)
    if {command!r}:
        job = subprocess.Popen(lab.mpirun({command!r}), stdout=subprocess.PIPE, text=True)
        print(*[job.stdout.readline().strip() for _ in lab.holders], flush=True)
    if {waits}:
        time.sleep(60)
"""
LINKS = """
import subprocess, sys
sys.path.insert(0, {folder!r})
from hosts import enter_switch, hosts

enter_switch()
with hosts(2) as lab:
    def reaches(address):
        program = "import socket, sys; socket.create_connection((sys.argv[1], 5000), 0.5)"
        command = lab.inside(0, [sys.executable, "-c", program, address])
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0

    serve = "import socket, time; s = socket.create_server(('', 5000)); print(flush=True); time.sleep(60)"
    server = subprocess.Popen(lab.inside(1, [sys.executable, "-c", serve]), stdout=subprocess.PIPE)
    server.stdout.readline()
    lab.limit(1, "10mbit", None)
    print(reaches(lab.addresses[1]))
    lab.cut(1)
    print(reaches(lab.addresses[1]))
    lab.mend(1)
    print(reaches(lab.addresses[1]))
    shown = [subprocess.run([*command, "qdisc", "show", "dev", device], capture_output=True, text=True).stdout
             for command, device in ((lab.inside(1, ["tc"]), "eth0"), (["tc"], "host1"))]
    print(*["rate 10Mbit" in one for one in shown])
    server.kill()
"""


@pytest.fixture(scope="module", autouse=True)
def namespaces():
    ways = (["unshare", "--net", "true"], ["unshare", "--user", "--map-root-user", "--net", "true"])
    try:
        if any(subprocess.run(way, capture_output=True).returncode == 0 for way in ways):
            return
    except FileNotFoundError:
        pass
    pytest.skip("this machine lets nobody make network namespaces: see benchmarks/README.md")


def start(rates=(), size=4_000_000, waits=False, command=()):
    program = PROGRAM.format(folder=str(FOLDER), rates=list(rates), size=size, waits=waits, command=list(command))
    # As Python knows the environment: MPI, where a test before this one started it, has put its own variables behind
    # that, and an mpirun that finds them fails without a word.
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": dict(os.environ)}
    return subprocess.Popen([sys.executable, "-c", program], **both)


def pids_of(argument):
    """Return the processes that have an argument."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if argument.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    return found


def assert_gone(pids):
    end = time.monotonic() + 10
    while left := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < end, f"still there: {left}"
        time.sleep(0.05)


def test_links_have_their_rate_in_turn():
    job = start(rates=("50mbit", "200mbit"))
    out, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    pids, *rates = out.splitlines()
    slow, fast = map(float, rates)
    assert 25e6 < slow < 52e6 and 80e6 < fast < 208e6  # a machine under load reads late
    assert_gone(map(int, pids.split()))


def test_a_link_is_cut_and_mended_and_has_a_rate_each_way():
    program = LINKS.format(folder=str(FOLDER))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "False", "True", "True", "False"], done.stdout + done.stderr


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_behind_however_it_ends(how):
    job = start(waits=True)
    pids = [int(pid) for pid in job.stdout.readline().split()]
    assert len(pids) == 2
    job.send_signal(how)
    job.communicate(timeout=20)
    assert_gone(pids)


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_job_ends_with_what_started_it(how):
    mark = str(60 + random.random())
    job = start(waits=True, command=["sh", "-c", f"echo started; exec sleep {mark}"])
    holders, started = job.stdout.readline(), job.stdout.readline()
    if started.split() != ["started"] * 2:
        job.kill()
        pytest.fail(f"mpirun printed {started!r} on hosts held by {holders}: {job.communicate()[1]}")
    end = time.monotonic() + 10
    while len(ranks := pids_of(mark)) < 2:
        assert time.monotonic() < end, ranks
    job.send_signal(how)
    job.communicate(timeout=20)
    assert_gone(ranks)


@pytest.mark.exhaustive
def test_ranks_that_wait_sleep():
    """A thousand turns take 50 ms at least; of the sched_yield of the system, one."""
    turns = "import os, time; t = time.perf_counter(); [os.sched_yield() for _ in range(1000)]; "
    job = start(command=[sys.executable, "-c", turns + "print(time.perf_counter() - t, flush=True)"])
    out, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    seconds = [float(cell) for cell in out.splitlines()[1].split()]
    assert len(seconds) == 2 and min(seconds) > 0.05


def test_a_rate_without_a_unit_is_refused():
    job = start(rates=("100",))
    _, errors = job.communicate(timeout=30)
    assert job.returncode != 0 and "a rate must end with kbit, mbit or gbit, such as 1gbit; got '100'" in errors
