"""Scenarios of faults, their findings, and how results are stored and printed."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "benchmarks" / "results" / "faults.json"
TABLE = ROOT / "benchmarks" / "results" / "faults.md"
COMMAND = "scripts/run.sh python tests/faults/run.py"


class Skipped(Exception):
    """A scenario cannot run on this machine; says what is missing."""


class Uncounted(Exception):
    """A try says nothing about its fault, and does not count; says why."""


@dataclass
class Found:
    """What became of the tries of one scenario."""

    asked = 1  # how many tries are wanted: those that are steps of one job make no more
    tries: int = 0
    failures: list[str] = field(default_factory=list)
    worst: float = 0.0  # seconds from a fault to recovery, or to the error on the last rank
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0  # of all tries
    uncounted: int = 0  # tries that do not count

    def note(self, text: str) -> None:
        """Keep a remark for the table, once."""
        if text not in self.notes:
            self.notes.append(text)

    def check(self, holds: bool, what: str) -> bool:
        """Count a failure unless this holds."""
        if not holds:
            self.failures.append(what)
            print(what, flush=True)
        return holds


@dataclass(frozen=True)
class Scenario:
    """One kind of fault.

    Args:
        item: The group of the table that it belongs to.
        title: What happens, for the table.
        tries: How many tries `make test-faults` makes.
        run: Makes one try: `run(found, number)`, which counts itself the tries it made, 1 unless it says otherwise.
        unit: What one try is.
    """

    item: str
    title: str
    tries: int
    run: Callable[[Found, int], None]
    unit: str = "tries"


def make(
    scenario: Scenario, tries: int, minutes: float, first: int = 0, after_each: Callable[[Found], None] | None = None
) -> Found:
    """Make a number of tries, or tries for a number of minutes; stop after five failures.

    first: the number of the first try. after_each: called after each try with what was found so far.
    """
    found, began, number = Found(), time.monotonic(), first
    found.asked = tries
    while found.tries < tries and len(found.failures) < 5 and time.monotonic() - began < 60 * minutes:
        before = found.tries
        try:
            scenario.run(found, number)
            found.tries = max(found.tries, before + 1)
        except Uncounted as reason:
            found.tries, found.uncounted = before, found.uncounted + 1
            found.note(f"not counted: {reason}")
        found.seconds = time.monotonic() - began
        number += 1
        if after_each is not None:
            after_each(found)
    return found


def kept_of(name: str, path: Path = KEPT) -> Found:
    """Return the result of a scenario that the file has, without tries if it has none."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    return Found(**kept.get(name, {}))


def keep(name: str, found: Found, last: Found, path: Path = KEPT) -> None:
    """Write a result to the file, added to an earlier one."""
    failures = [failure.split("\n")[0] for failure in found.failures]  # what was printed has all of it
    total = Found(
        tries=last.tries + found.tries,
        failures=last.failures + failures,
        worst=max(last.worst, found.worst),
        notes=last.notes + [note for note in found.notes if note not in last.notes],
        seconds=last.seconds + found.seconds,
        uncounted=last.uncounted + found.uncounted,
    )
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept[name] = asdict(total)
    path.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def table(scenarios: dict[str, Scenario], path: Path = KEPT) -> str:
    """Return the table of all results that are kept."""
    kept = {name: Found(**one) for name, one in json.loads(path.read_text()).items()} if path.exists() else {}
    lines = [
        "What was injected, how often, and what became of it: `make test-faults`, or one row with",
        f"`{COMMAND} NAME --tries NUMBER`; with `--add`, new tries are",
        "added to the row's. A failure is a hang, a rank that differs, a gradient that is lost or twice there, or an",
        "error that does not say what went wrong. Seconds are the worst ones from a fault until training went on, or",
        "until the last rank had its error. They include waiting for a core: the machine had two, shared with other",
        "work.",
        "",
        "| | what happens | name | tries | failures | worst, s | minutes | |",
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    for name, scenario in sorted(scenarios.items(), key=lambda one: int(one[1].item)):
        if name in kept:
            one = kept[name]
            worst = f"{one.worst:.1f}" if one.worst else ""
            tries = f"{one.tries:,}" if scenario.unit == "tries" else f"{one.tries:,} {scenario.unit}"
            notes = [*one.notes, *([f"{one.uncounted} jobs not counted"] if one.uncounted else [])]
            row = [scenario.item, scenario.title, f"`{name}`", tries, str(len(one.failures)), worst]
            lines.append("| " + " | ".join([*row, f"{one.seconds / 60:.1f}", "; ".join(notes)]) + " |")
    return "\n".join(lines) + "\n"
