"""Describes the machine and the versions that a benchmark ran with."""

import os
import platform
from importlib.metadata import version
from pathlib import Path


def machine() -> str:
    """Return the number of cores, the processor's name if the system knows it, and versions, as text."""
    found = Path("/proc/cpuinfo")
    lines = found.read_text().splitlines() if found.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "tensorflow", "numpy"))
    return f"{os.cpu_count()} cores, {names[0] if names else platform.machine()}, {versions}"
