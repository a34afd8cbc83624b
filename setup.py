"""Build and install hvd_sparse: ask the installed frameworks for their flags, call CMake.

Environment:
    HVD_SPARSE_WITH_TORCH=1, HVD_SPARSE_WITH_TENSORFLOW=1         make a missing framework an error
    HVD_SPARSE_WITHOUT_TORCH=1, HVD_SPARSE_WITHOUT_TENSORFLOW=1   leave its ops out
    HVD_SPARSE_WITH_CUDA=1, HVD_SPARSE_WITHOUT_CUDA=1             ops on CUDA tensors: an error without nvcc; never.
                                                                  Else where nvcc is found and PyTorch has CUDA;
                                                                  without PyTorch's ops, where TensorFlow has it
    CMAKE_ARGS                                                    more options of CMake's
    HVD_SPARSE_TARGETS                                            what CMake builds, in place of all operators
    HVD_SPARSE_BUILD                                              where CMake builds, kept for the next time
    CUDAARCHS                                                     compute capabilities, such as 90 or "80;90"
    CXX, CUDAHOSTCXX                                              the C++ compiler, and the one that nvcc calls: CXX
                                                                  unless this is set
    CMAKE_BUILD_PARALLEL_LEVEL                                    files compiled at once; else one on each processor
"""

import importlib
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def is_wanted(name: str) -> bool | None:
    """What the environment says of a part of the build: HVD_SPARSE_WITH_ it, HVD_SPARSE_WITHOUT_ it, or nothing."""
    told = {key: os.environ.get(key) or "0" for key in (f"HVD_SPARSE_WITH_{name}", f"HVD_SPARSE_WITHOUT_{name}")}
    for key, value in told.items():
        if value not in ("0", "1"):
            sys.exit(f"hvd_sparse: {key} must be 1 or 0, got {value}")
    having, without = (value == "1" for value in told.values())
    if having and without:
        sys.exit(f"hvd_sparse: {' and '.join(told)} contradict each other: set one of them")
    return having if having or without else None


def framework_wanted(name: str, module: str) -> bool:
    """Whether to build for a framework: where it is installed, unless the environment says otherwise."""
    wanted = is_wanted(name)
    if wanted is False:
        return False
    found = importlib.util.find_spec(module) is not None
    if wanted and not found:
        sys.exit(
            f"HVD_SPARSE_WITH_{name}=1, but {sys.executable} has no {module}. Install it first, "
            "and build with: pip install --no-build-isolation ."
        )
    return found


def torch_options() -> list[str]:
    """What CMake must know to compile against the installed PyTorch."""
    import torch
    from torch.utils import cpp_extension

    if not torch.compiled_with_cxx11_abi():  # the core has the new one, as TensorFlow has
        sys.exit(
            f"hvd_sparse: PyTorch {torch.__version__} was built with the C++ ABI of before GCC 5 "
            "(_GLIBCXX_USE_CXX11_ABI=0). Install a newer one, such as 2.7"
        )
    return [
        "-DHVD_SPARSE_TORCH=ON",
        "-DTORCH_INCLUDE_DIRS=" + ";".join(cpp_extension.include_paths()),
        f"-DTORCH_LIBRARY_DIR={Path(torch.__file__).parent / 'lib'}",
    ]


def ask_tensorflow(program: str) -> str:
    """The last line that a program prints, which imports TensorFlow."""
    # In a separate process: TensorFlow writes to standard error when it is imported, whatever its log level.
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        sys.exit(f"{done.stderr}\nhvd_sparse: the installed TensorFlow cannot be imported; see above")
    return done.stdout.splitlines()[-1]


def tensorflow_options() -> list[str]:
    """What CMake must know to compile against the installed TensorFlow."""
    program = (
        "import json, tensorflow as tf\n"
        "print(json.dumps([tf.sysconfig.get_compile_flags(), tf.sysconfig.get_link_flags()]))"
    )
    compile_flags, link_flags = json.loads(ask_tensorflow(program))
    includes = [flag[2:] for flag in compile_flags if flag.startswith("-I")]
    directories = [flag[2:] for flag in link_flags if flag.startswith("-L")]
    return [
        "-DHVD_SPARSE_TENSORFLOW=ON",
        "-DTENSORFLOW_INCLUDE_DIRS=" + ";".join(includes),
        "-DTENSORFLOW_COMPILE_FLAGS=" + ";".join(flag for flag in compile_flags if not flag.startswith("-I")),
        "-DTENSORFLOW_LIBRARY_DIRS=" + ";".join(directories),
        "-DTENSORFLOW_LINK_FLAGS=" + ";".join(flag for flag in link_flags if not flag.startswith("-L")),
    ]


def find_nvcc() -> str | None:
    """The path of CUDA's compiler: on PATH, in CUDA_HOME or CUDA_PATH, or where its installer puts it."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    places = os.pathsep.join(f"{home}/bin" for home in homes if home)
    return shutil.which("nvcc") or shutil.which("nvcc", path=places)


def architectures(nvcc: str) -> str:
    """The compute capabilities to compile for: those of A100, H100 and B200 that this nvcc knows, or CUDAARCHS."""
    if os.environ.get("CUDAARCHS"):
        return os.environ["CUDAARCHS"]
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout.split()
    return ";".join(one for one in ("80", "90", "100") if f"compute_{one}" in known)


def host_compiler() -> list[str]:
    """The option that makes nvcc call the compiler that CXX names; without it nvcc calls the system's g++."""
    launchers = ("ccache", "sccache", "distcc")
    named = [word for word in shlex.split(os.environ.get("CXX", "")) if Path(word).name not in launchers]
    if not named or os.environ.get("CUDAHOSTCXX"):  # CMake reads CUDAHOSTCXX itself
        return []
    return [f"-DCMAKE_CUDA_HOST_COMPILER={shutil.which(named[0]) or named[0]}"]


def has_cuda(built: set[str]) -> bool:
    """Whether the framework of these was built for CUDA: PyTorch, or TensorFlow if there are no ops for PyTorch."""
    if "torch" in built:
        return importlib.import_module("torch").version.cuda is not None
    if "tensorflow" not in built:
        return False
    program = "import tensorflow as tf; print(int(tf.test.is_built_with_cuda()))"
    return ask_tensorflow(program) == "1"


def cuda_options(built: set[str]) -> list[str]:
    """What CMake must know to build the ops on CUDA tensors, or to leave them out; it keeps what it was told before."""
    nvcc, wanted = find_nvcc(), is_wanted("CUDA")
    if wanted and nvcc is None:
        sys.exit("HVD_SPARSE_WITH_CUDA=1, but there is no nvcc. Install the CUDA toolkit, or set CUDA_HOME to it")
    if nvcc is None or wanted is False or not (wanted or has_cuda(built)):
        return ["-DHVD_SPARSE_CUDA=OFF"]
    found = architectures(nvcc)
    if not found:
        sys.exit(
            f"hvd_sparse: {nvcc} knows no GPU from compute capability 8.0 (A100) on. Update the CUDA toolkit, name the "
            "GPUs in CUDAARCHS, or leave CUDA out with HVD_SPARSE_WITHOUT_CUDA=1"
        )
    options = ["-DHVD_SPARSE_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={nvcc}", f"-DCMAKE_CUDA_ARCHITECTURES={found}"]
    return options + host_compiler()


NO_FRAMEWORK = (
    "hvd_sparse: {} has neither PyTorch nor TensorFlow. Install one first, and build with: pip install "
    "--no-build-isolation . (without that option, pip builds where none can be seen). For servers of asynchronous "
    "training alone: HVD_SPARSE_WITHOUT_TORCH=1 HVD_SPARSE_WITHOUT_TENSORFLOW=1"
)
CUDA_HINT = (
    ". If CUDA is at fault: CUDAHOSTCXX names the C++ compiler that nvcc calls, such as g++-13, if it refuses the "
    "system's; HVD_SPARSE_WITHOUT_CUDA=1 leaves CUDA out"
)
COMPILER_NEEDED = "A C++17 compiler is needed, such as GCC 9 or Clang 10 or newer"


def generator() -> list[str]:
    """The option that selects Ninja where there is no make, CMake's default, and the environment selects nothing."""
    selected = os.environ.get("CMAKE_GENERATOR") or "-G" in os.environ.get("CMAKE_ARGS", "")
    if selected or any(map(shutil.which, ("make", "gmake"))) or not shutil.which("ninja"):
        return []
    return ["-G", "Ninja"]


def installed_version(module: str) -> str:
    """The version of a framework that is installed."""
    return runpy.run_path(str(ROOT / "hvd_sparse" / "library.py"))["installed_version"](module)


def settings_of(built: set[str]) -> str:
    """What CMake keeps from the first time in a folder, or cannot see a change of: frameworks may have old headers."""
    versions = {module: installed_version(module) for module in sorted(built)}
    variables = ("CXX", "CXXFLAGS", "CUDAFLAGS", "CUDAHOSTCXX", "LDFLAGS", "CMAKE_ARGS")
    return json.dumps({**versions, **{name: os.environ.get(name, "") for name in variables}}, indent=1)


def forget_other_build(build: Path, settings: str) -> None:
    """Remove what CMake keeps in `build` if it was for another place, generator or compiler, or other settings."""
    cache, record = build / "CMakeCache.txt", build / "settings.json"
    same = record.exists() and record.read_text() == settings
    record.write_text(settings)
    if not cache.exists():
        return
    kept = dict(re.findall(r"^(\w+):\w+=(.*)$", cache.read_text(), re.MULTILINE))
    compiler = kept.get("CMAKE_CXX_COMPILER", "")
    named = shlex.split(os.environ.get("CXX", ""))[:1] or [compiler]
    paths = {"CMAKE_HOME_DIRECTORY": ROOT, "CMAKE_CACHEFILE_DIR": build, "CMAKE_CXX_COMPILER": shutil.which(named[0])}
    fits = all(path and os.path.realpath(kept.get(key, "")) == os.path.realpath(path) for key, path in paths.items())
    if "-G" not in os.environ.get("CMAKE_ARGS", ""):
        wanted = [os.environ.get("CMAKE_GENERATOR", "Unix Makefiles"), *generator()][-1]
        fits = fits and kept.get("CMAKE_GENERATOR") == wanted
    if not (fits and same):
        cache.unlink()
        shutil.rmtree(build / "CMakeFiles", ignore_errors=True)


def missing_tool() -> str:
    """Which tool of the build is not there, and how to get it; what is needed if all are."""
    wanted = shlex.split(os.environ.get("CXX", ""))[:1] or ["c++", "g++", "clang++"]
    if not any(map(shutil.which, wanted)):
        where = f"CXX={wanted[0]} is not one" if os.environ.get("CXX") else f"none of {', '.join(wanted)} is on PATH"
        return f"{COMPILER_NEEDED}; {where}. Install one (apt install g++, dnf install gcc-c++), or set CXX to it"
    if not any(map(shutil.which, ("make", "gmake", "ninja"))):
        return "There is neither make nor ninja. Install one: apt install make, or pip install ninja"
    return COMPILER_NEEDED


def record_versions(libraries: Path, modules: list[str]) -> None:
    """Write beside each framework's library which version it is built for; hvd_sparse.library compares."""
    for module in modules:
        (libraries / f"libhvd_sparse_{module}.version").write_text(installed_version(module) + "\n")


FRAMEWORKS = {"torch": ("PyTorch", torch_options), "tensorflow": ("TensorFlow", tensorflow_options)}


class FreshModules(build_py):
    """Copy the modules into an empty folder: those that a former build left there would enter the wheel."""

    def run(self):
        """Remove what was copied before, and copy; an editable installation copies nothing."""
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "hvd_sparse", ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """Build every native library with one CMake run, into hvd_sparse/lib of the package."""

    def run(self):
        """Configure and build; the libraries land in build_lib, or in the source tree for an editable install."""
        if sys.platform != "linux":
            sys.exit(f"hvd_sparse builds on Linux only; this is {sys.platform}")
        os.environ["PATH"] += os.pathsep + sysconfig.get_path("scripts")  # of an environment that is not activated
        package = (ROOT if self.inplace else Path(self.build_lib).resolve()) / "hvd_sparse"
        build = Path(os.environ.get("HVD_SPARSE_BUILD") or self.build_temp).resolve()
        configure = ["cmake", "-S", str(ROOT), "-B", str(build), "-DHVD_SPARSE_NUMPY=ON"]
        configure += [f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={package / 'lib'}"]
        targets = ["hvd_sparse_numpy"]
        built = {module for module in FRAMEWORKS if framework_wanted(module.upper(), module)}
        without = [module for module in FRAMEWORKS if is_wanted(module.upper()) is False]
        if not built and len(without) < len(FRAMEWORKS) and not os.environ.get("HVD_SPARSE_TARGETS"):
            sys.exit(NO_FRAMEWORK.format(sys.executable))
        configure += (cuda := cuda_options(built))
        for module, (title, options) in FRAMEWORKS.items():
            if module in built:
                configure += options()
                targets += [f"hvd_sparse_{module}"]
            else:
                configure += [f"-DHVD_SPARSE_{module.upper()}=OFF"]
                print(f"hvd_sparse: the ops for {title} are left out", file=sys.stderr)
        configure += [*generator(), *shlex.split(os.environ.get("CMAKE_ARGS", ""))]
        targets = os.environ.get("HVD_SPARSE_TARGETS", "").split() or targets
        build.mkdir(parents=True, exist_ok=True)
        forget_other_build(build, settings_of(built))
        # Libraries of another build, for other frameworks or other versions of them.
        if not self.inplace:
            shutil.rmtree(package / "lib", ignore_errors=True)
        for module in ("numpy", *FRAMEWORKS):  # in place, CMake would take them for its own
            if module not in ("numpy", *built) or f"hvd_sparse_{module}" in targets:
                for ending in ("so", "version"):
                    (package / "lib" / f"libhvd_sparse_{module}.{ending}").unlink(missing_ok=True)
        if shutil.which("cmake") is None:
            sys.exit("hvd_sparse: there is no CMake, and 3.18 or newer builds it. Install it: pip install cmake")
        if subprocess.run(configure).returncode != 0:
            hint = CUDA_HINT if len(cuda) > 1 else ""
            sys.exit(f"hvd_sparse: CMake could not prepare the build, see above. {missing_tool()}{hint}")
        compile_all = ["cmake", "--build", str(build), "--target", *targets]
        if "CMAKE_BUILD_PARALLEL_LEVEL" not in os.environ:
            compile_all += ["--parallel", str(len(os.sched_getaffinity(0)))]
        if subprocess.run(compile_all).returncode != 0:
            sys.exit(f"hvd_sparse: it did not compile; the first error above says why. {COMPILER_NEEDED}")
        record_versions(package / "lib", [module for module in built if f"hvd_sparse_{module}" in targets])

    def get_outputs(self):
        """The files that belong to the installation."""
        return [str(path) for path in (Path(self.build_lib) / "hvd_sparse" / "lib").glob("libhvd_sparse_*")]


def version() -> str:
    """The version, read without importing the package."""
    text = (ROOT / "hvd_sparse" / "_version.py").read_text()
    return re.search(r'__version__ = "(.+)"', text).group(1)


setup(
    name="hvd_sparse",
    version=version(),
    description="Sparse gradient compression for Horovod: DGC, Gradient Dropping and their peers",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    author="the hvd_sparse contributors",
    keywords="horovod distributed-training gradient-compression sparsification error-feedback pytorch tensorflow",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=find_packages(include=["hvd_sparse", "hvd_sparse.*"]),
    package_data={"hvd_sparse": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["numpy"],
    extras_require={
        "examples": ["scikit-learn", "matplotlib", "tqdm", "mpi4py", "tensorboard"],
    },
    entry_points={"console_scripts": ["hvd_sparse = hvd_sparse.__main__:main"]},
    ext_modules=[Extension("hvd_sparse.lib", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": FreshModules},
    zip_safe=False,
)
