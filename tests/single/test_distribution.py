"""The package that a user installs: a source distribution, built elsewhere, and its errors for missing requirements."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

import hvd_sparse
import hvd_sparse.tensorflow
import hvd_sparse.torch
from hvd_sparse import library

ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
IGNORED = shutil.ignore_patterns(".*", "build", "lib", "*.egg-info", "__pycache__", "tests", "results", "*.png")

USE = """
import sys
import hvd_sparse
import torch
from hvd_sparse.torch import ops
assert hvd_sparse.__file__.startswith(sys.argv[1]), hvd_sparse.__file__
print(ops.select_top_k(torch.tensor([0.5, -3.0, 2.0, 0.0]), 2)[0].tolist())
assert "horovod" not in sys.modules, "the operators alone need no Horovod"
"""


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Pack the working tree's files; return the archive."""
    place = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, place / "source", ignore=IGNORED)
    run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(place), cwd=place / "source")
    (archive,) = place.glob("hvd_sparse-*.tar.gz")
    return archive


@pytest.fixture
def unpacked(sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / sdist.name.removesuffix(".tar.gz")


def files(root, folder, pattern):
    return {str(path.relative_to(root)) for path in (root / folder).rglob(pattern)}


def test_the_source_distribution_has_all_that_is_compiled(unpacked):
    assert files(unpacked, "csrc", "[!.]*.*") == files(ROOT, "csrc", "[!.]*.*")
    assert files(unpacked, "hvd_sparse", "*.py") == files(ROOT, "hvd_sparse", "*.py")
    named = set(re.findall(r"csrc/\S+\.(?:cc|cu)\b", (unpacked / "CMakeLists.txt").read_text()))
    assert len(named) > 50 and all((unpacked / name).exists() for name in named)
    assert (unpacked / "README.md").read_text() == (ROOT / "README.md").read_text()


SETUP = """
import runpy, sys, sysconfig
get_path, scripts = sysconfig.get_path, sys.argv.pop(1)
sysconfig.get_path = lambda name, *more: scripts if name == "scripts" else get_path(name, *more)
sys.argv[0] = "setup.py"
runpy.run_path("setup.py", run_name="__main__")
"""


def build(source, path, scripts="", **environment):
    """Try to build where there is nothing but what `path` and the environment's `scripts` hold; return the error."""
    without = {f"HVD_SPARSE_WITHOUT_{what}": "1" for what in ("TORCH", "TENSORFLOW", "CUDA")}
    command = [sys.executable, "-c", SETUP, str(scripts), "-q", "build_ext", "--build-temp", str(source / "build")]
    environment = {"PATH": str(path), **without, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=source, env=environment)
    assert done.returncode != 0 and "Traceback" not in done.stdout + done.stderr
    return done.stderr.splitlines()[-1]


def test_a_missing_tool_is_named(unpacked, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    assert build(unpacked, tools).endswith("Install it: pip install cmake")
    in_scripts = tmp_path / "scripts"  # of an environment that is not activated
    in_scripts.mkdir()
    (in_scripts / "cmake").symlink_to(shutil.which("cmake"))
    assert "neither make nor ninja" in build(unpacked, tools, in_scripts, CXX=shutil.which("c++"))
    (tools / "cmake").symlink_to(shutil.which("cmake"))
    assert "neither make nor ninja" in build(unpacked, tools, CXX=shutil.which("c++"))
    (tools / "make").symlink_to(shutil.which("make"))
    assert "none of c++, g++, clang++ is on PATH. Install one (apt install g++" in build(unpacked, tools)
    assert "CXX=no-such-compiler is not one. Install one" in build(unpacked, tools, CXX="no-such-compiler -O2")


def test_ninja_builds_where_there_is_no_make(unpacked, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "cmake").symlink_to(shutil.which("cmake"))
    ninja = tools / "ninja"  # CMake asks for its version, then compiles a test program with it, which fails
    ninja.write_text('#!/bin/sh\n[ "$1" = --version ] && echo 1.11.1\n')
    ninja.chmod(0o755)
    compiler = shutil.which("c++")
    build(unpacked, tools, CXX=compiler)
    assert "CMAKE_GENERATOR:INTERNAL=Ninja" in (unpacked / "build" / "CMakeCache.txt").read_text()
    shutil.rmtree(unpacked / "build")
    build(unpacked, tools, CXX=compiler, CMAKE_GENERATOR="Unix Makefiles")
    assert "CMAKE_GENERATOR:INTERNAL=Unix Makefiles" in (unpacked / "build" / "CMakeCache.txt").read_text()


@pytest.mark.parametrize(("framework", "switch"), [("torch", "PYTORCH"), ("tensorflow", "TENSORFLOW")])
def test_a_missing_horovod_is_named(monkeypatch, framework, switch):
    monkeypatch.setitem(sys.modules, "horovod", None)  # as if it were not installed
    package = getattr(hvd_sparse, framework)
    told = f"needs Horovod, and .* has none.*HOROVOD_WITH_{switch}=1 pip install"
    with pytest.raises(ImportError, match=told) as found:
        _ = package.Compression
    assert ("DistributedDataParallel needs no Horovod" in str(found.value)) == (framework == "torch")


def test_a_missing_mpi4py_is_named(monkeypatch):
    from hvd_sparse.torch import asynchronous, model_parallel

    layer = torch.nn.Linear(2, 2)
    starts = {
        "hybrid": lambda: model_parallel.hybrid(stages=2),
        "pipeline": lambda: model_parallel.Pipeline(layer, micro_batches=1, loss=torch.nn.functional.mse_loss),
        "asynchronous": lambda: asynchronous.connect(layer, asynchronous.DGS()),
    }
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # as if it were not installed
    for start in starts.values():
        with pytest.raises(ImportError, match=r"mpi4py, and .* has none"):
            start()


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_libraries_name_no_folder_of_the_machine_that_built_them():
    libraries = list(library.LIBRARY_DIRECTORY.glob("*.so"))
    assert libraries
    for path in libraries:
        assert not re.search(r"\((RUNPATH|RPATH)\)", run("readelf", "-d", str(path))), path


@pytest.mark.exhaustive
def test_a_wheel_compiled_from_it_works_outside_the_source_tree(sdist, tmp_path):
    environment = {**os.environ, "HVD_SPARSE_WITH_TORCH": "1"}
    run(*PIP, "wheel", "--no-build-isolation", "--no-deps", "-w", str(tmp_path), str(sdist), env=environment)
    (wheel,) = tmp_path.glob("hvd_sparse-*.whl")
    site = tmp_path / "site"
    run(*PIP, "install", "--no-deps", "--target", str(site), str(wheel))
    environment = {**os.environ, "PYTHONPATH": str(site)}
    assert run(sys.executable, "-c", USE, str(site), cwd=tmp_path, env=environment).strip() == "[1, 2]"
    checked = run(sys.executable, "-m", "hvd_sparse", "--check-build", cwd=tmp_path, env=environment)
    assert "[X] PyTorch" in checked and hvd_sparse.__version__ in checked
