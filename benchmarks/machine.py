"""On what a benchmark ran."""

import os
import platform
from importlib.metadata import version
from pathlib import Path


def machine() -> str:
    """Return the number of cores, the processor as far as the system tells it, and versions, in words."""
    found = Path("/proc/cpuinfo")
    lines = found.read_text().splitlines() if found.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "tensorflow", "numpy"))
    return f"{os.cpu_count()} cores, {names[0] if names else platform.machine()}, {versions}"
