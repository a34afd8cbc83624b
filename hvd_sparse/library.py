"""Where the native libraries lie, and what was built."""

from pathlib import Path

LIBRARY_DIRECTORY = Path(__file__).parent / "lib"
FRAMEWORKS = ("torch", "tensorflow")  # beside "numpy", which is always built
CUDA_MARK = b"hvd_sparse was built with CUDA"  # to be read off a library without loading it


def is_built(framework: str) -> bool:
    """Return whether the operators of a framework were built."""
    return _path(framework).exists()


def has_cuda(framework: str) -> bool:
    """Return whether the operators of a framework were built for CUDA tensors, too."""
    return is_built(framework) and CUDA_MARK in _path(framework).read_bytes()


def find_library(framework: str) -> str:
    """Return the path of a framework's operators; ImportError says how to build them."""
    path = _path(framework)
    if not path.exists() and framework not in FRAMEWORKS:
        raise ImportError(f"hvd_sparse is not built: {path} is missing. Install it with pip install hvd_sparse, or .")
    if not path.exists():
        raise ImportError(
            f"hvd_sparse was built without its {framework} operators: {path} is missing. Install {framework} first, "
            f"then: HVD_SPARSE_WITH_{framework.upper()}=1 pip install --no-build-isolation --force-reinstall hvd_sparse"
        )
    return str(path)


def _path(framework: str) -> Path:
    return LIBRARY_DIRECTORY / f"libhvd_sparse_{framework}.so"
