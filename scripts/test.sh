#!/usr/bin/env bash
# Every test: native, one process, several ranks under mpirun and horovodrun. Stops at the first suite that fails.
. "$(dirname "$0")/step.sh"

cd "$ROOT"
run=scripts/run.sh
pytest="pytest -q"  # not python -m: that would put the source tree before what is installed
[ -t 1 ] || pytest="$pytest --color=no"  # mpirun gives its first rank a terminal of its own

suite() {
    local title=$1 start=$SECONDS
    shift
    printf '\n==> %s\n' "$title"
    "$@" || fail "$title" "run it again by hand: $*"
    printf '==> %s: passed in %d s\n' "$title" $((SECONDS - start))
}

compile() {  # DIRECTORY OPTION...
    local build=build/$1
    shift
    cmake -S . -B "$build" -DHVD_SPARSE_TESTS=ON "$@" >"$build.log" 2>&1 && cmake --build "$build" -j "$(nproc)" >>"$build.log" 2>&1 ||
        { tail -n 30 "$build.log"; return 1; }
}

native() {  # DIRECTORY OPTION...
    compile "$@" && ctest --test-dir "build/$1" -j "$(nproc)" --output-on-failure --timeout 300
}

# ThreadSanitizer wants addresses where some kernels put other things, unless they are told to shuffle nothing.
threads() {
    local probe=build/thread-sanitizer plain=
    if ! echo 'int main() {}' | ${CXX:-c++} -fsanitize=thread -x c++ - -o $probe 2>$probe.log; then
        echo "left out: the compiler has no ThreadSanitizer (build/thread-sanitizer.log)"
        return
    fi
    if ! $probe 2>$probe.log; then
        plain="setarch -R"
        $plain $probe 2>>$probe.log || { echo "left out: ThreadSanitizer cannot start here (build/thread-sanitizer.log)"; return; }
    fi
    compile threads -DHVD_SPARSE_SANITIZE=thread && $plain ctest --test-dir build/threads -j "$(nproc)" --output-on-failure --timeout 300
}

coverage() {
    find build -path '*coverage/*.gcda' -delete  # counts of runs before
    native coverage -DHVD_SPARSE_COVERAGE=ON && python scripts/coverage.py build/coverage --least 99
}

# libFuzzer where Clang is; else its driver, longer and from another seed than under ctest.
fuzz() {
    local clang
    clang=$(compgen -c clang++ | grep -E '^clang\+\+(-[0-9]+)?$' | sort -V | tail -n 1) || true  # Debian's may have a number
    if [ -n "$clang" ]; then
        CXX=$clang compile fuzz -DHVD_SPARSE_FUZZ=ON || return
        mkdir -p build/fuzz/found
        build/fuzz/tests/native/fuzz_payload -max_total_time="${SECONDS_OF_FUZZING:-60}" -artifact_prefix=build/fuzz/ build/fuzz/found tests/native/corpus
    else
        echo "no clang++, so no libFuzzer: mutations without its guidance"
        compile sanitize -DHVD_SPARSE_SANITIZE=ON && build/sanitize/tests/native/fuzz_payload_test tests/native/corpus "${MUTATIONS:-300000}" "${SEED:-2}"
    fi
}

mkdir -p build
case ${1:-all} in
native) suite "native tests" native native ;;
sanitize) suite "native tests under AddressSanitizer and UndefinedBehaviorSanitizer" native sanitize -DHVD_SPARSE_SANITIZE=ON ;;
threads) suite "native tests under ThreadSanitizer" threads ;;
coverage) suite "native tests, lines of the core that run" coverage ;;
fuzz) suite "payload decoder under random bytes" fuzz ;;
single) suite "tests of one process" $run $pytest tests/single ;;
parallel)
    for ranks in 1 2 3; do
        suite "parallel tests, mpirun -np $ranks" timeout 1800 $run mpirun -np "$ranks" $pytest tests/parallel
    done
    suite "parallel tests, horovodrun --gloo -np 2" timeout 1800 $run horovodrun --gloo -np 2 $pytest tests/parallel
    suite "parallel tests, horovodrun --mpi -np 2" timeout 1800 $run horovodrun --mpi -np 2 $pytest tests/parallel
    for ranks in 1 3; do
        suite "TensorFlow's, mpirun -np $ranks" timeout 1800 $run mpirun -np "$ranks" $pytest tests/parallel_tensorflow
    done
    suite "TensorFlow's, horovodrun --gloo -np 2" timeout 1800 $run horovodrun --gloo -np 2 $pytest tests/parallel_tensorflow
    ;;
tensorflow)
    suite "TensorFlow operators" $run $pytest tests/single/test_tensorflow_ops.py tests/single/test_tensorflow_accumulate.py tests/single/test_located.py tests/single/test_tensorflow_rows.py tests/single/test_tensorflow_boundary.py
    for ranks in 1 2; do
        suite "TensorFlow's, mpirun -np $ranks" timeout 1800 $run mpirun -np "$ranks" $pytest tests/parallel_tensorflow
    done
    ;;
cuda)
    if scripts/cuda.sh --has-nvcc; then
        suite "CUDA code, compiled" scripts/cuda.sh
    else
        printf '\n==> CUDA code: left out, as there is no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda\n'
    fi
    ;;
all) for part in native sanitize threads single parallel cuda; do "$0" $part; done ;;
*) fail "no suite named $1" "native, sanitize, threads, coverage, fuzz, single, parallel, tensorflow, cuda or all" ;;
esac
