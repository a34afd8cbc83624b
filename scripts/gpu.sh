#!/usr/bin/env bash
# Build the ops of PyTorch, and of TensorFlow if it is there, in place with the Python that is there, for the GPU that is
# there, and use them:
#   gpu.sh test               tests/gpu
#   gpu.sh sanitize           small cases of tests/gpu under compute-sanitizer, with each of its tools
#   gpu.sh bench [OPTION...]  benchmarks/gpu.py
# Needs one GPU, a PyTorch with CUDA, nvcc, CMake 3.18; no Horovod, no network, no .venv.
set -euo pipefail

cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}

stop() {
    printf 'hvd_sparse: %s\n  -> %s\n' "$1" "$2" >&2
    exit 1
}

"$PYTHON" -c 'import torch' 2>/dev/null || stop "$PYTHON has no PyTorch" "name one that has: make PYTHON=/path/to/python3"
"$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    stop "PyTorch of $PYTHON sees no GPU" "run this on a machine with one, with a PyTorch that was built with CUDA"
"$PYTHON" -c 'import setuptools' 2>/dev/null || stop "$PYTHON has no setuptools" "install it: $PYTHON -m pip install setuptools"
PATH="$PATH:$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')"
export PATH CUDAARCHS
command -v cmake >/dev/null || stop "there is no cmake" "install it: $PYTHON -m pip install cmake"
CUDAARCHS=$("$PYTHON" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')

rm -f .venv/.extension-*  # its libraries lie in the same place: it has to link them again
tensorflow=WITH
"$PYTHON" -c 'import tensorflow' 2>/dev/null || tensorflow=WITHOUT
env HVD_SPARSE_WITH_TORCH=1 "HVD_SPARSE_${tensorflow}_TENSORFLOW=1" HVD_SPARSE_WITH_CUDA=1 \
    "$PYTHON" setup.py -q build_ext --inplace --build-temp build/gpu

export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
case ${1:-test} in
test)
    if "$PYTHON" -c 'import pytest' 2>/dev/null; then
        "$PYTHON" -m pytest -q tests/gpu
    else
        "$PYTHON" tests/gpu/run.py
    fi
    ;;
sanitize)
    command -v compute-sanitizer >/dev/null || stop "there is no compute-sanitizer" "install the CUDA toolkit's"
    export HVD_SPARSE_GPU_TESTS=small
    for tool in memcheck racecheck initcheck synccheck; do
        printf '==> %s\n' "$tool"
        # Each tensor has memory of its own, so that accesses beyond it and uninitialized elements are seen.
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$PYTHON" tests/gpu/run.py \
            --under "compute-sanitizer --tool $tool --error-exitcode 1 --print-limit 20" tests/gpu/test_gpu_{buckets,payloads,rows,selection,varying}.py
    done
    ;;
bench) "$PYTHON" benchmarks/gpu.py "${@:2}" ;;
*) stop "no command named $1" "test, sanitize or bench" ;;
esac
