"""Run the tests of this folder without pytest: python tests/gpu/run.py [FILE...]"""

import importlib
import sys
import traceback
from pathlib import Path
from unittest import SkipTest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "shared"))  # as pyproject.toml tells pytest


def main() -> int:
    """Call every test function of the files, all unless some are named; return how many failed."""
    reason = importlib.import_module("gpu_helpers").reason_to_skip()
    if reason:
        print(f"skipped: {reason}")
        return 0
    failed = passed = left_out = 0
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(HERE.glob("test_*.py")):
        module = importlib.import_module(path.stem)
        for name in [name for name in vars(module) if name.startswith("test_")]:
            try:
                getattr(module, name)()
                passed += 1
                print(f"ok      {path.stem}.{name}", flush=True)
            except SkipTest as reason:
                left_out += 1
                print(f"skipped {path.stem}.{name}: {reason}", flush=True)
            except Exception:
                failed += 1
                print(f"FAILED  {path.stem}.{name}", flush=True)
                traceback.print_exc()
    print(f"{passed} passed, {failed} failed, {left_out} skipped")
    return failed


if __name__ == "__main__":
    sys.exit(main() != 0)
