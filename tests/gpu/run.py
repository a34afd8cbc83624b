"""Run the tests of this folder without pytest: python tests/gpu/run.py [--under COMMAND] [FILE | FILE::TEST ...]

--under COMMAND: each test in a process of its own under this command, such as compute-sanitizer with its options, with
as many processes at once as there are processors.
"""

import argparse
import importlib
import os
import shlex
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import SkipTest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "shared"))  # as pyproject.toml tells pytest


def find_tests(chosen: list[str]) -> list[tuple[str, str]]:
    """Return module and name of the chosen tests, of all unless some are chosen."""
    found = []
    for each in chosen or sorted(map(str, HERE.glob("test_*.py"))):
        path, _, name = each.partition("::")
        module = Path(path).stem
        names = [name] if name else [name for name in vars(importlib.import_module(module)) if name.startswith("test_")]
        found += [(module, name) for name in names]
    return found


def run_here(module: str, name: str) -> str:
    """Call one test; return how it ended: ok, skipped, or FAILED."""
    try:
        getattr(importlib.import_module(module), name)()
    except SkipTest as reason:
        print(f"skipped {module}.{name}: {reason}", flush=True)
        return "skipped"
    except Exception:
        traceback.print_exc()
        print(f"FAILED  {module}.{name}", flush=True)
        return "FAILED"
    print(f"ok      {module}.{name}", flush=True)
    return "ok"


def run_under(command: str, module: str, name: str) -> str:
    """Run one test in a process under a command; print its output only if it failed. Return how it ended."""
    start = time.monotonic()
    call = [*shlex.split(command), sys.executable, __file__, f"{HERE / module}.py::{name}"]
    done = subprocess.run(call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    end = "FAILED" if done.returncode else "skipped" if f"\nskipped {module}.{name}" in f"\n{done.stdout}" else "ok"
    print(f"{end:7} {module}.{name}, {time.monotonic() - start:.0f} s", flush=True)
    if end == "FAILED":
        print(done.stdout, flush=True)
    return end


def main() -> int:
    """Run the tests; return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--under", metavar="COMMAND")
    parser.add_argument("tests", nargs="*", metavar="FILE | FILE::TEST")
    arguments = parser.parse_args()
    reason = importlib.import_module("gpu_helpers").reason_to_skip()
    if reason:
        print(f"skipped: {reason}")
        return 0
    tests = find_tests(arguments.tests)
    if arguments.under is None:
        ends = [run_here(*test) for test in tests]
    else:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            ends = list(pool.map(lambda test: run_under(arguments.under, *test), tests))
    print(f"{ends.count('ok')} passed, {ends.count('FAILED')} failed, {ends.count('skipped')} skipped")
    return ends.count("FAILED")


if __name__ == "__main__":
    sys.exit(main() != 0)
