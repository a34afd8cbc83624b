"""Runs an example and records the time of each line of its table."""

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence

Curve = list[tuple[float, float]]  # (seconds since the first step, metric) pairs


def follow(command: Sequence[str], column: str, variables: Mapping[str, str] | None = None) -> Curve:
    """Run the command of an example with more environment variables; return the curve of a column of its table."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(variables or {})}
    header, curve, result = [], [], None
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            cells = line.split()
            if line.startswith("{"):
                result = json.loads(line)
            elif column in cells:
                header = cells
            elif len(cells) == len(header) and cells[0].isdigit():
                curve.append((time.monotonic(), float(cells[header.index(column)])))
    if process.returncode != 0 or result is None:
        raise RuntimeError(f"{' '.join(command)} failed; its output is above")
    start = curve[-1][0] - result["seconds"]  # the example's own clock starts after the imports
    return [(moment - start, metric) for moment, metric in curve]
