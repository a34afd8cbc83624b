"""What the benchmarks share: the folder of results, the runs in a file and those that are missing, jobs, and times."""

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def load(path: Path) -> list[dict]:
    """Return the runs in a file, a JSON list; an empty list if there is no file."""
    return json.loads(path.read_text()) if path.exists() else []


def save(path: Path, runs: list[dict]) -> None:
    """Write all runs, one per line, in a folder that need not be there yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")


def missing(wanted: Iterable[tuple], runs: Iterable[dict], keys: Sequence[str]) -> list[tuple]:
    """Return those of the wanted runs, tuples of the keys' values, that are not among the runs, each once."""
    known = {tuple(run[key] for key in keys) for run in runs}
    return [one for one in dict.fromkeys(wanted) if one not in known]


def refuse_other_settings(path: Path, found: dict, wanted: dict) -> None:
    """Exit if a file has results of other settings, which this call would overwrite."""
    if found != wanted:
        sys.exit(f"{path} has results of {found}, but this call is for {wanted}: name another folder with --out")


def number(value: float | None) -> float:
    """Return a number of an example's JSON line, where null is a number that is not finite: training diverged."""
    return math.nan if value is None else value


def last_json(command: Sequence[str], **options: Any) -> dict:
    """Run a command; return the last line that it prints, a JSON object.

    Args:
        options: More arguments of `subprocess.run`.

    Raises:
        subprocess.CalledProcessError: The command failed; its error output has been shown.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, **options)
    return json.loads(done.stdout.strip().splitlines()[-1])


def timed(action: Callable, *arguments: Any) -> float:
    """Return the seconds that an action takes."""
    start = perf_counter()
    action(*arguments)
    return perf_counter() - start


def median_seconds(rounds: int, action: Callable, *arguments: Any) -> float:
    """Return the median seconds of an action over a number of rounds."""
    return statistics.median(timed(action, *arguments) for _ in range(rounds))
