#!/usr/bin/env bash
# Build Horovod 0.28.1 from its PyPI source and install it; the wheel is kept in a per-user cache.
#   horovod.sh torch | tensorflow   for one framework: half the time, all that `make train` needs
#   horovod.sh all                  for both; continues the build of one
# Into an environment of your own, with an MPI and CMake: VENV=/path/to/environment MPI=system scripts/horovod.sh torch
# Three edits of build files make the release compile against today's frameworks; they change nothing else that it does:
#   C++14 -> C++17                torch >= 2.1 needs it; Horovod made the same change after 0.28.1
#   without xla_mpi_ops.cc        TensorFlow moved the XLA headers it includes; without it HOROVOD_ENABLE_XLA_OPS has no effect
#   run path relative to itself   the cached wheel then works in any virtual environment
. "$(dirname "$0")/step.sh"

VERSION=0.28.1
RECIPE=1 # count up when the edits below change: cached wheels of another recipe are then left alone
frameworks=${1:-all}
with_torch=1 with_tensorflow=1
case $frameworks in
all) ;;
torch) with_tensorflow=0 ;;
tensorflow) with_torch=0 ;;
*) fail "Horovod for $frameworks" "torch, tensorflow or all" ;;
esac
[ -x "$VENV/bin/python" ] ||  # pip would install into the environment of any other python on PATH
    fail "there is no $VENV/bin/python" "VENV is the folder of an environment (conda: VENV=\$CONDA_PREFIX); make sets up $ROOT/.venv"
command -v mpirun >/dev/null || fail "there is no mpirun on PATH" "load or install an MPI, or leave MPI=system out"
# What its setup.py imports, and what it imports at run time: nothing is downloaded where all of it is there.
step "packages that Horovod needs" python -m pip install --disable-pip-version-check cloudpickle packaging psutil pyyaml setuptools wheel ||
    fail "packages could not be installed" "is PyPI reachable? pip's own settings (index, proxy) are honoured"
installed=$(python -c 'from importlib.util import find_spec as find; print(*filter(find, ("torch", "tensorflow")))')
cache=$(wheel_cache $installed)/horovod-$VERSION-recipe$RECIPE
source=$ROOT/build/horovod

has_wheel() {  # DIRECTORY
    ls "$1"/horovod-*.whl >/dev/null 2>&1
}

fetch() {  # one chain: `step` calls this in a condition, where set -e is without effect
    rm -rf "$source" && mkdir -p "$source" &&
        python -m pip download --no-deps --no-build-isolation --no-binary :all: -d "$source" "horovod==$VERSION" &&
        tar xf "$source/horovod-$VERSION.tar.gz" -C "$source" --strip-components=1 &&
        sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 17)/' "$source"/CMakeLists.txt "$source"/horovod/torch/CMakeLists.txt &&
        sed -i '/xla_mpi_ops\.cc/d' "$source"/horovod/tensorflow/CMakeLists.txt &&
        sed -i '1i set(CMAKE_BUILD_RPATH "$ORIGIN/../../../..")' "$source"/CMakeLists.txt &&
        echo "$cache" >"$source/.patched"
}

build() {  # the policy version: CMake 4 refuses the Gloo in it otherwise
    HOROVOD_WITH_PYTORCH=$with_torch HOROVOD_WITHOUT_PYTORCH=$((1 - with_torch)) \
        HOROVOD_WITH_TENSORFLOW=$with_tensorflow HOROVOD_WITHOUT_TENSORFLOW=$((1 - with_tensorflow)) \
        HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 CMAKE_POLICY_VERSION_MINIMUM=3.5 \
        MAKEFLAGS=-j$(nproc) python -m pip wheel --no-build-isolation --no-deps -w "$source/dist" "$source" &&
        mkdir -p "$wheels" && mv "$source"/dist/horovod-*.whl "$wheels/"
}

wheels=$cache
[ "$frameworks" = all ] || has_wheel "$cache" || wheels=$cache-$frameworks
if ! has_wheel "$wheels"; then
    # A tree that was made for other versions of the frameworks, or not to its end, is made anew.
    [ "$(cat "$source/.patched" 2>/dev/null)" = "$cache" ] || step "Horovod $VERSION: source" fetch ||
        fail "Horovod's source could not be downloaded" "is PyPI reachable? pip's own settings (index, proxy) are honoured"
    step "Horovod $VERSION: build for $frameworks, once per set of versions (about 5 minutes on 2 cores for all)" build ||
        fail "Horovod did not build" "read the log above$([ "$MPI" = system ] || echo "; MPI=system builds against the system's MPI instead")"
    [ "$frameworks" != all ] || rm -rf "$source"
fi
step "Horovod $VERSION: install" python -m pip install --no-deps --force-reinstall "$wheels"/horovod-*.whl
