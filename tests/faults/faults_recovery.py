"""Asynchronous runs that lose a worker or their server, and train on: the loss is that of undisturbed runs."""

import re
import statistics
import tempfile
from pathlib import Path

import numpy as np
from faults_mpi import Ended, began, launch
from scenario import Found, Scenario

WORKERS = 3
PUSHES = 1500  # of all workers together
SEEDS = 5  # undisturbed runs
FACTOR = 5.0  # 99 of 100 more runs are within so many standard deviations of five runs' mean: t(4) * sqrt(1 + 1/5)
RECOVERY = ("--enable-recovery",)
_undisturbed: list[float] = []
_recovered: dict[str, list[float]] = {}


def train(seed: int, saved: str, fault: dict | None = None) -> Ended:
    """Run a job, which goes on from a saved file if there is one."""
    return launch("recovery_job.py", WORKERS + 1, [seed, PUSHES, saved], fault, RECOVERY if fault else ())


def loss_of(job: Ended) -> float:
    """Return the loss of the servers' model at the end of the worker that ended last."""
    return max((one["time"], one["loss"]) for one in job.ranks.values() if "loss" in one)[1]


def undisturbed() -> list[float]:
    """Return the losses of runs that nothing disturbs, each with a different seed."""
    while len(_undisturbed) < SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            job = train(1000 + len(_undisturbed), f"{folder}/saved.npz")
        if job.status != 0 or any(job.errors().values()):
            raise RuntimeError(f"the undisturbed job failed: {job.describe()}")
        _undisturbed.append(loss_of(job))
    return _undisturbed


def compare(found: Found, name: str, title: str, job: Ended) -> None:
    """Check a run's loss against those of undisturbed runs."""
    losses, loss = undisturbed(), loss_of(job)
    bound = statistics.mean(losses) + FACTOR * statistics.stdev(losses)
    found.check(loss <= bound, f"{title}loss {loss}, of undisturbed seeds {losses}\n{job.describe()}")
    _recovered.setdefault(name, []).append(loss)
    ends = [f"{end(ones):.3f}" for ones in (_recovered[name], losses) for end in (min, max)]
    found.notes = ["loss {} to {}, of {count} undisturbed seeds {} to {}".format(*ends, count=SEEDS)]


def recovered_worker(found: Found, number: int) -> None:
    """Kill a worker in a push: the others make the pushes that are left."""
    random = np.random.default_rng([number, 31])
    rank = int(random.integers(WORKERS))
    fault = {"kind": "kill", "phase": "push", "rank": rank, "step": int(random.integers(50, 300)), "entry": 0}
    with tempfile.TemporaryDirectory() as folder:
        job = train(number, f"{folder}/saved.npz", fault)
    title = f"{fault}: "
    if not began(found, title, job):
        return
    others = [one.get("error", "") for place, one in job.ranks.items() if place != rank]
    if found.check(others == [""] * WORKERS, title + job.describe()):
        compare(found, "worker", title, job)


def recovered_server(found: Found, number: int) -> None:
    """Kill the server in an update: all workers are told; a second job goes on from what the first has saved."""
    entry = int(np.random.default_rng([number, 32]).integers(300, 1200))
    fault = {"kind": "kill", "phase": "update", "rank": WORKERS, "step": 0, "entry": entry}
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "saved.npz"
        job = train(number, str(saved), fault)
        title = f"{fault}: "
        if not began(found, title, job):
            return
        told = [bool(re.search("TimeoutError: no answer from the servers", one)) for one in job.errors().values()]
        if not found.check(told == [True] * WORKERS and saved.exists(), f"{title}told {told}\n{job.describe()}"):
            return
        found.worst = max(found.worst, *(one["time"] - job.happened for one in job.ranks.values()))
        again = train(number, str(saved))
    ended = again.status == 0 and not any(again.errors().values())
    found.check(ended and all(one.get("before", 1) > 0 for one in again.ranks.values()), title + again.describe())
    if ended:
        compare(found, "server", title, again)
        found.note("10 s: workers wait for a killed server as long as timeout says")


SCENARIOS = {
    "recovered_worker": Scenario(
        "10", "DGS: a worker is killed, the others go on under --enable-recovery; loss of undisturbed seeds", 2,
        recovered_worker),
    "recovered_server": Scenario(
        "10", "DGS: the server is killed, a second job goes on from session.save; loss of undisturbed seeds", 2,
        recovered_server),
}  # fmt: skip
