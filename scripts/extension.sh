#!/usr/bin/env bash
# Build the C++ extension and install the package in place: Python files are used where they lie.
. "$(dirname "$0")/step.sh"

cd "$ROOT"
step "hvd_sparse: extension" env HVD_SPARSE_WITH_TORCH=1 HVD_SPARSE_WITH_TENSORFLOW=1 \
    pip install --disable-pip-version-check --no-build-isolation --no-deps --editable . ||
    fail "the extension did not build" "read the log above; it needs a C++17 compiler and CMake 3.18"
python -m hvd_sparse --check-build
