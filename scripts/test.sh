#!/usr/bin/env bash
# Run a suite of tests, or all: test.sh native | kernels | sanitize | threads | single | parallel | fuzz | cuda | all;
# parts of these: torch_ranks, ddp_ranks, tensorflow_ranks; and those that `all` leaves out: coverage, tensorflow.
# HVD_SPARSE_TESTS=all, which `make test-all` sets, runs everything; without it, of every suite what catches faults.
# A suite's output goes to build/logs; here stand its last line or, if it fails, its end and how to run it again.
. "$(dirname "$0")/step.sh"

cd "$ROOT"
tier=${HVD_SPARSE_TESTS:-quick}
run=scripts/run.sh
both="native_tests kernel_tests"  # with the kernels of the device, run on the host
pytest="pytest -q -x --tb=short --color=no --durations=40"  # not python -m: that would put the source tree before what is installed

limit="timeout --foreground 1800"  # in the group of processes that `lanes` ends

# Horovod and Open MPI wait in loops that call sched_yield. Beside other tests, a rank that yields has its next turn only
# milliseconds later, in each collective: let ranks that wait sleep for 50 us, as on the hosts of benchmarks/network.
# PyTorch's suites take half of the time then. Beside TensorFlow's, the tests of one process would lose what these gain.
sleep_to_wait() {
    mkdir -p build
    printf '%s\n' '#include <time.h>' \
        'int sched_yield(void) { struct timespec wait = {0, 50000}; return nanosleep(&wait, 0); }' |
        ${CXX:-c++} -shared -fPIC -o "build/sleep.so.$$" -x c - && mv "build/sleep.so.$$" build/sleep.so &&
        run="env LD_PRELOAD=$ROOT/build/sleep.so scripts/run.sh"
}

suite() {  # TITLE COMMAND... WHAT: what is tested comes last
    local title=$1 start=$SECONDS log found again
    shift
    mkdir -p "$LOGS"
    log=$LOGS/test-$(printf '%s' "$title" | tr -cs 'A-Za-z0-9.' '-').log
    printf '==> %s\n' "$title"
    if "$@" >"$log" 2>&1; then
        found=$(grep -E '[0-9]+ passed|tests passed|^left out' "$log" | tail -n 1 | sed -E 's/^.*<stdout>://; s/ in [0-9.]+s.*//' || true)
        printf '    %s: %s%d s\n' "$title" "${found:+$found, }" $((SECONDS - start))
        return
    fi
    again=$(grep -oE '(FAILED|ERROR|failed:|collecting) +tests/[^ ]+\.py.*' "$log" | head -n 1 | sed -E 's/^[A-Za-z:]+ +//; s/ (- |_|\(call|\(setup|\(teardown).*//' || true)
    tail -n 60 "$log"
    printf '\n==> %s FAILED after %d s. All of its output: %s\n' "$title" $((SECONDS - start)) "${log#"$ROOT"/}"
    if [ -n "$again" ]; then
        printf '    Its first failure again: %s "%s"\n' "${*:1:$#-1}" "$again"
    else
        printf '    The suite again: %s\n' "${ONLY:-scripts/test.sh $suites}"
    fi
    exit 1
}

# The tests of a folder in a job of several processes: in the quick tier those that a pytest expression of marks chooses.
ranks() {  # TITLE MARKS LAUNCHER... FOLDER
    local only=()
    [ "$tier" = all ] || [ -z "$2" ] || only=(-m "$2")
    suite "$1" $limit $run "${@:3:$#-3}" $pytest "${only[@]}" "${@: -1}"
}

torchrun="torchrun --standalone --no-python --nproc-per-node"

# What goes over the network is the same whoever starts the job: in the quick tier, that ranks agree is enough.
launcher() {  # TITLE LAUNCHER... FOLDER
    local what=${*: -1}
    [ "$tier" = all ] || what=$(echo "$what"/test_*ranks_agree.py)
    suite "$1" $limit $run "${@:2:$#-2}" $pytest "$what"
}

# Two hosts of two ranks each need four ranks. In the quick tier, one file of tests is enough.
hosts() {  # TITLE LAUNCHER... FOLDER
    local what=${*: -1}
    [ "$tier" = all ] || what=$what/test_hierarchical_hosts.py
    suite "$1" $limit $run "${@:2:$#-2}" $pytest -k hierarchical "$what"
}

compile() {  # TARGETS DIRECTORY OPTION...
    local targets=$1 build=$2
    shift 2
    cmake -S . -B "$build" -DHVD_SPARSE_TESTS=ON "$@" && cmake --build "$build" --target $targets -j "$(nproc)"
}

native() {  # TARGETS DIRECTORY OPTION...
    local only=
    case $1 in
    native_tests) only="-E ^kernel_" ;;
    kernel_tests) only="-R ^kernel_" ;;
    esac
    compile "$@" && ctest --test-dir "$2" $only -j "$(nproc)" --output-on-failure --stop-on-failure --timeout 300
}

# The choice of them runs under sanitizers alone; kernels on the host would take minutes there.
sanitize() {
    local options="-DHVD_SPARSE_SANITIZE=ON -DHVD_SPARSE_OPTIMIZE=-O1"
    if [ "$tier" = all ]; then
        native "$both" build/sanitize $options -DHVD_SPARSE_SANITIZE_TESTS=ON
    else
        native native_tests build/sanitize $options -DHVD_SPARSE_SANITIZE_TESTS=OFF
    fi
}

# ThreadSanitizer wants addresses where some kernels put other things, unless they are told to shuffle nothing.
threads() {
    local probe=build/thread-sanitizer plain=
    if ! echo 'int main() {}' | ${CXX:-c++} -fsanitize=thread -x c++ - -o $probe; then
        echo "left out: the compiler has no ThreadSanitizer"
        return
    fi
    if ! $probe; then
        plain="setarch -R"
        $plain $probe || { echo "left out: ThreadSanitizer cannot start here"; return; }
    fi
    compile native_tests build/threads -DHVD_SPARSE_SANITIZE=thread -DHVD_SPARSE_OPTIMIZE=-O1 &&
        $plain ctest --test-dir build/threads -j "$(nproc)" --output-on-failure --timeout 300
}

coverage() {
    find build -path '*coverage/*.gcda' -delete  # counts of runs before
    native "$both" build/coverage -DHVD_SPARSE_COVERAGE=ON && python scripts/coverage.py build/coverage --least 99
}

# libFuzzer where Clang is; else its driver, longer and from another seed than under ctest.
fuzz() {
    local clang
    clang=$(compgen -c clang++ | grep -E '^clang\+\+(-[0-9]+)?$' | sort -V | tail -n 1) || true  # Debian's may have a number
    if [ -n "$clang" ]; then
        CXX=$clang compile native_tests build/fuzz -DHVD_SPARSE_FUZZ=ON || return
        mkdir -p build/fuzz/found
        build/fuzz/tests/native/fuzz_payload -max_total_time="${SECONDS_OF_FUZZING:-60}" -artifact_prefix=build/fuzz/ build/fuzz/found tests/native/corpus
    else
        echo "no clang++, so no libFuzzer: mutations without its guidance"
        compile native_tests build/sanitize -DHVD_SPARSE_SANITIZE=ON && build/sanitize/tests/native/fuzz_payload_test tests/native/corpus "${MUTATIONS:-2000000}" "${SEED:-2}"
    fi
}

cuda() {
    scripts/cuda.sh --has-nvcc || { echo "left out: there is no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda"; return; }
    if [ "$tier" = all ]; then scripts/cuda.sh; else scripts/cuda.sh --one; fi
}

# Lists of suites side by side, as a suite of several processes waits half of its time. The first failure ends all.
lanes() {  # "PART..." ...
    local lane
    export IN_LANES=1
    set -m  # each lane is a group of processes
    for lane in "$@"; do
        (for part in $lane; do "$0" "$part"; done) </dev/null &
        groups+=(-$!)
    done
    trap 'kill -- "${groups[@]}" 2>/dev/null || true' EXIT
    trap 'exit 130' INT TERM
    for lane in "$@"; do wait -n; done
}
groups=()

suites=${1:-all}
case $suites in
native) suite "native tests" native "$both" "$BUILD" ;;
kernels) suite "kernels of the device, run on the host" native kernel_tests "$BUILD" ;;
sanitize) suite "native tests under AddressSanitizer and UndefinedBehaviorSanitizer" sanitize ;;
threads) suite "native tests under ThreadSanitizer" threads ;;
coverage) suite "native tests, lines of the core that run" coverage ;;
fuzz) suite "payload decoder under random bytes" fuzz ;;
single) suite "tests of one process" $run $pytest -n "$(nproc)" --dist worksteal tests/single ;;
parallel) for part in torch_ranks ddp_ranks tensorflow_ranks; do "$0" "$part"; done ;;
torch_ranks)
    [ -z "${IN_LANES:-}" ] || sleep_to_wait || echo "ranks that wait do not sleep: the compiler failed"
    ranks "PyTorch, mpirun -np 3" rank_counts mpirun -np 3 tests/parallel
    ranks "PyTorch, mpirun -np 2" "not rank_counts" mpirun -np 2 tests/parallel
    ranks "PyTorch, mpirun -np 1" rank_counts mpirun -np 1 tests/parallel
    hosts "PyTorch, hierarchical exchange, mpirun -np 4" mpirun -np 4 tests/parallel
    launcher "PyTorch, horovodrun --gloo -np 2" horovodrun --gloo -np 2 tests/parallel
    launcher "PyTorch, horovodrun --mpi -np 2" horovodrun --mpi -np 2 tests/parallel
    ;;
ddp_ranks)
    ranks "DistributedDataParallel, torchrun, 3 ranks" rank_counts $torchrun 3 tests/parallel_ddp
    ranks "DistributedDataParallel, torchrun, 2 ranks" "not rank_counts" $torchrun 2 tests/parallel_ddp
    if [ "$tier" = all ]; then
        ranks "DistributedDataParallel, torchrun, 1 rank" "" $torchrun 1 tests/parallel_ddp
        hosts "DistributedDataParallel, hierarchical exchange, torchrun, 4 ranks" $torchrun 4 tests/parallel_ddp
    fi
    ;;
tensorflow_ranks)
    ranks "TensorFlow, mpirun -np 3" rank_counts mpirun -np 3 tests/parallel_tensorflow
    ranks "TensorFlow, mpirun -np 2" "not rank_counts" mpirun -np 2 tests/parallel_tensorflow
    ranks "TensorFlow, mpirun -np 1" rank_counts mpirun -np 1 tests/parallel_tensorflow
    if [ "$tier" = all ]; then
        launcher "TensorFlow, horovodrun --gloo -np 2" horovodrun --gloo -np 2 tests/parallel_tensorflow
        hosts "TensorFlow, hierarchical exchange, mpirun -np 4" mpirun -np 4 tests/parallel_tensorflow
    fi
    ;;
tensorflow)
    suite "TensorFlow operators" $run $pytest tests/single/test_tensorflow_ops.py tests/single/test_tensorflow_accumulate.py tests/single/test_located.py tests/single/test_tensorflow_rows.py tests/single/test_tensorflow_boundary.py
    for number in 1 2; do
        ranks "TensorFlow, mpirun -np $number" "" mpirun -np "$number" tests/parallel_tensorflow
    done
    ;;
cuda) suite "CUDA code, compiled" cuda ;;
all)
    if [ "$tier" = all ]; then
        for part in native sanitize threads fuzz single parallel cuda; do "$0" "$part"; done
    else
        lanes "torch_ranks tensorflow_ranks ddp_ranks cuda" "kernels sanitize single"
    fi
    ;;
*) fail "no suite named $1" "native, kernels, sanitize, threads, coverage, fuzz, single, parallel (torch_ranks, ddp_ranks, tensorflow_ranks), tensorflow, cuda or all" ;;
esac
