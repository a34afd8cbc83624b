"""The parts that are built or omitted, and the messages about them."""

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiers
from setuptools import Distribution

from hvd_sparse import library, native_call
from hvd_sparse.__main__ import check_build, main

ROOT = Path(__file__).resolve().parents[2]


def test_missing_operators_say_how_to_get_them(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "LIBRARY_DIRECTORY", tmp_path)
    assert not library.is_built("torch")
    with pytest.raises(ImportError, match=r"HVD_SPARSE_WITH_TORCH=1 pip install .* --no-deps \.$"):
        library.find_library("torch")
    with pytest.raises(ImportError, match=r"source tree of hvd_sparse: pip install .* --no-deps \.$"):
        library.find_library("numpy")


def test_a_source_tree_where_nothing_is_built_says_so(monkeypatch, tmp_path):
    """Its directory comes first for `python -m`, before the installed package."""
    monkeypatch.setattr(library, "LIBRARY_DIRECTORY", tmp_path / "lib")
    monkeypatch.setattr(library, "SOURCE", tmp_path)
    (tmp_path / "setup.py").touch()
    for framework in ("numpy", "torch"):
        with pytest.raises(ImportError, match=f"source tree of hvd_sparse, {tmp_path}.*Run from another"):
            library.find_library(framework)
    assert check_build().endswith("pip install --no-build-isolation -e .")


def test_a_plan_where_nothing_is_built_says_so(monkeypatch):
    def find(name):
        raise ImportError("nothing is built here")

    monkeypatch.setattr(native_call, "_function", find)
    arguments = "plan --parameters 1e6 --compute-ms 10 --bandwidth 1gbit --ranks 8".split()
    monkeypatch.setattr(sys, "argv", ["hvd_sparse", *arguments])
    with pytest.raises(SystemExit, match=r"^hvd_sparse plan: nothing is built here$"):
        main()


def test_a_build_without_any_framework_must_be_asked_for(monkeypatch, tmp_path):
    """As in pip's isolated environment, where it would install a package that no framework can use."""
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    for name in ("HVD_SPARSE_TARGETS", "HVD_SPARSE_WITHOUT_TORCH", "HVD_SPARSE_WITHOUT_TENSORFLOW"):
        monkeypatch.delenv(name, raising=False)
    build = runpy.run_path(str(ROOT / "setup.py"))["CMakeBuild"](Distribution())
    build.inplace, build.build_temp, build.build_lib = 0, str(tmp_path), str(tmp_path)
    find = importlib.util.find_spec
    absent = ("torch", "tensorflow")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name in absent else find(name, *more))
    with pytest.raises(SystemExit, match=r"neither PyTorch nor TensorFlow.*--no-build-isolation"):
        build.run()
    monkeypatch.setenv("HVD_SPARSE_WITHOUT_TORCH", "1")
    monkeypatch.setenv("HVD_SPARSE_WITHOUT_TENSORFLOW", "1")
    commands, done = [], SimpleNamespace(returncode=0)
    monkeypatch.setattr("subprocess.run", lambda command, **_: commands.append(command) or done)
    build.run()
    assert "hvd_sparse_numpy" in commands[-1] and "hvd_sparse_torch" not in commands[-1], commands


def test_a_build_in_place_removes_the_libraries_of_other_builds(monkeypatch, tmp_path):
    """Those of frameworks that it leaves out, and others, which CMake would take for its own if they are newer."""
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.delenv("HVD_SPARSE_TARGETS", raising=False)
    monkeypatch.setenv("HVD_SPARSE_WITHOUT_TORCH", "1")
    monkeypatch.setenv("HVD_SPARSE_WITHOUT_TENSORFLOW", "1")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: SimpleNamespace(returncode=0))
    build_class = runpy.run_path(str(ROOT / "setup.py"))["CMakeBuild"]
    build_class.run.__globals__["ROOT"] = tmp_path
    build = build_class(Distribution())
    build.inplace, build.build_temp = 1, str(tmp_path / "build")
    libraries = tmp_path / "hvd_sparse" / "lib"
    libraries.mkdir(parents=True)
    for name in ("numpy", "torch", "tensorflow"):
        (libraries / f"libhvd_sparse_{name}.so").touch()
        (libraries / f"libhvd_sparse_{name}.version").touch()
    build.run()  # in which nothing is compiled
    assert not list(libraries.iterdir())


def test_a_build_records_the_versions_of_its_frameworks(monkeypatch, tmp_path):
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    record = runpy.run_path(str(ROOT / "setup.py"))["record_versions"]
    record(tmp_path, ["torch"])
    assert [path.name for path in tmp_path.iterdir()] == ["libhvd_sparse_torch.version"]
    monkeypatch.setattr(library, "LIBRARY_DIRECTORY", tmp_path)
    (tmp_path / "libhvd_sparse_torch.so").touch()
    assert library.other_version("torch") == ""
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name} 9")
    assert library.other_version("torch").endswith("installed is torch 9")
    (tmp_path / "libhvd_sparse_torch.version").unlink()  # of a build by CMake alone
    assert library.other_version("torch") == ""


def test_the_version_of_a_framework_from_a_package_of_another_name(monkeypatch):
    def version(name):
        if name != "tensorflow-cpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.21.0"

    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: {"tensorflow": ["tensorflow-cpu"]})
    assert library.installed_version("tensorflow") == "2.21.0"
    assert library.installed_version("torch") == ""


SYMBOLS = {"torch": b"_ZN2at4_ops", "tensorflow": b"_ZN10tensorflow15OpKernelContext"}  # what names of these begin with


@pytest.mark.parametrize("framework", tiers.choice(library.FRAMEWORKS, "torch"))
def test_a_library_for_another_version_of_its_framework_says_so(framework, tmp_path):
    """In a copy of the package, with a library that asks for symbols which no version of the framework has."""
    ignored = shutil.ignore_patterns("__pycache__", "*.version")
    package = shutil.copytree(Path(library.__file__).parent, tmp_path / "hvd_sparse", ignore=ignored)
    changed = package / "lib" / f"libhvd_sparse_{framework}.so"
    symbol = SYMBOLS[framework]
    changed.write_bytes(changed.read_bytes().replace(symbol, symbol[:-1] + b"0"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*options):
        command = [sys.executable, *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)

    installed = importlib.metadata.version(framework)
    built = run("-m", "hvd_sparse", "--check-build").stdout  # without a record of the version
    assert "[!]" not in built and built.count("[X] ") >= 3 and built.endswith(" mpi4py\n"), built
    (package / "lib" / f"libhvd_sparse_{framework}.version").write_text("1.2.3\n")
    build = rf"HVD_SPARSE_WITH_{framework.upper()}=1 pip install --no-build-isolation .* --no-deps \."
    told = run("-m", "hvd_sparse", "--check-build").stdout
    assert f"(CPU): built for {framework} 1.2.3, installed is {installed}\n" in told and told.count("[!]") == 1, told
    assert re.search(rf"The {framework} operators may not load: install hvd_sparse again\. .*{build}\n$", told), told
    failed = run("-c", f"import hvd_sparse.{framework}.ops").stderr.splitlines()[-1]
    assert failed.startswith(f"ImportError: hvd_sparse cannot load its {framework} operators, built for"), failed
    assert f"{framework} 1.2.3, installed is {installed}. Install hvd_sparse again. " in failed
    assert re.search(rf"{build} The loader says: {changed}: undefined symbol: \w+$", failed), failed


def test_a_library_that_does_not_load_for_another_reason_gives_it(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "LIBRARY_DIRECTORY", tmp_path)
    (tmp_path / "libhvd_sparse_torch.so").write_text("no library")
    with pytest.raises(ImportError, match=r"most likely .* version or build of torch .* says: .*(invalid|too short)"):
        library.load_library("torch", ctypes.CDLL)


def test_what_another_build_left_is_forgotten(monkeypatch, tmp_path):
    """CMake would keep compiler and flags, would not see other headers, and refuses another generator or place."""
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    forget = runpy.run_path(str(ROOT / "setup.py"))["forget_other_build"]
    for name in ("CXX", "CMAKE_ARGS", "CMAKE_GENERATOR"):
        monkeypatch.delenv(name, raising=False)
    settings = ["first"]
    compilers = {name: tmp_path / name for name in ("c++", "clang++", "make")}
    for path in compilers.values():
        path.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    cache = tmp_path / "CMakeCache.txt"

    def stays(**changes) -> bool:
        kept = {"HOME_DIRECTORY": ROOT, "CACHEFILE_DIR": tmp_path, "CXX_COMPILER": compilers["c++"]}
        kept = {**kept, "GENERATOR": "Unix Makefiles", **changes}
        cache.write_text("".join(f"CMAKE_{key}:INTERNAL={value}\n" for key, value in kept.items()))
        (tmp_path / "CMakeFiles").mkdir(exist_ok=True)
        forget(tmp_path, settings[-1])
        assert (tmp_path / "CMakeFiles").exists() == cache.exists()
        return cache.exists()

    assert not stays()  # nothing is known of the settings
    assert stays()
    settings.append("second")
    assert not stays() and stays()
    assert not stays(HOME_DIRECTORY="/elsewhere") and not stays(CACHEFILE_DIR="/elsewhere")
    assert not stays(CXX_COMPILER="CMAKE_CXX_COMPILER-NOTFOUND") and not stays(GENERATOR="Ninja")
    monkeypatch.setenv("CXX", "clang++ -O2")
    assert not stays() and stays(CXX_COMPILER=compilers["clang++"])
    monkeypatch.setenv("CMAKE_GENERATOR", "Ninja")
    assert not stays(CXX_COMPILER=compilers["clang++"])


def test_absent_framework_is_an_error_only_when_it_is_asked_for(monkeypatch):
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    wanted = runpy.run_path(str(ROOT / "setup.py"))["framework_wanted"]
    assert wanted("TORCH", "torch")
    assert not wanted("TORCH", "no_such_module")
    monkeypatch.setenv("HVD_SPARSE_WITHOUT_TORCH", "1")
    assert not wanted("TORCH", "torch")
    monkeypatch.delenv("HVD_SPARSE_WITHOUT_TORCH")
    monkeypatch.setenv("HVD_SPARSE_WITH_TORCH", "1")
    with pytest.raises(SystemExit, match="has no no_such_module"):
        wanted("TORCH", "no_such_module")
    monkeypatch.setenv("HVD_SPARSE_WITHOUT_TORCH", "1")
    with pytest.raises(SystemExit, match="HVD_SPARSE_WITH_TORCH and HVD_SPARSE_WITHOUT_TORCH contradict each other"):
        wanted("TORCH", "torch")
    monkeypatch.setenv("HVD_SPARSE_WITHOUT_TORCH", "yes")
    with pytest.raises(SystemExit, match="HVD_SPARSE_WITHOUT_TORCH must be 1 or 0, got yes"):
        wanted("TORCH", "torch")


def test_settings_of_a_build_name_versions_and_flags(monkeypatch):
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    settings_of = runpy.run_path(str(ROOT / "setup.py"))["settings_of"]
    before = settings_of({"torch"})
    assert before != settings_of(set())
    monkeypatch.setenv("CXXFLAGS", "-O1")
    assert before != settings_of({"torch"}) and "-O1" in settings_of({"torch"})


def test_cuda_is_built_where_it_is_asked_for_or_the_framework_has_it(monkeypatch):
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    for name in ("HVD_SPARSE_WITH_CUDA", "HVD_SPARSE_WITHOUT_CUDA", "CXX", "CUDAHOSTCXX", "CUDAARCHS"):
        monkeypatch.delenv(name, raising=False)
    options = runpy.run_path(str(ROOT / "setup.py"))["cuda_options"]
    known = SimpleNamespace(stdout="compute_75\ncompute_80\ncompute_90\n")  # as nvcc 12.0 says
    of_tensorflow = SimpleNamespace(stdout="0\n", returncode=0)
    monkeypatch.setattr("subprocess.run", lambda command, **_: of_tensorflow if "-c" in command else known)
    built = ["-DHVD_SPARSE_CUDA=ON", "-DCMAKE_CUDA_COMPILER=/somewhere/nvcc", "-DCMAKE_CUDA_ARCHITECTURES=80;90"]
    left_out = ["-DHVD_SPARSE_CUDA=OFF"]
    monkeypatch.setattr("shutil.which", lambda *_, **__: "/somewhere/nvcc")
    for version in (None, "13.0"):
        monkeypatch.setattr("torch.version.cuda", version)
        assert options({"torch", "tensorflow"}) == (built if version else left_out)
    for said in "01":
        of_tensorflow.stdout = f"{said}\n"
        assert options({"tensorflow"}) == (built if said == "1" else left_out)
    assert options(set()) == left_out
    monkeypatch.setenv("HVD_SPARSE_WITHOUT_CUDA", "1")
    assert options({"torch"}) == left_out
    monkeypatch.delenv("HVD_SPARSE_WITHOUT_CUDA")
    monkeypatch.setenv("HVD_SPARSE_WITH_CUDA", "1")
    assert options(set()) == built
    monkeypatch.setenv("CUDAARCHS", "70")
    assert options(set())[-1] == "-DCMAKE_CUDA_ARCHITECTURES=70"
    monkeypatch.delenv("CUDAARCHS")
    known.stdout = "compute_75\n"
    with pytest.raises(SystemExit, match="knows no GPU"):
        options({"torch"})
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(SystemExit, match="there is no nvcc"):
        options({"torch"})


def test_nvcc_calls_the_compiler_that_cxx_names_unless_cudahostcxx_is_set(monkeypatch):
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    monkeypatch.setattr("shutil.which", lambda name, **_: f"/tools/{name}")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: SimpleNamespace(stdout="compute_90"))
    monkeypatch.setenv("HVD_SPARSE_WITH_CUDA", "1")
    for name in ("HVD_SPARSE_WITHOUT_CUDA", "CXX", "CUDAHOSTCXX", "CUDAARCHS"):
        monkeypatch.delenv(name, raising=False)
    options = runpy.run_path(str(ROOT / "setup.py"))["cuda_options"]

    def named():
        return [one for one in options(set()) if one.startswith("-DCMAKE_CUDA_HOST_COMPILER")]

    assert named() == []
    for compiler in ("g++-13", "g++-13 -m64", "ccache g++-13"):
        monkeypatch.setenv("CXX", compiler)
        assert named() == ["-DCMAKE_CUDA_HOST_COMPILER=/tools/g++-13"]
    monkeypatch.setenv("CUDAHOSTCXX", "g++-12")
    assert named() == []


def test_a_library_tells_whether_it_has_cuda_without_being_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "LIBRARY_DIRECTORY", tmp_path)
    assert not library.has_cuda("torch")
    (tmp_path / "libhvd_sparse_torch.so").write_bytes(b"no mark")
    assert library.is_built("torch") and not library.has_cuda("torch")
    (tmp_path / "libhvd_sparse_torch.so").write_bytes(b"\x7fELF" + library.CUDA_MARK + b"\0")
    assert library.has_cuda("torch")


def test_horovod_is_built_for_an_environment_that_exists(tmp_path):
    """Without it, pip would install into the environment of any other python on PATH; here there is none."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "VENV": str(tmp_path),
        "MPI": "system",
        "PIP_NO_INDEX": "1",
        "HOME": str(tmp_path),
    }
    command = [str(ROOT / "scripts" / "horovod.sh"), "torch"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"there is no {tmp_path}/bin/python" in done.stderr
