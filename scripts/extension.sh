#!/usr/bin/env bash
# Build the C++ extension and install the package: in place, so that Python files are used where they lie; but as a
# copy into any environment other than .venv, since the source tree holds one build.
. "$(dirname "$0")/step.sh"

cd "$ROOT"
how=--editable
[ "$VENV" = "$ROOT/.venv" ] || how=--force-reinstall
step "hvd_sparse: extension" env HVD_SPARSE_WITH_TORCH=1 HVD_SPARSE_WITH_TENSORFLOW=1 \
    pip install --disable-pip-version-check --no-build-isolation --no-deps $how . || {
    grep -h "error:" "$LOGS"/hvd-sparse-extension.log | grep -v subprocess | head -n 5
    fail "the extension did not build" "read the log above; it needs a C++17 compiler and CMake 3.18"
}
cd / && python -m hvd_sparse --check-build
