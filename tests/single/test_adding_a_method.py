"""Follows `docs/adding-a-method.md`: its script runs, and in a copy of the source tree, the tests named there pass."""

import re
import shutil
import sys
from pathlib import Path

import launching
import numpy as np
import pytest

pytestmark = launching.MARKS
ROOT = Path(__file__).parent.parent.parent
OWN_FILE, PAGE = (ROOT / "docs" / "adding-a-method.md").read_text().split("\n## 1. ")
INSTRUCTION = re.compile(
    r"^(?:At the end of `([^`]+)`|In `([^`]+)`, below `([^`]+)`):\n\n```(?:python)?\n(.*?)^```$", re.M | re.S
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Copy the source tree, and make the changes that the page asks for."""
    tree = tmp_path_factory.mktemp("tree")
    shutil.copy(ROOT / "pyproject.toml", tree)
    for folder in ("hvd_sparse", "tests", "examples"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__", "lib"))
    (tree / "hvd_sparse" / "lib").symlink_to(ROOT / "hvd_sparse" / "lib")
    instructions = INSTRUCTION.findall(PAGE)
    assert len(instructions) == len(re.findall(r"^```", PAGE, re.M)) // 2 == 9, "every block says where it goes"
    for end_of, inside, above, code in instructions:
        path = tree / (end_of or inside)
        lines = path.read_text().splitlines(keepends=True)
        places = [i for i, line in enumerate(lines, 1) if line.strip() == above] if inside else [len(lines)]
        assert len(places) == 1, f"{above!r} is {len(places)} times in {inside}"
        lines.insert(places[0], code if inside else f"\n\n{code}")
        path.write_text("".join(lines))
    return tree


TRAINING = """
import horovod.torch as hvd

hvd.init()
weight = torch.nn.Parameter(torch.zeros(2000))
compression = MyCompression.random_block([("weight", weight)], density=0.01)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)], compression=compression)
received, starts = torch.zeros(2000), set()
for _ in range(5):
    optimizer.zero_grad()
    (weight * float(1 + hvd.rank())).sum().backward()
    optimizer.synchronize()
    places = weight.grad.nonzero().flatten()
    assert places.tolist() == list(range(places[0], places[0] + 20)), "a block of 1 %"
    received += weight.grad
    starts.add(int(places[0]))
    with optimizer.skip_synchronize():
        optimizer.step()
assert len(starts) > 1, "at a new position in each step"
waiting = compression.state_dict(summed=True)["memory"]["weight"]["residual"]
assert torch.equal(2 * received + waiting, torch.full([2000], 15.0))  # 5 * (1 + 2)
assert torch.equal(hvd.broadcast(weight.detach(), 0), weight.detach())
print("nothing is lost on rank", hvd.rank())
"""


def launch(tree, *command):
    environment = {"PYTHONPATH": str(tree), "HVD_SPARSE_TESTS": "all", "TF_USE_LEGACY_KERAS": "1"}
    code, output = launching.launch(["env", "-C", str(tree), *command], environment)
    assert code == 0, output
    return output


@pytest.mark.exhaustive
def test_the_script_of_a_file_of_ones_own_compresses(tmp_path):
    (code,) = re.findall(r"^```python\n(.*?)^```$", OWN_FILE, re.M | re.S)
    (path := tmp_path / "own.py").write_text(code + TRAINING)
    output = launch(ROOT, *launching.mpirun(2), sys.executable, str(path))
    assert output.count("nothing is lost on rank") == 2, output


def run_tests(tree, ranks, only, *files):
    python = [sys.executable, "-m", "pytest", "-q", "-k", only, *files]
    return re.findall(r"(\d+) passed", launch(tree, *launching.mpirun(ranks), *python))


def test_the_files_use_no_name_that_does_not_exist(tree):
    """TensorFlow's part runs only in `make test-all`: a name that was changed in the package is found here."""
    files = {end_of or inside for end_of, inside, _, _ in INSTRUCTION.findall(PAGE)}
    found = launch(tree, sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", *sorted(files))
    assert "All checks passed" in found


def test_nothing_is_lost(tree):
    assert run_tests(tree, 2, "random_block and test_nothing_is_lost", "tests/parallel/test_thresholds.py")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "file",
    [
        "tests/parallel/test_thresholds.py",
        "tests/parallel/test_low_bit.py",
        "tests/parallel_tensorflow/test_tape_thresholds.py",
    ],
)
def test_the_tests_of_all_methods_pass(tree, file):
    assert run_tests(tree, 2, "random_block", file)


@pytest.mark.exhaustive
def test_both_frameworks_send_the_same(tree, tmp_path):
    job = str(tree / "tests" / "shared" / "parity_job.py")
    for framework in ("torch", "tensorflow"):
        launch(tree, *launching.mpirun(2), sys.executable, job, framework, str(tmp_path))
    for rank in range(2):
        ours, theirs = (np.load(tmp_path / f"{name}.random_block.{rank}.npz") for name in ("torch", "tensorflow"))
        assert ours["sent"].size > 10_000
        np.testing.assert_array_equal(ours["sent"], theirs["sent"])


@pytest.mark.exhaustive
def test_the_examples_take_it(tree):
    options = ["--method", "random_block", "--epochs", "1", "--warmup-epochs", "0", "--batch-size", "64", "--plot", ""]
    python = [sys.executable, str(tree / "examples" / "pytorch_digits.py"), "--quiet", *options]
    output = launch(tree, *launching.mpirun(2), *python)
    assert '"method": "random_block"' in output
