"""Elastic jobs under horovodrun: of 4 ranks one is killed in a step, 3 continue, a new one joins; repeatedly."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import forked
import numpy as np
from elastic import RANKS, put_in
from scenario import Found, Scenario, Uncounted

JOBS = Path(__file__).resolve().parent / "jobs"
KILLS = 4  # of one job, but of the first one, which has one
LEAST = 2  # ranks that a world must have: Gloo can abort one more at the death of another
ABORTED = "terminate called after throwing an instance of 'gloo::"  # by a thread of Gloo or Horovod
MOST_SENT = 30  # elements that a rank sends in a step: density 0.01 of 3,000


def launch(job: str, folder: Path, kept: str, kills: int, seed: int, limit: float) -> tuple[int | None, str, int]:
    """Run a job; return its status, None if it hung, what it printed, and how many ranks Gloo aborted meanwhile."""
    (folder / "hosts").write_text("".join(f"127.{'0' * i}1:1\n" for i in range(RANKS)))
    discover = folder / "discover"
    discover.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    discover.chmod(0o755)
    command = ["horovodrun", "--gloo", "--network-interface", "lo", "-np", str(RANKS), "--min-np", str(LEAST)]
    command += ["--max-np", str(RANKS), "--host-discovery-script", str(discover), "--elastic-timeout", "300"]
    command += ["--start-timeout", "300", sys.executable, str(JOBS / job), str(folder), kept, str(kills), str(seed)]
    stacks, printed = "", folder / "output"
    with open(printed, "w") as output:
        started = subprocess.Popen(command, env=default_environment(), stdout=output, stderr=subprocess.STDOUT,
                                   start_new_session=True)  # fmt: skip
        try:
            status = started.wait(limit)
            aborted = printed.read_text(errors="replace").count(ABORTED)
        except subprocess.TimeoutExpired:
            status, aborted = None, printed.read_text(errors="replace").count(ABORTED)  # before ranks are ended below
            stacks = end(ranks_of(folder))
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
    return status, printed.read_text(errors="replace") + stacks, aborted


def default_environment() -> dict[str, str]:
    """Return the environment without dynamic process sets, which `run.py` turns on.

    With them, Horovod 0.28.1 holds a lock for as long as it waits for a rank that is dead, 30 s. A collective that is
    submitted meanwhile can be added after Horovod has dropped those in flight, and then never ends (docs/faults.md).
    """
    return {name: value for name, value in os.environ.items() if name != "HOROVOD_DYNAMIC_PROCESS_SETS"}


def ranks_of(folder: Path) -> list[int]:
    """Return the processes of a job's ranks that are alive: those that have the job's folder as an argument."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            words = path.read_bytes().split(b"\0")
            if len(words) > 2 and words[1].endswith(b"_job.py") and words[2] == os.fsencode(folder):
                found.append(int(path.parent.name))
    return found


def end(ranks: list[int]) -> str:
    """Let each rank of a job that hangs print where it stands in Python, and end it; return where its threads stand."""
    stacks = "".join(f"process {pid}\n{forked.native_stacks(pid)}\n" for pid in ranks)
    for pid in ranks:
        os.kill(pid, signal.SIGABRT)
    time.sleep(2.0)
    return stacks


def killed(kept: str, job: str = "elastic_job.py"):
    """Return what makes a try: a job in which ranks are killed, and what it must have kept of all gradients."""

    def run(found: Found, number: int) -> None:
        wanted = KILLS if number else 1
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "events").touch()
            status, output, aborted = launch(job, folder, kept, wanted, number, limit=300.0 + 100.0 * wanted)
            events = [json.loads(line) for line in (folder / "events").read_text().splitlines()]
            processes = {int(file.stem): dict(np.load(file)) for file in folder.glob("*.npz")}
        kills = [one for one in events if one["what"] == "kill"]
        found.tries += len(kills)
        title = f"{job} {number}, {kept}: "
        few_left = RANKS - 1 - aborted < LEAST
        if status not in (0, None) and few_left and not re.search(r"Error: hvd_sparse", output):
            raise Uncounted(f"jobs in which Gloo aborted other ranks, so that fewer than {LEAST} were left")
        if aborted:
            found.note("in some jobs Gloo aborted another rank as well, and they recovered from this, too")
        ended = [json.loads(one) for one in re.findall(r"ended (\{.*?\})", output)]
        if not found.check(
            status == 0 and len(ended) == RANKS,
            f"{title}status {status}\n{output[-20000:]}\n{events}",
        ):
            return
        found.check(all(one["same"] for one in ended) and len(kills) == wanted, f"{title}{ended}, {len(kills)} kills")
        alive = [processes[one["pid"]] for one in ended]
        dead = [one for pid, one in processes.items() if pid not in {rank["pid"] for rank in ended}]
        if job == "elastic_job.py":
            found.check(wanted <= len(dead) <= wanted + aborted, f"{title}{len(processes)} processes")
            total = sum(one["total"] for one in processes.values())
        else:
            total = put_in(events, ended[0]["batch"])
        judge(found, title, kept, total, alive, dead)
        begins = [one["time"] for one in events if one["what"] == "begin"]
        waits = [min((b for b in begins if b > one["time"]), default=one["time"]) - one["time"] for one in kills]
        found.worst = max(found.worst, *waits)

    return run


def judge(found: Found, title: str, kept: str, total: np.ndarray, alive: list[dict], dead: list[dict]) -> None:
    """Check what became of the gradients that went in, by what every process wrote down last."""
    lost = total - sum(one["waiting"] for one in alive) - alive[0]["moved"]
    if kept == "own":  # what waited on the ranks that were killed, less what they sent in steps that others completed
        more = lost - sum(one["waiting"] for one in dead)
        sent = [np.stack([np.zeros_like(more), one["waiting"] + one["gradient"]]) for one in dead]
        sums = np.stack([sum(choice) for choice in itertools.product(*sent)])
        found.check((sums == -more).any(axis=0).all() and np.count_nonzero(more) <= len(dead) * MOST_SENT,
                    f"{title}lost {np.abs(more).sum()} more, in {np.count_nonzero(more)} elements")  # fmt: skip
        found.note("lost: exactly what the killed ranks had not sent")
    else:  # shares of whole numbers are none: float32 rounds them as gradients are added
        found.check(np.abs(lost).max() < 0.01, f"{title}lost {np.abs(lost).max()}")
        found.note("all committed is there, within 1e-2 of whole numbers")


SCENARIOS = {
    f"elastic_{kept}": Scenario("1", f"elastic, 4 -> 3 -> 4 ranks, SIGKILL within a step, {what}, PyTorch", 2,
                                killed(kept), "kills")
    for kept, what in (("summed", "commits with a summed state"), ("own", "commits of each rank's own state"))
} | {
    "elastic_tensorflow": Scenario(
        "1", "the same within a step or a commit, commits with a summed state, TensorFlow", 2,
        killed("summed", "elastic_tensorflow_job.py"), "kills")
}  # fmt: skip
