"""Jobs on MPI in which a worker, a parameter server or a stage of a pipeline fails."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from injector import VARIABLE
from scenario import Found, Scenario

JOBS = Path(__file__).resolve().parent / "jobs"
LIMIT_SECONDS = 150.0  # of one job
WORKERS, STAGES = 2, 3
PUSHES, STEPS = 60, 6  # of those that a job makes: in them faults happen
KILLED = r"exited on signal 9|noticed that process rank|Killed"  # mpirun's own words
_losses: dict[str, list[float]] = {}


@dataclass
class Ended:
    """How a job ended."""

    status: int | None  # None: it hung
    output: str
    ranks: dict[int, dict] = field(default_factory=dict)  # what each that came to its end wrote down
    arrays: dict[int, dict] = field(default_factory=dict)
    departures: dict[int, dict] = field(default_factory=dict)  # as each server has them
    happened: float | None = None  # the time of the fault

    def errors(self) -> dict[int, str]:
        """Return the errors of the remaining ranks; an empty string for a rank that ended well."""
        return {rank: one.get("error", "") for rank, one in sorted(self.ranks.items())}

    def describe(self) -> str:
        """Return what there is to say."""
        return f"status {self.status}, {self.errors()}, {self.departures}\n{self.output[-3000:]}"


def launch(job: str, ranks: int, arguments: list, fault: dict | None, options: tuple[str, ...] = ()) -> Ended:
    """Run a job under mpirun."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [shutil.which("mpirun"), "-np", str(ranks), "--oversubscribe", *options, sys.executable]
        command += [str(JOBS / job), name, *map(str, arguments)]
        told = None if fault is None else {**fault, "told": f"{name}/told"}
        with open(folder / "output", "w") as output:
            environment = {**os.environ, VARIABLE: json.dumps(told)}
            done = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, env=environment)
            try:
                status = done.wait(LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(done.pid, signal.SIGKILL)
                done.wait()
                status = None
        return Ended(
            status,
            (folder / "output").read_text(errors="replace"),
            {int(file.stem): json.loads(file.read_text()) for file in folder.glob("*.json")},
            {int(file.stem): dict(np.load(file)) for file in folder.glob("*.npz")},
            {int(file.stem): json.loads(file.read_text()) for file in folder.glob("*.departures")},
            float((folder / "told").read_text()) if (folder / "told").exists() else None,
        )


def in_server(found: Found, number: int) -> None:
    """Have a server go wrong in an update, with one server and with two."""
    random, servers = np.random.default_rng([number, 11]), 1 + number // 6 % 2
    kind = ("stop", "raise", "kill", "kill, the others go on", "leave", "delay")[number % 6]
    rank = WORKERS + int(random.integers(servers))
    fault = {
        "kind": kind.split(",")[0],
        "phase": "update",
        "rank": rank,
        "step": 0,
        "entry": int(random.integers(PUSHES)),
    }
    fault |= {"seconds": 5.0 if kind == "stop" else 0.5}
    recovery = ("--enable-recovery",) if "," in kind else ()
    job = launch("server_job.py", WORKERS + servers, [servers, 0.02], fault, recovery)
    title = f"{kind}, {fault}: "
    if not began(found, title, job):
        return
    errors = {rank: job.errors().get(rank, "") for rank in range(WORKERS)}
    if kind in ("stop", "delay"):
        found.check(job.status == 0 and not any(errors.values()), title + job.describe())
        found.check(all(one == {"0": "", "1": ""} for one in job.departures.values()), title + job.describe())
        conserved(found, title, job, servers)
    elif kind == "kill":
        found.check(job.status != 0 and re.search(KILLED, job.output) is not None, title + job.describe())
    else:
        words = {"raise": r"ServerRefused: .*the server has stopped: Injected: in update",
                 "leave": r"ServerRefused: .*the server has stopped: SystemExit"}  # fmt: skip
        pattern = words.get(kind, rf"TimeoutError: no answer from the servers.*{rank}.* within 25 seconds")
        told = {number: bool(re.search(pattern, error)) for number, error in errors.items()}
        found.check(all(told.values()), f"{title}told {told}\n{job.describe()}")
        found.worst = max(found.worst, *(one["time"] - job.happened for one in job.ranks.values()))


def in_worker(found: Found, number: int) -> None:
    """Have a worker go wrong in a push: the others go on, and nothing that was pushed counts twice or not at all."""
    random, servers = np.random.default_rng([number, 12]), 1 + number // 4 % 2
    kind, rank = ("stop", "raise", "kill", "leave")[number % 4], int(random.integers(WORKERS))
    fault = {"kind": kind, "phase": "push", "rank": rank, "step": int(random.integers(15)), "entry": 0, "seconds": 5.0}
    pause = 0.3 if kind == "stop" else 0.02  # the others are still there when it goes on
    job = launch("server_job.py", WORKERS + servers, [servers, pause], fault, ("--enable-recovery",))
    title = f"{kind}, {fault}: "
    if not began(found, title, job):
        return
    errors = job.errors()
    others = [error for place, error in errors.items() if place != rank]
    found.check(len(others) == WORKERS + servers - 1 and not any(others), title + job.describe())
    if kind == "stop":
        found.check(errors.get(rank) == "" and f"worker {rank} is gone" in job.output, title + job.describe())
    reason = {
        "stop": "$",
        "raise": "Injected: in push",
        "kill": "no sign of life for 2 seconds",
        "leave": "$",  # sys.exit(0) within the session is no error
    }
    for departures in job.departures.values():
        found.check(departures.get(str(1 - rank)) == "", title + job.describe())
        found.check(re.match(reason[kind], departures.get(str(rank), "?")), title + job.describe())
    found.check(len(job.departures) == servers, title + job.describe())
    conserved(found, title, job, servers)


def began(found: Found, title: str, job: Ended) -> bool:
    """Check that a job has not hung, and that the fault has happened."""
    done = found.check(job.status is not None, f"{title}hung\n{job.describe()}")
    return done and found.check(job.happened is not None, f"{title}it did not happen\n{job.describe()}")


def conserved(found: Found, title: str, job: Ended, servers: int) -> None:
    """Check that the pushed gradients equal the change of the parameters plus the residuals, bit for bit."""
    shards = [job.arrays[rank] for rank in range(WORKERS, WORKERS + servers) if rank in job.arrays]
    if not found.check(len(shards) == servers, f"{title}not all servers have ended\n{job.describe()}"):
        return
    shards.sort(key=lambda one: int(one["begin"]))
    moved = np.concatenate([one["moved"] for one in shards]).astype(np.float64)
    workers = [
        job.arrays[rank] for rank in range(WORKERS) if rank in job.arrays
    ]  # one may have ended in its first step
    left = sum(one["total"] - one["waiting"] for one in workers) - moved
    found.check(not left.any(), f"{title}lost or twice: {np.abs(left).sum()}\n{job.describe()}")


def in_stage(framework: str):
    """Return what makes a try: a stage goes wrong as it sends or receives."""

    def run(found: Found, number: int) -> None:
        random = np.random.default_rng([number, 13])
        kind = ("stop", "raise", "corrupt", "kill", "leave", "delay")[number % 6]
        phase = "stage send" if kind == "corrupt" or number // 6 % 2 == 0 else "stage receive"
        rank, step = int(random.integers(STAGES)), int(random.integers(STEPS))
        fault = {"kind": kind, "phase": phase, "rank": rank, "step": step, "entry": int(random.integers(2))}
        fault |= {"seconds": 5.0 if kind == "stop" else 0.5, "bit": int(random.integers(2**20))}
        whole = undisturbed(framework)
        job = launch("stage_job.py", STAGES, [framework], fault)
        title = f"{framework}, {fault}: "
        if not began(found, title, job):
            return
        same = all(one["losses"] == whole[: len(one["losses"])] for one in job.ranks.values())
        found.check(same, f"{title}losses differ\n{job.describe()}")
        errors = job.errors()
        if kind in ("stop", "delay"):
            ended = [len(one["losses"]) == len(whole) for one in job.ranks.values()]
            found.check(job.status == 0 and ended == [True] * STAGES, title + job.describe())
            return
        found.check(job.status != 0, title + job.describe())
        if kind == "kill":
            found.check(re.search(KILLED, job.output) is not None, title + job.describe())
            return
        words = {"raise": rf"stage {rank} has failed: Injected: in {phase}", "corrupt": "DamagedMessage",
                 "leave": rf"stage {rank} has (ended|failed)"}  # fmt: skip
        told = {place: bool(re.search(words[kind], error)) for place, error in errors.items()}
        own = {"raise": "^Injected", "leave": "^SystemExit"}.get(kind)
        if own:
            told[rank] = bool(re.search(own, errors.get(rank, "")))
        found.check(len(told) == STAGES and all(told.values()), f"{title}told {told}\n{job.describe()}")
        found.worst = max(found.worst, *(one["time"] - job.happened for one in job.ranks.values()))

    return run


def undisturbed(framework: str) -> list[float]:
    """Return the losses of a run without a fault: the same on all ranks."""
    if framework not in _losses:
        job = launch("stage_job.py", STAGES, [framework], None)
        losses = [one["losses"] for one in job.ranks.values()]
        if job.status != 0 or losses != [losses[0]] * STAGES:
            raise RuntimeError(f"the undisturbed job failed: {job.describe()}")
        _losses[framework] = losses[0]
    return _losses[framework]


SCENARIOS = {
    "in_server": Scenario(
        "3", "a server is stopped for 5 s, raises, is killed, leaves or waits in an update", 12, in_server),
    "in_worker": Scenario("3", "a worker is stopped for 5 s, raises, is killed or leaves in a push", 8, in_worker),
    **{
        f"in_stage_{framework}": Scenario(
            "3", f"a stage is stopped for 5 s, raises, sends damage, is killed, leaves or waits, {framework}", 12,
            in_stage(framework))
        for framework in ("torch", "tensorflow")
    },
}  # fmt: skip
