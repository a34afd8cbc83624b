"""`hvd_sparse --check-build`: list what was built, like `horovodrun --check-build`. `hvd_sparse plan`: see plan.py."""

import argparse
import importlib.util
import sys

from hvd_sparse import __version__
from hvd_sparse.library import FRAMEWORKS, find_library, has_cuda, how_to_build, is_built, other_version

TITLES = {"torch": "PyTorch", "tensorflow": "TensorFlow"}


def check_build() -> str:
    """Return a table of the parts that were built, and of the frameworks that are installed."""

    def box(present: bool) -> str:
        """Tick a box."""
        return "[X]" if present else "[ ]"

    def operators(framework: str, device: str, present: bool) -> str:
        """Return the line of operators; those built for another version of the framework have a [!]."""
        other = other_version(framework) if present else ""
        line = f"    {'[!]' if other else box(present)} {TITLES[framework]} ({device})"
        return f"{line}: {other}" if other else line

    lines = [f"hvd_sparse v{__version__}:", "", "Operators built:"]
    lines.append(f"    {box(is_built('numpy'))} NumPy (CPU)")
    lines += [operators(framework, "CPU", is_built(framework)) for framework in FRAMEWORKS]
    lines += [operators(framework, "CUDA", has_cuda(framework)) for framework in FRAMEWORKS]
    lines += ["", "Installed packages:"]
    lines += [
        f"    {box(importlib.util.find_spec(module) is not None)} {module}"
        for module in ("horovod", *FRAMEWORKS, "mpi4py")
    ]
    if not is_built("numpy"):
        try:
            find_library("numpy")
        except ImportError as error:
            lines += ["", str(error)]
    for framework in filter(other_version, FRAMEWORKS):
        lines += ["", f"The {framework} operators may not load: install hvd_sparse again. {how_to_build(framework)}"]
    return "\n".join(lines)


def main() -> None:
    """Parse the command line."""
    if sys.argv[1:2] == ["plan"]:
        try:
            importlib.import_module("hvd_sparse.plan").main(sys.argv[2:])
        except ImportError as error:  # it times the native functions, which may not be built
            sys.exit(f"hvd_sparse plan: {error}")
        return
    parser = argparse.ArgumentParser(
        prog="hvd_sparse",
        usage="hvd_sparse [-h] [--version] [--check-build]\n       hvd_sparse plan [-h] ...",
        description="Sparse gradient compression for Horovod",
        epilog="hvd_sparse plan --help: predict the step times of your model on your network",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--check-build", action="store_true", help="show what was built")
    if parser.parse_args().check_build:
        print(check_build())
    else:
        parser.print_help()


if __name__ == "__main__":
    main()
