"""The paths of the native libraries, what was built, and error messages for what is missing."""

import contextlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

LIBRARY_DIRECTORY = Path(__file__).parent / "lib"
SOURCE = Path(__file__).parent.parent  # the source tree, if there is a setup.py
FRAMEWORKS = ("torch", "tensorflow")  # beside "numpy", which is always built
STARTED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # how many ranks Open MPI's launcher, or MPICH's, has started
CUDA_MARK = b"hvd_sparse was built with CUDA"  # to be read off a library without loading it
Loaded = TypeVar("Loaded")


def is_built(framework: str) -> bool:
    """Return whether the operators of a framework were built."""
    return _path(framework).exists()


def has_cuda(framework: str) -> bool:
    """Return whether the operators of a framework were built for CUDA tensors, too."""
    return is_built(framework) and CUDA_MARK in _path(framework).read_bytes()


def why_no_cuda(framework: str) -> str:
    """Return why a framework's operators know no GPU; an empty string if they were built for CUDA."""
    if has_cuda(framework):
        return ""
    return (
        "hvd_sparse was built without CUDA. To compress on the device, install it again with HVD_SPARSE_WITH_CUDA=1 "
        "pip install --no-build-isolation ."
    )


def find_library(framework: str) -> str:
    """Return the path of a framework's operators; ImportError says how to build them."""
    path = _path(framework)
    if not LIBRARY_DIRECTORY.exists() and (SOURCE / "setup.py").exists():
        raise ImportError(
            f"this is the source tree of hvd_sparse, {SOURCE}, where nothing is built: Python imports it from the "
            "current directory. Run from another one to use the installed package, or build here: pip install "
            "--no-build-isolation -e ."
        )
    if not path.exists() and framework not in FRAMEWORKS:
        raise ImportError(f"hvd_sparse is not built: {path} is missing. {_build('')}")
    if not path.exists():
        raise ImportError(
            f"hvd_sparse was built without its {framework} operators: {path} is missing. Install {framework} "
            f"first. {how_to_build(framework)}"
        )
    return str(path)


def load_library(framework: str, load: Callable[[str], Loaded]) -> Loaded:
    """Load a framework's operators with the framework's own function; ImportError says how to build them."""
    path = find_library(framework)
    try:
        return load(path)
    except Exception as error:  # OSError from PyTorch, a class of its own from TensorFlow
        why = other_version(framework) or (
            f"most likely built for another version or build of {framework} than the installed one, "
            f"{installed_version(framework) or 'of unknown version'}"
        )
        raise ImportError(
            f"hvd_sparse cannot load its {framework} operators, {why}. Install hvd_sparse again. "
            f"{how_to_build(framework)} The loader says: {error.__cause__ or error}"
        ) from error


def installed_version(framework: str) -> str:
    """Return the version of an installed framework without importing it; an empty string if it is unknown."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(framework)
    packages = importlib.metadata.packages_distributions().get(framework)  # such as tensorflow-cpu
    return importlib.metadata.version(min(packages)) if packages else ""


def other_version(framework: str) -> str:
    """Return which version a framework's operators were built for if another is installed, else an empty string."""
    record = _path(framework).with_suffix(".version")  # setup.py writes it
    built = record.read_text().strip() if is_built(framework) and record.exists() else ""
    installed = installed_version(framework) if built else ""
    return f"built for {framework} {built}, installed is {installed}" if installed not in ("", built) else ""


def require_horovod(framework: str) -> None:
    """Raise an ImportError that says how to get Horovod where there is none."""
    if importlib.util.find_spec("horovod") is None:
        switch = {"torch": "HOROVOD_WITH_PYTORCH", "tensorflow": "HOROVOD_WITH_TENSORFLOW"}[framework]
        message = (
            f"hvd_sparse.{framework} needs Horovod, and {sys.executable} has none. Install it with {switch}=1 "
            "pip install --no-build-isolation --no-cache-dir horovod; where that does not compile against a newer "
            "framework, scripts/horovod.sh in the source tree of hvd_sparse builds one that does"
        )
        if framework == "torch":
            message += ". DistributedDataParallel needs no Horovod: from hvd_sparse.torch.ddp import Compression"
        raise ImportError(message, name="horovod")


def mpi():
    """Return `mpi4py.MPI`, which starts MPI; ImportError says how to get mpi4py where there is none."""
    if importlib.util.find_spec("mpi4py") is None:
        raise ImportError(
            "pipelines, hybrid runs and asynchronous runs send their messages with mpi4py, and "
            f"{sys.executable} has none. Install it with pip install mpi4py",
            name="mpi4py",
        )
    from mpi4py import MPI

    return MPI


def checked_communicator(communicator):
    """Return an mpi4py communicator, COMM_WORLD for None.

    ValueError for COMM_NULL; RuntimeError where MPI has started each process of a job alone, or has been stopped.
    """
    from hvd_sparse.finalization import is_ending  # here, as setup.py runs this file without the package

    if is_ending(mpi()):
        raise RuntimeError(
            "MPI has been stopped, or is about to be: Horovod, if it has started MPI, stops it on all ranks when the "
            "first one ends. Import mpi4py.MPI before hvd.init()"
        )
    world = mpi().COMM_WORLD
    horovod, *started = (int(os.environ.get(name, 1)) for name in ("HOROVOD_SIZE", *STARTED))
    if horovod > 1 and world.Get_size() == 1:
        raise RuntimeError(
            f"MPI has 1 rank where Horovod has {horovod}: start with mpirun or horovodrun --mpi, and a Horovod built "
            "with MPI"
        )
    if max(started) > 1 and world.Get_size() == 1:
        raise RuntimeError(
            f"MPI has 1 rank where its launcher has started {max(started)}: mpi4py is built for another MPI. Build it "
            "for the launcher's with pip install --force-reinstall --no-binary mpi4py mpi4py"
        )
    if communicator is None:
        return world
    if communicator == mpi().COMM_NULL:
        raise ValueError(
            "communicator must be one that this rank is in, got COMM_NULL: ranks that Split(MPI.UNDEFINED) leaves out "
            "must not take part"
        )
    return communicator


def how_to_build(framework: str) -> str:
    """Return how to build hvd_sparse with the operators of a framework."""
    return _build(f"HVD_SPARSE_WITH_{framework.upper()}=1 ")


def _build(switches: str) -> str:
    return f"In the source tree of hvd_sparse: {switches}pip install --no-build-isolation --force-reinstall --no-deps ."


def _path(framework: str) -> Path:
    return LIBRARY_DIRECTORY / f"libhvd_sparse_{framework}.so"
