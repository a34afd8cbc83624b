"""Horovod jobs of forked processes: one import of the frameworks serves thousands of jobs, and 64 ranks on one machine.

Each rank is a fork of this process that starts Horovod on Gloo like `horovodrun --gloo`. The process that forks may
import a framework, but must not use it before.
"""

import contextlib
import faulthandler
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

IMPORTS = {
    "torch": ("horovod.torch", "hvd_sparse.torch", "torch._dynamo"),
    "tensorflow": ("horovod.tensorflow", "hvd_sparse.tensorflow"),
}
KILLED = -signal.SIGKILL
LIMIT_SECONDS = 60.0  # of a job that names no other: then it hangs


@dataclass
class Rank:
    """How one rank ended."""

    status: int | None = None  # of its exit, below 0: the signal that ended it; None: it hung
    result: object = None  # what its function returned
    error: str = ""  # "TypeOfError: message", if it raised
    seconds: float = 0.0  # from the start of the job
    output: str = ""
    stacks: str = ""  # of one that hung, where there is gdb


@dataclass
class Job:
    """How all ranks of a job ended."""

    ranks: list[Rank] = field(default_factory=list)
    began: float = 0.0

    @property
    def hung(self) -> list[int]:
        """The ranks that had to be ended."""
        return [rank for rank, one in enumerate(self.ranks) if one.status is None]

    def describe(self) -> str:
        """Return one line a rank, and what each printed last."""
        lines = [
            f"rank {i}: status {one.status}, {one.error or one.result!r}"[:1500] for i, one in enumerate(self.ranks)
        ]
        return "\n".join([*lines, *(one.output[-5000:] + one.stacks for one in self.ranks if one.status != 0)])


def preload(framework: str) -> None:
    """Import what the ranks of a framework need, so that forks have it; neither starts a thread as it is imported.

    Horovod has one table of process sets in a process: it becomes that of this framework, as if it were imported last.
    """
    for module in IMPORTS[framework]:
        importlib.import_module(module)
    horovod = importlib.import_module(f"horovod.{framework}.mpi_ops")
    importlib.import_module("horovod.common.process_sets")._setup(horovod._basics)


def run(
    function: Callable[[int], object],
    ranks: int,
    limit: float = LIMIT_SECONDS,
    environment: Sequence[tuple[str, str]] = (),
    watch: Callable[[list[int], float], None] | None = None,
) -> Job:
    """Run `function(rank)` in so many forks, with Horovod started in each; return how they ended.

    Args:
        function: What a rank does; it returns something that JSON can write.
        ranks: World size.
        limit: Seconds after which the ranks that are left are ended, and count as hung.
        environment: More variables.
        watch: Called again and again with the process ids and the seconds since the start.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="forked") as folder:
        with rendezvous(ranks) as port:
            began = time.monotonic()
            pids = [_fork(function, rank, ranks, port, Path(folder), environment) for rank in range(ranks)]
            return _wait(pids, began, limit, Path(folder), watch)


@contextlib.contextmanager
def rendezvous(ranks: int) -> Iterator[int]:
    """Give the port of Horovod's rendezvous server, for as long as the block runs."""
    server, port = _start_rendezvous(ranks)
    try:
        yield port
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


def _start_rendezvous(ranks: int) -> tuple[int, int]:
    """Return the process and the port of Horovod's rendezvous server: a fork, so that this process has no threads."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.close(read)
        try:
            from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
            from horovod.runner.http.http_server import RendezvousServer

            server = RendezvousServer(0)
            port = server.start()
            server.init(get_host_assignments(parse_hosts(f"localhost:{ranks}"), ranks))
            os.write(write, f"{port}\n".encode())
            os.close(write)
            while os.getppid() != 1:
                time.sleep(1.0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        return pid, int(file.readline())


def _fork(function, rank: int, ranks: int, port: int, folder: Path, environment) -> int:
    pid = os.fork()
    if pid != 0:
        return pid
    status = 1
    try:
        output = os.open(folder / f"{rank}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(os.dup(1), "w", 1), os.fdopen(os.dup(2), "w", 1)
        faulthandler.enable(sys.stderr)
        os.environ.update(environment_of(rank, ranks, port), **dict(environment))
        status = _work(function, rank, folder)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def environment_of(
    rank: int, ranks: int, port: int, address: str = "127.0.0.1", interface: str = "lo"
) -> dict[str, str]:
    """Return the variables that tell a rank its place, and where the rendezvous server is."""
    numbers = {"RANK": rank, "SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_SIZE": ranks, "CROSS_RANK": 0, "CROSS_SIZE": 1}
    named = {f"HOROVOD_{name}": str(number) for name, number in numbers.items()}
    return named | {
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": interface,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "600",  # ranks may wait long for a core
    }


def _work(function, rank: int, folder: Path) -> int:
    """Do a rank's work, and write down what became of it."""
    found: dict = {}
    try:
        found["result"] = function(rank)
    except SystemExit:
        found["error"] = "SystemExit"
    except BaseException as error:
        found["error"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    partial = folder / f"{rank}.partial"
    partial.write_text(json.dumps(found))
    partial.rename(folder / f"{rank}.json")
    return 1 if "error" in found else 0


def _has_time(began: float, limit: float, pids) -> bool:
    """Return whether ranks have time left, where time that they wait for a core does not count."""
    elapsed = time.monotonic() - began
    return elapsed < limit or (elapsed < 10 * limit and elapsed - max(map(_starved, pids)) < limit)


def _starved(pid: int) -> float:
    """Return the seconds that the threads of a process were ready to run and had no core, those of the worst one."""
    found = [0.0]
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            found.append(int(path.read_text().split()[1]) / 1e9)
    return max(found)


def native_stacks(pid: int) -> str:
    """Return where the threads of a process that hangs stand, as gdb has it; nothing where there is none."""
    gdb = shutil.which("gdb")
    if gdb is None:
        return ""
    command = [gdb, "-p", str(pid), "-batch", "-ex", "thread apply all bt 40"]
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120)
        return "\n".join(line[:200] for line in done.stdout.splitlines() if re.match(r"Thread |#", line))
    return ""


def _wait(pids: list[int], began: float, limit: float, folder: Path, watch) -> Job:
    job = Job([Rank() for _ in pids], began)
    left = dict(enumerate(pids))
    while left and _has_time(began, limit, left.values()):
        for rank, pid in list(left.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                job.ranks[rank].status = os.waitstatus_to_exitcode(status)
                job.ranks[rank].seconds = time.monotonic() - began
                del left[rank]
        if watch is not None:
            watch(pids, time.monotonic() - began)
        time.sleep(0.005)
    stacks = {rank: native_stacks(pid) for rank, pid in left.items()}
    for pid in left.values():
        os.kill(pid, signal.SIGABRT)  # it shows where it stands
    time.sleep(1.0 if left else 0.0)
    for rank, pid in left.items():
        job.ranks[rank].seconds = time.monotonic() - began
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for rank, one in enumerate(job.ranks):
        if (folder / f"{rank}.json").exists():
            found = json.loads((folder / f"{rank}.json").read_text())
            one.result, one.error = found.get("result"), found.get("error", "")
        if (folder / f"{rank}.output").exists():
            one.output = (folder / f"{rank}.output").read_text(errors="replace")
        one.stacks = stacks.get(rank, "")
    return job
