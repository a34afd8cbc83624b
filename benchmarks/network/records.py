"""Records of runs in a file: a JSON list with one run per line."""

import json
from pathlib import Path


def load(path: Path) -> list[dict]:
    """Return the runs in a file; an empty list if there is no file."""
    return json.loads(path.read_text()) if path.exists() else []


def save(path: Path, runs: list[dict]) -> None:
    """Write all runs."""
    path.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
