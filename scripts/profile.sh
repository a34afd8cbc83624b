#!/usr/bin/env bash
# Where the time of a compress and of a sum of payloads goes: times and bytes of their parts, then, if there is a
# valgrind, instructions by function. Valgrind knows no AVX-512: what has several versions runs in that for AVX2.
. "$(dirname "$0")/step.sh"

cd "$ROOT"
ELEMENTS=${ELEMENTS:-25600000}  # of the times
COUNTED=1000000                 # of the instructions, of so many steps
STEPS=10
build=build/profile
step "profile: build" sh -c "cmake -S . -B $build -DHVD_SPARSE_BENCH=ON && cmake --build $build -j $(nproc)"
$build/profile_core "$ELEMENTS"

command -v valgrind >/dev/null || { echo "no valgrind: no instructions are counted"; exit 0; }
for part in CompressSettled ReduceAll; do
    printf '\ninstructions of %s, %s float32, %s steps\n' $part $COUNTED $STEPS
    valgrind --tool=callgrind --toggle-collect="*::$part(*" --callgrind-out-file=$build/$part.out \
        $build/profile_core $COUNTED 60 $STEPS >$build/$part.log 2>&1
    callgrind_annotate --auto=no --threshold=99 $build/$part.out | sed -n '/PROGRAM TOTALS/p; /^ *[0-9,]* *(.*:/p' |
        sed 's/???:\|[^ ]*\/\|hvd_sparse:://g; s/(anonymous namespace):://g' | cut -c 1-100
done
