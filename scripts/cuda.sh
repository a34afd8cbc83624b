#!/usr/bin/env bash
# Compile the CUDA code and the ops that use it into build/cuda, for every GPU that setup.py names. Needs nvcc, no GPU.
#   cuda.sh --has-nvcc   only say, by the exit status, whether there is an nvcc
. "$(dirname "$0")/step.sh"

cd "$ROOT"
find_nvcc() {
    PATH="$PATH:${CUDA_HOME:+$CUDA_HOME/bin:}${CUDA_PATH:+$CUDA_PATH/bin:}/usr/local/cuda/bin" command -v nvcc
}
[ "${1:-}" != --has-nvcc ] || { find_nvcc >/dev/null; exit; }
find_nvcc >/dev/null || fail "there is no nvcc" "install the CUDA toolkit (12.8 or newer knows sm_100), or set CUDA_HOME to where it is"
export CUDAFLAGS=-Werror=all-warnings  # here only: another compiler's new warning is no reason to fail a user's build
step "CUDA code and its ops" env HVD_SPARSE_WITH_TORCH=1 HVD_SPARSE_WITH_TENSORFLOW=1 HVD_SPARSE_WITH_CUDA=1 \
    python setup.py build_ext --build-temp build/cuda --build-lib build/cuda
