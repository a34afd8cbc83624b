"""A synchronous job on hosts of the network lab, whose links are cut or have different rates.

    hosts_job.py PLAN

PLAN is JSON: see `Plan`. Moves into a network namespace, starts the job on Gloo or on MPI, cuts the link, and waits for
all ranks to end. Prints one JSON object: see `run`. When its input is closed, it ends every process that it started,
then itself.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "network"))
import forked
from hosts import SWITCH, Hosts, enter_switch, hosts

SCRIPT = Path(__file__).resolve().parent / "rank_job.py"
READY_SECONDS = 90.0  # until the job has made the steps before the cut


@dataclass
class Plan:
    """What is to happen.

    Args:
        transport: What Horovod uses, "gloo" or "mpi".
        settings: Of `faults_ranks.torch_job`.
        count: Hosts, with a rank on each.
        rates: What each host sends and receives at; fewer than hosts: the others have no limit.
        host: Whose link is cut; None: no link is.
        after: Steps before the cut.
        delay: Seconds between the end of that step and the cut.
        seconds: How long the link is cut; None: for good.
        environment: More variables of the ranks.
        options: More options of mpirun.
        limit: Seconds from the cut, or from the start, after which a rank that is left counts as one that hangs.
    """

    transport: str
    settings: dict
    count: int = 3
    rates: list[tuple[str, str]] = field(default_factory=list)
    host: int | None = None
    after: int = 0
    delay: float = 0.0
    seconds: float | None = None
    environment: dict[str, str] = field(default_factory=dict)
    options: list[str] = field(default_factory=list)
    limit: float = 120.0


@contextlib.contextmanager
def started(lab: Hosts, plan: Plan, folder: Path) -> Iterator[list[subprocess.Popen]]:
    """Start the ranks; give the processes whose ends tell how the job ended: those of the ranks, or mpirun."""
    command = [sys.executable, str(SCRIPT), str(folder), json.dumps(plan.settings)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(folder / "output", "w") as output:
        both = {"stdout": output, "stderr": output, "stdin": subprocess.DEVNULL}
        if plan.transport == "mpi":
            environment |= {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi", **plan.environment}
            yield [subprocess.Popen(lab.mpirun([*plan.options, *command]), env=environment, **both)]
            return
        with forked.rendezvous(plan.count) as port:
            processes = []  # on hosts whose names are their addresses: Gloo looks its own host's name up
            for rank in range(plan.count):
                own = forked.environment_of(rank, plan.count, port, SWITCH, "eth0") | plan.environment
                named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', lab.addresses[rank], *command]
                processes.append(subprocess.Popen(lab.job(rank, named), env={**environment, **own}, **both))
            yield processes


def ranks_left(folder: Path) -> int:
    """Return how many ranks of the job are there, on any host."""
    begin = b"\0".join(one.encode() for one in (sys.executable, str(SCRIPT), str(folder)))
    left = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            left += path.read_bytes().startswith(begin)
    return left


def notes(folder: Path) -> dict[int, list[str]]:
    """Return what each rank has written down after each of its steps."""
    return {int(one.stem): one.read_text().split() for one in folder.glob("[0-9].notes")}


def wait_for(count: int, folder: Path, processes: list[subprocess.Popen]) -> bool:
    """Wait until rank 0 has made so many steps; return whether it did."""
    end = time.monotonic() + READY_SECONDS
    while len(notes(folder).get(0, [])) < count:
        if time.monotonic() > end or all(one.poll() is not None for one in processes):
            return False
        time.sleep(0.002)
    return True


def disturb(lab: Hosts, plan: Plan, folder: Path, processes: list[subprocess.Popen]) -> dict:
    """Cut the link once the job has come so far, and mend it if that is the plan; return when that was."""
    if plan.host is None or not wait_for(plan.after, folder, processes):
        return {}
    time.sleep(plan.delay)
    lab.cut(plan.host)
    happened = time.time()
    if plan.seconds is None:
        return {"happened": happened}
    time.sleep(plan.seconds)
    before = len(notes(folder).get(0, []))
    lab.mend(plan.host)
    wait_for(before + 1, folder, processes)
    return {"happened": happened, "resumed": time.time() - happened}


def run(lab: Hosts, plan: Plan, folder: Path) -> dict:
    """Run the job; return how it ended, in seconds since the cut, or since the start."""
    for host, (sends, receives) in enumerate(plan.rates):
        lab.limit(host, sends, receives)
    began = time.time()
    with started(lab, plan, folder) as processes:
        found = disturb(lab, plan, folder, processes)
        began = found.get("happened", began)
        while left := ranks_left(folder) + sum(one.poll() is None for one in processes):
            if time.time() - began > plan.limit:
                break
            time.sleep(0.1)
        found |= {"left": left, "seconds": time.time() - began, "statuses": [one.poll() for one in processes]}
    found["ranks"] = {int(one.stem): json.loads(one.read_text()) for one in folder.glob("[0-9].json")}
    return {**found, "notes": notes(folder), "output": (folder / "output").read_text(errors="replace")}


def end_with_input() -> None:
    """Interrupt this process when its input is closed: hosts and jobs go with it."""
    while os.read(0, 1024):  # `sys.stdin` has a lock, which Python wants as it exits
        continue
    os.kill(os.getpid(), signal.SIGINT)


def main() -> None:
    """Do what the plan says."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    enter_switch()
    threading.Thread(target=end_with_input, daemon=True).start()
    plan = Plan(**json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory(prefix="job") as folder, hosts(plan.count) as lab:
        print(json.dumps(run(lab, plan, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
