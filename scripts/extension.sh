#!/usr/bin/env bash
# Build the C++ extension and install the package: in place, so that Python files are used where they lie; but as a
# copy into any environment other than .venv, since the source tree holds one build.
#   extension.sh all | torch | tensorflow   the operators of both frameworks, or of one: all that `make train` needs
. "$(dirname "$0")/step.sh"

cd "$ROOT"
frameworks=${1:-all}
with=()
[ "$frameworks" = tensorflow ] && with+=(HVD_SPARSE_WITHOUT_TORCH=1) || with+=(HVD_SPARSE_WITH_TORCH=1)
[ "$frameworks" = torch ] && with+=(HVD_SPARSE_WITHOUT_TENSORFLOW=1) || with+=(HVD_SPARSE_WITH_TENSORFLOW=1)
how=--editable
[ "$VENV" = "$ROOT/.venv" ] || how=--force-reinstall
# The objects are kept: the next build compiles what changed, and the native tests link the core.
step "hvd_sparse: extension for $frameworks" env "${with[@]}" HVD_SPARSE_BUILD="$BUILD" \
    pip install --disable-pip-version-check --no-build-isolation --no-deps $how . || {
    grep -h "error:" "$LOGS"/hvd-sparse-extension-for-"$frameworks".log | grep -v subprocess | head -n 5 || true
    fail "the extension did not build" "read the log above; it needs a C++17 compiler and CMake 3.18"
}
cd / && python -m hvd_sparse --check-build
