"""Say which lines of csrc/core ran: scripts/coverage.py BUILD, after ctest in a build with HVD_SPARSE_COVERAGE=ON.

gcov's own JSON, added up: a header counts as run where any executable that holds it ran the line. A source file without
counts, which no test links, is an error.
"""

import argparse
import collections
import json
import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
CORE = ROOT / "csrc" / "core"


def gcov_reports(build):
    """Yield gcov's report of every object that ran."""
    for data in sorted(build.rglob("*.gcda")):
        command = [os.environ.get("GCOV", "gcov"), "--json-format", "--stdout", str(data)]
        found = subprocess.run(command, check=True, capture_output=True, text=True, cwd=build)
        yield from (json.loads(line) for line in found.stdout.splitlines() if line)


def line_counts(build):
    """Return by file of the core how often each of its lines ran, {line: times}."""
    counts = collections.defaultdict(collections.Counter)
    for report in gcov_reports(build):
        for file in report["files"]:
            path = pathlib.Path(report["current_working_directory"], file["file"]).resolve()
            if path.parent == CORE:
                for line in file["lines"]:
                    counts[path.name][line["line_number"]] += line["count"]
    return counts


def ranges(numbers):
    """Write ascending numbers as 1-3, 7."""
    pieces = []
    for number in numbers:
        if pieces and number == pieces[-1][1] + 1:
            pieces[-1][1] = number
        else:
            pieces.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in pieces)


def main():
    """Print a line for each file, and the total; fail below what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--least", type=float, default=0.0, help="percent of all lines that must have run")
    arguments = parser.parse_args()
    counts = line_counts(arguments.build.resolve())
    ran = total = 0
    for name, lines in sorted(counts.items()):
        missed = sorted(number for number, times in lines.items() if times == 0)
        ran, total = ran + len(lines) - len(missed), total + len(lines)
        share = 100 * (1 - len(missed) / len(lines))
        print(f"{name:<16} {len(lines):5d} lines {share:6.1f} %  {ranges(missed) and 'not ' + ranges(missed)}".rstrip())
    if total == 0:
        raise SystemExit(f"no counts in {arguments.build}: build with HVD_SPARSE_COVERAGE=ON and run ctest there")
    print(f"{'csrc/core':<16} {total:5d} lines {100 * ran / total:6.1f} %")
    if missing := sorted({path.name for path in CORE.glob("*.cc")} - counts.keys()):
        raise SystemExit(f"no test links {', '.join(missing)}")
    if 100 * ran / total < arguments.least:
        raise SystemExit(f"less than {arguments.least} % of the lines ran")


if __name__ == "__main__":
    main()
