"""Inject faults: `scripts/run.sh python tests/faults/run.py [NAME...] [--tries N] [--minutes M] [--add] [--list]`.

Without names, it runs all scenarios with their default numbers of tries. Writes the results to
benchmarks/results/faults.json, and the table to benchmarks/results/faults.md.
"""

import argparse
import functools
import importlib
import os
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "shared", HERE.parent / "parallel", HERE.parent / "parallel_tensorflow"):
    sys.path.insert(0, str(folder))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import scenario  # noqa: E402 - the loop above finds it

FILES = ("elastic", "ranks", "mpi", "files", "numbers", "damage", "network", "recovery")


def keep_result(name: str, last: scenario.Found, scenarios: dict, found: scenario.Found) -> None:
    """Write what a scenario found so far, and the table; a run that is interrupted has kept its tries."""
    scenario.keep(name, found, last)
    scenario.TABLE.write_text(scenario.table(scenarios))


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="scenarios (default: all)")
    parser.add_argument("--tries", type=int, help="of each (default: each scenario's own)")
    parser.add_argument("--minutes", type=float, default=12.0, help="at most, for each (default: %(default)s)")
    parser.add_argument("--add", action="store_true", help="add to the results that are there")
    parser.add_argument("--dry", action="store_true", help="keep no results")
    parser.add_argument("--list", action="store_true", help="only say which scenarios there are")
    args = parser.parse_args()
    scenarios = {}
    for file in FILES:
        scenarios |= importlib.import_module(f"faults_{file}").SCENARIOS
    if unknown := set(args.names) - set(scenarios):
        parser.error(f"no scenario is named {', '.join(sorted(unknown))}; there are {', '.join(scenarios)}")
    failed = 0
    for name in args.names or scenarios:
        one = scenarios[name]
        if args.list:
            print(f"{name:28} {one.tries:>11,} {one.unit:9} {one.title}")
            continue
        print(f"==> {name}: {one.title}", flush=True)
        began = time.monotonic()
        last = scenario.kept_of(name) if args.add else scenario.Found()
        tries = one.tries if args.tries is None else args.tries
        keep = None if args.dry else functools.partial(keep_result, name, last, scenarios)
        try:
            found = scenario.make(one, tries, args.minutes, last.tries, keep)
        except scenario.Skipped as reason:
            print(f"    skipped: {reason}", flush=True)
            continue
        took = time.monotonic() - began
        print(f"    {found.tries:,} {one.unit}, {len(found.failures)} failures, worst {found.worst:.1f} s", end="")
        print(f", in {took:.0f} s; {'; '.join(found.notes)}", flush=True)
        failed += bool(found.failures) or found.tries == 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
