#!/usr/bin/env bash
# Compile the CUDA code and the ops that use it. Needs nvcc, no GPU.
#   cuda.sh              all of it, for every GPU that setup.py names, as a user's build does, into build/cuda
#   cuda.sh --one        only what is CUDA's own, for one GPU (sm_90), with little optimization: does it compile?
#   cuda.sh --has-nvcc   only say, by the exit status, whether there is an nvcc
. "$(dirname "$0")/step.sh"

cd "$ROOT"
find_nvcc() {
    PATH="$PATH:${CUDA_HOME:+$CUDA_HOME/bin:}${CUDA_PATH:+$CUDA_PATH/bin:}/usr/local/cuda/bin" command -v nvcc
}
[ "${1:-}" != --has-nvcc ] || { find_nvcc >/dev/null; exit; }
nvcc=$(find_nvcc) || fail "there is no nvcc" "install the CUDA toolkit (12.8 or newer knows sm_100), or set CUDA_HOME to where it is"
export CUDAFLAGS=-Werror=all-warnings  # here only: another compiler's new warning is no reason to fail a user's build
export HVD_SPARSE_WITH_TORCH=1 HVD_SPARSE_WITH_TENSORFLOW=1 HVD_SPARSE_WITH_CUDA=1
if [ "${1:-}" != --one ]; then
    step "CUDA code and its ops" python setup.py build_ext --build-temp build/cuda --build-lib build/cuda
    exit
fi
"$nvcc" --help | grep -q -- --Ofast-compile && CUDAFLAGS+=" --Ofast-compile=max"
export CUDAARCHS=90 CMAKE_ARGS="-DHVD_SPARSE_OPTIMIZE=-O0" CMAKE_GENERATOR="Unix Makefiles" HVD_SPARSE_BUILD=build/cuda-one
export HVD_SPARSE_TARGETS=hvd_sparse_cuda

# Objects of single files are targets of CMake's makefiles, which make one after the other; so both frameworks at once.
compile() {
    local framework running=()
    python setup.py build_ext --build-lib build/cuda-one || return
    for framework in torch tensorflow; do
        cmake --build build/cuda-one --target $(echo csrc/$framework/cuda_*.cc | sed 's/\.cc/.cc.o/g') &
        running+=($!)
    done
    wait "${running[0]}" && wait "${running[1]}"
}

step "CUDA code and its ops, for one GPU" compile
