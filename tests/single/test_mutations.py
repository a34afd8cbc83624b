"""The faults that scripts/mutate.py plants: each is a change of one place in the code."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from mutations import MUTATIONS  # noqa: E402

FOLDERS = {
    "single": "tests/single",
    "torch": "tests/parallel",
    "ddp": "tests/parallel_ddp",
    "tensorflow": "tests/parallel_tensorflow",
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_fault_fits_the_code(mutation):
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.new != mutation.old
    kind, name, *_ = mutation.test.split()
    test = ROOT / "tests" / "native" / f"{name}_test.cc" if kind == "native" else ROOT / FOLDERS[kind] / f"{name}.py"
    assert test.exists()
