"""Faults of the network, in the lab of benchmarks/network: links that are cut, links with rates of their own."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from faults_ranks import DENSITIES, RANKS, TOLD
from scenario import Found, Scenario, Skipped

SCRIPT = Path(__file__).resolve().parent / "jobs" / "hosts_job.py"
UNABLE = ("No network namespace can be made", "There is no")  # how the lab begins to say that it cannot run here
STEPS, SCALE, PAUSE = 30, 30, 0.05  # of a job: 91,500 parameters
CUT_SECONDS = 5.0
RATES = ("10mbit", "30mbit", "100mbit", "1gbit")
TRANSPORTS = ("gloo", "mpi")
KEEPALIVE = ["-mca", "oob_tcp_keepalive_time", "5", "-mca", "oob_tcp_keepalive_intvl", "2",
             "-mca", "oob_tcp_keepalive_probes", "5"]  # fmt: skip
ENDINGS = {  # what ends a job whose link is cut for good: transport, variables, options of mpirun, seconds until then
    "Gloo, HOROVOD_GLOO_TIMEOUT_SECONDS=10": ("gloo", {"HOROVOD_GLOO_TIMEOUT_SECONDS": "10"}, [], 30.0),
    "MPI, oob_tcp_keepalive_time=5": ("mpi", {}, KEEPALIVE, 60.0),
    "Gloo, its default of 30 s": ("gloo", {"HOROVOD_GLOO_TIMEOUT_SECONDS": "30"}, [], 50.0),
}
LOST = r"ORTE has lost communication with a remote daemon[^=]*Remote daemon: .* on node "  # mpirun's own words
_expected: dict[float, list[str]] = {}


def launch(transport: str, density: float, **plan) -> dict:
    """Run a job on hosts; return how it ended: see `hosts_job.run`.

    Raises:
        Skipped: This machine lets nobody make network namespaces.
    """
    settings = {"density": density, "steps": STEPS, "scale": SCALE, "pause": PAUSE}
    plan |= {"transport": transport, "settings": settings, "count": RANKS}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, str(SCRIPT), json.dumps(plan)]
        both = {"stdout": output, "stderr": errors, "stdin": subprocess.PIPE}
        job = subprocess.Popen(command, start_new_session=True, **both)
        try:
            status = job.wait(plan.get("limit", 120.0) + 150.0)
        finally:
            job.stdin.close()  # it ends, and what it started, if it has not ended
            job.wait(30.0)
        output.seek(0)
        errors.seek(0)
        told = errors.read()
        if status != 0 and told.startswith(UNABLE):
            raise Skipped(told.strip())
        if status != 0:
            raise RuntimeError(f"the lab failed: {told}")
        return json.loads(output.read())


def describe(job: dict) -> str:
    """Return what there is to say of a job."""
    short = {name: one for name, one in job.items() if name not in ("notes", "output")}
    steps = {rank: len(one) for rank, one in job["notes"].items()}
    return f"{short}, steps {steps}\n{job['output'][-3000:]}"


def expected(density: float) -> list[str]:
    """Return the digests of a job that nothing disturbs: sums are exact, so they depend on no transport."""
    if density not in _expected:
        job = launch("gloo", density)
        notes = list(job["notes"].values())
        if any(job["statuses"]) or notes != [notes[0]] * RANKS or len(notes[0]) != STEPS:
            raise RuntimeError(f"the undisturbed job failed: {describe(job)}")
        _expected[density] = notes[0]
    return _expected[density]


def cut_at_random(random: np.random.Generator) -> dict:
    """Return when, and of which host, a link is cut."""
    return {
        "host": int(random.integers(RANKS)),
        "after": int(random.integers(5, STEPS - 10)),
        "delay": float(random.uniform(0.0, 2 * PAUSE)),
    }


def same_as_undisturbed(found: Found, title: str, job: dict, density: float) -> None:
    """Check that a job came to its end, and that all ranks have the parameters of an undisturbed run in every step."""
    if not found.check(not job["left"], f"{title}hung\n{describe(job)}"):
        return
    found.check(not any(job["statuses"]), f"{title}failed\n{describe(job)}")
    whole = expected(density)
    same = [job["notes"].get(str(rank)) == whole for rank in range(RANKS)]
    found.check(all(same), f"{title}as the undisturbed run: {same}\n{describe(job)}")


def link_cut(found: Found, number: int) -> None:
    """Cut a link for 5 s: the job goes on."""
    transport, density = TRANSPORTS[number % 2], DENSITIES[number // 2 % 2]
    cut = cut_at_random(np.random.default_rng([number, 21]))
    job = launch(transport, density, seconds=CUT_SECONDS, **cut)
    title = f"{transport}, density {density}, {cut}: "
    if found.check("resumed" in job, f"{title}no cut\n{describe(job)}"):
        same_as_undisturbed(found, title, job, density)
        found.worst = max(found.worst, job["resumed"])
        found.note("seconds: from the cut until the next step")


def link_cut_for_good(found: Found, number: int) -> None:
    """Cut a link for good: all ranks end within a stated time, and say why."""
    name, density = list(ENDINGS)[number % len(ENDINGS)], DENSITIES[number // len(ENDINGS) % 2]
    transport, environment, options, limit = ENDINGS[name]
    cut = cut_at_random(np.random.default_rng([number, 22]))
    job = launch(transport, density, environment=environment, options=options, limit=limit, **cut)
    title = f"{name}, density {density}, {cut}: "
    if not found.check("happened" in job, f"{title}no cut\n{describe(job)}"):
        return
    if not found.check(not job["left"], f"{title}{job['left']} processes hang\n{describe(job)}"):
        return
    whole = expected(density)
    same = [one == whole[: len(one)] and len(one) < STEPS for one in job["notes"].values()]
    found.check(same == [True] * RANKS, f"{title}steps {same}\n{describe(job)}")
    found.check(all(one != 0 for one in job["statuses"]), f"{title}ended well\n{describe(job)}")
    if transport == "gloo":
        told = [bool(TOLD.search(job["ranks"].get(str(rank), {}).get("error", ""))) for rank in range(RANKS)]
        found.check(all(told), f"{title}told {told}\n{describe(job)}")
    else:
        own = rf"(host{cut['host']}|10\.99\.0\.{cut['host'] + 1})\b" if cut["host"] else ""  # mpirun is on host 0
        found.check(re.search(LOST + own, job["output"]), f"{title}not told\n{describe(job)}")
    found.worst = max(found.worst, job["seconds"])
    found.note(f"{name}: all ranks ended within {limit:.0f} s")


def asymmetric_rates(found: Found, number: int) -> None:
    """Give each host a rate at which it sends, and another at which it receives."""
    transport, density = TRANSPORTS[number % 2], DENSITIES[number // 2 % 2]
    random = np.random.default_rng([number, 23])
    rates = [[str(one) for one in random.choice(RATES, 2, replace=False)] for _ in range(RANKS)]
    job = launch(transport, density, rates=rates)
    same_as_undisturbed(found, f"{transport}, density {density}, {rates}: ", job, density)
    found.worst = max(found.worst, job["seconds"])
    found.note("seconds: of the whole job")


SCENARIOS = {
    "link_cut_torch": Scenario(
        "10", "a host's link is cut for 5 s, Gloo and MPI over TCP, PyTorch", 4, link_cut),
    "link_cut_for_good_torch": Scenario(
        "10", "a host's link is cut for good, Gloo and MPI over TCP, PyTorch", 3, link_cut_for_good),
    "asymmetric_rates_torch": Scenario(
        "10", "each host sends and receives at different rates, 10 Mbit/s to 1 Gbit/s, PyTorch", 3,
        asymmetric_rates),
}  # fmt: skip
