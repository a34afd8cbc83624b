"""Plant known faults, one after the other, and see whether the tests that `make test` chooses find each.

    scripts/run.sh python scripts/mutate.py [--only WORD] [--list]

Each fault is a change of a line. It is made in the working tree, the test that should find it runs, and the line is
put back. Before the first fault, each test runs once without any, and must pass. Needs `make setup`; a file with
changes that are not committed is refused. Fails if a fault was not found, or no longer fits the code.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "extension"
NO_TESTS = re.compile(r"^\d+ deselected in", re.MULTILINE)  # what pytest says where a mark leaves none
LIMIT_SECONDS = {"native": 120}  # others 300; a test that does not end finds the fault, too


def command_of(test: str) -> list[list[str]]:
    """Return the commands that run a test, written as in a `Mutation`."""
    kind, *rest = test.split(maxsplit=2)
    options = ["-q", "-x", "--color=no", "-p", "no:cacheprovider"]
    if len(rest) > 1:
        options += ["-k", rest[1]]
    if kind == "native":
        target = f"{rest[0]}_test"
        build = ["cmake", "--build", str(BUILD), "--target", target, "-j", str(os.cpu_count())]
        return [build, [str(BUILD / "tests" / "native" / target)]]
    if kind == "single":
        return [["pytest", *options, f"tests/single/{rest[0]}.py"]]
    if kind == "ddp":
        launcher = ["torchrun", "--standalone", "--no-python", "--nproc-per-node", "2"]
        return [[*launcher, "pytest", *options, f"tests/parallel_ddp/{rest[0]}.py"]]
    folder = {"torch": "tests/parallel", "tensorflow": "tests/parallel_tensorflow"}[kind]
    chosen = {2: "not rank_counts", 3: "rank_counts"}  # as scripts/test.sh does
    test = [*options, f"{folder}/{rest[0]}.py"]
    return [["mpirun", "-np", str(ranks), "pytest", "-m", marks, *test] for ranks, marks in chosen.items()]


def passes(test: str) -> bool:
    """Return whether a test passes. A build that fails is an error: the fault must compile."""
    for number, command in enumerate(command_of(test)):
        limit = 600 if command[0] == "cmake" else LIMIT_SECONDS.get(test.split()[0], 300)
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return False
        if done.returncode != 0 and not NO_TESTS.search(done.stdout):  # mpirun's status says less: it ends the others
            if command[0] == "cmake" and number == 0:
                sys.exit(f"the fault does not compile:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
            return False
    return True


def plant(mutation: Mutation) -> str:
    """Return what became of a fault: "found", "NOT FOUND", or "DOES NOT FIT" where its line is not there just once."""
    path = ROOT / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        return "DOES NOT FIT"
    try:
        path.write_text(text.replace(mutation.old, mutation.new))
        return "NOT FOUND" if passes(mutation.test) else "found"
    finally:
        path.write_text(text)


def changed_files() -> set[str]:
    """Return the files that git knows with changes that are not committed."""
    listed = subprocess.run(
        ["git", "diff", "--name-only", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(listed.stdout.split())


def main() -> None:
    """Plant the faults that were asked for."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the line is put back
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="faults whose name, file or test has this in it")
    parser.add_argument("--list", action="store_true", help="only say what they are, and whether they fit the code")
    arguments = parser.parse_args()
    chosen = [one for one in MUTATIONS if any(arguments.only in text for text in (one.name, one.file, one.test))]
    if arguments.list:
        for one in chosen:
            fits = (ROOT / one.file).read_text().count(one.old) == 1
            print(f"{'fits' if fits else 'DOES NOT FIT':12}  {one.name}  ({one.file}; {one.test})")
        return
    if changed := changed_files() & {one.file for one in chosen}:
        sys.exit(f"commit or stash first, a fault might stay behind: {', '.join(sorted(changed))}")
    os.environ.pop("HVD_SPARSE_TESTS", None)
    for test in dict.fromkeys(one.test for one in chosen):
        if not passes(test):
            sys.exit(f"this test fails without any fault, so that it finds none: {test}")
    rows = []
    for one in chosen:
        start = time.monotonic()
        outcome = plant(one)
        rows.append((one, outcome))
        print(f"| {one.name} | {one.file} | {one.test} | {outcome} | {time.monotonic() - start:.0f} s |", flush=True)
    missed = [one.name for one, outcome in rows if outcome != "found"]
    print(f"{len(rows) - len(missed)} of {len(rows)} faults found")
    if any("native" in one.test for one in chosen):
        subprocess.run(["cmake", "--build", str(BUILD), "--target", "native_tests"], capture_output=True, check=False)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
